"""Tensor operators along dimensions: reductions, softmax, scans, norms with parameters, and losses."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from components.bootstrap.loop_nest import Code, Line, Loop, Nest, Shape, attach, over_dims
from components.bootstrap.tensor_operator import (
    AFFINE,
    Arguments,
    Parts,
    TensorOperator,
    channels,
    same_shape,
)


def _dim(rng: random.Random, shape: Shape) -> Arguments:
    """Draw a dimension with at least four elements."""
    dims = [index for index, size in enumerate(shape) if size > 3]
    return {"dim": rng.choice(dims)} if dims else {"dim": -1}


def _dims(rng: random.Random, shape: Shape) -> Arguments:
    """Draw one or, for a rank of at least 4, several dimensions to reduce."""
    several = [tuple(range(2, len(shape))), tuple(range(1, len(shape)))] if len(shape) > 3 else []
    keepdim = len(shape) < 3 or rng.random() < 0.5
    return {"dim": rng.choice([_dim(rng, shape)["dim"], *several]), "keepdim": keepdim}


def _one_dim(rng: random.Random, shape: Shape) -> Arguments:
    return {**_dim(rng, shape), "keepdim": len(shape) < 3 or rng.random() < 0.5}


def sum_of(name: str, term: str, *values: tuple[str, str]) -> Loop:
    """Return a loop that adds up the C++ expression `term` over a group in the variable `name`.

    `values` are pairs of a variable and its C++ expression, which are computed after the loop and may contain
    `name`, such as ("mean", "total / COUNT").
    """
    return Loop((("sum", name, term),), values)


def reduction_of(code: Code) -> Callable[..., Parts]:
    """Return the builder of an operator along the dimensions `dim`, or along all if there is no `dim`.

    The input y, if the code needs it, has the shape of x or one that is broadcast to it.
    """

    def build(
        shape: Shape,
        inputs: dict[str, Shape],
        name: str,
        dim: int | tuple[int, ...] | None = None,
        keepdim: bool = False,
        **numbers: Any,
    ) -> Parts:
        dims = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
        axis = f"d{next(iter(dims)) % len(shape)}"
        filled = _fill(code, axis=axis, **{key: f"{float(value)!r}f" for key, value in numbers.items()})
        nest = over_dims(shape, dims, filled, keepdim=keepdim)
        operands = [key for key in inputs if f"{key}@" in str(filled)]
        return [_with_operands(nest, shape, {key: inputs[key] for key in operands})]

    return build


def _with_operands(nest: Nest, shape: Shape, operands: dict[str, Shape]) -> Nest:
    """Return the nest with operands that are broadcast with its tensor `a`, which has the shape `shape`."""
    for name, of in operands.items():
        nest = attach(nest, Line("", name, of), tensor="a", following=shape)
    return nest


def _fill(code: Code, **values: str) -> Code:
    """Return the code with `<NAME>` replaced by a value in all of its texts."""

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
_MEAN = sum_of("first", "v", ("mean", "first / COUNT"))
_SQUARES = sum_of("second", "(v - mean) * (v - mean)")
_EXTREME = "torch.{0}(x, dim={{dim}}, keepdim={{keepdim}})"
REDUCTIONS: dict[str, TensorOperator] = {
    name: TensorOperator(_EXTREME.format(name), reduction_of(code), _dims)
    for name, code in {
        "sum": Code((sum_of("total", "v"),), "total"),
        "mean": Code((sum_of("total", "v"),), "total / COUNT"),
        "amax": Code((TOP,), "top"),
        "amin": Code((_LOW,), "low"),
        "logsumexp": Code((TOP, _MASS), "top + level"),
        "var": Code((_MEAN, _SQUARES), "second / (COUNT - 1)"),
        "std": Code((_MEAN, _SQUARES), "std::sqrt(second / (COUNT - 1))"),
    }.items()
}
REDUCTIONS |= {
    name: TensorOperator(line, reduction_of(code), draw)
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
            lambda rng, shape: {**_dim(rng, shape), **same_shape(rng, shape)},
        ),
    )
}
_SQUARE_MEAN = sum_of("power", "v * v", ("rms", "1 / std::sqrt(power / COUNT + <eps>)"))
ALONG: dict[str, TensorOperator] = {
    name: TensorOperator(line, reduction_of(code), draw)
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
            "frobenius_norm",
            "x / torch.norm(x)",
            Code((sum_of("length", "v * v", ("unit", "1 / std::sqrt(length)")),), apply=("v = v * unit;",)),
            lambda rng, shape: {},
        ),
        (
            "rms_of_dim",
            "x / torch.sqrt(torch.mean(x ** 2, dim={dim}, keepdim=True) + {eps})",
            Code((_SQUARE_MEAN,), apply=("v = v * rms;",)),
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
            lambda rng, shape: {**_dim(rng, shape), **same_shape(rng, shape)},
        ),
        (
            "cummax",
            "torch.cummax(x, dim={dim})[0]",
            Code(apply=("total = vmax(total, v);", "v = total;"), carry=(("total", "-INFINITY"),)),
            _dim,
        ),
    )
}


# --- norms with parameters ----------------------------------------------------------------------------------

_NORM = Code(
    (
        _MEAN,
        sum_of("second", "(v - mean) * (v - mean)", ("inverse", "1 / std::sqrt(second / COUNT + <eps>)")),
    ),
    apply=("v = (v - mean) * inverse;",),
)


def _norm(kind: str, *, code: Code = _NORM, affine: bool = True) -> Callable[..., Parts]:
    """Return the builder of a norm with the weight and, unless it is an RMS norm, the bias of a module."""

    def build(shape: Shape, inputs: dict[str, Shape], name: str, *, eps: float = 1e-5, **sizes: Any) -> Parts:
        of: Shape = (*shape[1:2], *(1,) * (len(shape) - 2))
        view, dims = shape, tuple(range(2, len(shape)))
        if kind == "last":
            of = sizes["size"] if isinstance(sizes["size"], tuple) else (sizes["size"],)
            dims = tuple(range(len(shape) - len(of), len(shape)))
        elif kind == "batch":
            dims = (0, *dims)
        elif kind == "group":
            view = (shape[0], sizes["groups"], shape[1] // sizes["groups"], *shape[2:])
            dims = tuple(range(2, len(view)))
        lines = [Line(f"v = v * {name}_weight@;", f"{name}_weight", of)] if affine else []
        if affine and code is _NORM:
            lines.append(Line(f"v = v + {name}_bias@;", f"{name}_bias", of))
        nest = over_dims(view, dims, _fill(code, eps=f"{float(eps)!r}f"))
        for line in lines:
            nest = attach(nest, line, tensor="o", following=shape)
        return [replace(nest, shape=shape)]

    return build


def _running(shape: Shape, inputs: dict[str, Shape], name: str, channels: int) -> Parts:
    """Return the lines of a batch norm with the mean and the variance that a module has stored."""
    of = (channels, *(1,) * (len(shape) - 2))
    return [
        Line(f"v = v - {name}_running_mean@;", f"{name}_running_mean", of),
        Line(f"v = v / std::sqrt({name}_running_var@ + 1e-5f);", f"{name}_running_var", of),
        Line(f"v = v * {name}_weight@;", f"{name}_weight", of),
        Line(f"v = v + {name}_bias@;", f"{name}_bias", of),
    ]


def _last(rng: random.Random, shape: Shape) -> Arguments:
    return {"size": shape[-1:] if len(shape) < 4 or rng.random() < 0.5 else shape[1:]}


def _several(rng: random.Random, shape: Shape) -> Arguments | None:
    """Return the arguments of a norm over each channel, or None if a channel has only one element.

    torch demands several elements for each channel in training mode.
    """
    return channels(rng, shape) if prod(shape[2:] or shape[:1]) > 1 else None


def _groups(rng: random.Random, shape: Shape) -> Arguments | None:
    counts = [count for count in (2, 4, 8) if shape[1] % count == 0 and prod(shape[1:]) > 4 * count]
    return {"groups": rng.choice(counts), "channels": shape[1]} if counts else None


NORMS: dict[str, TensorOperator] = {
    "layer_norm": TensorOperator("{self}(x)", _norm("last"), _last, "nn.LayerNorm({size})", AFFINE),
    "rms_norm": TensorOperator(
        "{self}(x)",
        _norm("last", code=Code((_SQUARE_MEAN,), apply=("v = v * rms;",))),
        lambda rng, shape: {"size": shape[-1:], "eps": 1e-5},
        "nn.RMSNorm({size}, eps={eps})",
        ("_weight",),
    ),
    "group_norm": TensorOperator(
        "{self}(x)", _norm("group"), _groups, "nn.GroupNorm({groups}, {channels})", AFFINE
    ),
}
for _count, _ranks in ((1, (2, 3)), (2, (4,)), (3, (5,))):
    NORMS |= {
        f"batch_norm_{_count}": TensorOperator(
            "{self}(x)",
            _norm("batch"),
            _several,
            f"nn.BatchNorm{_count}d({{channels}}, track_running_stats=False)",
            AFFINE,
            _ranks,
        ),
        f"running_batch_norm_{_count}": TensorOperator(
            "{self}(x)",
            _running,
            None,  # its counter of batches never matters
            f"nn.BatchNorm{_count}d({{channels}})",
            (*AFFINE, "_running_mean", "_running_var", "_num_batches_tracked"),
        ),
        f"instance_norm_{_count}": TensorOperator(
            "{self}(x)",
            _norm("instance", affine=False),
            _several,
            f"nn.InstanceNorm{_count}d({{channels}})",
            ranks=_ranks[-1:],
        ),
        f"affine_instance_norm_{_count}": TensorOperator(
            "{self}(x)",
            _norm("instance"),
            _several,
            f"nn.InstanceNorm{_count}d({{channels}}, affine=True)",
            AFFINE,
            _ranks[-1:],
        ),
    }
