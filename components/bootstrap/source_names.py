"""Put values in place of the names in a task's source, and read the source in the layout of composed tasks.

Composed tasks have one line `x = …` of `forward` for each operator, and numbers in place of named sizes
(TASK_LAYOUT in operator_chain.py). People name sizes and arguments of the constructor, and write docstrings.
"""

import ast
import re
from collections import Counter

from components.bootstrap.operator_chain import SOURCE, TASK_LAYOUT
from components.bootstrap.source_parts import (
    UNREADABLE,
    Names,
    NotAChain,
    Parts,
    Substitution,
    assigned_names,
    is_docstring,
    number_of,
    parts_of,
)
from components.bootstrap.spelling import Speller, Spellings, is_number, is_value
from components.core.text import parse_python

# Names of the inputs in the layout of composed tasks, in their order, and of results that are no longer used.
INPUTS, GONE = "xyz", "_gone"


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
    except UNREADABLE:
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
    something other than a number or its transpose of the same shape, or if that tensor is not of floats.
    """
    if isinstance(value, ast.BinOp):
        left, right = ast.unparse(value.left), ast.unparse(value.right)
        drawn = _drawn(value.left)
        is_square = isinstance(drawn, ast.Call) and len({*map(ast.unparse, drawn.args)}) == 1
        is_other = right == "torch.rand(())" or (right == f"{left}.T" and is_square)
        is_float = ast.unparse(drawn).startswith(("torch.rand(", "torch.randn("))
        if not is_float or not (is_number(value.right) or is_other):
            raise NotAChain
        return drawn
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
            if isinstance(drawn, ast.Call) and ast.unparse(drawn.func) == "torch.randint":
                assert isinstance(drawn.args[-1], ast.Tuple)
                return ast.Call(ast.parse("torch.rand", mode="eval").body, drawn.args[-1].elts, [])
        case "rand" | "randn", sizes:
            value.args = [number_of(size) for size in sizes]
        case "randint", [low, high, ast.Attribute(value=ast.Call(func=made, args=sizes), attr="shape")] if (
            ast.unparse(made) in ("torch.rand", "torch.randn")
        ):
            value.args = [low, high, ast.Tuple(sizes, ast.Load())]
    return value
