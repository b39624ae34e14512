"""Write C++ and CUDA kernels for programs of loop nests (loop_nest.py, tensor_operators.py).

Each nest is one pass of a C++ kernel or one CUDA kernel, in which all sizes are constants. A tile is a part
of an axis whose elements are computed together. The last tile of an axis overlaps the one before where the
size is not a multiple of the tile's, so that no loop has a remainder.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args, get_type_hints

from components.bootstrap.kernel_writer import block_functions, indent
from components.bootstrap.loop_nest import (
    PRODUCT_ROWS,
    Axis,
    Line,
    Nest,
    Window,
    attach,
    elementwise_nest,
    merge,
    with_near_columns,
    without_windows,
)
from components.bootstrap.operator_code import replace_functions
from components.bootstrap.tensor_operators import Program
from components.core.records import Device

# For each kind of accumulated value: its C++ type, first value, update, and OpenMP reduction.
FOLDS = {
    "sum": ("double", "0", "{0} += {1};", "+"),
    "prod": ("double", "1", "{0} *= {1};", "*"),
    "max": ("float", "-INFINITY", "{0} = vmax({0}, {1});", "max"),
    "min": ("float", "INFINITY", "{0} = vmin({0}, {1});", "min"),
}
# Largest stride in `a` and in operands of an axis that is computed in vectors or by neighbouring threads.
MAX_LANE_STRIDE = 4
# Least size of the innermost reduced axis of groups that the threads of a block share.
MIN_SHARED = 32
# Number of terms of a partial sum in float.
PART = 128
# Declarations of cuBLAS, so that its headers are not needed.
CUBLAS = """extern "C" int cublasCreate_v2(void** handle);
extern "C" int cublasSetStream_v2(void* handle, cudaStream_t stream);
extern "C" int cublasSgemmStridedBatched(void* handle, int, int, int m, int n, int k, const float* alpha,
    const float* a, int lda, long long stride_a, const float* b, int ldb, long long stride_b,
    const float* beta, float* c, int ldc, long long stride_c, int count);"""


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
    the axis of which elements share inputs (`Nest.rows`). `threads` is the number of threads of a block,
    `combine` how the threads of a block combine their values (in shared memory, or within a warp by
    shuffles), and `products` whether products of matrices are computed by cuBLAS or by a kernel with one
    thread for each tile.
    """

    fusion: Literal["none", "all"]
    threads: Literal[128, 256, 512]
    accumulator: Literal["float", "double"]
    layout: Literal["given", "copy"]
    rows: Literal[1, 4]
    combine: Literal["shared", "shuffle"]
    products: Literal["cublas", "kernel"]


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


def fuse(program: Program, fusion: str, *, cublas: bool = False) -> list[Nest]:
    """Return the loop nests of a program, with its elementwise operators as lines of nests.

    If `fusion` is `all`, an elementwise operator is computed by the nest before it. Elementwise operators
    before the first nest are computed by this nest if it reads each element of its input once, and otherwise
    by one nest of their own. If `fusion` is `none`, each elementwise operator has a nest of its own. If
    `cublas` is true, elementwise operators after a product of matrices never belong to the nest of the
    product.
    """
    nests: list[Nest] = []
    pending: tuple[Line, ...] = ()
    for part in program.parts:
        if isinstance(part, Nest):
            if pending and part.reads_once:
                nests.pop()
                for line in pending:
                    part = attach(part, line, tensor="a", following=program.shape)
            nests.append(part)
            pending = ()
        else:
            if not nests or fusion == "none" or (cublas and nests[-1].rows == PRODUCT_ROWS):
                nests.append(elementwise_nest(nests[-1].shape if nests else program.shape))
            nests[-1] = attach(nests[-1], part, tensor="o", following=nests[-1].shape)
            if fusion == "all" and len(nests) == 1 and nests[0].is_elementwise:
                pending = (*pending, part)
    return nests


def write_program(program: Program, schedule: NestSchedule) -> str:
    """Return the text of kernels/forward.cpp (or .cu) for a program according to the schedule.

    The program has the loop nests that compute a task. The text is C++ for a `CpuNestSchedule` and CUDA for a
    `CudaNestSchedule`.
    """
    device: Device = "cpu" if isinstance(schedule, CpuNestSchedule) else "cuda"
    cublas = isinstance(schedule, CudaNestSchedule) and schedule.products == "cublas"
    nests = fuse(program, schedule.fusion, cublas=cublas)
    if schedule.layout == "copy":
        nests = [part for nest in nests for part in without_windows(nest)]
        nests = nests if cublas else [part for nest in nests for part in with_near_columns(nest)]
    types = {name: f"{program.types.get(name, 'float')}*" for name in program.tensors}
    arguments = [
        f"{'' if name == 'out' else 'const '}{kind} {name} = ({kind})t[{index}].data;"
        for index, (name, kind) in enumerate(types.items())
    ]
    functions, calls, source = [], [], "x"
    for index, nest in enumerate(nests):
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
    text = "\n".join([*functions, "KERNEL(forward) {", *indent(lines), "}", ""])
    if schedule.accumulator == "float":
        text = text.replace("double ", "float ").replace("(double)", "")
    if isinstance(schedule, CpuNestSchedule) and schedule.math == "libm":
        text = replace_functions(text)
    elif isinstance(schedule, CudaNestSchedule):
        helpers = block_functions(text, schedule.threads, schedule.combine)
        text = "\n".join([*helpers, *([CUBLAS] if "cublas" in text else []), text])
    return f'#include "binding_registry.h"\n#include "vec.h"\n{text}'


def _buffer(name: str, size: int, device: Device) -> list[str]:
    """Return the lines that declare a buffer for the output of a loop nest, which is kept between calls.

    `name` is the C++ variable of the buffer, and `size` is its number of floats.
    """
    if device == "cpu":
        return [
            f"static std::vector<float> {name}_values({size});",
            f"float* {name} = {name}_values.data();",
        ]
    return [
        f"static float* {name} = nullptr;",
        f"if ({name} == nullptr) cudaMalloc((void**)&{name}, {size}ll * sizeof(float));",
    ]


# --- code of a group ----------------------------------------------------------------------------------------


def _for(axis: Axis, body: Sequence[str], *, backwards: bool = False, threads: int = 0) -> list[str]:
    """Return the lines of a C++ loop over an axis, with the lines `body`.

    If `backwards` is true, the loop begins with the last index. If `threads`, the number of threads of a CUDA
    block, is not 0, the loop goes only over the indices of one thread, which are `threads` apart.
    """
    head = f"int64_t {axis.name} = 0; {axis.name} < {axis.size}; ++{axis.name}"
    if backwards:
        head = f"int64_t {axis.name} = {axis.size - 1}; {axis.name} >= 0; --{axis.name}"
    elif threads:
        head = f"int64_t {axis.name} = threadIdx.x; {axis.name} < {axis.size}; {axis.name} += {threads}"
    return [f"for ({head}) {{", *indent(body), "}"]


def _address(nest: Nest, tensor: str) -> str:
    """Return the C++ expression of the index of an element of `tensor` from the indices of the nest's axes.

    `tensor` is the nest's input `a`, its output `o`, or one of its operands.
    """
    terms = [(axis.name, axis.strides[tensor]) for axis in nest.axes if axis.strides.get(tensor)]
    if tensor == "a":
        terms += [
            (window.name if window.divisor == 1 else f"{window.name} / {window.divisor}", window.stride)
            for window in nest.windows
        ]
    start = [str(nest.start)] if tensor == "a" and nest.start else []
    return " + ".join([*start, *(name if step == 1 else f"{name} * {step}" for name, step in terms)]) or "0"


def _guarded(windows: Iterable[Window], body: list[str]) -> list[str]:
    """Return the C++ lines `body` inside conditions, so that they run only if the indices are in all windows.

    A window is an index that follows from several axes, such as a position in an image with a margin.
    """
    for window in reversed(list(windows)):
        terms = [name if by == 1 else f"{name} * {by}" for name, by in window.factors.items()]
        name = window.name
        check = f"{name} >= 0 && {name} < {window.size * window.divisor}"
        if window.divisor > 1:
            check += f" && {name} % {window.divisor} == 0"
        body = [
            f"const int64_t {name} = {' + '.join([*terms, str(window.offset)])};",
            f"if ({check}) {{",
            *indent(body),
            "}",
        ]
    return body


@dataclass(frozen=True)
class _Group:
    """Writer of the code of one group of a loop nest, or of one tile of groups.

    A group is a set of elements that are combined, such as those of one sum, and a tile has neighbouring
    groups that are computed together. `tiles` has the sizes of tiles by axis. `simd` says whether loops are
    vectorised. `threads` is the number of CUDA threads that share the group, and 0 if one thread computes it.
    `parts` says whether one thread adds up PART terms at a time, so that sums in float stay exact enough.
    """

    nest: Nest
    tiles: dict[str, int]
    simd: bool
    threads: int
    parts: bool

    def over_tile(self, body: list[str]) -> list[str]:
        """Return the lines of C++ loops over the groups of the tile, whose body has the lines `body`."""
        for index, (name, size) in enumerate(reversed(self.tiles.items())):
            body = [f"const int64_t {name} = {name}_s + {name}_t;", *body] if size > 1 else body
            if size > 1:
                body = _for(Axis(f"{name}_t", size, False, {}), body)
                if index == 0 and self.simd:
                    body = ["#pragma omp simd", *body]
        return body

    def over_group(
        self, body: list[str], clause: str, *, vector: bool, around: tuple[list[str], list[str]] = ([], [])
    ) -> list[str]:
        """Return the lines of C++ loops over the elements of the tile's groups.

        `body` are the lines of the loops' body. `clause` has the OpenMP reductions of the loop. `vector` says
        whether elements can be computed in any order, so that the loop may be vectorised. `around` are lines
        before and after each PART of the elements.
        """
        nest = self.nest
        inner = [window for window in nest.windows if set(window.factors) & set(self.tiles)]
        outer = [window for window in nest.windows if window not in inner]
        lines = _guarded(outer, self.over_tile(_guarded(inner, body)))
        reduced = [axis for axis in nest.axes if axis.reduced]
        for index, axis in enumerate(reversed(reduced)):
            innermost, name = index == 0, axis.name
            within = prod(other.size for other in reduced[len(reduced) - index :])
            if around[0] and within <= PART < within * axis.size:
                step, size = PART // within, axis.size
                lines = [
                    f"for (int64_t {name}_q = 0; {name}_q < {size}; {name}_q += {step}) {{",
                    f"  const int64_t end = {name}_q + {step} < {size} ? {name}_q + {step} : {size};",
                    *indent([*around[0], f"for (int64_t {name} = {name}_q; {name} < end; ++{name}) {{"]),
                    *indent([*indent(lines), "}", *around[1]]),
                    "}",
                ]
                continue
            lines = _for(
                axis,
                lines,
                backwards=nest.code.backwards,
                threads=self.threads if innermost else 0,
            )
            if innermost and self.simd and not self.tiles and vector:
                lines = [f"#pragma omp simd{clause}", *lines]
        return lines if reduced or self.tiles else ["{", *indent(lines), "}"]

    def write(self) -> list[str]:
        """Return the C++ lines that compute the groups of the tile and write the elements of `o`."""
        code, nest = self.nest.code, self.nest
        suffix = "".join(f"[{name}_t]" for name, size in self.tiles.items() if size > 1)
        sizes = "".join(f"[{size}]" for size in self.tiles.values() if size > 1)
        names = [name for loop in code.loops for _, each, _ in loop.folds for name in (each, f"{each}_part")]
        names += [name for loop in code.loops for name, _ in loop.values] + [name for name, _ in code.carry]
        count = prod(axis.size for axis in nest.axes if axis.reduced)

        def text(lines: Iterable[str]) -> list[str]:
            result = [line.replace("COUNT", f"{count}.0f") for line in lines]
            result = [
                re.sub(r"\b(\w+)@", lambda m: f"{m[1]}[{_address(nest, m[1])}]", line) for line in result
            ]
            if suffix and names:
                pattern = rf"\b({'|'.join(names)})\b"
                result = [re.sub(pattern, rf"\1{suffix}", line) for line in result]
            return result

        def declare(kind: str, name: str, value: str, const: str = "") -> list[str]:
            if not suffix:
                return text([f"{const}{kind} {name} = {value};"])
            return [f"{kind} {name}{sizes};", *self.over_tile(text([f"{name} = {value};"]))]

        load = text([f"float v = a[{_address(nest, 'a')}];", *nest.before])
        lines: list[str] = []
        for loop in code.loops:
            clauses: dict[str, list[str]] = {}
            body = []
            for kind, name, term in loop.folds:
                kind_type, first, update, operator = FOLDS[kind]
                lines += declare(kind_type, name, first)
                body.append(update.format(name, term))
                clauses.setdefault(operator, []).append(name)
            clause = "".join(f" reduction({by} : {', '.join(each)})" for by, each in clauses.items())
            around: tuple[list[str], list[str]] = ([], [])
            sums = [name for kind, name, _ in loop.folds if kind == "sum"]
            in_parts = self.parts and len(sums) == len(loop.folds) and (self.tiles or not self.simd)
            if in_parts and count > PART and not self.threads:
                declared = [line for name in sums for line in declare("double", f"{name}_part", "0", "")]
                around = declared, self.over_tile(text(f"{name} += {name}_part;" for name in sums))
                body = [
                    line.replace(f"{name} +=", f"{name}_part +=")
                    for line, name in zip(body, sums, strict=True)
                ]
            lines += self.over_group([*load, *text(body)], clause, vector=True, around=around)
            if self.threads:
                lines += [f"{name} = block_{kind}({name});" for kind, name, _ in loop.folds]
            for name, value in loop.values:
                lines += declare("float", name, value, "const ")
        for name, value in code.carry:
            lines += declare("double", name, value)
        write = [*text(nest.after), f"o[{_address(nest, 'o')}] = v;"]
        if code.result:
            end = self.over_tile([*text([f"{code.type} v = {code.result};"]), *write])
            return [*lines, *(["if (threadIdx.x == 0) {", *indent(end), "}"] if self.threads else end)]
        return [*lines, *self.over_group([*load, *text(code.apply), *write], "", vector=not code.carry)]


def _tiles(nest: Nest, rows: int, lanes: int) -> dict[str, int]:
    """Return the sizes of the tiles of a loop nest by axis, none of which is larger than its axis.

    A tile is a part of an axis whose elements are computed together. The innermost kept axis (one over which
    no sum goes) has a tile of `lanes` elements, and the axis `rows` of the nest one of `rows` elements. There
    are no tiles if neighbours on the innermost kept axis are not near each other, because the loops over the
    reduced axes are vectorised then. If `lanes` is 0, only the axis `rows` has a tile.
    """
    kept = [axis for axis in nest.axes if not axis.reduced]
    tiles = {axis.name: min(rows, axis.size) for axis in kept if axis.name == nest.rows and rows > 1}
    if not lanes:
        return tiles
    near = kept and _is_lane(nest, kept[-1])
    return tiles | {kept[-1].name: min(lanes, kept[-1].size)} if near else {}


def _is_lane(nest: Nest, axis: Axis) -> bool:
    """Return whether neighbours on an axis of a nest are near each other in all of its tensors.

    Near is a distance of at most MAX_LANE_STRIDE elements. The result is False for an axis of one element.
    """
    inside = sum(
        abs(window.factors.get(axis.name, 0)) * window.stride // window.divisor for window in nest.windows
    )
    return axis.size > 1 and all(abs(step) <= MAX_LANE_STRIDE for step in (*axis.strides.values(), inside))


def _position(axis: Axis, tiles: dict[str, int], index: str) -> str:
    """Return the C++ line that declares the index in an axis, or the first index of a tile of the axis.

    `tiles` has the sizes of tiles by axis, and `index` is the expression of the tile's number. An axis with
    tiles of one element has the variable `NAME`, such as `const int64_t d0 = t;`, and another one `NAME_s`.
    """
    size = tiles.get(axis.name, 1)
    if size == 1:
        return f"const int64_t {axis.name} = {index};"
    last = axis.size - size
    return f"const int64_t {axis.name}_s = {index} * {size} < {last} ? {index} * {size} : {last};"


def _count(axis: Axis, tiles: dict[str, int]) -> int:
    return -(-axis.size // tiles.get(axis.name, 1))


# --- passes -------------------------------------------------------------------------------------------------


def _cpu_pass(nest: Nest, schedule: CpuNestSchedule) -> list[str]:
    """Return the C++ lines that compute a loop nest, which read the array `a` and operands and write `o`."""
    nest = merge(nest if schedule.rows > 1 else replace(nest, rows=""))
    tiles = _tiles(nest, schedule.rows, schedule.lanes)
    tiles = {name: size for name, size in tiles.items() if size > 1}
    lines = _Group(nest, tiles, schedule.loops == "simd", 0, schedule.accumulator == "float").write()
    for axis in reversed([axis for axis in nest.axes if not axis.reduced]):
        if axis.name in tiles:
            index = f"{axis.name}_q"
            lines = _for(Axis(index, _count(axis, tiles), False, {}), [_position(axis, tiles, index), *lines])
        else:
            lines = _for(axis, lines)
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
    if schedule.products == "cublas" and nest.rows == PRODUCT_ROWS:
        return [], _cublas_call(nest, source, target)
    operands = nest.operands
    nest = merge(nest if schedule.rows > 1 else replace(nest, rows=""))
    kept = [axis for axis in nest.axes if not axis.reduced]
    reduced = [axis for axis in nest.axes if axis.reduced]
    is_long = bool(reduced) and reduced[-1].size >= MIN_SHARED and not nest.rows and not nest.code.carry
    by_block = is_long and not (kept and _is_lane(nest, kept[-1]))
    tiles = {} if by_block else _tiles(nest, schedule.rows, 0)
    threads = schedule.threads
    total = prod(_count(axis, tiles) for axis in kept)
    parameters = ["const float* a", *(f"const {types[key]} {key}" for key in operands)]
    body = ["int64_t tile = blockIdx.x;"] if kept else []
    if not by_block:
        body = [f"int64_t tile = blockIdx.x * {threads}ll + threadIdx.x;", f"if (tile >= {total}) return;"]
    for axis in reversed(kept):
        count = _count(axis, tiles)
        body += [_position(axis, tiles, f"(tile % {count})"), f"tile /= {count};"]
    body += _Group(nest, tiles, False, threads if by_block else 0, schedule.accumulator == "float").write()
    grid = total if by_block else -(-total // threads)
    arguments = ", ".join([source, *operands, target])
    return (
        [
            f"__global__ void {name}({', '.join(parameters)}, {nest.code.type}* o) {{",
            *indent(body),
            "}",
        ],
        [f"{name}<<<{grid}, {threads}, 0, (cudaStream_t)stream>>>({arguments});"],
    )


def _cublas_call(nest: Nest, source: str, target: str) -> list[str]:
    """Return the C++ lines that compute a loop nest, which is a product of matrices, by cuBLAS.

    `source` and `target` are the C++ variables of the first factor and of the product.
    """
    axes = {axis.name: axis for axis in nest.axes}
    batches = [axis for axis in merge(nest).axes if axis.name not in "ijk"]
    batch = batches[0] if batches else Axis("b", 1, False, {})
    i, j, k = (axes[name] for name in "ijk")
    (right,) = nest.operands

    def side(outer: Axis, tensor: str) -> tuple[bool, int]:
        """Return whether neighbours on `outer` are neighbours in memory, and the leading dimension."""
        across, along = outer.strides[tensor], k.strides[tensor]
        return (True, max(along, outer.size)) if across == 1 else (False, max(across, k.size))

    # cuBLAS has columns first, so that it computes the transposed product with the factors swapped.
    (plain, lead_b), (transposed, lead_a) = side(j, right), side(i, "a")
    steps = {name: batch.strides.get(name, 0) for name in ("a", "o", right)}
    return [
        "{",
        "  static void* handle = nullptr;",
        "  if (handle == nullptr) cublasCreate_v2(&handle);",
        "  cublasSetStream_v2(handle, (cudaStream_t)stream);",
        "  const float one = 1, zero = 0;",
        f"  cublasSgemmStridedBatched(handle, {int(not plain)}, {int(transposed)}, {j.size}, {i.size},",
        f"      {k.size}, &one, {right}, {lead_b}, {steps[right]}, {source}, {lead_a}, {steps['a']},",
        f"      &zero, {target}, {j.size}, {steps['o']}, {batch.size});",
        "}",
    ]
