"""A person's module as the composed task that says the same: a policy made from scratch has read no other layout.

Other names, intermediate variables, named sizes, methods, modules of activations, and operands in another order make no
difference. What comes out is a prompt only: a kernel is compared with the person's own module.
"""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass, field

from components.bootstrap.chain_parser import COMPOSED, PATTERNS, read_chain

SPELLED = {
    name: f"{room}.{name}"
    for pattern in PATTERNS.values()
    for room, name in re.findall(r"(F|torch)\\\.(\w+)", pattern.pattern)
}
"""A function of the table as composed tasks write it: relu is F.relu, tanh is torch.tanh."""
MODULES = {name.replace("_", ""): name for name in SPELLED}
"""The function that a module of nn computes, by the module's name in lower case: leakyrelu is leaky_relu."""
ROOMS = frozenset({"torch", "F", "nn.functional", "torch.nn.functional"})
CONSTANTS = {"leaky_relu": ("negative_slope",), "softshrink": ("lambd",), "clamp": ("min", "max")}
"""Arguments that composed tasks give by place."""
OF_ROWS = frozenset({"softmax", "log_softmax", "normalize", "sum", "mean", "amax", "logsumexp"})
NORMS = {"nn.LayerNorm": "layer_norm", "nn.RMSNorm": "rms_norm"}

Names = dict[str, ast.expr]


class _NoChain(Exception):
    """The source is no chain of known operators."""


def canonicalize(code: str) -> str | None:
    """The source of a chain in the very layout of composed tasks; None for a source that is no such chain. A composed task
    comes back as it is."""
    try:
        tree = ast.parse(code)
        text = _written(tree)
    except (_NoChain, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text if read_chain(text) is not None else None


def _written(tree: ast.Module) -> str:
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    model = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"), None
    )
    methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)} if model else {}
    if "forward" not in methods or "get_inputs" not in functions:
        raise _NoChain
    constants = {
        name: value for statement in tree.body for name, value in _bound(statement).items() if _number(value)
    }
    inputs, rank = _inputs(_returned(functions["get_inputs"].body, dict(constants)))
    given = (
        _returned(functions["get_init_inputs"].body, dict(constants))
        if "get_init_inputs" in functions
        else ast.List([])
    )
    attributes = _attributes(methods["__init__"], given, constants) if "__init__" in methods else {}
    arguments = [argument.arg for argument in methods["forward"].args.args[1:]]
    if not 1 <= len(arguments) <= 2:
        raise _NoChain
    names = constants | {name: ast.Name(letter) for name, letter in zip(arguments, "xy", strict=False)}
    spelling = _Spelling(attributes, rank)
    steps = _unfolded(spelling.visit(_returned(methods["forward"].body, names)))
    return COMPOSED.format(
        init="".join(f"        {line}\n" for line in spelling.init()).replace("1e-05", "1e-5"),
        arguments=", ".join("xy"[: len(arguments)]),
        lines="".join(f"        x = {step}\n" for step in steps),
        inputs=f"return [{', '.join(inputs)}]",
    )


# --- names -------------------------------------------------------------------------------------------------------------


def _number(node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _bound(statement: ast.stmt) -> Names:
    """What a plain assignment binds: `a = …`, or `a, b = …, …`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return {}
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = list(zip(target.elts, value.elts, strict=True))
    else:
        pairs = [(target, value)]
    return {name.id: bound for name, bound in pairs if isinstance(name, ast.Name)}


class _Put(ast.NodeTransformer):
    """Expressions in the place of names. What is computed may be used once: a chain never branches."""

    def __init__(self, names: Names):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = self.names.get(node.id)
        if found is None:
            return node
        return (
            copy.deepcopy(found) if _number(found) or isinstance(found, ast.Name) else self.names.pop(node.id)
        )


def _returned(body: list[ast.stmt], names: Names) -> ast.expr:
    """What straight-line code returns, as one expression over what `names` does not hold."""
    for statement in body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            return _Put(names).visit(statement.value)
        bound = _bound(statement)
        if bound:
            names |= {name: _Put(names).visit(value) for name, value in bound.items()}
        elif not _words(statement):
            raise _NoChain
    raise _NoChain


def _words(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _inputs(value: ast.expr) -> tuple[list[str], int | None]:
    """The inputs as composed tasks write them, and their rank where all have the same. Their distribution is no matter of
    a kernel's."""
    if not isinstance(value, ast.List | ast.Tuple):
        raise _NoChain
    written: list[str] = []
    ranks: set[int | None] = set()
    for element in value.elts:
        simple = (
            isinstance(element, ast.Call)
            and not element.keywords
            and all(_number(size) for size in element.args)
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
        written.append(ast.unparse(element))
    return written, ranks.pop() if len(ranks) == 1 else None


def _attributes(init: ast.FunctionDef, given: ast.expr, constants: Names) -> Names:
    """What the constructor keeps, in its order, with its arguments put in."""
    arguments = [argument.arg for argument in init.args.args[1:]]
    names = constants | dict(zip(reversed(arguments), reversed(init.args.defaults), strict=False))
    names |= dict(zip(arguments, given.elts if isinstance(given, ast.List | ast.Tuple) else [], strict=False))
    found: Names = {}
    for statement in init.body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Attribute)
            and ast.unparse(statement.targets[0].value) == "self"
        ):
            found[statement.targets[0].attr] = _Put(names).visit(statement.value)
        elif not _words(statement) and not ast.unparse(statement).startswith("super("):
            raise _NoChain
    return found


# --- spelling ----------------------------------------------------------------------------------------------------------


@dataclass
class _Spelling(ast.NodeTransformer):
    """Expressions as composed tasks spell them; `attributes` are the module's own, `rank` is that of its inputs."""

    attributes: Names
    rank: int | None
    renamed: dict[str, str] = field(default_factory=dict)
    """What an attribute with parameters is called in a composed task."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        room, _, name = ast.unparse(node.func).rpartition(".")
        if room == "self":
            made = self.attributes.get(name)
            if not isinstance(made, ast.Call):
                raise _NoChain
            kind = "nn." + ast.unparse(made.func).rpartition(".")[2]
            if kind in NORMS:
                return ast.Call(self._renamed(name, NORMS[kind]), node.args, node.keywords)
            return self._function(
                MODULES.get(kind.removeprefix("nn.").lower(), ""),
                [*node.args, *made.args],
                [*node.keywords, *made.keywords],
            )
        if room not in ROOMS and isinstance(node.func, ast.Attribute):
            return self._function(name, [node.func.value, *node.args], node.keywords)
        return self._function(name, node.args, node.keywords)

    def _function(self, name: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> ast.expr:
        if name not in SPELLED or not arguments:
            raise _NoChain
        by_name = {keyword.arg or "": keyword.value for keyword in keywords}
        if name in OF_ROWS and len(arguments) == 2:
            by_name["dim"] = arguments.pop()
        if (
            name in OF_ROWS
            and self.rank is not None
            and ast.unparse(by_name.get("dim", ast.Constant(0))) == str(self.rank - 1)
        ):
            by_name["dim"] = ast.Constant(-1)
        arguments += [by_name.pop(place) for place in CONSTANTS.get(name, ()) if place in by_name]
        function = ast.parse(SPELLED[name], mode="eval").body
        return ast.Call(
            function,
            [arguments[0], *map(_decimal, arguments[1:])],
            [ast.keyword(key, by_name[key]) for key in sorted(by_name)],
        )

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow) and ast.unparse(node.right) in ("2", "2.0"):
            return self._function("square", [node.left], [])
        if not isinstance(node.op, ast.Add | ast.Mult):
            raise _NoChain
        left, right = (
            (node.right, node.left)
            if self._plain(node.left) and not self._plain(node.right)
            else (node.left, node.right)
        )
        if isinstance(right, ast.Attribute):
            right = self._renamed(right.attr, "scale" if isinstance(node.op, ast.Mult) else "shift")
        return ast.BinOp(left, node.op, _decimal(right))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """A number that the constructor keeps is that number."""
        value = self.attributes.get(node.attr)
        if (
            isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and value is not None
            and _number(value)
        ):
            return copy.deepcopy(value)
        self.generic_visit(node)
        return node

    def _plain(self, node: ast.expr) -> bool:
        """Whether this is what a chain's operator is applied with, not what it is applied to."""
        return (
            _number(node)
            or isinstance(node, ast.Attribute)
            or (isinstance(node, ast.Name) and node.id == "y")
        )

    def _renamed(self, attribute: str, name: str) -> ast.Attribute:
        if (
            attribute not in self.attributes
            or self.renamed.setdefault(attribute, name) != name
            or list(self.renamed.values()).count(name) > 1
        ):
            raise _NoChain
        return ast.Attribute(ast.Name("self"), name)

    def init(self) -> list[str]:
        """The constructor's lines, in its order: it is that of the kernel's arguments."""
        lines = []
        for attribute, made in self.attributes.items():
            if attribute not in self.renamed:
                if (
                    isinstance(made, ast.Call)
                    and ast.unparse(made.func).rpartition(".")[2].lower() in MODULES
                ):
                    continue
                if _number(made):
                    continue
                raise _NoChain
            text = ast.unparse(made).replace("torch.nn.", "nn.")
            parameter = re.fullmatch(r"nn\.Parameter\(torch\.\w+\((\d+)\)\)", text)
            lines.append(
                f"self.{self.renamed[attribute]} = {f'nn.Parameter(torch.randn({parameter[1]}))' if parameter else text}"
            )
        return lines


def _decimal(node: ast.expr) -> ast.expr:
    """A number with its point, as composed tasks write it."""
    return ast.parse(repr(float(ast.unparse(node))), mode="eval").body if _number(node) else node


def _unfolded(rest: ast.expr) -> list[str]:
    """Nested operators as right-hand sides of `x = …`, innermost first."""
    lines: list[str] = []
    while not isinstance(rest, ast.Name):
        text, inner, line = ast.unparse(rest), _operand(rest), ""
        while inner is not None:
            line = text.replace(ast.unparse(inner), "x", 1)
            if any(pattern.fullmatch(line) for pattern in PATTERNS.values()):
                break
            inner = _operand(inner)
        if inner is None:
            raise _NoChain
        lines.insert(0, line)
        rest = inner
    if rest.id != "x":
        raise _NoChain
    return lines


def _operand(node: ast.expr) -> ast.expr | None:
    """What an operator is applied to: a call's first argument, the left side of an arithmetic expression."""
    if isinstance(node, ast.Call) and node.args:
        return node.args[0]
    return node.left if isinstance(node, ast.BinOp) else None
