"""Define the tensor operators that are products of matrices.

A tensor operator is a row of the table in tensor_operators.py, for which kernels can be written by rules.
"""

import random
from functools import partial

from components.bootstrap.loop_nest import (
    PRODUCT_ROWS,
    Axis,
    Code,
    Line,
    Loop,
    Nest,
    Shape,
    Window,
    strides_of,
)
from components.bootstrap.size import as_float
from components.bootstrap.tensor_operator import (
    AFFINE,
    Arguments,
    Parts,
    TensorOperator,
    further_inputs,
)
from components.bootstrap.tensor_reductions import ALONG


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
    matrices of `a`. `windows` restrict the sums to a part of the matrices, such as a triangle. Raises
    ValueError if a tensor is a vector, or if their sizes are not equal and one would have to be broadcast.
    """
    (m, k), (step_i, step_k) = shape[-2:], (shape[-1], 1)
    if transposed[0]:
        (m, k), (step_i, step_k) = (k, m), (step_k, step_i)
    (height, n), step_n, along = right[-2:], 1, right[-1]
    if transposed[1]:
        height, n, step_n, along = n, height, right[-1], 1
    if height != k or right[:-2] not in ((), shape[:-2]):
        raise ValueError(f"a product of tensors of the shapes {shape} and {right}")
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


def _product(
    shape: Shape, inputs: dict[str, Shape], name: str, *, left: bool = False, right: bool = False
) -> Parts:
    """Return the loop nest of the product of the matrices x and y, of which `inputs` has the shape of y.

    If `left` is true, the last two dimensions of x are exchanged before the product, and if `right` is true,
    those of y. `name` is not used.
    """
    return [_matrices(shape, inputs["y"], "y", transposed=(left, right))]


def _product_of_parameter(
    shape: Shape, inputs: dict[str, Shape], name: str, size: Shape, *, right: bool
) -> Parts:
    """Return the loop nest of the product of x and a parameter `name` of the shape `size`.

    If `right` is true, the last two dimensions of the parameter are exchanged before the product. `inputs` is
    not used.
    """
    return [_matrices(shape, size, name, transposed=(False, right))]


def _draw_product(rng: random.Random, shape: Shape, *, left: bool, right: bool) -> Arguments | None:
    width = rng.choice((shape[-1], max(shape[-1] // 2, 1), 2 * shape[-1], 100, 1))
    k = shape[-2] if left else shape[-1]
    if not 8 <= k <= 8192:
        return None
    batch = shape[:-2] if rng.random() < 0.5 else ()
    return {"inputs": {"y": (*batch, *((width, k) if right else (k, width)))}}


def _draw_parameter(rng: random.Random, shape: Shape, *, right: bool) -> Arguments | None:
    drawn = _draw_product(rng, shape, left=False, right=right)
    return drawn and {"size": drawn["inputs"]["y"][-2:]}


def _triangle(name: str, *, inside: bool) -> TensorOperator:
    """Return the tensor operator of a product of matrices in which only a triangle is kept.

    `name` is triu for the upper or tril for the lower triangle. If `inside` is true, both factors are
    replaced by their triangles before the product, and otherwise the result is replaced by its triangle.
    """
    up = name == "triu"
    pairs = (("i", "k"), ("k", "j")) if inside else (("i", "j"),)

    def build(shape: Shape, inputs: dict[str, Shape], _: str) -> Parts:
        size = max(*shape, *inputs["y"])
        windows = [
            Window(f"h{index}", {low: -1, high: 1} if up else {low: 1, high: -1}, 0, 1, size, 0)
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

    `shape` is the shape of x, and `inputs` has that of y. `name` is not used. Raises ValueError if y does not
    have as many rows as x has elements.
    """
    rows, cols = inputs["y"]
    if shape != (rows,):
        raise ValueError(f"a diagonal of {shape} for {rows} rows")
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
    product = _matrices(shape, (outs, ins), f"{name}_weight", transposed=(False, True))
    return [product, *([Line(f"v = v + {name}_bias@;", f"{name}_bias", (outs,))] if bias else [])]


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
        Line(f"v = v / std::sqrt({as_float(shape[-1])});"),
        *ALONG["softmax"].build(scores.shape, {}, name, dim=-1),
        _matrices(scores.shape, inputs["z"], "z"),
    ]


PRODUCTS: dict[str, TensorOperator] = {
    f"matmul{'_t' * left}{'_of_t' * right}": TensorOperator(
        f"torch.matmul(x{'.transpose(-2, -1)' * left}, y{'.transpose(-2, -1)' * right})",
        partial(_product, left=left, right=right),
        partial(_draw_product, left=left, right=right),
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
            partial(_product_of_parameter, right=right),
            partial(_draw_parameter, right=right),
            "nn.Parameter(torch.randn({size}))",
            ("",),
            (2, 3, 4),
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
