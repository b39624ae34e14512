"""The workloads of a kernel task: the calls of its `get_inputs` on which every candidate is judged.

A candidate is an implementation of the task's module with its own kernels. A task's source may assign a list
of tuples to `WORKLOADS`. Each tuple has the arguments of one call of `get_inputs`. The judge handles each
workload as a task of its own, with the source in `Workload.code`.
"""

import ast
import math
from dataclasses import dataclass
from typing import TypeGuard

from components.core.errors import UserError, refuse
from components.core.text import parse_python, readable

# Name that a task's source assigns its workloads to, and the largest number of them.
WORKLOADS = "WORKLOADS"
MAX_WORKLOADS = 8
# Largest number of characters of a call in a message.
CALL_CHARACTERS = 200
# Errors of Python's parser and of functions on syntax trees; deep nesting raises the last two.
SYNTAX_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True)
class Workload:
    """One workload of a task, which is a call of `get_inputs` on whose inputs kernels are judged.

    `call` is the call that makes its inputs, such as `get_inputs(32, 128)`, or "" if the task names no
    workloads. `code` is the source of a task without workloads, whose `get_inputs` takes no arguments and
    makes these inputs.
    """

    call: str
    code: str


def parse_task(code: str, origin: str) -> ast.Module:
    """Return the syntax tree of a task's source; raise UserError if the source is not valid Python.

    The message begins with `origin`, which is the path of the task's file, or another text that says which
    task it is.
    """
    try:
        return parse_python(code)
    except SYNTAX_ERRORS as error:
        raise UserError(f"{origin}: not valid Python ({error}); fix the syntax.") from error


def workloads_of(code: str, origin: str) -> list[Workload]:
    """Return the workloads that the source of a task names, in their order.

    A workload is a call of the task's `get_inputs` on whose inputs kernels are judged. If the source does not
    assign `WORKLOADS`, the result is one workload with the source itself. Raises UserError, which names
    `origin` (such as the path of the task's file), if the source is not valid Python, if `WORKLOADS` is
    assigned more than once or used elsewhere, or if its value is not a list of 1 to `MAX_WORKLOADS` tuples of
    literals that `get_inputs` takes as arguments.
    """
    whole = [Workload("", code)]
    if WORKLOADS not in code:
        return whole
    tree = parse_task(code, origin)
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == WORKLOADS]
    if not any(isinstance(node.ctx, ast.Store) for node in uses):
        return whole
    assignments = [node for node in tree.body if assigns_workloads(node)]
    refuse(
        (
            len(assignments) != 1 or len(uses) > 1,
            f"{origin}: {WORKLOADS} is not assigned once at the top level, or used elsewhere; assign a list "
            "once, and do not use its name otherwise.",
        )
    )
    value = assignments[0].value
    items = value.elts if isinstance(value, ast.List | ast.Tuple) else []
    tuples = [item for item in items if isinstance(item, ast.Tuple | ast.List)]
    refuse(
        (
            not 1 <= len(items) <= MAX_WORKLOADS or len(tuples) < len(items),
            f"{origin}: {WORKLOADS} is not a list of 1 to {MAX_WORKLOADS} tuples; write the arguments of "
            f"each call of get_inputs as a tuple, such as {WORKLOADS} = [(32, 128), (64, 512)].",
        )
    )
    least, most = _argument_counts(tree, origin)
    try:
        rest = ast.unparse(ast.Module([node for node in tree.body if node is not assignments[0]], []))
    except SYNTAX_ERRORS as error:
        raise UserError(f"{origin}: nested too deeply ({type(error).__name__}); split it.") from error
    found = []
    for index, item in enumerate(tuples):
        place, count = f"{origin}: {WORKLOADS}[{index}]", len(item.elts)
        try:
            ast.literal_eval(item)
            arguments = ", ".join(map(ast.unparse, item.elts))
        except (*SYNTAX_ERRORS, TypeError) as error:
            raise UserError(
                f"{place} is not a tuple of literals; write its values out, without names and calls."
            ) from error
        refuse(
            (
                not least <= count <= most,
                f"{place} has {count} values, and get_inputs takes {least} to {most:g} arguments; give a "
                "value for each argument.",
            )
        )
        # The argument's default value is the function with arguments, which this one then replaces.
        source = f"{rest}\n\n\ndef get_inputs(draw=get_inputs):\n    return draw({arguments})\n"
        found.append(Workload(readable(f"get_inputs({arguments})", CALL_CHARACTERS), source))
    return found


def assigns_workloads(node: ast.stmt) -> TypeGuard[ast.Assign | ast.AnnAssign]:
    """Return whether a statement assigns a value to the name `WORKLOADS`, with or without an annotation."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return any(isinstance(target, ast.Name) and target.id == WORKLOADS for target in targets)


def _argument_counts(tree: ast.Module, origin: str) -> tuple[int, float]:
    """Return the smallest and the largest number of positional arguments of the function `get_inputs`.

    The largest is infinite if the function has `*args`. Raises UserError, which names `origin`, if `tree` has
    no such function.
    """
    functions = [
        node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_inputs"
    ]
    refuse((not functions, f"{origin}: get_inputs is missing; define get_inputs(…) for {WORKLOADS}."))
    taken = functions[-1]
    count = len(taken.posonlyargs) + len(taken.args)
    return count - len(taken.defaults), math.inf if taken.vararg else count
