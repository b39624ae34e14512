"""Write the C++ and CUDA code of one group of a loop nest, which is the set of elements that are combined.

A tile is a part of an axis whose elements are computed together. nest_writer.py writes the loops or the
kernel around this code.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from components.bootstrap.kernel_writer import indent
from components.bootstrap.loop_nest import Axis, Nest, Window
from components.bootstrap.size import as_float, bare, ceil_div

# For each kind of accumulated value: its C++ type, first value, update, and OpenMP reduction.
FOLDS = {
    "sum": ("double", "0", "{0} += {1};", "+"),
    "prod": ("double", "1", "{0} *= {1};", "*"),
    "max": ("float", "-INFINITY", "{0} = vmax({0}, {1});", "max"),
    "min": ("float", "INFINITY", "{0} = vmin({0}, {1});", "min"),
}
# Largest stride in `a` and in operands of an axis that is computed in vectors or by neighbouring threads.
MAX_LANE_STRIDE = 4
# Number of terms of a partial sum in float.
PART = 128


def for_axis(axis: Axis, body: Sequence[str], *, backwards: bool = False, threads: int = 0) -> list[str]:
    """Return the lines of a C++ loop over an axis, with the lines `body`.

    If `backwards` is true, the loop begins with the last index. If `threads`, the number of threads of a CUDA
    block, is not 0, the loop goes only over the indices of one thread, which are `threads` apart.
    """
    head = f"int64_t {axis.name} = 0; {axis.name} < {bare(axis.size)}; ++{axis.name}"
    if backwards:
        head = f"int64_t {axis.name} = {bare(axis.size - 1)}; {axis.name} >= 0; --{axis.name}"
    elif threads:
        head = f"int64_t {axis.name} = threadIdx.x; {axis.name} < {bare(axis.size)}; {axis.name} += {threads}"
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
class Group:
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
            if size > 1 and re.search(rf"\b{name}\b", "\n".join(body)):
                body = [f"const int64_t {name} = {name}_s + {name}_t;", *body]
            if size > 1:
                body = for_axis(Axis(f"{name}_t", size, False, {}), body)
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
                    f"for (int64_t {name}_q = 0; {name}_q < {bare(size)}; {name}_q += {step}) {{",
                    f"  const int64_t end = {name}_q + {step} < {size} ? {name}_q + {step} : {size};",
                    *indent([*around[0], f"for (int64_t {name} = {name}_q; {name} < end; ++{name}) {{"]),
                    *indent([*indent(lines), "}", *around[1]]),
                    "}",
                ]
                continue
            lines = for_axis(
                axis, lines, backwards=nest.code.backwards, threads=self.threads if innermost else 0
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
            result = [line.replace("COUNT", as_float(count)) for line in lines]
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
                lines += [f"{name} = vblock_{kind}({name});" for kind, name, _ in loop.folds]
            for name, value in loop.values:
                lines += declare("float", name, value, "const ")
        for name, value in code.carry:
            lines += declare("double", name, value)
        write = [*text(nest.after), f"o[{_address(nest, 'o')}] = v;"]
        if code.result:
            end = self.over_tile([*text([f"{code.type} v = {code.result};"]), *write])
            return [*lines, *(["if (threadIdx.x == 0) {", *indent(end), "}"] if self.threads else end)]
        return [*lines, *self.over_group([*load, *text(code.apply), *write], "", vector=not code.carry)]


def tiles_of(nest: Nest, rows: int, lanes: int) -> dict[str, int]:
    """Return the sizes of the tiles of a loop nest by axis, none of which is larger than its axis.

    A tile is a part of an axis whose elements are computed together. The innermost kept axis (one over which
    no sum goes) has a tile of `lanes` elements, and the axis `rows` of the nest one of `rows` elements. There
    are no tiles if neighbours on the innermost kept axis are not near each other, because the loops over the
    reduced axes are vectorised then. If `lanes` is 0, only the axis `rows` has a tile. A copy between zeros
    has none, because g++ 12 with -O3 and AVX-512 makes wrong code for the conditions of its windows.
    """
    kept = [axis for axis in nest.axes if not axis.reduced]
    tiles = {axis.name: min(rows, axis.size) for axis in kept if axis.name == nest.rows and rows > 1}
    if not lanes or (nest.windows and kept == list(nest.axes)):
        return tiles
    near = kept and is_lane(nest, kept[-1])
    return tiles | {kept[-1].name: min(lanes, kept[-1].size)} if near else {}


def is_lane(nest: Nest, axis: Axis) -> bool:
    """Return whether neighbours on an axis of a nest are near each other in all of its tensors.

    Near is a distance of at most MAX_LANE_STRIDE elements. The result is False for an axis of one element.
    """
    inside = sum(
        abs(window.factors.get(axis.name, 0)) * window.stride // window.divisor for window in nest.windows
    )
    return axis.size > 1 and all(abs(step) <= MAX_LANE_STRIDE for step in (*axis.strides.values(), inside))


def position(axis: Axis, tiles: dict[str, int], index: str) -> list[str]:
    """Return the C++ lines that declare the index in an axis, or the first index of a tile of the axis.

    `tiles` has the sizes of tiles by axis, and `index` is the expression of the tile's number. An axis with
    tiles of one element has the variable `NAME`, such as `const int64_t d0 = t;`, and another one `NAME_s`.
    """
    size = tiles.get(axis.name, 1)
    if size == 1:
        return [f"const int64_t {axis.name} = {index};"]
    first, last = f"{axis.name}_s", bare(axis.size - size)
    if size == axis.size:
        return [f"const int64_t {first} = 0;"]
    return [f"int64_t {first} = {index} * {size};", f"if ({first} > {last}) {first} = {last};"]


def tile_count(axis: Axis, tiles: dict[str, int]) -> int:
    """Return the number of tiles of an axis, the last of which may overlap the one before."""
    return ceil_div(axis.size, tiles.get(axis.name, 1))
