"""Turn a chain of operators and a schedule into the text of a kernel, by rules.

A C++ kernel is divided into passes over the memory, which are over all elements or over rows, and a CUDA
kernel into launches. Operators share a pass or a launch, or have one each, as the schedule says.

A schedule is one combination of the independent choices by which kernels for one chain of operators differ.
It changes how a kernel computes, not what. Which schedule is the fastest depends on the operators and the
shape of a task, and some schedules are too inexact for some tasks, for example float accumulators for long
rows. A choice that does not concern a chain leaves its kernel unchanged.
"""

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, Literal, get_args, get_type_hints

from components.bootstrap.operator_chain import OperatorChain, Step
from components.bootstrap.operator_code import (
    ROW,
    Sweep,
    elementwise,
    fuse_row,
    replace_functions,
)
from components.core.records import Device

# Types of vec.h, by dtype.
VEC_TYPES = {"float16": "f16", "bfloat16": "bf16"}
# Lines of a kernel, and the line that launches it.
Kernel = tuple[list[str], str]


@dataclass(frozen=True)
class CpuSchedule:
    """The choices by which C++ kernels for one chain of operators differ.

    `fusion` says whether all operators share a pass over the memory or each has its own, `math` whether
    functions such as exp are those of libm or of vec.h, `loops` whether loops are vectorised, `accumulator`
    the type of sums, and `algorithm` how operators such as softmax are computed (in operator_code.py, ROW for
    "store" and ALGORITHMS for the others).
    """

    fusion: Literal["none", "all"]
    math: Literal["libm", "vec"]
    loops: Literal["scalar", "simd"]
    accumulator: Literal["float", "double"]
    algorithm: Literal["store", "recompute", "online"]


@dataclass(frozen=True)
class CudaSchedule:
    """The choices by which CUDA kernels for one chain of operators differ.

    `fusion` says whether all operators share a launch or each has its own, and `threads` is the number of
    threads of a block. `width` is the number of elements of one memory access, in kernels of which all
    operators are elementwise and share a launch.
    """

    fusion: Literal["none", "all"]
    threads: Literal[128, 256, 512]
    width: Literal[1, 4]


Schedule = CpuSchedule | CudaSchedule
TYPES: dict[Device, type[CpuSchedule] | type[CudaSchedule]] = {"cpu": CpuSchedule, "cuda": CudaSchedule}


@cache
def choices(device: Device) -> dict[str, tuple[Any, ...]]:
    """Return the possible values of each choice in the schedules of a device, by the name of the choice.

    A schedule is one combination of the choices by which kernels for one chain of operators differ, such as
    the type of sums.
    """
    hints = get_type_hints(TYPES[device])
    return {field.name: get_args(hints[field.name]) for field in fields(TYPES[device])}


@cache
def all_schedules(device: Device) -> tuple[Schedule, ...]:
    """Return all schedules of a device, in a fixed order.

    A schedule is one combination of the choices by which kernels for one chain of operators differ.
    """
    return tuple(TYPES[device](*values) for values in itertools.product(*choices(device).values()))


def draw_schedule(rng: random.Random, device: Device) -> Schedule:
    """Return a random schedule for kernels on `device`; every one has the same probability.

    A schedule is one combination of the choices by which kernels for one chain of operators differ.
    """
    return rng.choice(all_schedules(device))


def write_kernel(chain: OperatorChain, schedule: Schedule) -> str:
    """Return the text of kernels/forward.cpp (or .cu) for the chain according to the schedule.

    The chain has the operators of the kernel, and the schedule says how it computes them: in C++ for a
    `CpuSchedule`, and in CUDA for a `CudaSchedule`. A kernel in half precision reads and writes the types of
    vec.h, and computes in float.
    """
    text = (
        write_cpu_kernel(chain, schedule)
        if isinstance(schedule, CpuSchedule)
        else write_cuda_kernel(chain, schedule)
    )
    if chain.dtype == "float32":
        return text
    kind = VEC_TYPES[chain.dtype]
    text = re.sub(r"f32\((t\[\d+\])\)", rf"({kind}*)\1.data", text)
    text = re.sub(rf"float\* ({'|'.join(chain.tensors)})\b", rf"{kind}* \1", text)
    # A row of the inputs may also be in a buffer of floats.
    return re.sub(r"const float\* ([as]) ", r"const auto* \1 ", text)


def is_reduction(step: Step) -> bool:
    """Return whether the operator returns one value for each row."""
    return step.name in ROW and bool(ROW[step.name].result)


# --- C++ ----------------------------------------------------------------------------------------------------


def indent(lines: Sequence[str]) -> list[str]:
    """Return C++ lines with two more spaces of indentation."""
    return [f"  {line}" for line in lines]


def for_loop(name: str, end: str, body: Sequence[str]) -> list[str]:
    """Return the lines of a C++ loop in which `name` goes from 0 to `end`, with the lines `body`."""
    return [f"for (int64_t {name} = 0; {name} < {end}; ++{name}) {{", *indent(body), "}"]


def pragma(schedule: CpuSchedule, clause: str = "") -> list[str]:
    """Return the OpenMP line that vectorises the next loop, or no line if the schedule's loops are scalar.

    `clause` is the content of the reduction clause, such as "+ : sum". If it is empty, the line has no such
    clause.
    """
    reduction = f" reduction({clause})" if clause else ""
    return [] if schedule.loops == "scalar" else [f"#pragma omp simd{reduction}"]


def element_pass(
    steps: Sequence[Step], source: str, target: str, size: str, schedule: CpuSchedule
) -> list[str]:
    """Return the C++ lines of one loop over all elements, for elementwise operators.

    `source` and `target` are the names of the C++ arrays that the pass reads and writes: the input `x`, the
    output `out`, or the buffer `w`. `size` is the C++ expression of the number of elements of `target`.
    """
    body = [f"float v = {source}[i];", *map(elementwise, steps), f"{target}[i] = v;"]
    return [*pragma(schedule), *for_loop("i", size, body)]


def row_pass(
    steps: Sequence[Step], source: str, target: str, schedule: CpuSchedule, *, is_half: bool = False
) -> list[str]:
    """Return the C++ lines of a loop over all rows, for operators that are not all elementwise.

    Operators that are not elementwise read the whole row, as softmax does, or the index of an element in its
    row. `source` and `target` are the names of the arrays that the loop reads and writes, as in
    `element_pass`. If `is_half` is set, the elements of `target` have half precision, so the intermediate
    values of a row are stored in a buffer of floats, and not in `target`.
    """

    def over_row(array: str, body: Sequence[str]) -> list[str]:
        return for_loop("i", "cols", [f"float v = {array}[i];", *body])

    def write_sweep(sweep: Sweep, array: str, body: list[str]) -> list[str]:
        pragmas = pragma(schedule, sweep.clause) if sweep.clause else []
        return [*sweep.declare, *pragmas, *over_row(array, body), *sweep.finish]

    row = fuse_row(steps, write_sweep, schedule.algorithm)
    buffered = (row.tail or is_half) and row.source == "b"
    if row.tail:
        end = [*row.tail, f"{target}[r] = v;"]
    else:
        stored = f"{target}[r * cols + i]" if is_half else "b[i]"
        end = [*pragma(schedule), *over_row(row.source, [*row.pending, f"{stored} = v;"])]
    body = [
        f"const float* a = {source} + r * cols;",
        *(["float* b = row.data();"] if buffered else []),
        *([] if row.tail or is_half else [f"float* b = {target} + r * cols;"]),
        *(["const float* s = y + r * cols;"] if any("input" in step.name for step in steps) else []),
        *row.lines,
        *end,
    ]
    return [*(["std::vector<float> row(cols);"] if buffered else []), *for_loop("r", "rows", body)]


def write_cpu_kernel(chain: OperatorChain, schedule: CpuSchedule) -> str:
    """Return the text of kernels/forward.cpp for the chain according to the schedule.

    A pass is one loop over the memory. The passes before a reduction, which returns one value for each row,
    write to the buffer `w`, which is as large as the input, and all other passes write to `out`.
    """
    groups = [chain.steps] if schedule.fusion == "all" else [(step,) for step in chain.steps]
    changing = next((i for i, group in enumerate(groups) if any(map(is_reduction, group))), 0)
    source, lines = "x", []
    for index, steps in enumerate(groups):
        target, tensor = ("w", 0) if index < changing else ("out", len(chain.tensors) - 1)
        if OperatorChain(steps, chain.tensors).by_row:
            lines += row_pass(steps, source, target, schedule, is_half=chain.dtype != "float32")
        else:
            lines += element_pass(steps, source, target, f"t[{tensor}].numel", schedule)
        source = target
    if any(re.search(r"\bw\b", line) for line in lines):
        lines = ["std::vector<float> work(t[0].numel);", "float* w = work.data();", *lines]
    text = "\n".join(indent([*arguments(chain), *lines]))
    if schedule.accumulator == "float":
        text = text.replace("(double)", "").replace("double ", "float ")
    if schedule.math == "libm":
        text = replace_functions(text)
    is_light = schedule.math == "libm" and chain.dtype == "float32"
    header = "#include <cmath>" if is_light else '#include "vec.h"'
    return "\n".join(['#include "binding_registry.h"', header, "KERNEL(forward) {", text, "}", ""])


def arguments(chain: OperatorChain) -> list[str]:
    """Return the C++ declarations of the kernel's tensors and of the size of the input.

    The size, in rows and columns, is declared only if an operator works on rows or depends on the position in
    a row.
    """
    return [
        *(
            f"{'' if name == 'out' else 'const '}float* {name} = f32(t[{index}]);"
            for index, name in enumerate(chain.tensors)
        ),
        *(["const int64_t rows = t[0].size[0], cols = t[0].size[1];"] if chain.by_row else []),
    ]


# --- CUDA ---------------------------------------------------------------------------------------------------


def parameters(chain: OperatorChain) -> str:
    """Return the parameters of a CUDA kernel, as C++ text: its tensors, and one number.

    It is the number of columns if an operator works on rows or depends on the position in a row, and
    otherwise the number of elements.
    """
    tensors = ", ".join(f"{'' if name == 'out' else 'const '}float* {name}" for name in chain.tensors)
    return f"{tensors}, int64_t {'cols' if chain.by_row else 'n'}"


def launch(chain: OperatorChain, name: str, grid: str, threads: int, shared: str = "0") -> str:
    """Return the C++ line that launches the CUDA kernel `name` with the tensors of the chain.

    `grid` is the expression of the number of blocks, `threads` the number of threads of a block, and `shared`
    the expression of the bytes of dynamic shared memory of a block.
    """
    tensors = ", ".join(f"f32(t[{index}])" for index in range(len(chain.tensors)))
    last = "t[0].size[1]" if chain.by_row else "t[0].numel"
    return f"  {name}<<<{grid}, {threads}, {shared}, (cudaStream_t)stream>>>({tensors}, {last});"


def element_kernel(chain: OperatorChain, threads: int, name: str = "fused") -> Kernel:
    """Return a CUDA kernel `name` for the chain, in which each thread computes one element.

    `threads` is the number of threads of a block. The result has the lines of the kernel, and the line that
    launches it.
    """
    kernel = [
        f"__global__ void {name}({parameters(chain)}) {{",
        f"  int64_t i = blockIdx.x * {threads}ll + threadIdx.x;",
        "  if (i < n) {",
        "    float v = x[i];",
        *(f"    {elementwise(step)}" for step in chain.steps),
        "    out[i] = v;",
        "  }",
        "}",
    ]
    return kernel, launch(chain, name, f"(t[0].numel + {threads - 1}) / {threads}", threads)


def float4_kernel(chain: OperatorChain, threads: int) -> Kernel:
    """Return a CUDA kernel for the chain, in which each thread computes four elements as one float4.

    The result has the lines of the kernel, and the line that launches it. `threads` is the number of threads
    of a block. The kernel needs no remainder loop, because composed tasks have a multiple of 16 elements.
    """
    names = [name for name in chain.tensors if name in ("x", "y")]
    body = [f"    r.{lane} = chain(x4.{lane}{f', y4.{lane}' if 'y' in names else ''});" for lane in "xyzw"]
    kernel = [
        f"__device__ float chain(float v{', float y' if 'y' in names else ''}) {{",
        *(f"  {elementwise(step).replace('y[i]', 'y')}" for step in chain.steps),
        "  return v;",
        "}",
        f"__global__ void wide({parameters(chain)}) {{",
        f"  int64_t i = blockIdx.x * {threads}ll + threadIdx.x;",
        "  if (i < n / 4) {",
        *(f"    const float4 {name}4 = ((const float4*){name})[i];" for name in names),
        "    float4 r;",
        *body,
        "    ((float4*)out)[i] = r;",
        "  }",
        "}",
    ]
    return kernel, launch(chain, "wide", f"(t[0].numel / 4 + {threads - 1}) / {threads}", threads)


def loop(source: str, body: list[str], threads: int) -> list[str]:
    """Return the CUDA lines of a loop in which a block goes over the elements of a row in the array `source`.

    `body` are the lines for each element, which is the variable `v`. `threads` is the size of the block.
    """
    return [
        f"  for (int64_t i = threadIdx.x; i < cols; i += {threads}) {{",
        f"    float v = {source}[i];",
        *(f"    {line}" for line in body),
        "  }",
    ]


def sweep_lines(sweep: Sweep, source: str, body: list[str], threads: int) -> list[str]:
    """Return the CUDA lines of one sweep (a loop over a row), in which a block goes over its row.

    `source` is the array that has the row, `body` are the lines for each element, and `threads` is the number
    of threads of the block. The accumulators of the threads are combined after the loop.
    """
    kind, names = sweep.clause.split(" : ")
    function = "vblock_max" if kind == "max" else "vblock_sum"
    return [
        *(f"  {line.replace('double', 'float')}" for line in sweep.declare),
        *loop(source, [line.replace("(double)", "") for line in body], threads),
        *(f"  {name} = {function}({name});" for name in names.split(", ")),
        *(f"  {line}" for line in sweep.finish),
    ]


def row_kernel(chain: OperatorChain, threads: int, name: str = "rows") -> Kernel:
    """Return a CUDA kernel `name` for the chain, with one block of threads for each row of the input.

    `threads` is the number of threads of a block. A row that the operators have changed is kept in shared
    memory. The result has the lines of the kernel, and the line that launches it.
    """
    row = fuse_row(chain.steps, partial(sweep_lines, threads=threads))
    if row.tail:
        end = [*(f"  {line}" for line in row.tail), "  if (threadIdx.x == 0) out[blockIdx.x] = v;"]
    else:
        end = loop(row.source, [*row.pending, "out[blockIdx.x * cols + i] = v;"], threads)
    kernel = [
        f"__global__ void {name}({parameters(chain)}) {{",
        "  extern __shared__ float b[];",
        "  const float* a = x + blockIdx.x * cols;",
        *(["  const float* s = y + blockIdx.x * cols;"] if "y" in chain.tensors else []),
        *row.lines,
        *end,
        "}",
    ]
    return kernel, launch(chain, name, "t[0].size[0]", threads, "t[0].size[1] * sizeof(float)")


def separate_kernels(chain: OperatorChain, threads: int) -> list[Kernel]:
    """Return one CUDA kernel for each operator of the chain, in the order in which they are launched.

    Each has its lines, and the line that launches it. `threads` is the number of threads of a block. A kernel
    writes its result to the output tensor, and the next one reads it there. A reduction and the operators
    before it are one kernel, because the output tensor is too small for rows.
    """
    cut = next((index + 1 for index, step in enumerate(chain.steps) if is_reduction(step)), 0)
    groups = [chain.steps[:cut]] if cut else []
    kernels = []
    for index, group in enumerate([*groups, *((step,) for step in chain.steps[cut:])]):
        part = OperatorChain(group, chain.tensors)
        kernel, call = (row_kernel if part.by_row else element_kernel)(part, threads, f"pass{index}")
        if index:
            call = call.replace("f32(t[0])", f"f32(t[{len(chain.tensors) - 1}])", 1)
            if cut:
                call = call.replace("t[0].numel", f"t[{len(chain.tensors) - 1}].numel")
        kernels.append((kernel, call))
    return kernels


def write_cuda_kernel(chain: OperatorChain, schedule: CudaSchedule) -> str:
    """Return the text of kernels/forward.cu for the chain of operators according to the schedule."""
    threads = schedule.threads
    if schedule.fusion == "none":
        kernels = separate_kernels(chain, threads)
    elif chain.by_row:
        kernels = [row_kernel(chain, threads)]
    else:
        is_wide = schedule.width == 4 and chain.dtype == "float32"
        kernels = [(float4_kernel if is_wide else element_kernel)(chain, threads)]
    body = "\n".join(line for kernel, _ in kernels for line in kernel)
    lines = [body, "KERNEL(forward) {", *(call for _, call in kernels), "}"]
    return "\n".join(['#include "binding_registry.h"', '#include "vec.h"', *lines, ""])
