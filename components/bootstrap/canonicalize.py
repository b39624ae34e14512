"""Rewriting of a user's module into the layout of composed tasks.

A policy that was trained from scratch has read no other layout. Names, intermediate variables, named sizes,
methods, activation modules and the order of operands are normalised. The result only serves as the prompt:
kernels are compared with the user's own module.
"""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass, field

from components.bootstrap.chain_parser import OPERATOR_LINES, PATTERNS, TASK_LAYOUT, read_chain

QUALIFIED_NAMES = {
    name: f"{module}.{name}"
    for line in OPERATOR_LINES.values()
    for module, name in re.findall(r"(F|torch)\.(\w+)", line)
}
"""Functions as composed tasks write them: relu is F.relu, tanh is torch.tanh."""
MODULE_FUNCTIONS = {name.replace("_", ""): name for name in QUALIFIED_NAMES}
"""Functions by the lower-case name of the torch.nn module that computes them: leakyrelu is leaky_relu."""
TORCH_NAMESPACES = frozenset({"torch", "F", "nn.functional", "torch.nn.functional"})
POSITIONAL_CONSTANTS = {"leaky_relu": ("negative_slope",), "softshrink": ("lambd",), "clamp": ("min", "max")}
"""Keyword arguments that composed tasks pass by position."""
DIM_FUNCTIONS = frozenset({"softmax", "log_softmax", "normalize", "sum", "mean", "amax", "logsumexp"})
NORMS = {"nn.LayerNorm": "layer_norm", "nn.RMSNorm": "rms_norm"}

Names = dict[str, ast.expr]


class _NotAChain(Exception):
    """Error of a source that is not a chain of known operators."""


def canonicalize(code: str) -> str | None:
    """Return the source of an operator chain in the layout of composed tasks; None for any other source.

    A composed task is returned unchanged.
    """
    try:
        text = _rewrite(ast.parse(code))
    except (_NotAChain, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text if read_chain(text) is not None else None


def _rewrite(tree: ast.Module) -> str:
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    model = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"), None
    )
    methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)} if model else {}
    if "forward" not in methods or "get_inputs" not in functions:
        raise _NotAChain
    constants = {
        name: value
        for statement in tree.body
        for name, value in _assigned_names(statement).items()
        if _is_number(value)
    }
    inputs, rank = _inputs(_returned_expression(functions["get_inputs"].body, dict(constants)))
    init_arguments = (
        _returned_expression(functions["get_init_inputs"].body, dict(constants))
        if "get_init_inputs" in functions
        else ast.List([])
    )
    attributes = _attributes(methods["__init__"], init_arguments, constants) if "__init__" in methods else {}
    arguments = [argument.arg for argument in methods["forward"].args.args[1:]]
    if not 1 <= len(arguments) <= 2:
        raise _NotAChain
    names = constants | {name: ast.Name(letter) for name, letter in zip(arguments, "xy", strict=False)}
    speller = _Speller(attributes, rank)
    steps = _unfold(speller.visit(_returned_expression(methods["forward"].body, names)))
    return TASK_LAYOUT.format(
        init="".join(f"        {line}\n" for line in speller.init()).replace("1e-05", "1e-5"),
        arguments=", ".join("xy"[: len(arguments)]),
        lines="\n".join(f"        x = {step}" for step in steps),
        inputs=", ".join(inputs),
    )


# --- names --------------------------------------------------------------------------------------------------


def _is_number(node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _assigned_names(statement: ast.stmt) -> Names:
    """Return the names that an assignment binds, with their expressions; {} for other statements.

    Assignments are `a = …` and `a, b = …, …`.
    """
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return {}
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = list(zip(target.elts, value.elts, strict=True))
    else:
        pairs = [(target, value)]
    return {name.id: bound for name, bound in pairs if isinstance(name, ast.Name)}


class _Substitution(ast.NodeTransformer):
    """Transformer that replaces names by expressions.

    A computed expression may be used once, because a chain never branches.
    """

    def __init__(self, names: Names):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.names.get(node.id)
        if value is None:
            return node
        return (
            copy.deepcopy(value)
            if _is_number(value) or isinstance(value, ast.Name)
            else self.names.pop(node.id)
        )


def _returned_expression(body: list[ast.stmt], names: Names) -> ast.expr:
    """Return what straight-line code returns, as one expression in which `names` are substituted."""
    for statement in body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            returned: ast.expr = _Substitution(names).visit(statement.value)
            return returned
        bound = _assigned_names(statement)
        if bound:
            names |= {name: _Substitution(names).visit(value) for name, value in bound.items()}
        elif not _is_docstring(statement):
            raise _NotAChain
    raise _NotAChain


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _inputs(value: ast.expr) -> tuple[list[str], int | None]:
    """Return the inputs as composed tasks write them, and their rank when all have the same.

    torch.rand becomes torch.randn: a kernel does not depend on the distribution of its inputs.
    """
    if not isinstance(value, ast.List | ast.Tuple):
        raise _NotAChain
    sources: list[str] = []
    ranks: set[int | None] = set()
    for element in value.elts:
        simple = (
            isinstance(element, ast.Call)
            and not element.keywords
            and all(_is_number(size) for size in element.args)
        )
        if (
            isinstance(element, ast.Call)
            and simple
            and ast.unparse(element.func) in ("torch.randn", "torch.rand")
        ):
            element.func = ast.Attribute(ast.Name("torch"), "randn")
            ranks.add(len(element.args))
        else:
            ranks.add(None)
        sources.append(ast.unparse(element))
    return sources, ranks.pop() if len(ranks) == 1 else None


def _attributes(init: ast.FunctionDef, init_arguments: ast.expr, constants: Names) -> Names:
    """Return the expressions of the constructor's `self.name = …` by name, in its order.

    The constructor's arguments are substituted.
    """
    arguments = [argument.arg for argument in init.args.args[1:]]
    names = constants | dict(zip(reversed(arguments), reversed(init.args.defaults), strict=False))
    names |= dict(
        zip(
            arguments,
            init_arguments.elts if isinstance(init_arguments, ast.List | ast.Tuple) else [],
            strict=False,
        )
    )
    attributes: Names = {}
    for statement in init.body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Attribute)
            and ast.unparse(statement.targets[0].value) == "self"
        ):
            attributes[statement.targets[0].attr] = _Substitution(names).visit(statement.value)
        elif not _is_docstring(statement) and not ast.unparse(statement).startswith("super("):
            raise _NotAChain
    return attributes


# --- rewriter -----------------------------------------------------------------------------------------------


@dataclass
class _Speller(ast.NodeTransformer):
    """Transformer that rewrites expressions into the form of composed tasks.

    `attributes` are those of the user's module, `rank` is that of its inputs when all have the same.
    """

    attributes: Names
    rank: int | None
    renamed: dict[str, str] = field(default_factory=dict)
    """The name of each attribute with parameters in a composed task, by the user's name."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        namespace, _, name = ast.unparse(node.func).rpartition(".")
        if namespace == "self":
            value = self.attributes.get(name)
            if not isinstance(value, ast.Call):
                raise _NotAChain
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
        if name not in QUALIFIED_NAMES or not arguments:
            raise _NotAChain
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
        function = ast.parse(QUALIFIED_NAMES[name], mode="eval").body
        return ast.Call(
            function,
            [arguments[0], *map(_with_decimal_point, arguments[1:])],
            [ast.keyword(key, by_name[key]) for key in sorted(by_name)],
        )

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow) and ast.unparse(node.right) in ("2", "2.0"):
            return self._function("square", [node.left], [])
        if not isinstance(node.op, ast.Add | ast.Mult):
            raise _NotAChain
        left, right = (
            (node.right, node.left)
            if self._is_second_operand(node.left) and not self._is_second_operand(node.right)
            else (node.left, node.right)
        )
        if isinstance(right, ast.Attribute):
            right = self._renamed(right.attr, "scale" if isinstance(node.op, ast.Mult) else "shift")
        return ast.BinOp(left, node.op, _with_decimal_point(right))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace `self.name` by its value where the constructor assigns a number."""
        value = self.attributes.get(node.attr)
        if (
            isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and value is not None
            and _is_number(value)
        ):
            return copy.deepcopy(value)
        self.generic_visit(node)
        return node

    def _is_second_operand(self, node: ast.expr) -> bool:
        """Return whether this is a second operand: a number, a parameter, or the second input."""
        return (
            _is_number(node)
            or isinstance(node, ast.Attribute)
            or (isinstance(node, ast.Name) and node.id == "y")
        )

    def _renamed(self, attribute: str, name: str) -> ast.Attribute:
        if (
            attribute not in self.attributes
            or self.renamed.setdefault(attribute, name) != name
            or list(self.renamed.values()).count(name) > 1
        ):
            raise _NotAChain
        return ast.Attribute(ast.Name("self"), name)

    def init(self) -> list[str]:
        """Return the lines of the constructor, in the user's order.

        The kernel's arguments have the same order.
        """
        lines = []
        for attribute, value in self.attributes.items():
            if attribute not in self.renamed:
                if (
                    isinstance(value, ast.Call)
                    and ast.unparse(value.func).rpartition(".")[2].lower() in MODULE_FUNCTIONS
                ):
                    continue
                if _is_number(value):
                    continue
                raise _NotAChain
            text = ast.unparse(value).replace("torch.nn.", "nn.")
            parameter = re.fullmatch(r"nn\.Parameter\(torch\.\w+\((\d+)\)\)", text)
            lines.append(
                f"self.{self.renamed[attribute]} = "
                f"{f'nn.Parameter(torch.randn({parameter[1]}))' if parameter else text}"
            )
        return lines


def _with_decimal_point(node: ast.expr) -> ast.expr:
    """Write a number with a decimal point; return any other expression as it is."""
    return ast.parse(repr(float(ast.unparse(node))), mode="eval").body if _is_number(node) else node


def _unfold(expression: ast.expr) -> list[str]:
    """Split nested operators into right-hand sides of `x = …`, innermost first."""
    lines: list[str] = []
    while not isinstance(expression, ast.Name):
        text, inner, line = ast.unparse(expression), _operand(expression), ""
        while inner is not None:
            line = text.replace(ast.unparse(inner), "x", 1)
            if any(pattern.fullmatch(line) for pattern in PATTERNS.values()):
                break
            inner = _operand(inner)
        if inner is None:
            raise _NotAChain
        lines.insert(0, line)
        expression = inner
    if expression.id != "x":
        raise _NotAChain
    return lines


def _operand(node: ast.expr) -> ast.expr | None:
    """Return an operator's first operand; None for an expression that is no operator.

    It is a call's first argument, or the left side of an arithmetic expression.
    """
    if isinstance(node, ast.Call) and node.args:
        return node.args[0]
    return node.left if isinstance(node, ast.BinOp) else None
