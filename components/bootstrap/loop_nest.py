"""Describe what one kernel or one pass over the memory computes, as loop nests over the axes of tensors.

A nest reads the main tensor `a` and further tensors, its operands, and writes the tensor `o`. A group is the
set of elements that are combined, such as those of one sum. The nest has kept axes, which go from group to
group, and reduced axes, over which the loops of one group go. Sums, products of matrices, convolutions,
pooling, norms and scans differ only in their axes and in their `Code`. The text of the kernels is written by
nest_writer.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from components.bootstrap.size import calculated

# Name of the axis `rows` of a product of matrices.
PRODUCT_ROWS = "i"
Shape = tuple[int, ...]
# Strides by the name of a tensor; a tensor that an axis does not move has none.
Strides = dict[str, int]


@dataclass(frozen=True)
class Axis:
    """An axis of a loop nest, whose index goes from 0 to `size` - 1.

    `reduced` says whether the axis goes over the elements that are combined into one group, such as those of
    a sum. `strides` has, by the name of a tensor, the number of elements between neighbours on the axis. The
    axis does not move a tensor without an entry, unless a `Window` depends on the axis.
    """

    name: str
    size: int
    reduced: bool
    strides: Strides


@dataclass(frozen=True)
class Window:
    """An index of the tensor `a` that follows from several axes, such as a position in an image.

    The index is `offset` plus the sum of each axis times its factor in `factors`, divided by `divisor`. Only
    positions at which the division leaves no remainder and the index is from 0 to `size` - 1 are computed, so
    that nothing is added elsewhere. `stride` is the number of elements between neighbours of the index in
    `a`. It is 0 if the window only leaves out positions.
    """

    name: str
    factors: dict[str, int]
    offset: int
    divisor: int
    size: int
    stride: int


@dataclass(frozen=True)
class Loop:
    """One loop over the reduced axes of a group, which is a set of elements that are combined.

    `folds` has the kind (sum, prod, max or min), the C++ variable and the C++ expression of each value that
    is accumulated. `values` has C++ variables and expressions that are computed after the loop.
    """

    folds: tuple[tuple[str, str, str], ...]
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Code:
    """C++ code of an operator on groups, which are sets of elements that are combined, such as rows.

    `loops` are run first. They are followed by the expression `result` if the operator returns one value for
    each group, and otherwise by the lines `apply` for every element `v`. In the code, `NAME@` is the element
    of the operand NAME, a further tensor that is read, and COUNT is the number of elements of a group.
    `carry` has variables, with their first values, that the lines `apply` pass on from one element to the
    next; `backwards` says that they begin with the last element. `type` is the C++ type of the elements of
    the output.
    """

    loops: tuple[Loop, ...] = ()
    result: str = ""
    apply: tuple[str, ...] = ()
    carry: tuple[tuple[str, str], ...] = ()
    backwards: bool = False
    type: str = "float"


@dataclass(frozen=True)
class Line:
    """A C++ line of an elementwise operator, which changes an element `v`.

    `operand` is the name of a further tensor whose element the line reads as `NAME@`, and `shape` is its
    shape. Both are empty if there is no such tensor. An empty `text` only declares the operand.
    """

    text: str
    operand: str = ""
    shape: Shape = ()


@dataclass(frozen=True)
class Convolution:
    """The sizes of a convolution, or of a transposed one, by which a library can compute it.

    `x`, `weight` and `y` are the shapes of the input, the weight and the output, and `operand` is the name of
    the weight. `padding`, `stride` and `dilation` have a number for each dimension of x after the first two.
    """

    x: Shape
    weight: Shape
    y: Shape
    operand: str
    padding: Shape
    stride: Shape
    dilation: Shape
    groups: int
    transposed: bool


@dataclass(frozen=True)
class Nest:
    """A loop nest, which computes the tensor `o` of the shape `shape` from the tensor `a` and operands.

    `axes` go over the groups of elements that are combined and over the elements of a group, and `code` is
    the C++ code of one group. `windows` are indices of `a` that follow from several axes. The lines `before`
    change each element of `a` when it is read, and the lines `after` each element of `o` before it is
    written. `start` is the index of the first element of `a`. `rows` is the name of the kept axis (one over
    which no sum goes) of which a thread computes several elements at once, because they share elements of `a`
    or of an operand; it is empty if there is no such axis. `convolution` has the sizes if the nest is a
    convolution. `source` and `target` are the names of the tensors `a` and `o` if the nest copies an operand
    of the next nest. `target` alone is the name under which `a` is kept for a later nest, and `source` alone
    that of a kept tensor with which the program goes on.
    """

    axes: tuple[Axis, ...]
    code: Code
    shape: Shape
    windows: tuple[Window, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    rows: str = ""
    start: int = 0
    convolution: Convolution | None = None
    # Names of the tensors `a` and `o` of a nest that copies an operand of the next nest.
    source: str = ""
    target: str = ""

    @property
    def operands(self) -> tuple[str, ...]:
        """Return the sorted names of the operands, which are the tensors other than `a` and `o`."""
        return tuple(sorted({name for axis in self.axes for name in axis.strides} - {"a", "o"}))

    @property
    def has_library(self) -> bool:
        """Return whether the nest is a product of matrices (for cuBLAS) or a convolution (for cuDNN)."""
        return self.rows == PRODUCT_ROWS or self.convolution is not None

    @property
    def is_name(self) -> bool:
        """Return whether the nest only gives `a` a name, to keep it, or takes back what was kept."""
        return bool(self.target) != bool(self.source)

    @property
    def is_elementwise(self) -> bool:
        """Return whether the nest only copies `a` to `o`, through the lines `before` and `after`."""
        return self.code == Code()

    @property
    def reads_once(self) -> bool:
        """Return whether no element of `a` is read by several groups, such as several sums.

        This is so if there are no windows and every axis of more than one element has a stride in `a`.
        """
        return not self.windows and all(axis.strides.get("a") or axis.size == 1 for axis in self.axes)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[index + 1 :]) for index in range(len(shape)))


def fits(shape: Shape, following: Shape) -> bool:
    """Return whether a tensor of the shape `shape` can be broadcast to the shape `following`."""
    pairs = zip(reversed(shape), reversed(following), strict=False)
    return len(shape) <= len(following) and all(one in (1, size) for one, size in pairs)


def broadcast(shape: Shape, stride: int, following: Shape) -> int:
    """Return the stride of an axis in an operand that is broadcast to the shape `following` of a tensor.

    `stride` is the stride of the axis in this tensor; the axis stays within one dimension. The tensor and the
    operand are contiguous, and strides are in elements. `shape` is the shape of the operand. The result is 0
    if the operand has the same elements at all indices of the axis. Raises ValueError if the operand cannot
    be broadcast to the tensor.
    """
    if not fits(shape, following):
        raise ValueError(f"an operand of the shape {shape} for a tensor of the shape {following}")
    padded = (1,) * (len(following) - len(shape)) + shape
    # Sizes that are equal are written with the names that they have in the tensor.
    padded = tuple(1 if size == 1 else same for size, same in zip(padded, following, strict=True))
    for size, step, own in zip(padded, strides_of(following), strides_of(padded), strict=True):
        if 0 < step <= stride:
            return 0 if size == 1 else stride // step * own
    return 0


def reads_elsewhere(nest: Nest, line: Line, *, tensor: str, following: Shape) -> bool:
    """Return whether the loop nest already reads the operand of a line, and at other indices than the line.

    The line then cannot be added to the nest. The arguments are those of `attach`.
    """
    return line.operand in nest.operands and any(
        axis.strides.get(line.operand, 0) != broadcast(line.shape, axis.strides.get(tensor, 0), following)
        for axis in nest.axes
    )


def attach(nest: Nest, line: Line, *, tensor: str, following: Shape) -> Nest:
    """Return the loop nest with the C++ line `line` added for each element of `tensor`.

    `tensor` is "a", whose elements the line changes after they are read, or "o", whose elements it changes
    before they are written. `following` is the shape of this tensor, to which the operand of the line is
    broadcast.
    """
    moves = [
        {line.operand: broadcast(line.shape, axis.strides.get(tensor, 0), following)} if line.operand else {}
        for axis in nest.axes
    ]
    axes = (replace(axis, strides=axis.strides | more) for axis, more in zip(nest.axes, moves, strict=True))
    before, after = [(line.text,) if line.text and tensor == side else () for side in ("a", "o")]
    return replace(nest, axes=tuple(axes), before=nest.before + before, after=nest.after + after)


def over_dims(shape: Shape, dims: Iterable[int], code: Code, *, keepdim: bool = False) -> Nest:
    """Return a loop nest in which `code` reduces the dimensions `dims` of a contiguous tensor.

    `shape` is the shape of the tensor. If the code has a result for each group, the output does not have
    these dimensions, or has them with size 1 if `keepdim` is true; otherwise it has the shape of the input.
    """
    reduced = {dim % len(shape) for dim in dims}
    kept = tuple(1 if index in reduced else size for index, size in enumerate(shape))
    outer = strides_of(kept if code.result else shape)
    axes = tuple(
        Axis(
            f"d{index}",
            size,
            index in reduced,
            {"a": stride, "o": 0 if code.result and index in reduced else outer[index]},
        )
        for index, (size, stride) in enumerate(zip(shape, strides_of(shape), strict=True))
    )
    if code.result and not keepdim:
        kept = tuple(size for index, size in enumerate(shape) if index not in reduced)
    return Nest(axes, code, kept if code.result else shape)


@dataclass(frozen=True)
class Slide:
    """How the kernel of a convolution or a pooling slides over one spatial dimension of the input.

    The fields have the names and meanings of torch's arguments, and `size` is the size of the input.
    `padding` is the number of elements that are missing before the first. If `transposed` is true, `stride`
    is the distance of the input's elements in the output.
    """

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    transposed: bool = False
    output_padding: int = 0

    @property
    def out(self) -> int:
        """Return the size of the output in this dimension."""
        formula = (
            "({size} - 1) * {stride} - 2 * {padding} + {dilation} * ({kernel} - 1) + {output_padding} + 1"
            if self.transposed
            else "({size} + 2 * {padding} - {dilation} * ({kernel} - 1) - 1) / {stride} + 1"
        )
        return calculated(formula, vars(self))

    def window(self, index: int, stride: int) -> Window:
        """Return the window, the index of the input at a position of the output and a tap of the kernel.

        The position and the tap are the axes `p` and `k` followed by `index`, the number of the dimension.
        `stride` is the number of elements of the input between neighbours in the dimension.
        """
        position, tap = f"p{index}", f"k{index}"
        if self.transposed:
            factors = {position: 1, tap: -self.dilation}
            return Window(f"h{index}", factors, self.padding, self.stride, self.size, stride)
        factors = {position: self.stride, tap: self.dilation}
        return Window(f"h{index}", factors, -self.padding, 1, self.size, stride)


def sliding(slides: Sequence[Slide], lead: Sequence[Axis], taps: Strides, code: Code, shape: Shape) -> Nest:
    """Return a loop nest that slides a kernel over the last dimensions of its input.

    `slides` has an entry for each of these dimensions. `lead` are the axes of the other dimensions, which
    come first. `taps` has the stride of the kernel's last dimension in each operand that holds such kernels,
    by name. `code` is the C++ code of one position, and `shape` is the shape of the output.
    """
    sizes, outs = [slide.size for slide in slides], [slide.out for slide in slides]
    inputs, outputs, kernel = (strides_of(part) for part in (sizes, outs, [slide.kernel for slide in slides]))
    positions = [Axis(f"p{i}", outs[i], False, {"o": outputs[i]}) for i in range(len(slides))]
    axes = [
        Axis(f"k{i}", slide.kernel, True, {name: step * kernel[i] for name, step in taps.items()})
        for i, slide in enumerate(slides)
    ]
    windows = []
    for i, slide in enumerate(slides):
        window = slide.window(i, inputs[i])
        if slide.padding or slide.transposed:
            windows.append(window)
        else:
            for group in (positions, axes):
                factor = window.factors[group[i].name] * window.stride
                group[i] = replace(group[i], strides=group[i].strides | {"a": factor})
    return Nest((*lead, *positions, *axes), code, shape, tuple(windows))


def merge(nest: Nest) -> Nest:
    """Return the nest with neighbouring axes joined into one axis, if that changes the index in no tensor.

    Axes of one element are left out. The axis `rows` and axes on which windows depend stay as they are.
    """
    fixed = {name for window in nest.windows for name in window.factors} | {nest.rows}
    axes: list[Axis] = []
    for axis in [axis for axis in nest.axes if axis.size > 1 or axis.name in fixed]:
        last = axes[-1] if axes else None
        if (
            last is not None
            and last.reduced == axis.reduced
            and not {last.name, axis.name} & fixed
            and all(
                last.strides.get(name, 0) == axis.strides.get(name, 0) * axis.size
                for name in {*last.strides, *axis.strides}
            )
        ):
            axes[-1] = replace(axis, size=last.size * axis.size)
        else:
            axes.append(axis)
    return replace(nest, axes=tuple(axes))
