"""Rewrite calls of torch as the lines of the tensor operators spell them (tensor_operators.py).

People write `torch.relu(x)`, `x.relu()`, or `self.act(x)` with `nn.ReLU()`, for `F.relu(x)`. They name
arguments that the lines pass by position, pass by position what the lines name, and leave out defaults.
"""

import ast
import copy
import inspect
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

NAMESPACES = frozenset("torch F nn.functional torch.nn.functional".split())
# Names of arguments that the lines pass by position, by function.
POSITIONAL = {
    "leaky_relu": ("negative_slope",),
    "softshrink": ("lambd",),
    "hardshrink": ("lambd",),
    "clamp": ("min", "max"),
    "hardtanh": ("min_val", "max_val"),
    "squeeze": ("dim",),
    "unsqueeze": ("dim",),
    "flatten": ("start_dim",),
}
# Numbers of the arguments after the tensors that may be given by position, by function, if torch has others
# there than the lines name, such as p in F.normalize(x, p, dim).
BY_POSITION = {"var": 1, "std": 1, "normalize": 0, "huber_loss": 0, "kl_div": 0}
# Functions that compute the same and stand for those that no line has.
SAME = {"bmm": "matmul", "hardtanh": "clamp"}
# Values of arguments that people leave out, or write although it is the default, as source texts.
DEFAULTS = {
    "keepdim": "False",
    "min_val": "-1.0",
    "max_val": "1.0",
    "padding": "0",
    "dilation": "1",
    "alpha": "1.0",
    "delta": "1.0",
    "margin": "1.0",
    "negative_slope": "0.01",
    "lambd": "0.5",
    "p": "2",
    "return_indices": "False",
    "ceil_mode": "False",
    "count_include_pad": "True",
}
# Signs of the arithmetic operators of which both sides may be operators, and what they do with numbers.
SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
NUMBERS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
# Methods that return the same values.
COPIES = frozenset("clone detach contiguous".split())
# Functions that make tensors, from which parameters are made.
MAKERS = frozenset("ones zeros empty rand randn full".split())
# Functions whose last argument is the value of the elements, which says of what type they are.
FILLED = frozenset(("tensor", "full"))
# Modules that return their input, since the judge measures modules in evaluation mode.
IDENTITIES = frozenset("identity dropout dropout1d dropout2d dropout3d alphadropout".split())

# Expressions of an input x, and of a second one y, that a function computes too.
EXPRESSIONS = {
    "x * torch.sigmoid(x)": "F.silu(x)",
    "torch.sigmoid(x) * x": "F.silu(x)",
    "x / (torch.abs(x) + 1)": "F.softsign(x)",
    "torch.mean((x - y) ** 2)": "F.mse_loss(x, y)",
    "x ** 2": "torch.square(x)",
    "x + x": "x * 2.0",
    "torch.tanh(F.softplus(x)) * x": "F.mish(x)",
    "x * torch.tanh(F.softplus(x))": "F.mish(x)",
    "x * torch.clamp((x + 3) / 6, 0, 1)": "F.hardswish(x)",
    "x * 0.5 * (torch.tanh((x + torch.pow(x, 3.0) * 0.044715) * 0.7978845608028654) + 1.0)": (
        'F.gelu(x, approximate="tanh")'
    ),
    "x / torch.norm(x, p=2)": "x / torch.norm(x)",
    "x / torch.norm(x, p='fro')": "x / torch.norm(x)",
    "torch.unsqueeze(x, 1) * y": "torch.matmul(torch.diag(x), y)",
    "torch.mean(torch.clamp(1 - x * y, min=0))": "torch.mean(torch.clamp(1.0 - x * y, min=0.0))",
}


@dataclass(frozen=True)
class Spellings:
    """Calls of torch's functions and of constructors of its modules, as lines spell them, by their names.

    A name is that of the function or class without its module. Arguments that vary are names. `patterns` are
    those of all lines.
    """

    functions: dict[str, ast.Call]
    modules: dict[str, ast.Call]
    patterns: tuple[re.Pattern[str], ...]


def spellings(
    lines: Iterable[str], constructors: Iterable[str], patterns: Iterable[re.Pattern[str]]
) -> Spellings:
    """Return the calls in texts such as `torch.sum(x, dim={dim})`; of several, the first counts.

    `patterns` are those of the lines.
    """

    def calls(texts: Iterable[str]) -> dict[str, ast.Call]:
        found: dict[str, ast.Call] = {}
        for text in texts:
            for node in ast.walk(ast.parse(re.sub(r"\{(\w+)\}", r"\1", text))):
                if isinstance(node, ast.Call):
                    found.setdefault(ast.unparse(node.func).rpartition(".")[2], node)
        return found

    return Spellings(calls(lines), calls(constructors), tuple(patterns))


def is_number(node: ast.expr) -> bool:
    """Return whether the node is a number with or without a minus sign."""
    node = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def is_value(node: ast.expr) -> bool:
    """Return whether the node is a number, or a tuple of numbers."""
    return all(map(is_number, node.elts)) if isinstance(node, ast.Tuple) else is_number(node)


def unfold(
    expression: ast.expr, spelled: Callable[[str], str | None], kept: Iterator[int]
) -> list[str] | None:
    """Split nested operators into the right-hand sides of `x = …`, in the order of computation.

    For example, `F.relu(x * 2.0)` gives ["x * 2.0", "F.relu(x)"]. If both sides of an arithmetic operator
    need x, it is kept under a number of `kept`: `F.relu(x) + x` gives ["keep(x, 0)", "F.relu(x)",
    "x + kept_0"], and the line "kept_0" takes it back. `spelled` returns the line of an operator, or None for
    another text. The result is None if a part of the expression is no operator.
    """
    if isinstance(expression, ast.Name) and (expression.id == "x" or expression.id.startswith("kept_")):
        return [] if expression.id == "x" else [expression.id]
    text, operands = ast.unparse(expression), [expression]
    while (operand := _operand(operands[-1])) is not None:
        operands.append(operand)
    # The innermost operand first, so that the last line has as much as one operator computes.
    for inner in reversed(operands[1:]):
        before, after = text.split(ast.unparse(inner), 1)
        is_input = isinstance(inner, ast.Name) and inner.id == "x"
        # Otherwise another x would be the input, and not the result of the inner operators.
        if is_input or not re.search(r"\bx\b", before + after):
            # A sum is written in parentheses before a product.
            line = spelled(re.sub(r"^\(x\)", "x", f"{before}x{after}"))
            earlier = unfold(inner, spelled, kept) if line is not None else None
            if line is not None and earlier is not None:
                return [*earlier, line]
    if not isinstance(expression, ast.BinOp) or type(expression.op) not in SIGNS:
        return None
    left, right = (unfold(side, spelled, kept) for side in (expression.left, expression.right))
    if left is None or right is None or not (left or right):
        return None
    sign, first, second = SIGNS[type(expression.op)], next(kept), next(kept)
    if not right:
        return [f"keep(x, {first})", *left, f"x {sign} kept_{first}"]
    middle = [*left, f"keep(x, {second})", f"kept_{first}"] if left else []
    last = f"kept_{second if left else first}"
    together = f"x {sign} {last}" if sign in "+*" else f"{last} {sign} x"
    return [f"keep(x, {first})", *middle, *right, together]


def _operand(node: ast.expr) -> ast.expr | None:
    """Return the first operand of an operator, or None if the node is not an operator.

    The first operand is the first argument of a call, the left side of an arithmetic expression, or the tuple
    of results of which one is taken.
    """
    if isinstance(node, ast.Call) and node.args:
        return node.args[0]
    if isinstance(node, ast.Subscript):
        return _operand(node.value)
    return node.left if isinstance(node, ast.BinOp) else None


def _equal(one: ast.expr, other: ast.expr) -> bool:
    """Return whether two expressions are equal numbers or other literals."""
    try:
        return bool(ast.literal_eval(one) == ast.literal_eval(other))
    except ValueError:
        return False


def _uses_x(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "x" for part in ast.walk(node))


def _parameter(made: ast.expr) -> ast.expr:
    """Return a call of torch.randn for a tensor of the shape of `made`, or `made` if that is not known.

    The values of parameters do not matter to a kernel. A number that `made` is multiplied by is left out.
    """
    while isinstance(made, ast.BinOp) and is_number(made.right):
        made = made.left
    name = ast.unparse(made.func).rpartition(".")[2] if isinstance(made, ast.Call) else ""
    if not isinstance(made, ast.Call) or made.keywords:
        return made
    if name in FILLED and not isinstance(ast.literal_eval(made.args[-1]), float):
        return made  # of integers
    if name not in (*MAKERS, "tensor"):
        return made
    sizes = [] if name == "tensor" else made.args
    size = sizes[0] if len(sizes) == 1 or name == "full" else ast.Tuple(sizes, ast.Load())
    return ast.Call(ast.parse("torch.randn", mode="eval").body, [size], [])


@dataclass
class Speller(ast.NodeTransformer):
    """A transformer that gives expressions of `forward` the spelling of `known`.

    `attributes` are the expressions that the constructor assigns to attributes of `self`, by name.
    """

    known: Spellings
    attributes: dict[str, ast.expr]
    # Numbers of results that are kept (`unfold`).
    kept: Iterator[int] = field(default_factory=itertools.count)
    # How often each parameter was viewed in another shape, by attribute.
    viewed: Counter[str] = field(default_factory=Counter)

    def lines(self, expression: ast.expr) -> list[str]:
        """Return the right-hand sides of `x = …` that compute a spelled expression, one for each operator.

        An expression that is not made of known operators is returned as one line.
        """
        text = ast.unparse(expression)
        return unfold(expression, self._line, self.kept) or [EXPRESSIONS.get(text, text)]

    def _line(self, text: str) -> str | None:
        line = EXPRESSIONS.get(text, text).replace("'", '"')
        return line if any(pattern.fullmatch(line) for pattern in self.known.patterns) else None

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Spell a transposed matrix, the first of a function's results, a number of `self`, and `math.pi`."""
        self.generic_visit(node)
        value = self.attributes.get(node.attr) if ast.unparse(node.value) == "self" else None
        if value is not None and is_value(value):
            return copy.deepcopy(value)
        if node.attr == "T":
            return ast.parse(f"{ast.unparse(node.value)}.transpose(0, 1)", mode="eval").body
        if node.attr == "values":
            return ast.Subscript(node.value, ast.Constant(0))
        if ast.unparse(node) == "math.pi":
            return ast.Constant(math.pi)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Spell a product of matrices as a call, and write what does not depend on x on the right side."""
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult):
            return self._call("matmul", [node.left, node.right], []) or node
        if type(node.op) in SIGNS and is_number(node.left) and is_number(node.right):
            compute = NUMBERS[SIGNS[type(node.op)]]
            return ast.Constant(compute(ast.literal_eval(node.left), ast.literal_eval(node.right)))
        if isinstance(node.op, ast.Add | ast.Mult) and not _uses_x(node.left) and _uses_x(node.right):
            node.left, node.right = node.right, node.left
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Spell a call of a function, of a method of a tensor, or of a module without parameters."""
        self.generic_visit(node)
        namespace, _, name = ast.unparse(node.func).rpartition(".")
        if ast.unparse(node.func) == "math.sqrt" and is_number(node.args[0]):
            return ast.Constant(math.sqrt(ast.literal_eval(node.args[0])))
        if namespace in NAMESPACES:
            return self._function(name, node.args, node.keywords) or node
        made = self.attributes.get(name) if namespace == "self" else None
        if isinstance(made, ast.Call) and (function := self.function_of(made)):
            return self._function(function, [*node.args, *made.args], made.keywords) or node
        if name in ("view", "reshape") and self._is_reshaped(namespace, node.args):
            assert isinstance(node.func, ast.Attribute)
            return node.func.value
        is_method = not re.fullmatch(r"(self|torch|F|nn|math)(\.\w+)*", namespace)
        if isinstance(node.func, ast.Attribute) and is_method and name != "transpose":
            return self._function(name, [node.func.value, *node.args], node.keywords) or node
        return node

    def _is_reshaped(self, attribute: str, sizes: list[ast.expr]) -> bool:
        """Return whether `attribute` is a parameter that is viewed with one of the given sizes not 1.

        `attribute` is an expression such as `self.bias`, and a size of -1 stands for all elements. Its shape
        is then changed in `attributes`, which is right only if each use is such a view (`viewed`).
        """
        name = attribute.removeprefix("self.")
        made = ast.unparse(self.constructor(self.attributes.get(name, ast.Constant(None))))
        shape = ast.unparse(ast.Tuple(sizes, ast.Load()))
        numel = re.fullmatch(r"nn\.Parameter\(torch\.randn\(\(?(?:1, )*(\d+),?(?:, 1)*\)?\)\)", made)
        if numel is None or not re.fullmatch(r"\((1, )*-1(, 1)*,?\)", shape):
            return False
        text = f"nn.Parameter(torch.randn({shape.replace('-1', numel[1])}))"
        if self.viewed[name] and text != made:
            return False
        self.attributes[name] = ast.parse(text, mode="eval").body
        self.viewed[name] += 1
        return True

    def _function(self, name: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> ast.expr | None:
        """Return the call of a function as the lines spell it, or None if no line has it.

        The minimum and the maximum of x and a number are spelled as `torch.clamp`, and the product of
        matrices as `torch.matmul` if it is written with letters (einsum).
        """
        if name == "identity" or (name in COPIES and len(arguments) == 1):
            return arguments[0]
        if name in ("min", "max") and len(arguments) == 2 and not keywords and not is_number(arguments[1]):
            match arguments[1]:
                case ast.Call(func=ast.Attribute(attr="tensor"), args=[bound], keywords=options) if {
                    option.arg for option in options
                } <= {"device"}:
                    side = "max" if name == "min" else "min"
                    return self._call("clamp", arguments[:1], [ast.keyword(side, bound)])
            return self._call(f"{name}imum", arguments, keywords)
        if name in ("mul", "multiply") and len(arguments) == 2 and not keywords:
            return self.visit_BinOp(ast.BinOp(arguments[0], ast.Mult(), arguments[1]))
        if name == "einsum":
            letters = re.fullmatch(r"'(\w+)(\w), ?\2(\w) ?-> ?\1\3'", ast.unparse(arguments[0]))
            if letters and len({*"".join(letters.groups())}) == len("".join(letters.groups())):
                return self._call("matmul", arguments[1:], [])
        return self._call(name, arguments, keywords)

    def function_of(self, made: ast.expr) -> str:
        """Return the name of the function that a module computes, such as leaky_relu for nn.LeakyReLU(0.1).

        `made` is the expression that makes the module. The result is `identity` for modules that
        return their input, and "" for modules with parameters, other expressions, and functions that no line
        has.
        """
        kind = ast.unparse(made.func).rpartition(".")[2] if isinstance(made, ast.Call) else ""
        names = {name.replace("_", ""): name for name in (*SAME, *self.known.functions)}
        names |= dict.fromkeys(IDENTITIES, "identity")
        return names.get(kind.lower(), "")

    def _call(self, name: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> ast.expr | None:
        """Return the call of a function with its arguments as the lines spell them, None if none has it."""
        line = self.known.functions.get(name) or self.known.functions.get(SAME.get(name, ""))
        if line is None:
            return None
        placed = POSITIONAL.get(name, ())[: len(line.args) - 1]
        named = [keyword.arg or "" for keyword in line.keywords]
        tensors = max(1, len(line.args) - len(placed))
        if len(arguments) - tensors > BY_POSITION.get(name, len(placed) + len(named)):
            return None
        values = dict(zip((*placed, *named), arguments[tensors:], strict=False))
        values |= {keyword.arg or "": keyword.value for keyword in keywords}
        for argument, text in DEFAULTS.items():
            default = ast.parse(text, mode="eval").body
            if argument in (*placed, *named) and not (argument == "keepdim" and "dim" not in values):
                values.setdefault(argument, default)
            elif argument in values and _equal(values[argument], default):
                del values[argument]
        if not values.keys() >= set(placed):
            placed = ()
        if "stride" in named and ast.unparse(values.get("stride", ast.Constant(None))) == "None":
            values["stride"] = values["kernel_size"]
        if name == "flip" and is_number(values["dims"]):
            values["dims"] = ast.Tuple([values["dims"]], ast.Load())
        order = [*(key for key in named if key in values), *(key for key in values if key not in named)]
        return ast.Call(
            line.func,
            [*arguments[:tensors], *(values[place] for place in placed)],
            [ast.keyword(key, values[key]) for key in order if key not in placed],
        )

    def constructor(self, made: ast.expr) -> ast.expr:
        """Return the expression that makes a module or a parameter in the spelling of the lines."""
        from torch import nn  # imported here because it takes a second

        kind = ast.unparse(made.func).rpartition(".")[2] if isinstance(made, ast.Call) else ""
        line = self.known.modules.get(kind)
        if not isinstance(made, ast.Call) or line is None or not hasattr(nn, kind):
            return made
        if kind == "Parameter":
            return ast.Call(line.func, [_parameter(made.args[0])], [])
        signature = inspect.signature(getattr(nn, kind))
        given = signature.bind(*made.args, **{keyword.arg or "": keyword.value for keyword in made.keywords})
        defaults = {
            name: ast.parse(repr(parameter.default), mode="eval").body
            for name, parameter in signature.parameters.items()
            if parameter.default is not parameter.empty
        }
        placed = list(signature.parameters)[: len(line.args)]
        varying = [keyword.arg or "" for keyword in line.keywords if isinstance(keyword.value, ast.Name)]
        unusual = [
            name
            for name, value in given.arguments.items()
            if name not in (*placed, *varying) and ast.unparse(value) != ast.unparse(defaults[name])
        ]
        values = defaults | given.arguments
        return ast.Call(
            line.func,
            [values[name] for name in placed],
            [ast.keyword(name, values[name]) for name in (*varying, *unusual)],
        )
