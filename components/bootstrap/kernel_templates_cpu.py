"""Generation of C++ kernels for operator chains, according to a schedule.

A chain is divided into groups of operators. Each group is one pass over the memory: over all elements, over
rows, along dimension 0, over the windows of a pooling, or over the tiles of a transposition.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.bootstrap.chain_parser import PER_COLUMN, OperatorChain, Step
from components.bootstrap.kernel_templates_cpp import (
    Sweep,
    elementwise,
    fuse_row,
    replace_functions,
    row_operator,
)
from components.bootstrap.schedules import CpuSchedule

# Lines of each pooling before the loop over a window, for each element `v` of the window, and after the loop.
POOLS = {
    "avg_pool": ("float total = 0;", "total += v;", "float v = total / window;"),
    "max_pool": ("float largest = -INFINITY;", "largest = vmax(largest, v);", "float v = largest;"),
}


@dataclass(frozen=True)
class Group:
    """Operators of a chain that share one pass over the memory.

    `source` and `target` are the names of the C++ arrays that the pass reads and writes: the input `x`, the
    output `out`, or the buffer `w`. `size` is the C++ expression of the number of elements of `target`.
    """

    steps: Sequence[Step]
    source: str
    target: str
    size: str


def indent(lines: Sequence[str]) -> list[str]:
    """Return C++ lines with two more spaces of indentation."""
    return [f"  {line}" for line in lines]


def for_head(name: str, end: str, start: str = "0", step: str = "") -> str:
    """Return the head of a C++ loop in which `name` goes from `start` to `end` in steps of `step` or 1.

    A loop whose body is only another loop is written as this head without braces, and both loops have the
    same indentation. So an operator's line has the same indentation, and the same token, in most kernels.
    """
    return f"for (int64_t {name} = {start}; {name} < {end}; {f'{name} += {step}' if step else f'++{name}'})"


def for_loop(name: str, end: str, body: Sequence[str], start: str = "0", step: str = "") -> list[str]:
    """Return the lines of a C++ loop with the lines `body`. For the other arguments see `for_head`."""
    return [for_head(name, end, start, step) + " {", *indent(body), "}"]


def pragma(schedule: CpuSchedule, clause: str = "") -> list[str]:
    """Return the OpenMP line that vectorises the next loop, or nothing if the schedule's loops are scalar.

    `clause` is the content of the reduction clause, such as "+ : sum". Without it there is no such clause.
    """
    if schedule.loops == "scalar":
        return []
    return [f"#pragma omp simd{f' reduction({clause})' if clause else ''}"]


def element_pass(group: Group, schedule: CpuSchedule) -> list[str]:
    """Return the C++ lines of one loop over all elements, for elementwise operators."""
    body = [f"float v = {group.source}[i];", *map(elementwise, group.steps), f"{group.target}[i] = v;"]
    return [*pragma(schedule), *for_loop("i", group.size, body)]


def row_pass(group: Group, schedule: CpuSchedule) -> list[str]:
    """Return the C++ lines of a pass over the rows, for operators that need a row or the index in it."""

    def loop(array: str, body: Sequence[str], clause: str, vectorised: bool) -> list[str]:
        pragmas = pragma(schedule, clause) if vectorised else []
        return [*pragmas, *for_loop("i", "cols", [f"float v = {array}[i];", *body])]

    def write_sweep(sweep: Sweep, array: str, body: list[str]) -> list[str]:
        lines = loop(array, body, sweep.clause, bool(sweep.clause)) if body else []
        return [*sweep.declare, *lines, *sweep.finish]

    row = fuse_row(group.steps, write_sweep, schedule.algorithm)
    buffered = row.tail and row.source == "b"
    if row.tail:
        end = [*row.tail, f"{group.target}[r] = v;"]
    else:
        end = loop(row.source, [*row.pending, "b[i] = v;"], "", not row.scan)
    body = [
        f"const float* a = {group.source} + r * cols;",
        *(["float* b = row.data();"] if buffered else []),
        *([] if row.tail else [f"float* b = {group.target} + r * cols;"]),
        *(["const float* s = y + r * cols;"] if any("input" in step.name for step in group.steps) else []),
        *row.lines,
        *end,
    ]
    return [*(["std::vector<float> row(cols);"] if buffered else []), *for_loop("r", "rows", body)]


def _declared(line: str) -> tuple[str, str, str]:
    """Return the type, the name and the value of the variable that a C++ line declares."""
    match = re.fullmatch(r"(?:const )?(\w+) (\w+) = (.*);", line)
    if match is None:
        raise ValueError(f"no declaration of one variable: {line}")
    return match[1], match[2], match[3]


def _array(line: str) -> list[str]:
    """Return C++ lines that declare and initialise one accumulator for each column of a block.

    `line` is the C++ declaration of a single accumulator. The accumulators are an array with the same type,
    name and initial value. For example, `double total = 0;` gives `double total[block] = {};`.
    """
    kind, name, value = _declared(line)
    if value == "0":
        return [f"{kind} {name}[block] = {{}};"]
    return [f"{kind} {name}[block];", f"for ({kind}& v : {name}) v = {value};"]


def column_pass(group: Group, schedule: CpuSchedule) -> list[str]:
    """Return the C++ lines of a pass along dimension 0, for operators that need whole columns.

    If the schedule's order is `columns`, each column is computed alone, and otherwise a block of columns is
    computed row by row, with an array in the place of each accumulator.
    """
    by_column = schedule.order == "columns"
    shrinks = any(map(changes_shape, group.steps))
    arrays = {"a": f"{group.source}[r * cols + i]", "b": f"{'w' if shrinks else group.target}[r * cols + i]"}
    names: list[str] = []

    def over_rows(array: str, body: Sequence[str]) -> list[str]:
        lines = [f"float v = {arrays[array]};", *body]
        if by_column:
            return for_loop("r", "rows", lines)
        return [for_head("r", "rows"), *over_block(lines)]

    def over_block(body: Sequence[str]) -> list[str]:
        found = [re.sub(rf"\b({'|'.join(names)})\b", r"\1[i - k]", line) for line in body] if names else body
        return [*pragma(schedule), *for_loop("i", "k + block", found, start="k")]

    def write_sweep(sweep: Sweep, array: str, body: list[str]) -> list[str]:
        """Return the C++ lines of a sweep over the columns in `array`; `body` are the lines for each element.

        For a block of columns, each variable of the sweep becomes an array with one value for each column.
        """
        if by_column:
            return [*sweep.declare, *(over_rows(array, body) if body else []), *sweep.finish]
        names.extend(_declared(line)[1] for line in (*sweep.declare, *sweep.finish))
        lines = [line for declaration in sweep.declare for line in _array(declaration)]
        if body:
            lines += over_rows(array, body)
        if sweep.finish:
            lines += [f"float {_declared(line)[1]}[block];" for line in sweep.finish]
            lines += over_block([line.removeprefix("const float ") for line in sweep.finish])
        return lines

    row = fuse_row(group.steps, write_sweep, schedule.algorithm)
    if row.tail:
        end = [*row.tail, f"{group.target}[i] = v;"]
        end = end if by_column else over_block(end)
    else:
        end = over_rows(row.source, [*row.pending, "b[i] = v;"])
    lines = [
        line.replace("b[i] = v;", f"{arrays['b']} = v;").replace("/ cols", "/ rows")
        for line in (*row.lines, *end)
    ]
    if by_column:
        return for_loop("i", "cols", lines)
    return [f"constexpr int64_t block = {schedule.block};", *for_loop("k", "cols", lines, step="block")]


def pool_pass(group: Group, schedule: CpuSchedule) -> list[str]:
    """Return the C++ lines of a pooling and the elementwise operators before and after it."""
    place = next(index for index, step in enumerate(group.steps) if step.name in POOLS)
    pool, before, after = group.steps[place], group.steps[:place], group.steps[place + 1 :]
    declare, each, finish = POOLS[pool.name]
    load = [f"float v = {group.source}[i * window + k];", *map(elementwise, before), each]
    body = [
        declare,
        *for_loop("k", "window", load),
        finish,
        *map(elementwise, after),
        f"{group.target}[i] = v;",
    ]
    window = f"constexpr int64_t window = {pool.constants[0]};"
    return [window, *pragma(schedule), *for_loop("i", group.size, body)]


def transpose_pass(group: Group, schedule: CpuSchedule) -> list[str]:
    """Return the C++ lines of a transposition by tiles and the elementwise operators before and after it."""
    body = [
        f"float v = {group.source}[r * cols + i];",
        *(elementwise(step) for step in group.steps if step.name != "transpose"),
        f"{group.target}[i * rows + r] = v;",
    ]
    outer, inner = ("r", "i") if schedule.order == "rows" else ("i", "r")
    ends, starts = {"r": "rows", "i": "cols"}, {"r": "m", "i": "k"}
    if schedule.tile == 1:
        return [for_head(outer, ends[outer]), *pragma(schedule), *for_loop(inner, ends[inner], body)]
    return [
        f"constexpr int64_t tile = {schedule.tile};",
        *(for_head(starts[name], ends[name], step="tile") for name in ("r", "i")),
        for_head(outer, f"{starts[outer]} + tile", starts[outer]),
        *pragma(schedule),
        *for_loop(inner, f"{starts[inner]} + tile", body, starts[inner]),
    ]


# Type of a function that returns the C++ lines of the pass of a group.
Pass = Callable[[Group, CpuSchedule], list[str]]


def pass_of(step: Step) -> Pass | None:
    """Return the function that writes the pass of the operator `step`.

    Returns None for an operator that every pass can compute, which is elementwise without a parameter.
    """
    if step.name in POOLS:
        return pool_pass
    if step.name == "transpose":
        return transpose_pass
    if step.name.endswith("_dim0"):
        return column_pass
    return row_pass if step.name in PER_COLUMN or row_operator(step.name) else None


def changes_shape(step: Step) -> bool:
    """Return whether the operator's output has another shape than its input."""
    operator = row_operator(step.name)
    return step.name in POOLS or step.name == "transpose" or bool(operator and operator.result)


def divide(steps: Sequence[Step], schedule: CpuSchedule) -> list[list[Step]]:
    """Return the groups of neighbouring operators that share a pass.

    If the schedule's fusion is `none`, each operator is a group, except that a transposition and all
    operators after it are one group.
    """
    if schedule.fusion == "all":
        return [[*steps]]
    end = next((index for index, step in enumerate(steps) if step.name == "transpose"), len(steps))
    return [*([step] for step in steps[:end]), *([[*steps[end:]]] if end < len(steps) else [])]


def write_cpu_kernel(chain: OperatorChain, schedule: CpuSchedule) -> str:
    """Return the text of kernels/forward.cpp for the chain according to the schedule.

    The passes before the first operator that changes the shape write to the buffer `w`, which is as large as
    the input, and all other passes write to `out`.
    """
    groups = divide(chain.steps, schedule)
    changing = next((i for i, group in enumerate(groups) if any(map(changes_shape, group))), 0)
    source, lines = "x", []
    for index, steps in enumerate(groups):
        target, tensor = ("w", 0) if index < changing else ("out", len(chain.tensors) - 1)
        write = next((found for step in steps if (found := pass_of(step))), element_pass)
        lines += write(Group(steps, source, target, f"t[{tensor}].numel"), schedule)
        source = target
    if any(re.search(r"\bw\b", line) for line in lines):
        lines = ["std::vector<float> work(t[0].numel);", "float* w = work.data();", *lines]
    text = "\n".join(indent([*arguments(chain), *lines]))
    if schedule.accumulator == "float":
        text = text.replace("(double)", "").replace("double ", "float ")
    if schedule.math == "libm":
        text = replace_functions(text)
    header = "#include <cmath>" if schedule.math == "libm" else '#include "vec.h"'
    return "\n".join(['#include "binding_registry.h"', header, "KERNEL(forward) {", text, "}", ""])


def arguments(chain: OperatorChain) -> list[str]:
    """Return the C++ declarations of the kernel's tensors and, if needed, of the size of the input."""
    sized = any(pass_of(step) not in (None, pool_pass) for step in chain.steps)
    return [
        *(
            f"{'' if name == 'out' else 'const '}float* {name} = f32(t[{index}]);"
            for index, name in enumerate(chain.tensors)
        ),
        *(["const int64_t rows = t[0].size[0], cols = t[0].size[1];"] if sized else []),
    ]
