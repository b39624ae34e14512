"""Structural similarity of `Model` classes, which keeps training tasks different from evaluation programs.

A task is a PyTorch module, the class `Model`, that a policy has to make faster. An evaluation program is the
source of a benchmark's task, such as one of KernelBench, that data.against names. The paper of CUDA Agent
(arXiv 2602.24286, appendix 6) drops a training task if its similarity to an evaluation program is above 0.9;
here the limit is data.max_similarity. The similarity is the Dice coefficient of the multisets of all subtrees
of the two sources' syntax trees. It is 1 for equal structures, and 0 if there is no common subtree. Before
the comparison, assignments are inlined, and variable names, numbers, docstrings and module prefixes are
removed.
"""

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from components.core.errors import UserError, refuse
from components.core.files import digest_bytes
from components.core.task import CASTS, missing_kernelbench, read_rows
from components.core.text import parse_python

# Variables that stand for modules of torch. They are kept, and every other variable is replaced by one word.
LIBRARIES = frozenset({"torch", "nn", "F", "functional"})
# Largest number of syntax nodes of an expression that is inlined. The limit is needed because repeated
# assignments such as x = x * x grow exponentially when they are inlined.
MAX_INLINED_NODES = 2000

# Pattern of the statements of a constructor that compute nothing.
IGNORED = re.compile(rf"super\(|^self\.({'|'.join(CASTS.values())})\(\)$")

# Type of a multiset of subtrees: how often each subtree, named by a text, occurs.
Subtrees = Counter[str]


def count_subtrees(code: str, *, constants: bool = False) -> Subtrees:
    """Return how often each subtree occurs in the normalised syntax trees of the methods of class `Model`.

    `code` is the source of a task, which has that class. Normalised means that assignments are inlined,
    and that variable names, numbers, docstrings and module prefixes are removed. Subtrees are named by
    texts of at most 64 characters. If `constants` is true, the values of constants are kept, variables are
    numbered in the order of a method's arguments and of their first use, attributes are told apart by what
    the constructor makes them of and by their first use, and the functions `get_inputs` and `get_init_inputs`
    and assignments of the module are included. Then equal results mean equal operator graphs on equal shapes.
    Raises what `ast.parse` raises if `code` is not valid Python.
    """
    counts: Subtrees = Counter()
    made: dict[str, str] = {}
    for node in parse_python(code).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            for method in sorted(methods, key=lambda method: method.name != "__init__"):
                labels = _Labels(constants, counts, method, made)
                for statement in _inline_assignments(method):
                    labels.label(statement)
                if constants and method.name == "__init__":
                    made = _Labels(constants, Counter(), method, {}).attributes_made(method)
        elif (
            constants and isinstance(node, ast.FunctionDef) and node.name in ("get_inputs", "get_init_inputs")
        ):
            labels = _Labels(constants, counts, node, {})
            for statement in _inline_assignments(node):
                labels.label(statement)
        elif constants and isinstance(node, ast.Assign | ast.AnnAssign):
            _Labels(constants, counts, None, {}).label(node)
    return counts


def graph_digest(code: str) -> str:
    """Return a digest of the operator graph and the input shapes of a task's source.

    The digest is equal for sources that differ only in the names of variables, in module prefixes and in
    formatting.
    """
    return digest_bytes(
        "\n".join(
            f"{label} {count}" for label, count in sorted(count_subtrees(code, constants=True).items())
        ).encode()
    )


def similarity(a: Subtrees, b: Subtrees) -> float:
    """Return the Dice coefficient of two multisets of subtrees, from 0 to 1; it is 0 if both are empty."""
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 0.0


class EvaluationPrograms:
    """The evaluation programs (sources of benchmark tasks) to which training tasks must not be similar."""

    def __init__(self, against: Iterable[str]):
        """Read the programs at the paths `against`, which are those of the parameter data.against.

        A path is a .py file, a parquet file with a column `code`, or a folder of either. Of a KernelBench
        checkout only the folder `KernelBench` is read, which has the tasks. Raises UserError, which names the
        first path that cannot be read or has no program with a class `Model`.
        """
        self.programs = [
            (origin, count_subtrees(code)) for name in against for origin, code in _sources(Path(name))
        ]

    def nearest(self, code: str) -> tuple[float, str]:
        """Return the highest similarity of a task's source to any program, and the origin of that program.

        The similarity is from 0 to 1. The origin is the program's path, or FILE:ROW for a row of a parquet
        file. Returns (0.0, "") if there are no programs.
        """
        subtrees = count_subtrees(code) if self.programs else Counter()
        return max(
            ((similarity(subtrees, other), origin) for origin, other in self.programs), default=(0.0, "")
        )


def _sources(path: Path) -> list[tuple[str, str]]:
    if path.suffix == ".parquet":
        rows = read_rows(path, "code", field="data.against: ")
        sources = [(f"{path.name}:{index}", str(row["code"])) for index, row in enumerate(rows)]
    elif path.is_dir() or (path.suffix == ".py" and path.is_file()):
        nested = path / "KernelBench"
        root = nested if nested.is_dir() else path
        files = sorted(root.rglob("*.py")) if path.is_dir() else [path]
        if not files and (tables := sorted(root.rglob("*.parquet"))):
            return [source for table in tables for source in _sources(table)]
        sources = [(str(file.relative_to(path.parent)), file.read_text(errors="replace")) for file in files]
    else:
        fault = missing_kernelbench(path) or (
            f"{path} is neither a folder of .py files nor a parquet file; give an existing path"
        )
        raise UserError(f"data.against: {fault}.")
    programs = [(origin, code) for origin, code in sources if _has_model(code)]
    remedy = "give a folder or parquet of evaluation programs"
    refuse((not programs, f"data.against: {path} holds no program with a class Model; {remedy}."))
    return programs


def _has_model(code: str) -> bool:
    try:
        tree = parse_python(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.ClassDef) and node.name == "Model" for node in tree.body)


# --- normalisation ------------------------------------------------------------------------------------------


def _inline_assignments(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the statements of a function, in which a name that was assigned is replaced by its expression.

    The assignments `name = expression` themselves are removed; `name += expression` is such an assignment,
    too. An expression with more than MAX_INLINED_NODES
    syntax nodes is not inlined. Also removed are the docstring, super().__init__(), and a statement such as
    self.half() that casts the module to another dtype.
    """
    values: dict[str, ast.expr] = {}
    body: list[ast.stmt] = []
    for statement in function.body:
        if isinstance(statement, ast.Expr) and (
            isinstance(statement.value, ast.Constant) or IGNORED.search(ast.unparse(statement.value))
        ):
            continue
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            before = ast.Name(statement.target.id, ast.Load())
            value = ast.BinOp(before, statement.op, statement.value)
            statement = ast.Assign([statement.target], value)
        statement = _Substitute(values).visit(copy.deepcopy(statement))
        if (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            if sum(1 for _ in ast.walk(statement.value)) <= MAX_INLINED_NODES:
                values[statement.targets[0].id] = statement.value
                continue
            values.pop(statement.targets[0].id, None)
        elif not isinstance(statement, ast.Return | ast.Assign | ast.Expr):
            # A name that is assigned in a branch or a loop has no known value afterwards.
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    values.pop(node.id, None)
        body.append(statement)
    return body


class _Substitute(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values[node.id] if isinstance(node.ctx, ast.Load) and node.id in self.values else node


class _Labels:
    """Names the subtrees of a method by texts, and counts them in `counts`.

    The arguments `constants` and `counts` are those of `count_subtrees`. `made` has the texts of what the
    constructor makes the attributes of.
    """

    def __init__(
        self, constants: bool, counts: Subtrees, method: ast.FunctionDef | None, made: dict[str, str]
    ):
        self.constants, self.counts, self.made = constants, counts, made
        arguments = method.args.args if method else []
        # Numbers of variables and of attributes in the order of their first use.
        self.names = {argument.arg: number for number, argument in enumerate(arguments)}
        self.attributes: dict[str, int] = {}

    def attributes_made(self, constructor: ast.FunctionDef) -> dict[str, str]:
        """Return the texts of the expressions that the constructor assigns to attributes, by attribute."""
        return {
            statement.targets[0].attr: self.label(statement.value)
            for statement in _inline_assignments(constructor)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute)
        }

    def label(self, node: ast.AST) -> str:
        """Return the text of a subtree, after adding it and those in it to the counts."""
        match node:
            case ast.Name(id=name) if name in LIBRARIES:
                text = name
            case ast.Name(id=name):
                text = f"name{self.names.setdefault(name, len(self.names))}" if self.constants else "name"
            case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr=attribute) if (
                name in LIBRARIES
            ):
                text = f".{attribute}"
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute) if attribute in self.made:
                number = self.attributes.setdefault(attribute, len(self.attributes))
                text = f"self{number}:{self.made[attribute]}"
            case ast.Attribute(value=ast.Name(id="self")):
                text = "self"
            case ast.Attribute(value=value, attr=attribute):
                text = f"{self.label(value)}.{attribute}"
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
                text = ast.unparse(node) if self.constants else "number"
            case ast.Constant(value=value):
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                text = "number" if is_number and not self.constants else repr(value)
            case ast.keyword(arg=argument, value=value):
                text = f"{argument}={self.label(value)}"
            case _:
                children = [
                    self.label(child)
                    for child in ast.iter_child_nodes(node)
                    if not isinstance(child, ast.expr_context)
                ]
                text = f"{type(node).__name__}({','.join(children)})"
        if len(text) > 64:
            text = digest_bytes(text.encode())[:32]
        self.counts[text] += 1
        return text
