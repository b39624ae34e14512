"""Define the tensor operators that combine many elements of several tensors.

These are pooling, convolutions, and products of matrices. A tensor operator is a row of the table in
tensor_operators.py, for which kernels can be written by rules.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from components.bootstrap.loop_nest import (
    PRODUCT_ROWS,
    Axis,
    Code,
    Line,
    Loop,
    Nest,
    Shape,
    Slide,
    Window,
    sliding,
    strides_of,
)
from components.bootstrap.tensor_operator import (
    AFFINE,
    Arguments,
    Draw,
    Parts,
    TensorOperator,
    further_inputs,
)
from components.bootstrap.tensor_reductions import ALONG, REDUCTIONS


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
        parts: list[Nest | Line] = [replace(nest, rows="c" if out > 1 else "")]
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


# --- products of matrices -----------------------------------------------------------------------------------


def _matrices(
    shape: Shape,
    right: Shape,
    name: str,
    *,
    transposed: tuple[bool, bool] = (False, False),
    windows: tuple[Window, ...] = (),
) -> Nest:
    """Return the loop nest of the product of the matrices `a` and the operand `name`.

    `shape` and `right` are the shapes of `a` and of the operand in memory, and `transposed` says of each
    whether its last two dimensions are exchanged before the product. An operand of rank 2 is the same for all
    matrices of `a`. `windows` restrict the sums to a part of the matrices, such as a triangle.
    """
    (m, k), (step_i, step_k) = shape[-2:], (shape[-1], 1)
    if transposed[0]:
        (m, k), (step_i, step_k) = (k, m), (step_k, step_i)
    n, step_n, along = right[-1], 1, right[-1]
    if transposed[1]:
        n, step_n, along = right[-2], right[-1], 1
    out = (*shape[:-2], m, n)
    batch, batch_out = strides_of(shape), strides_of(out)
    batch_right = strides_of(right)[:-2] or (0,) * len(shape[:-2])
    axes = [
        Axis(f"b{index}", size, False, {"a": batch[index], "o": batch_out[index], name: batch_right[index]})
        for index, size in enumerate(shape[:-2])
    ]
    axes += [
        Axis(PRODUCT_ROWS, m, False, {"a": step_i, "o": n}),
        Axis("j", n, False, {"o": 1, name: step_n}),
        Axis("k", k, True, {"a": step_k, name: along}),
    ]
    code = Code((Loop((("sum", "total", f"v * {name}@"),)),), "total")
    rows = "" if windows or n == 1 else PRODUCT_ROWS
    return Nest(tuple(axes), code, out, windows, rows=rows)


def _product(*, left: bool = False, right: bool = False) -> Callable[..., Parts]:
    """Return a function that builds the loop nest of a matrix product, for `TensorOperator.build`.

    The product is that of x and y. The function takes the shape of x and, in a dict, the shape of y. If
    `left` is true, the last two dimensions of x are exchanged before the product, and if `right` is true,
    those of y.
    """
    return lambda shape, inputs, name: [_matrices(shape, inputs["y"], "y", transposed=(left, right))]


def _product_of_parameter(*, right: bool) -> Callable[..., Parts]:
    """Return a function that builds the product of x and a parameter of the shape `size`.

    If `right` is true, the last two dimensions of the parameter are exchanged before the product.
    """
    return lambda shape, inputs, name, size: [_matrices(shape, size, name, transposed=(False, right))]


def _draw_product(*, left: bool = False, right: bool = False) -> Draw:
    def draw(rng: random.Random, shape: Shape) -> Arguments | None:
        width = rng.choice((shape[-1], max(shape[-1] // 2, 1), 2 * shape[-1], 100, 1))
        k = shape[-2] if left else shape[-1]
        if not 8 <= k <= 8192:
            return None
        batch = shape[:-2] if rng.random() < 0.5 else ()
        return {"inputs": {"y": (*batch, *((width, k) if right else (k, width)))}}

    return draw


def _triangle(name: str, *, inside: bool) -> TensorOperator:
    """Return the tensor operator of a product of square matrices in which only a triangle is kept.

    `name` is triu for the upper or tril for the lower triangle. If `inside` is true, both factors are
    replaced by their triangles before the product, and otherwise the result is replaced by its triangle.
    """
    up = name == "triu"
    pairs = (("i", "k"), ("k", "j")) if inside else (("i", "j"),)

    def build(shape: Shape, inputs: dict[str, Shape], _: str) -> Parts:
        windows = [
            Window(f"h{index}", {low: -1, high: 1} if up else {low: 1, high: -1}, 0, 1, max(shape), 0)
            for index, (low, high) in enumerate(pairs)
        ]
        return [_matrices(shape, inputs["y"], "y", windows=tuple(windows))]

    line = (
        f"torch.matmul(torch.{name}(x), torch.{name}(y))" if inside else f"torch.{name}(torch.matmul(x, y))"
    )
    return TensorOperator(line, build, _square, ranks=(2,))


def _square(rng: random.Random, shape: Shape) -> Arguments | None:
    return {"inputs": {"y": shape}} if shape[0] == shape[1] else None


def _diagonal(shape: Shape, inputs: dict[str, Shape], name: str) -> Parts:
    """Return the loop nest of the product of a diagonal matrix, whose diagonal is x, and the matrix y.

    `inputs` has the shape of y. `shape` and `name` are not used.
    """
    rows, cols = inputs["y"]
    axes = (
        Axis("i", rows, False, {"a": 1, "o": cols, "y": cols}),
        Axis("j", cols, False, {"o": 1, "y": 1}),
    )
    return [Nest(axes, Code(apply=("v = v * y@;",)), (rows, cols))]


def _linear(shape: Shape, inputs: dict[str, Shape], name: str, ins: int, outs: int, bias: bool) -> Parts:
    """Return the loop nest of nn.Linear and, if `bias` is true, the C++ line that adds its bias.

    `shape` is the shape of x, `name` is the name of the module, and `ins` and `outs` are its numbers of
    features.
    """
    weight = f"{name}_weight"
    parts: list[Nest | Line] = [_matrices(shape, (outs, ins), weight, transposed=(False, True))]
    return [*parts, Line(f"v = v + {name}_bias@;", f"{name}_bias", (outs,))] if bias else parts


def _draw_linear(rng: random.Random, shape: Shape) -> Arguments | None:
    outs = rng.choice((shape[-1], max(shape[-1] // 2, 1), 2 * shape[-1], 100))
    return {"ins": shape[-1], "outs": outs, "bias": rng.random() < 0.7} if 8 <= shape[-1] <= 8192 else None


def _attention(shape: Shape, inputs: dict[str, Shape], name: str) -> Parts:
    """Return the loop nests and C++ lines of the attention of the queries x to the keys y and the values z.

    `shape` is the shape of x, and `inputs` has those of y and z. The nests and lines compute the scores,
    divide them by the square root of the width of x, and compute the softmax and the product with z.
    """
    scores = _matrices(shape, inputs["y"], "y", transposed=(False, True))
    return [
        scores,
        Line(f"v = v * {shape[-1] ** -0.5!r}f;"),
        *ALONG["softmax"].build(scores.shape, {}, name, dim=-1),
        _matrices(scores.shape, inputs["z"], "z"),
    ]


PRODUCTS: dict[str, TensorOperator] = {
    f"matmul{'_t' * left}{'_of_t' * right}": TensorOperator(
        f"torch.matmul(x{'.transpose(-2, -1)' * left}, y{'.transpose(-2, -1)' * right})",
        _product(left=left, right=right),
        _draw_product(left=left, right=right),
        ranks=(2, 3, 4),
    )
    for left in (False, True)
    for right in (False, True)
}
PRODUCTS |= {
    "triu": _triangle("triu", inside=False),
    "tril": _triangle("tril", inside=False),
    "triu_factors": _triangle("triu", inside=True),
    "tril_factors": _triangle("tril", inside=True),
    **{
        f"matmul_of_parameter{'_t' * right}": TensorOperator(
            f"torch.matmul(x, {{self}}{'.transpose(-2, -1)' * right})",
            _product_of_parameter(right=right),
            None,
            "nn.Parameter(torch.randn({size}))",
            ("",),
        )
        for right in (False, True)
    },
    "diagonal": TensorOperator(
        "torch.matmul(torch.diag(x), y)",
        _diagonal,
        lambda rng, shape: {"inputs": {"y": (shape[0], rng.choice((512, 1000)))}},
        ranks=(1,),
    ),
    "linear": TensorOperator(
        "{self}(x)", _linear, _draw_linear, "nn.Linear({ins}, {outs}, bias={bias})", AFFINE, (2, 3, 4)
    ),
    "attention": TensorOperator(
        "F.scaled_dot_product_attention(x, y, z)",
        _attention,
        further_inputs("y", "z"),
        ranks=(4,),
    ),
}
