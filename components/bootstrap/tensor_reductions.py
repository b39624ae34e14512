"""Define the tensor operators along dimensions: reductions, softmax, scans, and changes of shape.

A tensor operator is a row of the table in tensor_operators.py, for which kernels can be written by rules.
"""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from components.bootstrap.loop_nest import Code, Line, Loop, Shape, attach, over_dims
from components.bootstrap.tensor_operator import (
    ALL_RANKS,
    ALL_TYPES,
    Arguments,
    Parts,
    TensorOperator,
)


def _dim(rng: random.Random, shape: Shape) -> Arguments:
    """Draw the argument `dim`, a dimension with at least four elements, or -1 if there is none."""
    dims = [index for index, size in enumerate(shape) if size > 3]
    return {"dim": rng.choice(dims)} if dims else {"dim": -1}


def _dims(rng: random.Random, shape: Shape) -> Arguments:
    """Draw the arguments `dim` and `keepdim` of a reduction of an input of this shape.

    `dim` is a dimension with at least four elements, or -1 if there is none. For a rank of at least 4 it may
    also be a tuple of all dimensions but the first, or but the first two. `keepdim` is true for a rank below
    3, and with the probability 0.5 for others.
    """
    several = [tuple(range(2, len(shape))), tuple(range(1, len(shape)))] if len(shape) > 3 else []
    keepdim = len(shape) < 3 or rng.random() < 0.5
    return {"dim": rng.choice([_dim(rng, shape)["dim"], *several]), "keepdim": keepdim}


def _one_dim(rng: random.Random, shape: Shape) -> Arguments:
    return {**_dim(rng, shape), "keepdim": len(shape) < 3 or rng.random() < 0.5}


def sum_of(name: str, term: str, *values: tuple[str, str]) -> Loop:
    """Return a loop that adds up the C++ expression `term` in the variable `name`.

    The loop goes over a group, which is the set of elements that are reduced together. `values` are pairs of
    a variable and its C++ expression, which are computed after the loop and may contain `name`, such as
    ("mean", "total / COUNT"), in which COUNT is the number of elements of the group.
    """
    return Loop((("sum", name, term),), values)


def reduction(
    shape: Shape,
    inputs: dict[str, Shape],
    name: str,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    *,
    code: Code,
    **numbers: Any,
) -> Parts:
    """Return the loop nest of an operator along dimensions of x, which is a `TensorOperator.build`.

    `shape` is the shape of x, and `inputs` has the shapes of the further inputs by name. `name` is not used.
    The elements of x along the dimensions `dim`, or all if that is None, form a group, on which `code`
    computes. If `code` returns one value for each group and `keepdim` is true, the output has these
    dimensions with size 1. A further input that the code reads has the shape of x or is broadcast to it. In
    the code, `<NAME>` is replaced by the argument NAME of `numbers`, and `<axis>` by the index in the first
    of the dimensions. Raises ValueError if `dim` is empty or a truth value, which torch takes as something
    else.
    """
    dims = (*range(len(shape)),) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if not dims or isinstance(dim, bool):
        raise ValueError(f"the dimensions {dim}")
    first = dims[0] % len(shape)
    axis = f"d{first}" if shape[first] > 1 else "0"  # kernels have no loop over a single element
    filled = fill_code(code, axis=axis, **{key: f"{float(value)!r}f" for key, value in numbers.items()})
    nest = over_dims(shape, dims, filled, keepdim=keepdim)
    for key, of in inputs.items():
        if f"{key}@" in str(filled):
            nest = attach(nest, Line("", key, of), tensor="a", following=shape)
    return [nest]


def fill_code(code: Code, **values: str) -> Code:
    """Return the code with each `<NAME>` in its C++ texts replaced by the value of the keyword NAME.

    Raises KeyError if there is no such keyword.
    """

    def fill(text: str) -> str:
        return re.sub(r"<(\w+)>", lambda match: values[match[1]], text)

    return replace(
        code,
        loops=tuple(
            Loop(
                tuple((kind, name, fill(term)) for kind, name, term in loop.folds),
                tuple((name, fill(value)) for name, value in loop.values),
            )
            for loop in code.loops
        ),
        result=fill(code.result),
        apply=tuple(map(fill, code.apply)),
    )


TOP = Loop((("max", "top", "v"),))
_LOW = Loop((("min", "low", "v"),))
_MASS = sum_of("total", "vexp(v - top)", ("level", "std::log(total)"))
MEAN = sum_of("first", "v", ("mean", "first / COUNT"))
_SQUARES = sum_of("second", "(v - mean) * (v - mean)")
_EXTREME = "torch.{0}(x, dim={{dim}}, keepdim={{keepdim}})"
REDUCTIONS: dict[str, TensorOperator] = {
    name: TensorOperator(_EXTREME.format(name), partial(reduction, code=code), _dims)
    for name, code in {
        "sum": Code((sum_of("total", "v"),), "total"),
        "mean": Code((sum_of("total", "v"),), "total / COUNT"),
        "amax": Code((TOP,), "top"),
        "amin": Code((_LOW,), "low"),
        "logsumexp": Code((TOP, _MASS), "top + level"),
        "var": Code((MEAN, _SQUARES), "second / (COUNT - 1)"),
        "std": Code((MEAN, _SQUARES), "std::sqrt(second / (COUNT - 1))"),
    }.items()
}
REDUCTIONS |= {
    name: TensorOperator(line, partial(reduction, code=code), draw)
    for name, line, code, draw in (
        (
            "prod",
            "torch.prod(x, dim={dim}, keepdim={keepdim})",
            Code((Loop((("prod", "total", "v"),)),), "total"),
            _one_dim,
        ),
        ("max", "torch.max(x, dim={dim}, keepdim={keepdim})[0]", Code((TOP,), "top"), _one_dim),
        ("min", "torch.min(x, dim={dim}, keepdim={keepdim})[0]", Code((_LOW,), "low"), _one_dim),
        (
            "argmax",
            "torch.argmax(x, dim={dim}, keepdim={keepdim})",
            Code(
                (TOP, Loop((("min", "index", "v == top ? (float)<axis> : INFINITY"),))),
                "(int64_t)index",
                type="int64_t",
            ),
            None,
        ),
        (
            "argmin",
            "torch.argmin(x, dim={dim}, keepdim={keepdim})",
            Code(
                (_LOW, Loop((("min", "index", "v == low ? (float)<axis> : INFINITY"),))),
                "(int64_t)index",
                type="int64_t",
            ),
            None,
        ),
        (
            "l1",
            "torch.linalg.vector_norm(x, ord=1, dim={dim}, keepdim={keepdim})",
            Code((sum_of("total", "vabs(v)"),), "total"),
            _dims,
        ),
        (
            "l2",
            "torch.linalg.vector_norm(x, ord=2, dim={dim}, keepdim={keepdim})",
            Code((sum_of("total", "v * v"),), "std::sqrt(total)"),
            _dims,
        ),
        (
            "cosine_similarity",
            "F.cosine_similarity(x, y, dim={dim})",
            Code(
                (Loop((("sum", "dot", "v * y@"), ("sum", "left", "v * v"), ("sum", "right", "y@ * y@"))),),
                "dot / (vmax(std::sqrt(left), 1e-8f) * vmax(std::sqrt(right), 1e-8f))",
            ),
            lambda rng, shape: {**_dim(rng, shape), "inputs": {"y": shape}},
        ),
    )
}
SQUARE_MEAN = sum_of("power", "v * v", ("rms", "1 / std::sqrt(power / COUNT + <eps>)"))
ALONG: dict[str, TensorOperator] = {
    name: TensorOperator(
        line, partial(reduction, code=code), draw, types=ALL_TYPES if name == "cumsum_masked" else ("float",)
    )
    for name, line, code, draw in (
        (
            "softmax",
            "torch.softmax(x, dim={dim})",
            Code(
                (TOP, sum_of("total", "vexp(v - top)", ("part", "1 / total"))),
                apply=("v = vexp(v - top) * part;",),
            ),
            _dim,
        ),
        (
            "log_softmax",
            "torch.log_softmax(x, dim={dim})",
            Code((TOP, _MASS), apply=("v = v - top - level;",)),
            _dim,
        ),
        (
            "softmin",
            "F.softmin(x, dim={dim})",
            Code(
                (_LOW, sum_of("total", "vexp(low - v)", ("part", "1 / total"))),
                apply=("v = vexp(low - v) * part;",),
            ),
            _dim,
        ),
        (
            "normalize",
            "F.normalize(x, dim={dim})",
            Code(
                (sum_of("length", "v * v", ("unit", "1 / vmax(std::sqrt(length), 1e-12f)")),),
                apply=("v = v * unit;",),
            ),
            _dim,
        ),
        (
            "l1_norm",
            "x / torch.mean(torch.abs(x), dim={dim}, keepdim=True)",
            Code((sum_of("length", "vabs(v)", ("unit", "COUNT / length")),), apply=("v = v * unit;",)),
            _dim,
        ),
        (
            "l2_norm",
            "x / torch.norm(x, p=2, dim={dim}, keepdim=True)",
            Code((sum_of("length", "v * v", ("unit", "1 / std::sqrt(length)")),), apply=("v = v * unit;",)),
            _dim,
        ),
        (
            "frobenius_norm",
            "x / torch.norm(x)",
            Code((sum_of("length", "v * v", ("unit", "1 / std::sqrt(length)")),), apply=("v = v * unit;",)),
            lambda rng, shape: {},
        ),
        (
            "subtract_mean",
            "x - torch.mean(x, dim={dim}, keepdim=True)",
            Code((MEAN,), apply=("v = v - mean;",)),
            _dim,
        ),
        (
            "rms_of_dim",
            "x / torch.sqrt(torch.mean(x ** 2, dim={dim}, keepdim=True) + {eps})",
            Code((SQUARE_MEAN,), apply=("v = v * rms;",)),
            lambda rng, shape: {**_dim(rng, shape), "eps": 1e-5},
        ),
        (
            "cumsum",
            "torch.cumsum(x, dim={dim})",
            Code(apply=("total += v;", "v = total;"), carry=(("total", "0"),)),
            _dim,
        ),
        (
            "cumprod",
            "torch.cumprod(x, dim={dim})",
            Code(apply=("total *= v;", "v = total;"), carry=(("total", "1"),)),
            _dim,
        ),
        (
            "cumsum_reverse",
            "torch.flip(torch.cumsum(torch.flip(x, dims=({dim},)), dim={dim}), dims=({dim},))",
            Code(apply=("total += v;", "v = total;"), carry=(("total", "0"),), backwards=True),
            _dim,
        ),
        (
            "cumsum_exclusive",
            "torch.cumsum(x, dim={dim}) - x",
            Code(apply=("const double u = total;", "total += v;", "v = u;"), carry=(("total", "0"),)),
            _dim,
        ),
        (
            "cumsum_masked",
            "torch.cumsum(x * y, dim={dim})",
            Code(apply=("total += v * y@;", "v = total;"), carry=(("total", "0"),)),
            lambda rng, shape: {**_dim(rng, shape), "inputs": {"y": shape}},
        ),
        (
            "cummax",
            "torch.cummax(x, dim={dim})[0]",
            Code(apply=("total = vmax(total, v);", "v = total;"), carry=(("total", "-INFINITY"),)),
            _dim,
        ),
    )
}


def _reshaped(
    shape: Shape, inputs: dict[str, Shape], name: str, dim: int, *, new_shape: Callable[[Shape, int], Shape]
) -> Parts:
    """Return the loop nest that copies x in another shape.

    `new_shape` takes the shape of x and the argument `dim`, which may be negative. `inputs` and `name` are
    not used.
    """
    return [over_dims(new_shape(shape, dim), (), Code())]


def _squeezed(shape: Shape, dim: int) -> Shape:
    dim %= len(shape)
    return shape[:dim] + shape[dim + (shape[dim] == 1) :]


def _unsqueezed(shape: Shape, dim: int) -> Shape:
    dim %= len(shape) + 1
    return (*shape[:dim], 1, *shape[dim:])


def _flattened(shape: Shape, dim: int) -> Shape:
    return (*shape[: dim % len(shape)], prod(shape[dim % len(shape) :]))


def _draw_squeezed(rng: random.Random, shape: Shape) -> Arguments | None:
    """Draw the argument `dim`, a dimension with one element, or return None if there is none."""
    dims = [index for index, size in enumerate(shape) if size == 1]
    return {"dim": rng.choice(dims)} if dims and len(shape) > 1 else None


def _draw_unsqueezed(rng: random.Random, shape: Shape) -> Arguments | None:
    """Draw the argument `dim`, the place of a new dimension, or return None if there are five dimensions."""
    return {"dim": rng.randrange(1, len(shape) + 1)} if len(shape) < 5 else None


def _draw_flattened(rng: random.Random, shape: Shape) -> Arguments | None:
    """Return the argument `dim` of a flattening to a matrix, or None if x has only two dimensions."""
    return {"dim": 1} if len(shape) > 2 else None


RESHAPES = {
    name: TensorOperator(
        f"torch.{name}(x, {{dim}})", partial(_reshaped, new_shape=new_shape), draw, ranks=ALL_RANKS
    )
    for name, new_shape, draw in (
        ("squeeze", _squeezed, _draw_squeezed),
        ("unsqueeze", _unsqueezed, _draw_unsqueezed),
        ("flatten", _flattened, _draw_flattened),
    )
}
