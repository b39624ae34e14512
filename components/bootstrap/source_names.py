"""Put values in place of the names in a task's source, and read the source in the layout of composed tasks.

Composed tasks have one line `x = …` of `forward` for each operator, and numbers in place of named sizes
(TASK_LAYOUT in operator_chain.py). People name sizes and arguments of the constructor, and write docstrings.
"""

import ast
import copy
import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from components.bootstrap.operator_chain import SOURCE, TASK_LAYOUT
from components.bootstrap.spelling import Speller, Spellings, is_number, is_value
from components.core.text import parse_python
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
# Names of the inputs in the layout of composed tasks, in their order, and of results that are no longer used.
INPUTS, GONE = "xyz", "_gone"


class NotAChain(Exception):
    """Error raised if a source is no chain of known operators, applied to `x` one after another."""


@dataclass(frozen=True)
class Parts:
    """The parts of a task's source in which values are in place of the names of sizes.

    `constants` are the values that the module names. `inputs` is the expression that get_inputs returns.
    `attributes` are the expressions that the constructor assigns to attributes of `self`, in their order, and
    `arguments` the names of the inputs of `forward`, whose statements are `forward`.
    """

    constants: Names
    inputs: ast.expr
    attributes: Names
    arguments: list[str]
    forward: list[ast.stmt]


def plain_layout(code: str, known: Spellings) -> str | None:
    """Return the source of a task in the layout of composed tasks, or None if it cannot be written so.

    In the result, numbers are in place of named sizes and of arguments and attributes of the constructor, and
    docstrings and annotations are left out. Calls of torch are spelled as in `known`, and nested operators
    get lines of their own. A result that is needed again later is kept by a line of its own
    (`spelling.unfold`). A source that already has the layout is returned unchanged.
    """
    if SOURCE.fullmatch(code):
        return code
    try:
        return _plain(parts_of(parse_python(code)), known)
    except (NotAChain, SyntaxError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
        return None


def _plain(parts: Parts, known: Spellings) -> str:
    if not isinstance(parts.inputs, ast.List | ast.Tuple) or not 1 <= len(parts.arguments) <= len(INPUTS):
        raise NotAChain
    names = parts.constants | {
        name: ast.Name(letter) for name, letter in zip(parts.arguments, INPUTS, strict=False)
    }
    speller = Speller(known, parts.attributes)
    lines = _forward_lines(parts, names, speller)
    used = Counter(
        part.attr for one in parts.forward for part in ast.walk(one) if isinstance(part, ast.Attribute)
    )
    if any(used[name] != count for name, count in speller.viewed.items()):
        raise NotAChain
    attributes = {
        name: ast.unparse(speller.constructor(value))
        for name, value in parts.attributes.items()
        if not speller.function_of(value)
    }
    return (
        TASK_LAYOUT.format(
            init="".join(
                f"        self.{name} = {text}\n"
                for name, text in attributes.items()
                if not is_value(parts.attributes[name])
            ),
            arguments=", ".join(INPUTS[: len(parts.arguments)]),
            lines="\n".join(f"        x = {line}" for line in lines if line != INPUTS[0]),
            inputs=", ".join(ast.unparse(_drawn(value)) for value in parts.inputs.elts),
        )
        .replace("torch.nn.functional.", "F.")
        .replace("'", '"')
    )


def _forward_lines(parts: Parts, names: Names, speller: Speller) -> list[str]:
    """Return the right-hand sides of `x = …` that compute what `forward` returns.

    `names` has the expressions of names, and is changed: x for the result that was computed last, a name
    such as kept_0 for one that is needed again later, and GONE for others.
    """
    lines, last = list[str](), parts.arguments[0]
    returns = [index for index, one in enumerate(parts.forward) if isinstance(one, ast.Return)]
    if not returns:
        raise NotAChain
    body = parts.forward[: returns[0] + 1]
    # How often each statement, and none after the last one, reads each name.
    reads = [
        Counter(
            part.id for part in ast.walk(one) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
        )
        for one in [*body, ast.Pass()]
    ]
    for index, statement in enumerate(body):
        if isinstance(statement, ast.Return) and statement.value is not None:
            lines += _lines(speller.visit(Substitution(names).visit(statement.value)), speller)
            continue
        bound = assigned_names(statement)
        if len(bound) != 1:
            if is_docstring(statement):
                continue
            raise NotAChain
        ((name, expression),) = bound.items()
        expression = speller.visit(Substitution(names).visit(expression))
        following, later = reads[index + 1], set[str]().union(*reads[index + 2 :])
        if name != last and following[name] == 1 and following[last] and name not in later:
            names[name] = expression  # for instance a norm by which x is divided
            continue
        if isinstance(expression, ast.Name):
            names[name] = expression
            continue
        same = {key for key, value in names.items() if ast.unparse(value) == INPUTS[0] and key != name}
        if same & (following.keys() | later):
            number = next(speller.kept)
            lines.append(f"keep({INPUTS[0]}, {number})")
            names |= dict.fromkeys(same, ast.Name(f"kept_{number}"))
        else:
            names |= dict.fromkeys(same, ast.Name(GONE))
        lines += _lines(expression, speller)
        names[name], last = ast.Name(INPUTS[0]), name
    if any(re.search(rf"\b{GONE}\b", line) for line in lines):
        raise NotAChain
    return lines


def _lines(expression: ast.expr, speller: Speller) -> list[str]:
    """Return the right-hand sides of `x = …` for an expression of x, or of one result that was kept."""
    parts = {part.id for part in ast.walk(expression) if isinstance(part, ast.Name)}
    kept = [part for part in parts if part.startswith("kept_")]
    if INPUTS[0] in parts or len(kept) != 1:
        return speller.lines(expression)
    return [kept[0], *speller.lines(Substitution({kept[0]: ast.Name(INPUTS[0])}).visit(expression))]


def _drawn(value: ast.expr) -> ast.expr:
    """Return the call that draws a tensor of the shape and type of an input, which is enough for a kernel.

    `value` is the input in the list that get_inputs returns, such as `torch.triu(torch.rand(64, 64))`. The
    result is `value` if it has no other form. Raises NotAChain if it is a sum or a product of a tensor and
    something other than a number or its transpose.
    """
    if isinstance(value, ast.BinOp):
        others = ("torch.rand(())", f"{ast.unparse(value.left)}.T")
        if not is_number(value.right) and ast.unparse(value.right) not in others:
            raise NotAChain
        return _drawn(value.left)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return value
    match value.func.attr, value.args:
        case "triu" | "tril", [tensor]:
            return _drawn(tensor)
        case "softmax", _:
            return _drawn(value.func.value)
        case "bool", _:
            value.func.value = _drawn(value.func.value)
        case "float", _:
            drawn = _drawn(value.func.value)
            if isinstance(drawn, ast.Call) and isinstance(drawn.args[-1], ast.Tuple):
                return ast.Call(ast.parse("torch.rand", mode="eval").body, drawn.args[-1].elts, [])
        case "rand" | "randn", sizes:
            value.args = [_number(size) for size in sizes]
        case "randint", [low, high, ast.Attribute(value=ast.Call(args=sizes), attr="shape")]:
            value.args = [low, high, ast.Tuple(sizes, ast.Load())]
    return value


def parts_of(tree: ast.Module) -> Parts:
    """Return the parts of a task's source, of which `tree` is the syntax tree.

    Raises NotAChain if `forward` of the class Model or get_inputs is missing or has branches, or if the
    source names workloads (several calls of get_inputs), which the layout of composed tasks has no place for.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    model = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"), None
    )
    methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)} if model else {}
    if "forward" not in methods or "get_inputs" not in functions or any(map(assigns_workloads, tree.body)):
        raise NotAChain
    constants: Names = {}
    for statement in tree.body:
        for name, value in assigned_names(statement).items():
            number = _number(Substitution(constants).visit(value))
            constants |= {name: number} if is_value(number) else {}
    given = (
        returned_expression(functions["get_init_inputs"].body, dict(constants))
        if "get_init_inputs" in functions
        else ast.List([])
    )
    return Parts(
        constants,
        returned_expression(functions["get_inputs"].body, dict(constants)),
        constructed(methods["__init__"], given, constants) if "__init__" in methods else {},
        [argument.arg for argument in methods["forward"].args.args[1:]],
        methods["forward"].body,
    )


# --- names --------------------------------------------------------------------------------------------------


def _number(node: ast.expr) -> ast.expr:
    """Return the number that arithmetic with numbers gives, or the node if it is something else.

    Raises OverflowError for a power that could be too large to compute.
    """
    if isinstance(node, ast.Tuple):
        return ast.Tuple([_number(element) for element in node.elts], ast.Load())
    if not isinstance(node, ast.BinOp) or type(node.op) not in ARITHMETIC:
        return node
    left, right = _number(node.left), _number(node.right)
    if not is_number(left) or not is_number(right):
        return node
    numbers = ast.literal_eval(left), ast.literal_eval(right)
    if isinstance(node.op, ast.Pow) and max(map(abs, numbers)) > MAX_POWER:
        raise OverflowError
    value = ARITHMETIC[type(node.op)](*numbers)
    return ast.parse(repr(value), mode="eval").body


def assigned_names(statement: ast.stmt) -> Names:
    """Return the names that an assignment binds, with their expressions.

    Only `a = …`, `a = b = …` and `a, b = …, …` are supported. The result is empty for other statements.
    """
    if not isinstance(statement, ast.Assign):
        return {}
    if len(statement.targets) > 1:
        return {one.id: statement.value for one in statement.targets if isinstance(one, ast.Name)}
    target, value = statement.targets[0], statement.value
    pairs = (
        zip(target.elts, value.elts, strict=True)
        if isinstance(target, ast.Tuple)
        and isinstance(value, ast.Tuple)
        and len(target.elts) == len(value.elts)
        else [(target, value)]
    )
    return {name.id: bound for name, bound in pairs if isinstance(name, ast.Name)}


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
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Attribute)
            and ast.unparse(statement.targets[0].value) == "self"
        ):
            attributes[statement.targets[0].attr] = Substitution(names).visit(statement.value)
        elif not is_docstring(statement) and not ast.unparse(statement).startswith("super("):
            raise NotAChain
    return attributes
