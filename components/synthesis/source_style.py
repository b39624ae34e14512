"""Write the source of a composed task as people write theirs, in the manner of KernelBench's tasks.

Composed tasks have numbers for all sizes and no docstrings. A task in this style names sizes on the level of
the module, passes arguments to the constructor, keeps some of them in attributes, and has docstrings and
annotations. It computes the same from the same inputs, and its parameters have the same order and shapes.
`source_names.plain_layout` is the inverse, except that modules and parameters keep the names they have here.
"""

import ast
import itertools
import random
import re
from collections.abc import Mapping, Sequence

from components.core.text import parse_python

# Names of an input's dimensions, by its rank.
DIMENSIONS: dict[int, tuple[tuple[str, ...], ...]] = {
    1: (("size",), ("dim",), ("n",)),
    2: (("batch_size", "dim"), ("batch_size", "features"), ("M", "N"), ("rows", "cols")),
    3: (
        ("batch_size", "channels", "length"),
        ("batch_size", "dim1", "dim2"),
        ("batch_size", "seq_len", "dim"),
    ),
    4: (("batch_size", "channels", "height", "width"), ("batch_size", "features", "dim1", "dim2")),
    5: (("batch_size", "channels", "depth", "height", "width"), ("batch_size", "features", "d", "h", "w")),
}
# Names of the positional arguments of constructors, by the class without a number of dimensions.
POSITIONAL = {
    "Linear": ("in_features", "out_features"),
    "Conv": ("in_channels", "out_channels", "kernel_size"),
    "ConvTranspose": ("in_channels", "out_channels", "kernel_size"),
    "BatchNorm": ("num_features",),
    "InstanceNorm": ("num_features",),
    "GroupNorm": ("num_groups", "num_features"),
    "LayerNorm": ("normalized_shape",),
    "RMSNorm": ("normalized_shape",),
    "PReLU": ("num_parameters",),
    "randn": ("bias_shape",),
}
# Names of attributes for numbers in `forward`, by the function or the arithmetic operator.
NUMBERS = {
    "Mult": "scaling_factor",
    "Add": "add_value",
    "Sub": "subtract_value",
    "Div": "divisor",
    "leaky_relu": "negative_slope",
    "softshrink": "lambd",
    "hardshrink": "lambd",
}
# Keyword arguments in `forward` that become attributes.
KEYWORDS = frozenset("dim kernel_size stride padding dilation alpha delta margin".split())
# Probability that a size, an argument or a number gets a name, and that a part that computes nothing is
# written: annotations and docstrings.
NAMED_SHARE, WRITTEN_SHARE = 0.8, 0.7
# Beginnings of a class's docstring.
BEGINNINGS = ("Simple model that performs", "Model that performs", "A model that applies", "Performs")


class _Style:
    """The names that one source in the style gives to values, which `rng` decides.

    All values are source texts. `constants` are the sizes on the level of the module by name, and
    `parameters` the values of the constructor's arguments by name. `given` has what get_init_inputs returns
    for each argument that has no default.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.constants: dict[str, str] = {}
        self.parameters: dict[str, str] = {}
        self.given: dict[str, str] = {}

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def constant(self, name: str, value: str) -> str:
        """Return a name on the level of the module for `value`: `name`, with a number if it is taken."""
        free = _free_name(name, value, self.constants)
        self.constants[free] = value
        return free

    def parameter(self, name: str, value: str) -> ast.expr:
        """Return an expression for `value` in the constructor: the name of an argument, or the value itself.

        An argument gets its value from a name on the level of the module, often that of an equal size of an
        input, or as its default.
        """
        if not self.chance(NAMED_SHARE):
            return ast.parse(value, mode="eval").body
        free = _free_name(name, value, self.parameters)
        if free not in self.parameters and self.chance(NAMED_SHARE):
            equal = [key for key, text in self.constants.items() if text == value and len(value) > 1]
            reuses = equal and self.chance(NAMED_SHARE)
            self.given[free] = equal[0] if reuses else self.constant(free, value)
        self.parameters[free] = value
        return ast.Name(free)


def _free_name(name: str, value: str, named: Mapping[str, str]) -> str:
    """Return `name`, with a number if `named` has it with another value."""
    numbered = (f"{name}{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if named.get(one, value) == value)


def restyle(code: str, ops: Sequence[str], rng: random.Random) -> str:
    """Return the source of a composed task, a chain of the operators `ops`, in the style of KernelBench.

    `code` is in the layout of composed tasks (operator_chain.py). `rng` decides the names and what is
    written.
    """
    tree, style = parse_python(code), _Style(rng)
    model = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    inputs = functions["get_inputs"].body[0]
    assert isinstance(inputs, ast.Return) and isinstance(inputs.value, ast.List)
    draws = inputs.value.elts
    names = [argument.arg for argument in functions["forward"].args.args[1:]]
    shapes = [_name_sizes(draw, style) for draw in draws]
    init, forward = functions["__init__"], functions["forward"]
    attributes = _Attributes(init.body[1:], style)
    lines = [attributes.visit(statement) for statement in forward.body[:-1]]
    init.body = [*parse_python("super(Model, self).__init__()").body, *attributes.statements]
    forward.body = [*lines, *parse_python("return x").body]
    if len(lines) == 1 or style.chance(0.3):
        last = lines[-1]
        assert isinstance(last, ast.Assign)
        forward.body = [*lines[:-1], ast.Return(last.value)]
    defaults = {name: value for name, value in style.parameters.items() if name not in style.given}
    init.args.args += [ast.arg(name) for name in (*style.given, *defaults)]
    init.args.defaults = [ast.parse(value, mode="eval").body for value in defaults.values()]
    if style.chance(WRITTEN_SHARE):
        _annotate(forward)
    if style.chance(WRITTEN_SHARE):
        _describe(model, forward, ops, dict(zip(names, shapes, strict=True)), style)
    text = ast.unparse(ast.fix_missing_locations(model))
    used = "F." in text
    if used and style.chance(0.3):
        text, used = text.replace("F.", "torch.nn.functional."), False
    constants = "".join(f"{name} = {value}\n" for name, value in style.constants.items())
    if style.chance(0.5):
        made = "".join(f"    {name} = {ast.unparse(draw)}\n" for name, draw in zip(names, draws, strict=True))
        made += f"    return [{', '.join(names)}]"
    else:
        made = f"    return [{', '.join(map(ast.unparse, draws))}]"
    return (
        "import torch\nimport torch.nn as nn\n" + "import torch.nn.functional as F\n" * used + f"\n{text}\n\n"
        f"{constants}\ndef get_inputs():\n{made}\n\ndef get_init_inputs():\n"
        f"    return [{', '.join(style.given.values())}]\n"
    )


def _name_sizes(draw: ast.expr, style: _Style) -> str:
    """Put names for the sizes in a call that draws an input, and return the input's shape as text."""
    assert isinstance(draw, ast.Call)
    call = (
        draw.func.value
        if isinstance(draw.func, ast.Attribute) and isinstance(draw.func.value, ast.Call)
        else draw
    )
    last = call.args[-1]
    holder = last.elts if isinstance(last, ast.Tuple) else call.args
    rank = len(holder)
    for index, name in enumerate(style.rng.choice(DIMENSIONS[rank])):
        if style.chance(NAMED_SHARE):
            holder[index] = ast.Name(style.constant(name, ast.unparse(holder[index])))
    return f"({', '.join(map(ast.unparse, holder))})"


class _Attributes(ast.NodeTransformer):
    """A transformer of `forward` that puts attributes of `self` in place of numbers, and renames attributes.

    `statements` are those of the constructor that make the attributes.
    """

    def __init__(self, made: Sequence[ast.stmt], style: _Style):
        self.style = style
        self.statements: list[ast.stmt] = []
        self.renamed: dict[str, str] = {}
        for statement in made:
            assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute)
            attribute = statement.targets[0].attr
            short = re.sub(r"_\d+$", "", re.sub(r"_\d+$", "", attribute))
            name = short if short not in self.renamed.values() and style.chance(0.8) else attribute
            self.renamed[attribute] = name
            assert isinstance(statement.value, ast.Call)
            self._name_arguments(statement.value)
            self.statements += parse_python(f"self.{name} = {ast.unparse(statement.value)}").body

    def _name_arguments(self, call: ast.Call) -> None:
        """Put arguments of the constructor in place of the values in a call that makes a module."""
        if isinstance(call.args[0], ast.Call):  # nn.Parameter(torch.randn(…))
            call = call.args[0]
        kind = re.sub(r"\d+d$", "", ast.unparse(call.func).rpartition(".")[2])
        for index, name in enumerate(POSITIONAL[kind][: len(call.args)]):
            call.args[index] = self.style.parameter(name, ast.unparse(call.args[index]))
        for keyword in call.keywords:
            if keyword.arg and ast.unparse(keyword.value) not in ("True", "False"):
                keyword.value = self.style.parameter(keyword.arg, ast.unparse(keyword.value))

    def _attribute(self, name: str, value: ast.expr) -> ast.expr:
        """Return an attribute of `self` for `value`, which the constructor makes, or `value` itself."""
        given = self.style.parameter(name, ast.unparse(value))
        if not isinstance(given, ast.Name):
            return value
        (statement,) = parse_python(f"self.{given.id} = {given.id}").body
        if ast.unparse(statement) not in map(ast.unparse, self.statements):
            self.statements.append(statement)
        return ast.parse(f"self.{given.id}", mode="eval").body

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Rename an attribute of `self`."""
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            node.attr = self.renamed[node.attr]
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Put attributes in place of keyword arguments, and of the number of an activation."""
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg in KEYWORDS:
                keyword.value = self._attribute(keyword.arg, keyword.value)
        name = NUMBERS.get(ast.unparse(node.func).rpartition(".")[2])
        if name and len(node.args) == 2:
            node.args[1] = self._attribute(name, node.args[1])
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Put an attribute in place of the number in a line such as `x = x * 2.0`."""
        value = node.value
        if isinstance(value, ast.BinOp) and isinstance(value.right, ast.Constant):
            if isinstance(value.left, ast.Name):
                value.right = self._attribute(NUMBERS[type(value.op).__name__], value.right)
            return node
        return self.generic_visit(node)


def _annotate(forward: ast.FunctionDef) -> None:
    tensor = ast.parse("torch.Tensor", mode="eval").body
    for argument in forward.args.args[1:]:
        argument.annotation = tensor
    forward.returns = tensor


def _describe(
    model: ast.ClassDef, forward: ast.FunctionDef, ops: Sequence[str], shapes: dict[str, str], style: _Style
) -> None:
    """Write docstrings of the class and of `forward`; `shapes` has the shape of each input by its name."""
    words = [re.sub(r"_\d$", "", name).replace("_", " ") for name in ops]
    listed = " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    beginning = style.rng.choice(BEGINNINGS)
    model.body.insert(0, ast.Expr(ast.Constant(f"\n    {beginning} {listed}.\n    ")))
    if style.chance(WRITTEN_SHARE):
        arguments = "".join(
            f"            {name} (torch.Tensor): Input tensor of shape {shape}.\n"
            for name, shape in shapes.items()
        )
        results = "        Returns:\n            torch.Tensor: Output tensor.\n        "
        text = f"\n        Args:\n{arguments}\n{results}"
        forward.body.insert(0, ast.Expr(ast.Constant(text)))
