"""Define the tensor operators that slide over images: pooling and convolutions.

A tensor operator is a row of the table in tensor_operators.py, for which kernels can be written by rules.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

from components.bootstrap.loop_nest import (
    Axis,
    Code,
    Convolution,
    Line,
    Loop,
    Nest,
    Shape,
    Slide,
    sliding,
    strides_of,
)
from components.bootstrap.tensor_operator import AFFINE, Arguments, Parts, TensorOperator
from components.bootstrap.tensor_reductions import REDUCTIONS


def _each(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * count


def _pool(
    shape: Shape,
    inputs: dict[str, Shape],
    name: str,
    kernel: int | tuple[int, ...],
    stride: int | tuple[int, ...],
    padding: int | tuple[int, ...],
    dilation: int | tuple[int, ...] = 1,
    *,
    code: Code,
) -> Parts:
    """Return the loop nest of a pooling, which applies `code` to each window.

    `shape` is the shape of x. `inputs` and `name` are not used. Each of torch's arguments `kernel`, `stride`,
    `padding` and `dilation` is one number, or has one for each dimension of x after the first two, over which
    the windows slide.
    """
    count = len(shape) - 2
    sides = zip(*(_each(value, count) for value in (kernel, stride, padding, dilation)), strict=True)
    slides = [Slide(size, *side) for size, side in zip(shape[2:], sides, strict=True)]
    outs = (*shape[:2], *(slide.out for slide in slides))
    steps, out_steps = strides_of(shape), strides_of(outs)
    lead = [Axis(f"n{i}", shape[i], False, {"a": steps[i], "o": out_steps[i]}) for i in range(2)]
    return [sliding(slides, lead, {}, code, outs)]


def _global_mean(shape: Shape, inputs: dict[str, Shape], name: str, size: int | tuple[int, ...]) -> Parts:
    """Return the loop nest of an adaptive average pooling to one element for each channel.

    `shape` is the shape of x. `inputs` and `name` are not used. Raises ValueError if `size`, the size of the
    output, is another.
    """
    if set(_each(size, 1)) != {1}:
        raise ValueError(f"an adaptive pooling to {size}")
    return REDUCTIONS["mean"].build(shape, {}, name, dim=tuple(range(2, len(shape))), keepdim=True)


def _convolution(
    shape: Shape,
    inputs: dict[str, Shape],
    name: str,
    ins: int,
    outs: int,
    kernel: int | tuple[int, ...],
    stride: int | tuple[int, ...],
    padding: int | tuple[int, ...],
    dilation: int | tuple[int, ...],
    groups: int,
    bias: bool,
    output_padding: int | tuple[int, ...] = 0,
    *,
    transposed: bool = False,
) -> Parts:
    """Return the loop nest of a convolution and, if `bias` is true, a C++ line that adds its bias.

    `shape` is the shape of x, and `name` is the name of the module; `inputs` is not used. Of torch's
    arguments, `ins` and `outs` are numbers of channels, and each of `kernel`, `stride`, `padding`, `dilation`
    and `output_padding` is one number, or has one for each dimension of x after the first two. If
    `transposed` is true, it is a transposed convolution.
    """
    count = len(shape) - 2
    sides = zip(
        *(_each(value, count) for value in (kernel, stride, padding, dilation, output_padding)), strict=True
    )
    slides = [
        Slide(size, taps, step, margin, apart, transposed, more)
        for size, (taps, step, margin, apart, more) in zip(shape[2:], sides, strict=True)
    ]
    out_shape = (shape[0], outs, *(slide.out for slide in slides))
    into, out, weight = ins // groups, outs // groups, f"{name}_weight"
    weight_shape = (
        *((ins, out) if transposed else (outs, into)),
        *(slide.kernel for slide in slides),
    )
    first, second, *_ = strides_of(weight_shape)
    size, out_size = prod(shape[2:]), prod(out_shape[2:])
    lead = [
        Axis("n", shape[0], False, {"a": ins * size, "o": outs * out_size}),
        Axis(
            "g",
            groups,
            False,
            {"a": into * size, "o": out * out_size, weight: weight_shape[0] // groups * first},
        ),
        Axis("c", out, False, {"o": out_size, weight: second if transposed else first}),
        Axis("u", into, True, {"a": size, weight: first if transposed else second}),
    ]
    code = Code((Loop((("sum", "total", f"v * {weight}@"),)),), "total")
    nest = sliding(slides, lead, {weight: 1}, code, out_shape)
    convolution = Convolution(
        x=shape,
        weight=weight_shape,
        y=out_shape,
        operand=weight,
        padding=_each(padding, count),
        stride=_each(stride, count),
        dilation=_each(dilation, count),
        groups=groups,
        transposed=transposed,
    )
    parts: list[Nest | Line] = [replace(nest, rows="c" if out > 1 else "", convolution=convolution)]
    shift = Line(f"v = v + {name}_bias@;", f"{name}_bias", (outs, *(1,) * count))
    return [*parts, shift] if bias else parts


# Probability that a pooling or a convolution has arguments as most of KernelBench's have: windows that do not
# overlap, or no dilation and no groups.
USUAL_SHARE = 0.5


def _sides(rng: random.Random, shape: Shape, kernels: Sequence[int]) -> list[int]:
    """Draw the sizes of a window or kernel, one for each dimension of `shape` after the first two.

    Each is one of `kernels`. With the probability 0.65 all sizes are equal, and otherwise each is drawn by
    itself.
    """
    sizes = [rng.choice(kernels) for _ in shape[2:]]
    return sizes if rng.random() < 0.35 else sizes[:1] * len(sizes)


def _shorten(rng: random.Random, values: Sequence[int]) -> int | tuple[int, ...]:
    """Return numbers, one for each dimension, as a tuple, or mostly as one number if all are equal."""
    return values[0] if len(set(values)) == 1 and rng.random() < 0.85 else tuple(values)


def _draw_pool(rng: random.Random, shape: Shape, *, dilated: bool) -> Arguments | None:
    sizes, count = _sides(rng, shape, (2, 2, 3, 4, 5, 8)), len(shape) - 2
    steps, padding, dilation = list(sizes), 0, 1
    if rng.random() >= USUAL_SHARE:
        steps = [rng.choice((1, 2, 2, 3))] * count
        padding = rng.randint(0, min(sizes) // 2)
        dilation = rng.choice((1, 1, 2, 3)) if dilated else 1
    drawn = {
        "kernel": _shorten(rng, sizes),
        "stride": _shorten(rng, steps),
        "padding": _shorten(rng, [padding] * count),
    }
    drawn |= {"dilation": dilation} if dilated else {}
    return None if min(shape[2:]) < dilation * max(sizes) else drawn


def _draw_convolution(rng: random.Random, shape: Shape, *, transposed: bool) -> Arguments | None:
    sizes, count, ins = _sides(rng, shape, (1, 3, 3, 3, 4, 5, 7)), len(shape) - 2, shape[1]
    strides, dilations, groups = [rng.choice((1, 1, 2))] * count, [1] * count, 1
    margins = [rng.choice((0, 0, 1, sizes[0] // 2))] * count
    if rng.random() >= USUAL_SHARE:
        strides = _sides(rng, shape, (1, 1, 2, 3))
        dilations = _sides(rng, shape, (1, 1, 2, 3))
        margins = _sides(rng, shape, (0, 0, 1, 2, 3))
        groups = rng.choice([count for count in (1, 1, 2, 4, 8, ins) if ins % count == 0])
    margins = [min(margin, size - 1) for margin, size in zip(margins, sizes, strict=True)]
    if ins < 2 or any(
        side < apart * size for side, apart, size in zip(shape[2:], dilations, sizes, strict=True)
    ):
        return None
    ratio = rng.choice((0.5, 1, 1, 2, 4))
    outs = max(groups, int(ins * ratio) // groups * groups)
    drawn = {"ins": ins, "outs": outs, "kernel": _shorten(rng, sizes), "stride": _shorten(rng, strides)}
    drawn |= {"padding": _shorten(rng, margins), "dilation": _shorten(rng, dilations), "groups": groups}
    drawn |= {"bias": rng.random() < 0.7}
    more = [rng.choice((0, stride - 1)) for stride in strides[:1]] * count
    more = [min(one, stride - 1) for one, stride in zip(more, strides, strict=True)]
    return drawn | ({"output_padding": _shorten(rng, more)} if transposed else {})


SLIDING: dict[str, TensorOperator] = {}
_SIDES = "stride={stride}, padding={padding}, dilation={dilation}"
for _count in (1, 2, 3):
    SLIDING |= {
        f"max_pool_{_count}": TensorOperator(
            f"F.max_pool{_count}d(x, kernel_size={{kernel}}, {_SIDES})",
            partial(_pool, code=Code((Loop((("max", "top", "v"),)),), "top")),
            partial(_draw_pool, dilated=True),
            ranks=(_count + 2,),
        ),
        f"avg_pool_{_count}": TensorOperator(
            f"F.avg_pool{_count}d(x, kernel_size={{kernel}}, stride={{stride}}, padding={{padding}})",
            partial(_pool, code=Code((Loop((("sum", "total", "v"),)),), "total / COUNT")),
            partial(_draw_pool, dilated=False),
            ranks=(_count + 2,),
        ),
        f"global_mean_{_count}": TensorOperator(
            f"F.adaptive_avg_pool{_count}d(x, {{size}})",
            _global_mean,
            lambda rng, shape: {"size": 1},
            ranks=(_count + 2,),
        ),
        f"conv_{_count}": TensorOperator(
            "{self}(x)",
            _convolution,
            partial(_draw_convolution, transposed=False),
            f"nn.Conv{_count}d({{ins}}, {{outs}}, {{kernel}}, {_SIDES}, groups={{groups}}, bias={{bias}})",
            AFFINE,
            (_count + 2,),
        ),
        f"conv_transpose_{_count}": TensorOperator(
            "{self}(x)",
            partial(_convolution, transposed=True),
            partial(_draw_convolution, transposed=True),
            f"nn.ConvTranspose{_count}d({{ins}}, {{outs}}, {{kernel}}, {_SIDES}, "
            "output_padding={output_padding}, groups={groups}, bias={bias})",
            AFFINE,
            (_count + 2,),
        ),
    }
