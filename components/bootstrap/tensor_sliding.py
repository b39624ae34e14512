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


def _sides(rng: random.Random, shape: Shape, kernels: Sequence[int]) -> list[int]:
    """Draw the sizes of a window or kernel, one for each dimension of `shape` after the first two.

    Each is one of `kernels`. With the probability 0.65 all sizes are equal, and otherwise each is drawn by
    itself.
    """
    sizes = [rng.choice(kernels) for _ in shape[2:]]
    return sizes if rng.random() < 0.35 else sizes[:1] * len(sizes)


def _shorten(values: Sequence[int]) -> int | tuple[int, ...]:
    return values[0] if len(set(values)) == 1 else tuple(values)


def _draw_pool(rng: random.Random, shape: Shape, *, dilated: bool) -> Arguments | None:
    sizes, stride = _sides(rng, shape, (2, 3, 4, 5)), rng.choice((1, 2, 2, 3))
    padding = min(rng.choice((0, 0, 1)), min(sizes) // 2)
    dilation = rng.choice((1, 1, 2)) if dilated else 1
    drawn = {"kernel": _shorten(sizes), "stride": stride, "padding": padding}
    drawn |= {"dilation": dilation} if dilated else {}
    return None if min(shape[2:]) < dilation * max(sizes) else drawn


def _draw_convolution(rng: random.Random, shape: Shape, *, transposed: bool) -> Arguments | None:
    sizes = _sides(rng, shape, (1, 3, 3, 5))
    stride, dilation = rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 1, 2))
    padding = rng.choice((0, 0, 1, 2)) if max(sizes) > 1 else 0
    kind, ratio = rng.random(), rng.choice((0.5, 1, 1, 2))
    if min(shape[2:]) < dilation * max(sizes) or shape[1] < 2:
        return None
    ins = shape[1]
    groups = ins if kind < 0.2 else 2 if kind < 0.35 and ins % 4 == 0 else 1
    outs = ins if groups == ins else max(groups, int(ins * ratio) // groups * groups)
    drawn = {"ins": ins, "outs": outs, "kernel": _shorten(sizes), "stride": stride, "padding": padding}
    drawn |= {"dilation": dilation, "groups": groups, "bias": rng.random() < 0.5}
    return drawn | ({"output_padding": stride - 1} if transposed else {})


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
