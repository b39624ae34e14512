"""Copy the tensors that a loop nest reads into a layout in which its kernel is simpler or faster."""

from dataclasses import replace

from components.bootstrap.loop_nest import PRODUCT_ROWS, Axis, Code, Loop, Nest, strides_of


def without_windows(nest: Nest) -> list[Nest]:
    """Return a nest that copies the input of a convolution between zeros, and the nest on this copy.

    The second nest has no conditions on positions (windows), because every position that it reads lies in the
    copy. If `nest` has no windows or is not a convolution, the result is a list with `nest` only.
    """
    if not nest.windows or not nest.operands or not all(window.stride for window in nest.windows):
        return [nest]
    spans = {axis.name: axis.size - 1 for axis in nest.axes}
    lows, sizes = {}, []
    for window in nest.windows:
        ends = [spans[name] * factor for name, factor in window.factors.items()]
        lows[window.name] = sum(min(end, 0) for end in ends)
        sizes.append(sum(map(abs, ends)) + 1)
    moved = [axis for axis in nest.axes if axis.strides.get("a")]
    shape = (*(axis.size for axis in moved), *sizes)
    steps = strides_of(shape)
    places = dict(zip([axis.name for axis in moved], steps, strict=False))
    strides = dict(zip(lows, steps[len(moved) :], strict=True))
    lead = [
        Axis(axis.name, axis.size, False, {"a": axis.strides["a"], "o": places[axis.name]}) for axis in moved
    ]
    stretched = [
        Axis(f"q{i}", size, False, {"o": step})
        for i, (size, step) in enumerate(zip(sizes, strides.values(), strict=True))
    ]
    windows = tuple(
        replace(window, factors={f"q{i}": 1}, offset=window.offset + lows[window.name])
        for i, window in enumerate(nest.windows)
    )
    copy = Nest((*lead, *stretched), Code((Loop((("sum", "total", "v"),)),), "total"), shape, windows)
    for window in nest.windows:
        places |= {name: factor * strides[window.name] for name, factor in window.factors.items()}
    axes = [
        replace(axis, strides=axis.strides | ({"a": places[axis.name]} if axis.name in places else {}))
        for axis in nest.axes
    ]
    start = -sum(low * strides[name] for name, low in lows.items())
    return [copy, replace(nest, axes=tuple(axes), windows=(), start=start)]


def with_near_columns(nest: Nest) -> list[Nest]:
    """Return a nest that copies the second factor of a matrix product, and the product with this copy.

    In the copy, elements of neighbouring columns lie beside each other in memory. If `nest` is no product of
    matrices, or if its second factor has this layout, the result is a list with `nest` only.
    """
    axes = {axis.name: axis for axis in nest.axes}
    if nest.rows != PRODUCT_ROWS:
        return [nest]
    name = next(key for key in nest.operands if axes["k"].strides.get(key))
    if axes["j"].strides[name] == 1:
        return [nest]
    moved = sorted((axis for axis in nest.axes if axis.strides.get(name)), key=lambda axis: axis.name == "j")
    shape, copied = tuple(axis.size for axis in moved), f"{name}_columns"
    steps = {axis.name: step for axis, step in zip(moved, strides_of(shape), strict=True)}
    copy = Nest(
        tuple(
            Axis(axis.name, axis.size, False, {"a": axis.strides[name], "o": steps[axis.name]})
            for axis in moved
        ),
        Code(),
        shape,
        source=name,
        target=copied,
    )
    code = Code((Loop((("sum", "total", f"v * {copied}@"),)),), "total")
    strides = [
        {key: step for key, step in axis.strides.items() if key != name}
        | ({copied: steps[axis.name]} if axis.name in steps else {})
        for axis in nest.axes
    ]
    moved_axes = (replace(axis, strides=step) for axis, step in zip(nest.axes, strides, strict=True))
    return [copy, replace(nest, axes=tuple(moved_axes), code=code)]
