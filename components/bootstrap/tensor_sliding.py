"""Define the tensor operators that slide over images: pooling and convolutions.

A tensor operator is a row of the table in tensor_operators.py, for which kernels can be written by rules.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from components.bootstrap.tensor_operator import AFFINE, Arguments, Draw, Parts, TensorOperator
from components.bootstrap.tensor_reductions import REDUCTIONS


def _each(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * count


def _pool(code: Code) -> Callable[..., Parts]:
    """Return a function that builds the loop nest of a pooling, for `TensorOperator.build`.

    The pooling applies `code` to each window. The function takes the shape of x and torch's arguments
    `kernel`, `stride`, `padding` and `dilation`. Each of these is one number, or has one for each dimension
    of x after the first two, over which the windows slide.
    """

    def build(
        shape: Shape,
        inputs: dict[str, Shape],
        name: str,
        kernel: int | tuple[int, ...],
        stride: int | tuple[int, ...],
        padding: int | tuple[int, ...],
        dilation: int | tuple[int, ...] = 1,
    ) -> Parts:
        count = len(shape) - 2
        sides = zip(*(_each(value, count) for value in (kernel, stride, padding, dilation)), strict=True)
        slides = [Slide(size, *side) for size, side in zip(shape[2:], sides, strict=True)]
        outs = (*shape[:2], *(slide.out for slide in slides))
        steps, out_steps = strides_of(shape), strides_of(outs)
        lead = [Axis(f"n{i}", shape[i], False, {"a": steps[i], "o": out_steps[i]}) for i in range(2)]
        return [sliding(slides, lead, {}, code, outs)]

    return build


def _global_mean(shape: Shape, inputs: dict[str, Shape], name: str, size: int | tuple[int, ...]) -> Parts:
    """Return the loop nest of an adaptive average pooling to one element for each channel.

    `shape` is the shape of x. `inputs` and `name` are not used. Raises ValueError if `size`, the size of the
    output, is another.
    """
    if set(_each(size, 1)) != {1}:
        raise ValueError(f"an adaptive pooling to {size}")
    return REDUCTIONS["mean"].build(shape, {}, name, dim=tuple(range(2, len(shape))), keepdim=True)


def _convolution(*, transposed: bool) -> Callable[..., Parts]:
    """Return a function that builds a convolution, which may be `transposed`, for `TensorOperator.build`.

    The function takes the shape of x, the name of the module, and torch's arguments: `ins` and `outs` are
    numbers of channels, and each of `kernel`, `stride`, `padding`, `dilation` and `output_padding` is one
    number, or has one for each dimension of x after the first two. It returns a loop nest and, if `bias` is
    true, a C++ line that adds the bias.
    """

    def build(
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
    ) -> Parts:
        count = len(shape) - 2
        sides = zip(
            *(_each(value, count) for value in (kernel, stride, padding, dilation, output_padding)),
            strict=True,
        )
        slides = [
            Slide(size, taps, step, margin, apart, transposed, more)
            for size, (taps, step, margin, apart, more) in zip(shape[2:], sides, strict=True)
        ]
        out_shape = (shape[0], outs, *(slide.out for slide in slides))
        taps = prod(slide.kernel for slide in slides)
        size, out_size = prod(shape[2:]), prod(out_shape[2:])
        into, out = ins // groups, outs // groups
        weight = f"{name}_weight"
        # The weight has the shape [outs, ins / groups, …], or [ins, outs / groups, …] if transposed.
        steps = (
            (into * out * taps, taps, out * taps) if transposed else (out * into * taps, into * taps, taps)
        )
        lead = [
            Axis("n", shape[0], False, {"a": ins * size, "o": outs * out_size}),
            Axis("g", groups, False, {"a": into * size, "o": out * out_size, weight: steps[0]}),
            Axis("c", out, False, {"o": out_size, weight: steps[1]}),
            Axis("u", into, True, {"a": size, weight: steps[2]}),
        ]
        nest = sliding(
            slides,
            lead,
            {weight: 1},
            Code((Loop((("sum", "total", f"v * {weight}@"),)),), "total"),
            out_shape,
        )
        convolution = Convolution(
            x=shape,
            weight=(ins, out, *(slide.kernel for slide in slides))
            if transposed
            else (outs, into, *(slide.kernel for slide in slides)),
            y=out_shape,
            operand=weight,
            padding=_each(padding, count),
            stride=_each(stride, count),
            dilation=_each(dilation, count),
            groups=groups,
            transposed=transposed,
        )
        parts: list[Nest | Line] = [replace(nest, rows="c" if out > 1 else "", convolution=convolution)]
        if bias:
            parts.append(Line(f"v = v + {name}_bias@;", f"{name}_bias", (outs, *(1,) * count)))
        return parts

    return build


def _sides(rng: random.Random, shape: Shape, kernels: Sequence[int]) -> list[int]:
    """Draw the sizes of a window or kernel, one for each dimension of `shape` after the first two.

    Each is one of `kernels`. With the probability 0.65 all sizes are equal, and otherwise each is drawn by
    itself.
    """
    sizes = [rng.choice(kernels) for _ in shape[2:]]
    return sizes if rng.random() < 0.35 else sizes[:1] * len(sizes)


def _shorten(values: Sequence[int]) -> int | tuple[int, ...]:
    return values[0] if len(set(values)) == 1 else tuple(values)


def _draw_pool(*, dilated: bool) -> Draw:
    def draw(rng: random.Random, shape: Shape) -> Arguments | None:
        sizes, stride = _sides(rng, shape, (2, 3, 4, 5)), rng.choice((1, 2, 2, 3))
        padding, dilation = (
            min(rng.choice((0, 0, 1)), min(sizes) // 2),
            rng.choice((1, 1, 2)) if dilated else 1,
        )
        if min(shape[2:]) < dilation * max(sizes):
            return None
        drawn = {"kernel": _shorten(sizes), "stride": stride, "padding": padding}
        return drawn | ({"dilation": dilation} if dilated else {})

    return draw


def _draw_convolution(*, transposed: bool) -> Draw:
    def draw(rng: random.Random, shape: Shape) -> Arguments | None:
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

    return draw


SLIDING: dict[str, TensorOperator] = {}
_SIDES = "stride={stride}, padding={padding}, dilation={dilation}"
for _count in (1, 2, 3):
    SLIDING |= {
        f"max_pool_{_count}": TensorOperator(
            f"F.max_pool{_count}d(x, kernel_size={{kernel}}, {_SIDES})",
            _pool(Code((Loop((("max", "top", "v"),)),), "top")),
            _draw_pool(dilated=True),
            ranks=(_count + 2,),
        ),
        f"avg_pool_{_count}": TensorOperator(
            f"F.avg_pool{_count}d(x, kernel_size={{kernel}}, stride={{stride}}, padding={{padding}})",
            _pool(Code((Loop((("sum", "total", "v"),)),), "total / COUNT")),
            _draw_pool(dilated=False),
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
            _convolution(transposed=False),
            _draw_convolution(transposed=False),
            f"nn.Conv{_count}d({{ins}}, {{outs}}, {{kernel}}, {_SIDES}, groups={{groups}}, bias={{bias}})",
            AFFINE,
            (_count + 2,),
        ),
        f"conv_transpose_{_count}": TensorOperator(
            "{self}(x)",
            _convolution(transposed=True),
            _draw_convolution(transposed=True),
            f"nn.ConvTranspose{_count}d({{ins}}, {{outs}}, {{kernel}}, {_SIDES}, "
            "output_padding={output_padding}, groups={groups}, bias={bias})",
            AFFINE,
            (_count + 2,),
        ),
    }
