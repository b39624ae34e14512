"""Rewrite a user's module in the layout of composed tasks, which has one line `x = …` for each operator.

Composed tasks are chains of operators that components/synthesis/core_composer.py writes. Rewriting is needed
for policies that are made from scratch, because they are trained on this layout only (TASK_LAYOUT in
operator_chain.py). Names, intermediate variables, named sizes, methods, activation modules and the order of
operands are normalised. The result is used only as the prompt. The judge compares kernels with the user's own
module.
"""

import ast
import copy
import re
from dataclasses import dataclass, field

from components.bootstrap.operator_chain import CORE_OPERATORS, PATTERNS, TASK_LAYOUT, read_chain
from components.bootstrap.source_names import Names, NotAChain, parts_of, returned_expression
from components.bootstrap.spelling import is_number, unfold
from components.core.text import parse_python

# Names of torch functions as they are written in composed tasks, such as F.relu for relu.
QUALIFIED_NAMES = {
    name: f"{module}.{name}"
    for operator in CORE_OPERATORS
    for module, name in re.findall(r"(F|torch)\.(\w+)", operator.line)
}
# Names of torch functions by the lower-case name of the torch.nn module that computes the same. For example,
# leaky_relu has the key leakyrelu.
MODULE_FUNCTIONS = {name.replace("_", ""): name for name in QUALIFIED_NAMES}
TORCH_NAMESPACES = frozenset({"torch", "F", "nn.functional", "torch.nn.functional"})
# Keyword arguments that composed tasks pass as positional arguments, by function.
POSITIONAL_CONSTANTS = {
    "leaky_relu": ("negative_slope",),
    "softshrink": ("lambd",),
    "clamp": ("min", "max"),
}
# Functions along one dimension, which composed tasks pass as the keyword argument `dim`.
DIM_FUNCTIONS = frozenset({"softmax", "log_softmax", "normalize", "sum", "mean", "amax", "logsumexp"})
# Names of the attributes that hold norms in composed tasks, by the class of the norm.
NORMS = {"nn.LayerNorm": "layer_norm", "nn.RMSNorm": "rms_norm"}


def canonicalize(code: str) -> str | None:
    """Return the source of an operator chain in the layout of composed tasks, or None for another source.

    The layout (TASK_LAYOUT in operator_chain.py) has one line `x = …` of forward for each operator of the
    chain. A source that already has this layout is returned unchanged.
    """
    if read_chain(code) is not None:
        return code
    try:
        text = _rewrite(parse_python(code))
    except (NotAChain, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text if read_chain(text) is not None else None


def _rewrite(tree: ast.Module) -> str:
    """Return the source of a module in the layout of composed tasks, for a module with a class Model.

    The layout has one line `x = …` of `forward` for each operator. Raises NotAChain if `forward` of the
    class or get_inputs is missing, if `forward` has not one or two inputs, if it is not a chain of known
    operators, or if the module names workloads (several calls of get_inputs), which this layout has no place
    for.
    """
    parts = parts_of(tree)
    inputs, rank = _inputs(parts.inputs)
    arguments = parts.arguments
    if not 1 <= len(arguments) <= 2:
        raise NotAChain
    names = parts.constants | {name: ast.Name(letter) for name, letter in zip(arguments, "xy", strict=False)}
    speller = _Speller(parts.attributes, rank)
    steps = unfold(
        speller.visit(returned_expression(parts.forward, names)),
        lambda line: line if any(pattern.fullmatch(line) for pattern in PATTERNS.values()) else None,
    )
    if steps is None:
        raise NotAChain
    return TASK_LAYOUT.format(
        init="".join(f"        {line}\n" for line in speller.init()).replace("1e-05", "1e-5"),
        arguments=", ".join("xy"[: len(arguments)]),
        lines="\n".join(f"        x = {step}" for step in steps),
        inputs=", ".join(inputs),
    )


def _inputs(value: ast.expr) -> tuple[list[str], int | None]:
    """Return the source texts of a task's inputs, and the rank that all of them have.

    `value` is the expression that get_inputs returns. For example, `[torch.rand(64, 256)]` gives
    (["torch.randn(64, 256)"], 2). torch.rand is replaced by torch.randn, as in composed tasks, because the
    kernel does not depend on the distribution of the inputs. The rank is None if the inputs have different
    ranks, or if one of them is not a call of torch.rand or torch.randn with numbers. Raises NotAChain if
    `value` is not a list or a tuple.
    """
    if not isinstance(value, ast.List | ast.Tuple):
        raise NotAChain
    sources: list[str] = []
    ranks: set[int | None] = set()
    for source in map(ast.unparse, value.elts):
        sizes = re.fullmatch(r"torch\.randn?\(([\d, ]+)\)", source)
        sources.append(f"torch.randn({sizes[1]})" if sizes else source)
        ranks.add(len(sizes[1].split(",")) if sizes else None)
    return sources, ranks.pop() if len(ranks) == 1 else None


# --- rewriter -----------------------------------------------------------------------------------------------


@dataclass
class _Speller(ast.NodeTransformer):
    """A transformer that rewrites expressions of a user's module into the form that composed tasks have.

    Composed tasks are chains of operators in a fixed layout. For example, `x.relu()` becomes `F.relu(x)`,
    `2 * x` becomes `x * 2.0`, and `x ** 2` becomes `torch.square(x)`. `attributes` are the expressions of the
    attributes of the user's module, by name. `rank` is the rank of its inputs, or None if they have different
    ranks. `renamed` is filled with the name in the composed task of each attribute with parameters, by its
    name in the user's module.
    """

    attributes: Names
    rank: int | None
    renamed: dict[str, str] = field(default_factory=dict)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Rewrite a call of a function, a method or a module of the constructor.

        Calls of norms stay calls of modules, and everything else becomes a call of a torch function. Raises
        NotAChain if composed tasks have no such module or function.
        """
        self.generic_visit(node)
        namespace, _, name = ast.unparse(node.func).rpartition(".")
        if namespace == "self":
            value = self.attributes.get(name)
            if not isinstance(value, ast.Call):
                raise NotAChain
            kind = "nn." + ast.unparse(value.func).rpartition(".")[2]
            if kind in NORMS:
                return ast.Call(self._renamed(name, NORMS[kind]), node.args, node.keywords)
            return self._function(
                MODULE_FUNCTIONS.get(kind.removeprefix("nn.").lower(), ""),
                [*node.args, *value.args],
                [*node.keywords, *value.keywords],
            )
        if namespace not in TORCH_NAMESPACES and isinstance(node.func, ast.Attribute):
            return self._function(name, [node.func.value, *node.args], node.keywords)
        return self._function(name, node.args, node.keywords)

    def _function(self, name: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> ast.expr:
        """Return the call of a torch function with its arguments as composed tasks write them.

        `name` is the function's name without its module. In the call, the dimension is a keyword, which is -1
        for the last one, other constants are positional, and numbers have a decimal point. Raises NotAChain
        if composed tasks have no function `name`, or if there are no arguments.
        """
        if name not in QUALIFIED_NAMES or not arguments:
            raise NotAChain
        by_name = {keyword.arg or "": keyword.value for keyword in keywords}
        if name in DIM_FUNCTIONS and len(arguments) == 2:
            by_name["dim"] = arguments.pop()
        if (
            name in DIM_FUNCTIONS
            and self.rank is not None
            and ast.unparse(by_name.get("dim", ast.Constant(0))) == str(self.rank - 1)
        ):
            by_name["dim"] = ast.Constant(-1)
        arguments += [by_name.pop(place) for place in POSITIONAL_CONSTANTS.get(name, ()) if place in by_name]
        return ast.Call(
            ast.parse(QUALIFIED_NAMES[name], mode="eval").body,
            [arguments[0], *map(_with_decimal_point, arguments[1:])],
            [ast.keyword(key, by_name[key]) for key in sorted(by_name)],
        )

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Rewrite a sum, a product or a square as composed tasks write it.

        Numbers, parameters and the second input become the right operand of a sum or product, and a square
        becomes torch.square. Raises NotAChain for other arithmetic operators.
        """
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow) and ast.unparse(node.right) in ("2", "2.0"):
            return self._function("square", [node.left], [])
        if not isinstance(node.op, ast.Add | ast.Mult):
            raise NotAChain
        left, right = sorted((node.left, node.right), key=self._is_second_operand)
        if isinstance(right, ast.Attribute):
            right = self._renamed(right.attr, "scale" if isinstance(node.op, ast.Mult) else "shift")
        return ast.BinOp(left, node.op, _with_decimal_point(right))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace `self.name` by its value if the constructor assigns a number to it."""
        value = self.attributes.get(node.attr)
        if (
            isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and value is not None
            and is_number(value)
        ):
            return copy.deepcopy(value)
        return self.generic_visit(node)

    def _is_second_operand(self, node: ast.expr) -> bool:
        """Return whether composed tasks write the node on the right of `+` or `*`.

        They do so with numbers, parameters and the second input.
        """
        return (
            is_number(node)
            or isinstance(node, ast.Attribute)
            or (isinstance(node, ast.Name) and node.id == "y")
        )

    def _renamed(self, attribute: str, name: str) -> ast.Attribute:
        """Return the attribute `attribute` of the user's module as `self.name`, its name in composed tasks.

        Raises NotAChain if the constructor does not assign `attribute`, if it has another name already, or
        if two attributes would have one name.
        """
        if (
            attribute not in self.attributes
            or self.renamed.setdefault(attribute, name) != name
            or list(self.renamed.values()).count(name) > 1
        ):
            raise NotAChain
        return ast.Attribute(ast.Name("self"), name)

    def init(self) -> list[str]:
        """Return the lines of the composed task's constructor, which create its norms and parameters.

        An example is "self.scale = nn.Parameter(torch.randn(256))". The method is called after `forward` was
        rewritten, because that fills `renamed`. Attributes of the user's module that are numbers or
        activation modules need no line. Raises NotAChain for any other attribute that `forward` does not
        use. The lines are in the order of the user's constructor, because this order determines that of the
        kernel's arguments.
        """
        lines = []
        for attribute, value in self.attributes.items():
            if attribute not in self.renamed:
                if is_number(value) or (
                    isinstance(value, ast.Call)
                    and ast.unparse(value.func).rpartition(".")[2].lower() in MODULE_FUNCTIONS
                ):
                    continue
                raise NotAChain
            text = ast.unparse(value).replace("torch.nn.", "nn.")
            parameter = re.fullmatch(r"nn\.Parameter\(torch\.\w+\((\d+)\)\)", text)
            lines.append(
                f"self.{self.renamed[attribute]} = "
                f"{f'nn.Parameter(torch.randn({parameter[1]}))' if parameter else text}"
            )
        return lines


def _with_decimal_point(node: ast.expr) -> ast.expr:
    """Return a number with a decimal point, or any other expression unchanged."""
    return ast.parse(repr(float(ast.unparse(node))), mode="eval").body if is_number(node) else node
