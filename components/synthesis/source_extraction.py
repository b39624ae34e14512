"""Extraction of a class or function from one file of transformers, so that a task can contain its source.

The result includes all definitions of the file that the class or function uses, without annotations,
docstrings and most decorators. A definition that needs another file of the library cannot be extracted.
"""

import ast
import re
from pathlib import Path
from typing import Any

MINED_CLASSES = re.compile(
    r"\w*(Norm|MLP|Mlp|FeedForward|FFN|ActDense|RotaryEmbedding|PositionalEmbedding|Attention"
    r"|Router|Gate|Experts|MoeBlock|MoE|GLU|Activation|Intermediate|Output"
    r"|LayerScale|GRN|Pooling|Pooler|Mixer|SquizeExcite|ConvLayer|Gelu|GELU)(\w{0,3})"
)
ACTIVATIONS = {
    "gelu": "nn.GELU()",
    "gelu_new": 'nn.GELU(approximate="tanh")',
    "gelu_pytorch_tanh": 'nn.GELU(approximate="tanh")',
    "gelu_fast": 'nn.GELU(approximate="tanh")',
    "silu": "nn.SiLU()",
    "swish": "nn.SiLU()",
    "relu": "nn.ReLU()",
    "tanh": "nn.Tanh()",
    "sigmoid": "nn.Sigmoid()",
}
EXCLUDED_CLASSES = re.compile(r"Model|ForC|ForM|ForQ|Flash|Sdpa|Outputs?With|Encoder$")
STANDARD = {
    "torch": "import torch",
    "nn": "import torch.nn as nn",
    "F": "import torch.nn.functional as F",
    "functional": "import torch.nn.functional as functional",
    "math": "import math",
    "Tensor": "from torch import Tensor",
    "OrderedDict": "from collections import OrderedDict",
    "partial": "from functools import partial",
    "Parameter": "from torch.nn import Parameter",
    "SimpleNamespace": "from types import SimpleNamespace",
    "logger": "logger = None",
    "ACT2FN": "ACT2FN = {" + ", ".join(f'"{name}": {made}' for name, made in ACTIVATIONS.items()) + "}",
    "ROPE_INIT_FUNCTIONS": "ROPE_INIT_FUNCTIONS = {}",
}


class CannotExtract(Exception):
    """Error raised if a class or function of transformers cannot become a task, a module to be made faster.

    The message is the reason.
    """


class LibraryFile:
    """A parsed file of transformers, from which the source of single classes and functions is extracted.

    The constructor reads the file `path`. `defined` has the syntax trees of its classes and functions by
    name, `imported` the names that it imports, and `prefix` the beginning of its class names, such as Llama,
    or "Family" if it has no class whose name ends with PreTrainedModel.
    """

    def __init__(self, path: Path):
        tree = ast.parse(path.read_text())
        self.defined = {
            node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        self.imported = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom | ast.Import)
            for alias in node.names
        }
        self.prefix = next(
            (
                name.removesuffix("PreTrainedModel")
                for name, node in self.defined.items()
                if isinstance(node, ast.ClassDef) and name.endswith("PreTrainedModel")
            ),
            "Family",
        )

    def classes(self) -> list[str]:
        return [
            name
            for name, node in self.defined.items()
            if isinstance(node, ast.ClassDef)
            and MINED_CLASSES.fullmatch(name)
            and not EXCLUDED_CLASSES.search(name)
        ]

    def rotations(self) -> list[str]:
        """Return the names of the functions that apply rotary embeddings to queries and keys."""
        return [
            name
            for name, node in self.defined.items()
            if isinstance(node, ast.FunctionDef) and re.fullmatch(r"apply_\w*rotary\w*", name)
        ]

    def extract(self, name: str) -> str:
        """Return the source of the class or function `name`, with all imports and definitions that it uses.

        The source is cleaned (`SourceCleaner`), for example of annotations. Raises CannotExtract if it uses a
        definition of another file of the library.
        """
        order: list[str] = []
        outside: set[str] = set()

        def visit(dependency: str) -> None:
            if dependency in order:
                return
            node = SourceCleaner().visit(ast.parse(ast.unparse(self.defined[dependency])).body[0])
            self.defined[dependency] = node
            order.append(dependency)
            for used in sorted(
                {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            ):
                if used in self.defined and used != dependency:
                    visit(used)
                elif used in STANDARD and (used in self.imported or used in ("logger", "SimpleNamespace")):
                    outside.add(used)
                elif used in self.imported:
                    raise CannotExtract(f"needs {used} from elsewhere in transformers")

        visit(name)
        # The definitions keep their order in the file, so that a base class comes before its subclasses.
        body = "\n\n\n".join(ast.unparse(node) for used, node in self.defined.items() if used in order)
        head = sorted(
            (STANDARD[used] for used in outside | {"torch", "nn", "SimpleNamespace"}),
            key=lambda line: (not line.startswith(("import", "from")), line),
        )
        return "\n".join(head) + "\n\n\n" + body


class SourceCleaner(ast.NodeTransformer):
    """A transformer of syntax trees that removes annotations, docstrings and decorators.

    The decorators staticmethod, classmethod and property of functions are kept. The class also replaces the
    choice of an attention implementation by the eager function of the file, the base class
    GradientCheckpointingLayer by nn.Module, and parameters made by torch.empty or torch.zeros by random ones.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.returns = None
        for argument in [
            *node.args.posonlyargs,
            *node.args.args,
            *node.args.kwonlyargs,
            *filter(None, (node.args.vararg, node.args.kwarg)),
        ]:
            argument.annotation = None
        node.decorator_list = [
            d for d in node.decorator_list if ast.unparse(d) in ("staticmethod", "classmethod", "property")
        ]
        return self._undocumented(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        node.decorator_list = []
        node.bases = [
            ast.parse("nn.Module", mode="eval").body
            if ast.unparse(base) == "GradientCheckpointingLayer"
            else base
            for base in node.bases
        ]
        return self._undocumented(node)

    def _undocumented(self, node: Any) -> Any:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value, lineno=node.lineno) if node.value else None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = ast.unparse(node.func)
        if function == "ALL_ATTENTION_FUNCTIONS.get_interface":
            return node.args[1]
        if function == "nn.Parameter" and ast.unparse(node.args[0]).startswith(
            ("torch.empty(", "torch.zeros(")
        ):
            # The library initialises such weights later. Without this change, they would be uninitialised or
            # constant in a task.
            shape = [ast.unparse(argument) for argument in getattr(node.args[0], "args", [])]
            return ast.parse(f"nn.Parameter(torch.randn({', '.join(shape)}) * 0.02)", mode="eval").body
        return node
