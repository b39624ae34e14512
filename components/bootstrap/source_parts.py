"""Take a task's source apart, and put values in place of the names that it gives to sizes.

A source is taken apart only if its effect is certain: a name with two meanings, or a statement of the module
that could change what a known name means, makes it no chain of operators.
"""

import ast
import copy
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from components.bootstrap.spelling import is_number, is_value
from components.core.workloads import assigns_workloads

# Expressions by the names or attributes that they are assigned to.
Names = dict[str, ast.expr]
# Arithmetic with the numbers that a module names.
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
# Largest base and exponent of a power that is computed.
MAX_POWER = 64
# Names that composed tasks have for modules, by the modules' full names.
USUAL = {"torch": "torch", "torch.nn": "nn", "torch.nn.functional": "F", "math": "math"}
FUNCTIONS = ("get_inputs", "get_init_inputs")
SUPER = re.compile(r"super\((Model, self)?\)\.__init__\(\)")


class NotAChain(Exception):
    """Error raised if a source is no chain of known operators, applied to `x` one after another."""


# What the readers may raise for a source that they do not expect, which is no chain.
UNREADABLE: tuple[type[Exception], ...] = (
    *(NotAChain, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(RecursionError, StopIteration, SyntaxError, TypeError, ValueError),
)


@dataclass(frozen=True)
class Parts:
    """The parts of a task's source in which values are in place of the names of sizes.

    `constants` are the values that the module names, and those of arguments of `forward` that no input is
    given for. `inputs` is the expression that get_inputs returns. `attributes` are the expressions that the
    constructor assigns to attributes of `self`, in their order, and `arguments` the names of the inputs of
    `forward`, whose statements are `forward`.
    """

    constants: Names
    inputs: ast.expr
    attributes: Names
    arguments: list[str]
    forward: list[ast.stmt]


def parts_of(tree: ast.Module) -> Parts:
    """Return the parts of a task's source, of which `tree` is the syntax tree.

    Raises NotAChain if `forward` of the class Model or get_inputs is missing or has branches, if the effect
    of the source is not certain (`_methods`, `_constants`), or if the source names workloads (several calls
    of get_inputs), which the layout of composed tasks has no place for. Names that the source imports from
    torch or math are replaced by the usual ones, such as F.relu for relu.
    """
    tree = _with_usual_names(tree)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    model = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"), None
    )
    methods = _methods(model) if model else {}
    if "forward" not in methods or "get_inputs" not in functions or any(map(assigns_workloads, tree.body)):
        raise NotAChain
    for node in (*methods.values(), *(functions[name] for name in FUNCTIONS if name in functions)):
        others = ast.arguments([], node.args.args, None, [], [], None, node.args.defaults)
        if node.decorator_list or ast.unparse(node.args) != ast.unparse(others):
            raise NotAChain
    constants = _constants(tree)
    given = (
        returned_expression(functions["get_init_inputs"].body, dict(constants))
        if "get_init_inputs" in functions
        else ast.List([])
    )
    inputs = returned_expression(functions["get_inputs"].body, dict(constants))
    arguments = [argument.arg for argument in methods["forward"].args.args[1:]]
    given_names = arguments[: len(inputs.elts)] if isinstance(inputs, ast.List | ast.Tuple) else arguments
    defaults = dict(zip(reversed(arguments), reversed(methods["forward"].args.defaults), strict=False))
    left_out = {name: defaults[name] for name in arguments[len(given_names) :]}
    if not all(map(is_value, left_out.values())):
        raise NotAChain
    return Parts(
        constants | left_out,
        inputs,
        constructed(methods["__init__"], given, constants) if "__init__" in methods else {},
        given_names,
        methods["forward"].body,
    )


def _methods(model: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Return the constructor, if there is one, and `forward` of the class Model by their names.

    Raises NotAChain if the class has anything else but docstrings, or a base class other than nn.Module.
    """
    methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)}
    others = [one for one in model.body if not isinstance(one, ast.FunctionDef) and not is_docstring(one)]
    bases = [ast.unparse(base).removeprefix("torch.").removeprefix("nn.") for base in model.bases]
    if others or model.decorator_list or bases != ["Module"] or not methods.keys() <= {"__init__", "forward"}:
        raise NotAChain
    return methods


def _with_usual_names(tree: ast.Module) -> ast.Module:
    """Return a module in which the names that it imports from torch and math are replaced by the usual ones.

    Raises NotAChain if such a name has a second meaning in the module.
    """
    imports = [one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
    pairs = {pair for statement in imports for pair in _imported(statement)}
    usual = {name: text for name, text in pairs if text}
    others = [one for one in tree.body if one not in imports]
    parts = [part for one in others for part in ast.walk(one)]
    bound = {part.arg for part in parts if isinstance(part, ast.arg)}
    bound |= {part.name for part in parts if isinstance(part, ast.FunctionDef | ast.ClassDef)}
    bound |= {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    if len({name for name, _ in pairs}) != len(pairs) or bound & usual.keys():
        raise NotAChain
    renamed = Renamed(usual)
    return ast.Module([one if one in imports else renamed.visit(one) for one in tree.body], [])


def _constants(tree: ast.Module) -> Names:
    """Return the values that a module names.

    Raises NotAChain if the module has a statement that is none of those that people write: imports,
    functions, classes, assignments, docstrings and a main program. Raises it also if what runs when the
    module is imported calls a function or changes an object, or if Model or a function for the inputs is
    defined twice, or reads a name that is bound to anything but a value or a part of torch or math.
    """
    constants: Names = {}
    known = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    known = [node for node in known if node.name in ("Model", *FUNCTIONS)]
    unknown = set[str]()
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            unknown |= {name for name, text in _imported(statement) if not text}
        elif not _is_main(statement) and any(map(_has_effect, _executed(statement))):
            raise NotAChain
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            unknown |= {statement.name} - {node.name for node in known}
        elif names := assigned_names(statement):
            for name, value in names.items():
                number = number_of(Substitution(constants).visit(value))
                constants |= {name: number} if is_value(number) else {}
                unknown |= set() if is_value(number) else {name}
        elif not is_docstring(statement) and not _is_main(statement):
            raise NotAChain
    read = {part.id for node in known for part in ast.walk(node) if isinstance(part, ast.Name)}
    if len({node.name for node in known}) != len(known) or unknown & (read | {"*", "Model", *FUNCTIONS}):
        raise NotAChain
    return constants


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those parts of it that run when its module is imported, unlike bodies of functions."""
    yield node
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef):
        parts = (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults))
    for part in parts:
        yield from _executed(part)


def _has_effect(node: ast.AST) -> bool:
    """Return whether a node is a call, or an attribute or an element that is assigned or deleted."""
    changes = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
    return changes or isinstance(node, ast.Call)


def _imported(statement: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """Return the names that an import binds, each with its usual name, such as F.relu for relu.

    The usual name is empty if it is not known, and that of a type in `typing` is the name itself. A name is
    `*` if the import binds all names of a module.
    """
    found = []
    for alias in statement.names:
        name, origin = alias.asname or alias.name, alias.name
        if isinstance(statement, ast.Import):
            name = alias.asname or alias.name.partition(".")[0]
            found.append((name, USUAL.get(origin if alias.asname else name, "")))
            continue
        module = "" if statement.level else statement.module or ""
        text = USUAL.get(f"{module}.{origin}") or (f"{USUAL[module]}.{origin}" if module in USUAL else "")
        found.append((name, "" if name == "*" else name if module == "typing" else text))
    return found


def _is_main(statement: ast.stmt) -> bool:
    """Return whether the statement is a main program, which is not run when the module is imported."""
    is_if = isinstance(statement, ast.If) and not statement.orelse
    return is_if and ast.unparse(statement).startswith("if __name__ == '__main__':")


# --- names --------------------------------------------------------------------------------------------------


def number_of(node: ast.expr) -> ast.expr:
    """Return the number that arithmetic with numbers gives, or the node if it is something else.

    Raises OverflowError for a power that could be too large to compute.
    """
    if isinstance(node, ast.Tuple):
        return ast.Tuple([number_of(element) for element in node.elts], ast.Load())
    if not isinstance(node, ast.BinOp) or type(node.op) not in ARITHMETIC:
        return node
    left, right = number_of(node.left), number_of(node.right)
    if not is_number(left) or not is_number(right):
        return node
    numbers = ast.literal_eval(left), ast.literal_eval(right)
    if isinstance(node.op, ast.Pow) and max(map(abs, numbers)) > MAX_POWER:
        raise OverflowError
    value = ARITHMETIC[type(node.op)](*numbers)
    return ast.parse(repr(value), mode="eval").body


def assigned_names(statement: ast.stmt) -> Names:
    """Return the names that an assignment binds, with their expressions.

    Only `a = …`, `a = b = …` and `a, b = …, …` are supported. The result is empty for other statements, and
    if the statement binds or changes anything else.
    """
    if not isinstance(statement, ast.Assign):
        return {}
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for target in statement.targets:
        value = statement.value
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            pairs += zip(target.elts, value.elts, strict=True)
        else:
            pairs.append((target, value))
    names = {
        name.id: value
        for name, value in pairs
        if isinstance(name, ast.Name) and not isinstance(value, ast.Starred)
    }
    binds_more = any(isinstance(part, ast.NamedExpr) for part in ast.walk(statement))
    return {} if binds_more or len(names) != len(pairs) else names


@dataclass(frozen=True)
class Renamed(ast.NodeTransformer):
    """A transformer that replaces names by others, or by attributes such as F.relu, given as texts."""

    names: Mapping[str, str]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the expression of a name of `names`, and any other name as it is."""
        return ast.parse(self.names[node.id], mode="eval").body if node.id in self.names else node


@dataclass
class Substitution(ast.NodeTransformer):
    """A transformer that replaces names by expressions.

    A value, a name or a random tensor may be used several times. Any other expression is used at most once.
    """

    names: Names

    def visit_Starred(self, node: ast.Starred) -> Any:
        """Replace `*sizes` by the elements of the tuple that the name has."""
        value = self.visit(node.value)
        return value.elts if isinstance(value, ast.Tuple) else ast.Starred(value, ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name of `names` by its expression, and leave any other name.

        An expression that is neither a value, a name nor a random tensor is removed from `names`, so that it
        is used only once.
        """
        value = self.names.get(node.id)
        if value is None:
            return node
        is_drawn = ast.unparse(value).startswith(("torch.rand(", "torch.randn("))
        return (
            copy.deepcopy(value)
            if is_value(value) or isinstance(value, ast.Name) or is_drawn
            else self.names.pop(node.id)
        )


def returned_expression(body: list[ast.stmt], names: Names) -> ast.expr:
    """Return the expression that statements without branches return, after substituting names in it.

    Replaced are the names of `names` and those that the statements assign, which are added to `names`. Raises
    NotAChain for other statements.
    """
    for statement in body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            returned: ast.expr = Substitution(names).visit(statement.value)
            return returned
        bound = assigned_names(statement)
        if bound:
            names |= {name: Substitution(names).visit(value) for name, value in bound.items()}
        elif not is_docstring(statement):
            raise NotAChain
    raise NotAChain


def is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def constructed(init: ast.FunctionDef, init_arguments: ast.expr, constants: Names) -> Names:
    """Return the expressions that the constructor assigns to attributes of `self`, in their order.

    In these expressions, the names of `constants` and the constructor's arguments are replaced by their
    values. `init_arguments` is the list of the arguments' values that get_init_inputs returns. Raises
    NotAChain if the constructor has another statement than such assignments, docstrings and the call of the
    base class's constructor.
    """
    arguments = [argument.arg for argument in init.args.args[1:]]
    values = init_arguments.elts if isinstance(init_arguments, ast.List | ast.Tuple) else []
    names = (
        constants
        | dict(zip(reversed(arguments), reversed(init.args.defaults), strict=False))
        | dict(zip(arguments, values, strict=False))
    )
    attributes: Names = {}
    for statement in init.body:
        match statement:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                attributes[name] = Substitution(names).visit(statement.value)
            case _ if not is_docstring(statement) and not SUPER.fullmatch(ast.unparse(statement)):
                raise NotAChain
    return attributes
