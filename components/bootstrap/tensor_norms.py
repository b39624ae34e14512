"""Define the tensor operators that are norms with parameters.

A tensor operator is a row of the table in tensor_operators.py, for which kernels can be written by rules.
"""

import random
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from components.bootstrap.loop_nest import Code, Line, Shape, attach, over_dims
from components.bootstrap.tensor_operator import AFFINE, Arguments, Parts, TensorOperator, channels
from components.bootstrap.tensor_reductions import MEAN, SQUARE_MEAN, fill_code, sum_of

_NORM = Code(
    (
        MEAN,
        sum_of("second", "(v - mean) * (v - mean)", ("inverse", "1 / std::sqrt(second / COUNT + <eps>)")),
    ),
    apply=("v = (v - mean) * inverse;",),
)


def _norm(
    shape: Shape,
    inputs: dict[str, Shape],
    name: str,
    *,
    kind: str,
    code: Code = _NORM,
    affine: bool = True,
    eps: float = 1e-5,
    **sizes: Any,
) -> Parts:
    """Return the loop nest of a norm, which is a `TensorOperator.build`.

    `shape` is the shape of x, `name` is the name of the norm's module, and `eps` and `sizes` are the module's
    arguments. `inputs` is not used. The norm applies `code` to each group of elements. `kind` says which
    elements form a group: those along the last dimensions ("last", as many as the argument `size` has), those
    of a channel in the whole batch ("batch"), those of several channels of a sample ("group"), or those of
    one channel of a sample ("instance"). If `affine` is true, the result is multiplied by the weight of the
    module, and the bias is added unless `code` is that of an RMS norm.
    """
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
    nest = over_dims(view, dims, fill_code(code, eps=f"{float(eps)!r}f"))
    for line in lines:
        nest = attach(nest, line, tensor="o", following=shape)
    return [replace(nest, shape=shape)]


def _running(shape: Shape, inputs: dict[str, Shape], name: str, channels: int) -> Parts:
    """Return the C++ lines of a batch norm with the mean and the variance that its module has stored.

    `shape` is the shape of x with `channels` as its second dimension, and `name` is the name of the module.
    `inputs` is not used.
    """
    of = (channels, *(1,) * (len(shape) - 2))
    return [
        Line(f"v = v - {name}_running_mean@;", f"{name}_running_mean", of),
        Line(f"v = v / std::sqrt({name}_running_var@ + 1e-5f);", f"{name}_running_var", of),
        Line(f"v = v * {name}_weight@;", f"{name}_weight", of),
        Line(f"v = v + {name}_bias@;", f"{name}_bias", of),
    ]


def _last(rng: random.Random, shape: Shape) -> Arguments:
    """Draw the argument `size` of a norm over the last dimension, or for a rank from 4 also over all but one.

    The size of one dimension is a number or a tuple.
    """
    if len(shape) > 3 and rng.random() < 0.5:
        return {"size": shape[1:]}
    return {"size": shape[-1:] if rng.random() < 0.7 else shape[-1]}


def _several(rng: random.Random, shape: Shape) -> Arguments | None:
    """Return the argument `channels` of a norm over each channel, or None if a channel has only one element.

    The elements are those of one sample, or of the batch if x has two dimensions. torch demands several
    elements for each channel in training mode. `rng` is not used.
    """
    return channels(rng, shape) if prod(shape[2:] or shape[:1]) > 1 else None


def _groups(rng: random.Random, shape: Shape) -> Arguments | None:
    counts = [count for count in (2, 4, 8, 16, 32) if shape[1] % count == 0 and prod(shape[1:]) > 4 * count]
    return {"groups": rng.choice(counts), "channels": shape[1]} if counts else None


NORMS: dict[str, TensorOperator] = {
    "layer_norm": TensorOperator(
        "{self}(x)", partial(_norm, kind="last"), _last, "nn.LayerNorm({size})", AFFINE
    ),
    "rms_norm": TensorOperator(
        "{self}(x)",
        partial(_norm, kind="last", code=Code((SQUARE_MEAN,), apply=("v = v * rms;",))),
        lambda rng, shape: {"size": shape[-1:], "eps": 1e-5},
        "nn.RMSNorm({size}, eps={eps})",
        ("_weight",),
    ),
    "group_norm": TensorOperator(
        "{self}(x)", partial(_norm, kind="group"), _groups, "nn.GroupNorm({groups}, {channels})", AFFINE
    ),
}
for _count, _ranks in ((1, (2, 3)), (2, (4,)), (3, (5,))):
    NORMS |= {
        f"batch_norm_{_count}": TensorOperator(
            "{self}(x)",
            partial(_norm, kind="batch"),
            _several,
            f"nn.BatchNorm{_count}d({{channels}}, track_running_stats=False)",
            AFFINE,
            _ranks,
        ),
        f"running_batch_norm_{_count}": TensorOperator(
            "{self}(x)",
            _running,
            _several,
            f"nn.BatchNorm{_count}d({{channels}})",
            (*AFFINE, "_running_mean", "_running_var", "_num_batches_tracked"),
            _ranks,
        ),
        f"instance_norm_{_count}": TensorOperator(
            "{self}(x)",
            partial(_norm, kind="instance", affine=False),
            _several,
            f"nn.InstanceNorm{_count}d({{channels}})",
            ranks=_ranks[-1:],
        ),
        f"affine_instance_norm_{_count}": TensorOperator(
            "{self}(x)",
            partial(_norm, kind="instance"),
            _several,
            f"nn.InstanceNorm{_count}d({{channels}}, affine=True)",
            AFFINE,
            _ranks[-1:],
        ),
    }
