"""Write C++ and CUDA kernels for programs of loop nests (loop_nest.py, tensor_operators.py).

Each nest is one pass of a C++ kernel or one CUDA kernel, in which all sizes are constants. A tile is a part
of an axis whose elements are computed together. The last tile of an axis overlaps the one before where the
size is not a multiple of the tile's, so that no loop has a remainder.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args, get_type_hints

from components.bootstrap.kernel_writer import indent
from components.bootstrap.library_calls import library_call
from components.bootstrap.loop_nest import Axis, Code, Line, Nest, attach, merge, over_dims, reads_elsewhere
from components.bootstrap.nest_group import Group, for_axis, is_lane, position, tile_count, tiles_of
from components.bootstrap.nest_layout import with_near_columns, without_windows
from components.bootstrap.operator_code import replace_functions
from components.bootstrap.size import Size, bare, ceil_div
from components.bootstrap.tensor_operators import Program
from components.core.records import Device

# Least size of the innermost reduced axis of groups that the threads of a block share.
MIN_SHARED = 32
# Names of cuda_libraries.h.
LIBRARIES = re.compile(r"\b(device_buffer|matrix_product)\(|\b(Transposed)?Convolution ")


@dataclass(frozen=True)
class CpuNestSchedule:
    """The choices by which C++ kernels for one program of loop nests differ.

    `fusion` says whether elementwise operators share the pass over the memory of a neighbour ("all") or have
    their own, `math` whether functions are those of libm or of vec.h, `loops` whether loops are vectorised,
    and `accumulator` the type of sums. `layout` says whether tensors are read as they are, or are first
    copied: the input of a convolution between zeros, so that no index lies outside, and the second factor of
    a matrix product so that its columns are neighbours in memory. A tile is a set of elements that are
    computed together. `rows` is its size along the axis of which elements share inputs (`Nest.rows`), and
    `lanes` along the innermost axis.
    """

    fusion: Literal["none", "all"]
    math: Literal["libm", "vec"]
    loops: Literal["scalar", "simd"]
    accumulator: Literal["float", "double"]
    layout: Literal["given", "copy"]
    rows: Literal[1, 4]
    lanes: Literal[16, 64]


@dataclass(frozen=True)
class CudaNestSchedule:
    """The choices by which CUDA kernels for one program of loop nests differ.

    `fusion` says whether elementwise operators share the kernel of a neighbour ("all") or have their own, and
    `accumulator` is the type of sums. `layout` says whether tensors are read as they are, or are first
    copied: the input of a convolution between zeros, and the second factor of a matrix product so that its
    columns are neighbours in memory. `rows` is the number of elements that a thread computes together along
    the axis of which elements share inputs (`Nest.rows`). `threads` is the number of threads of a block, and
    `products` says whether products of matrices are computed by cuBLAS and convolutions by cuDNN, or both by
    a kernel with one thread for each tile.
    """

    fusion: Literal["none", "all"]
    threads: Literal[128, 256, 512]
    accumulator: Literal["float", "double"]
    layout: Literal["given", "copy"]
    rows: Literal[1, 4]
    products: Literal["library", "kernel"]


NestSchedule = CpuNestSchedule | CudaNestSchedule
TYPES: dict[Device, type[CpuNestSchedule] | type[CudaNestSchedule]] = {
    "cpu": CpuNestSchedule,
    "cuda": CudaNestSchedule,
}


def draw_nest_schedule(rng: random.Random, device: Device) -> NestSchedule:
    """Return a random schedule for kernels of loop nests on `device`; every one has the same probability.

    A schedule is one combination of the choices by which the kernels for a program differ.
    """
    return TYPES[device](*(rng.choice(get_args(hint)) for hint in get_type_hints(TYPES[device]).values()))


def fuse(program: Program, fusion: str, *, library: bool = False) -> list[Nest]:
    """Return the loop nests of a program, with its elementwise operators as lines of nests.

    If `fusion` is `all`, an elementwise operator is computed by the nest before it. Elementwise operators
    before the first nest are computed by this nest if it reads each element of its input once and does not
    change the shape for their operands, and otherwise by one nest of their own. If `fusion` is `none`, each
    elementwise operator has a nest of its own. If `library` is true, no elementwise operator belongs to a
    nest that a library computes.
    """
    nests: list[Nest] = []
    pending: tuple[Line, ...] = ()
    for part in program.parts:
        if isinstance(part, Nest):
            by_library = library and part.has_library
            reshapes = part.is_elementwise and any(line.operand for line in pending)
            clashes = any(
                reads_elsewhere(part, line, tensor="a", following=program.shape) for line in pending
            )
            if pending and part.reads_once and not (part.is_name or by_library or reshapes or clashes):
                nests.pop()
                for line in pending:
                    part = attach(part, line, tensor="a", following=program.shape)
            nests.append(part)
            pending = ()
        else:
            shape = nests[-1].shape if nests else program.shape
            if (
                not nests
                or fusion == "none"
                or nests[-1].is_name
                or (library and nests[-1].has_library)
                or reads_elsewhere(nests[-1], part, tensor="o", following=shape)
            ):
                nests.append(over_dims(shape, (), Code()))
            nests[-1] = attach(nests[-1], part, tensor="o", following=shape)
            if fusion == "all" and len(nests) == 1 and nests[0].is_elementwise:
                pending = (*pending, part)
    return nests


def write_program(program: Program, schedule: NestSchedule) -> str:
    """Return the text of kernels/forward.cpp (or .cu) for a program according to the schedule.

    The program has the loop nests that compute a task. The text is C++ for a `CpuNestSchedule` and CUDA for a
    `CudaNestSchedule`.
    """
    device: Device = "cpu" if isinstance(schedule, CpuNestSchedule) else "cuda"
    library = isinstance(schedule, CudaNestSchedule) and schedule.products == "library"
    nests = fuse(program, schedule.fusion, library=library)
    if schedule.layout == "copy" and not library:
        nests = [part for nest in nests for part in without_windows(nest)]
        nests = [part for nest in nests for part in with_near_columns(nest)]
    types = {name: f"{program.types.get(name, 'float')}*" for name in program.tensors}
    arguments = [
        f"{'' if name == 'out' else 'const '}{kind} {name} = ({kind})t[{index}].data;"
        for index, (name, kind) in enumerate(types.items())
    ]
    functions, calls, source = [], [], "x"
    for index, nest in enumerate(nests):
        if nest.is_name:
            if nest.target:
                calls.append(f"const float* {nest.target} = {source};")
                types[nest.target] = "float*"
            source = nest.source or source
            continue
        if nest.source and nest.target in types:
            continue  # the operand that it copies has been copied for an earlier nest
        target = nest.target or ("out" if index == len(nests) - 1 else f"w{index}")
        if target != "out":
            calls += _buffer(target, prod(nest.shape), device)
        if isinstance(schedule, CpuNestSchedule):
            head = [f"const float* a = {nest.source or source};", f"{nest.code.type}* o = {target};"]
            calls += ["{", *indent([*head, *_cpu_pass(nest, schedule)]), "}"]
        else:
            function, call = _cuda_pass(nest, schedule, f"pass{index}", nest.source or source, target, types)
            functions += function
            calls += call
        types[target] = f"{nest.code.type}*"
        source = source if nest.target else target
    used = "\n".join(calls)
    lines = [*(line for line in arguments if re.search(rf"\b{line.split()[-3]}\b", used)), *calls]
    text = _with_names(
        "\n".join([*functions, "KERNEL(forward) {", *indent(lines), "}", ""]), nests, program.sizes
    )
    if schedule.accumulator == "float":
        text = text.replace("double ", "float ").replace("(double)", "")
    if isinstance(schedule, CpuNestSchedule) and schedule.math == "libm":
        text = replace_functions(text)
    headers = ["binding_registry.h", "vec.h"]
    headers += ["cuda_libraries.h"] if device == "cuda" and LIBRARIES.search(text) else []
    return "\n".join([*(f'#include "{header}"' for header in headers), text])


def _with_names(text: str, nests: Sequence[Nest], sizes: dict[str, int]) -> str:
    """Return the C++ lines `text` with names for sizes, which are declared before them.

    `sizes` has the sizes of the inputs by name. Each size of an output of `nests` that is calculated gets a
    name, too, which replaces its expression.
    """
    sizes_of = (size for nest in nests for size in nest.shape if isinstance(size, Size))
    found = {factor: None for size in sizes_of for factor in size.factors if factor[0] in "(["}
    calculated: dict[str, str] = {}
    for factor in sorted(found, key=len):  # a size from which another one is calculated is part of its text
        for known, name in calculated.items():
            factor = factor.replace(known, name)
        calculated[factor] = f"S{len(calculated)}"
        text = text.replace(factor, calculated[factor])
    lines = [f"constexpr int64_t {name} = {factor[1:-1]};" for factor, name in calculated.items()]
    used = [
        f"{name} = {size}"
        for name, size in sizes.items()
        if re.search(rf"\b{name}\b", "".join([*lines, text]))
    ]
    first = [f"constexpr int64_t {', '.join(used)};"] if used else []
    return "\n".join([*first, *lines, text])


def _buffer(name: str, size: int, device: Device) -> list[str]:
    """Return the lines that declare a buffer for the output of a loop nest, which is kept between calls.

    `name` is the C++ variable of the buffer, and `size` is its number of floats.
    """
    if device == "cpu":
        return [
            f"static std::vector<float> {name}_values({bare(size)});",
            f"float* {name} = {name}_values.data();",
        ]
    return [f"static float* {name} = device_buffer({bare(size)});"]


# --- passes -------------------------------------------------------------------------------------------------


def _cpu_pass(nest: Nest, schedule: CpuNestSchedule) -> list[str]:
    """Return the C++ lines that compute a loop nest, which read the array `a` and operands and write `o`."""
    nest = merge(nest if schedule.rows > 1 else replace(nest, rows=""))
    tiles = tiles_of(nest, schedule.rows, schedule.lanes)
    tiles = {name: size for name, size in tiles.items() if size > 1}
    lines = Group(nest, tiles, schedule.loops == "simd", 0, schedule.accumulator == "float").write()
    for axis in reversed([axis for axis in nest.axes if not axis.reduced]):
        if axis.name in tiles:
            index = f"{axis.name}_q"
            lines = for_axis(
                Axis(index, tile_count(axis, tiles), False, {}), [*position(axis, tiles, index), *lines]
            )
        else:
            lines = for_axis(axis, lines)
    return lines


def _cuda_pass(
    nest: Nest, schedule: CudaNestSchedule, name: str, source: str, target: str, types: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Return the lines of the CUDA kernel `name` that computes a loop nest, and those that launch it.

    `source` and `target` are the C++ variables of the nest's input and output, which are `a` and `o` in the
    kernel, and `types` has the C++ types of the kernel's other arguments by name. The elements that are
    reduced to one output are read by a block if they are many and near each other in memory, and otherwise by
    one thread.
    """
    if schedule.products == "library" and nest.has_library:
        return [], library_call(nest, source, target)
    operands = nest.operands
    nest = merge(nest if schedule.rows > 1 else replace(nest, rows=""))
    kept = [axis for axis in nest.axes if not axis.reduced]
    reduced = [axis for axis in nest.axes if axis.reduced]
    is_long = bool(reduced) and reduced[-1].size >= MIN_SHARED and not nest.rows and not nest.code.carry
    by_block = is_long and not (kept and is_lane(nest, kept[-1]))
    tiles = {} if by_block else tiles_of(nest, schedule.rows, 0)
    threads = schedule.threads
    total = prod(tile_count(axis, tiles) for axis in kept)
    parameters = ["const float* a", *(f"const {types[key]} {key}" for key in operands)]
    body = ["int64_t tile = blockIdx.x;"] if kept else []
    if not by_block:
        body = [
            f"int64_t tile = blockIdx.x * {threads}ll + threadIdx.x;",
            f"if (tile >= {bare(total)}) return;",
        ]
    for axis in reversed(kept[1:]):
        count = tile_count(axis, tiles)
        body += [*position(axis, tiles, f"tile % {count}"), f"tile /= {bare(count)};"]
    body += [line for axis in kept[:1] for line in position(axis, tiles, "tile")]
    body += Group(nest, tiles, False, threads if by_block else 0, schedule.accumulator == "float").write()
    grid = total if by_block else ceil_div(total, threads)
    arguments = ", ".join([source, *operands, target])
    return (
        [
            f"__global__ void {name}({', '.join(parameters)}, {nest.code.type}* o) {{",
            *indent(body),
            "}",
        ],
        [f"{name}<<<{bare(grid)}, {threads}, 0, (cudaStream_t)stream>>>({arguments});"],
    )
