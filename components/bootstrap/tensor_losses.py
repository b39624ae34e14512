"""Define the tensor operators that return one number, which are losses.

A tensor operator is a row of the table in tensor_operators.py, for which kernels can be written by rules.
"""

from functools import partial
from math import prod
from typing import Any

from components.bootstrap.loop_nest import Code, Loop, Shape, over_dims
from components.bootstrap.operator_chain import PALETTE, SLOPES
from components.bootstrap.size import as_float
from components.bootstrap.tensor_operator import Parts, TensorOperator, further_inputs
from components.bootstrap.tensor_reductions import TOP, reduction, sum_of


def _loss(
    shape: Shape, inputs: dict[str, Shape], name: str, *, code: Code, elements: bool, **numbers: Any
) -> Parts:
    """Return the loop nests of a loss, which is a `TensorOperator.build`.

    `shape` is the shape of x, `inputs` has the shapes of the further inputs by name, and `numbers` are the
    loss's constants. `code` computes one value for each row, which has the elements of x with the same first
    index. The loss is the sum of these values, divided by the number of all elements of x if `elements` is
    true, and otherwise by the number of rows.
    """
    rows, total = shape[0], prod(shape) if elements else shape[0]
    dims = tuple(range(1, len(shape)))
    mean = Code((sum_of("total", "v"),), f"total / {as_float(total)}")
    return [
        *reduction(shape, inputs, name, dims, code=code, **numbers),
        over_dims((rows,), (0,), mean),
    ]


def _cross_entropy(shape: Shape, inputs: dict[str, Shape], name: str) -> Parts:
    """Return the loop nests of the cross entropy of the rows of x, with the class of each row in y."""
    if inputs["y"] != shape[:1]:
        raise ValueError(f"classes of the shape {inputs['y']}")
    return _loss(shape, {"y": (*inputs["y"], 1)}, name, code=_CROSS_ENTROPY, elements=False)


def _elements(term: str) -> Code:
    return Code((sum_of("total", term),), "total")


_CROSS_ENTROPY = Code(
    (
        TOP,
        Loop(
            (("sum", "total", "vexp(v - top)"), ("sum", "chosen", "<axis> == y@ ? v : 0")),
            (("level", "std::log(total)"),),
        ),
    ),
    "top - chosen + level",
)
_D = "(v - y@)"
_ANY_RANK = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "hinge_loss")
LOSSES: dict[str, TensorOperator] = {
    name: TensorOperator(
        line,
        partial(_loss, code=code, elements=elements),
        draw,
        ranks=(2, 3, 4, 5) if name in _ANY_RANK else (2,),
    )
    for name, line, code, elements, draw in (
        ("mse_loss", "F.mse_loss(x, y)", _elements(f"{_D} * {_D}"), True, further_inputs("y")),
        ("l1_loss", "F.l1_loss(x, y)", _elements(f"vabs{_D}"), True, further_inputs("y")),
        (
            "smooth_l1_loss",
            "F.smooth_l1_loss(x, y)",
            _elements(f"vabs{_D} < 1 ? 0.5f * {_D} * {_D} : vabs{_D} - 0.5f"),
            True,
            further_inputs("y"),
        ),
        (
            "huber_loss",
            "F.huber_loss(x, y, delta={delta})",
            _elements(f"vabs{_D} < <delta> ? 0.5f * {_D} * {_D} : <delta> * (vabs{_D} - 0.5f * <delta>)"),
            True,
            further_inputs("y", delta=SLOPES),
        ),
        (
            "kl_div",
            'F.kl_div(x, y, reduction="batchmean", log_target=True)',
            _elements("vexp(y@) * (y@ - v)"),
            False,
            further_inputs("y"),
        ),
        (
            "kl_div_of_log",  # not composed, since its inputs are to be positive
            'F.kl_div(torch.log(x), y, reduction="batchmean")',
            _elements("y@ > 0 ? y@ * (vlog(y@) - vlog(v)) : 0"),
            False,
            None,
        ),
        (
            "hinge_loss",
            "torch.mean(torch.clamp(1.0 - x * y, min=0.0))",
            _elements("vmax(1 - v * y@, 0)"),
            True,
            further_inputs("y"),
        ),
        (
            "triplet_margin_loss",
            "F.triplet_margin_loss(x, y, z, margin={margin})",
            Code(
                (
                    Loop(
                        (
                            ("sum", "near", "(v - y@ + 1e-6f) * (v - y@ + 1e-6f)"),
                            ("sum", "far", "(v - z@ + 1e-6f) * (v - z@ + 1e-6f)"),
                        )
                    ),
                ),
                "vmax(std::sqrt(near) - std::sqrt(far) + <margin>, 0)",
            ),
            False,
            further_inputs("y", "z", margin=PALETTE),
        ),
    )
}
LOSSES["cross_entropy"] = TensorOperator(
    "F.cross_entropy(x, y)",
    _cross_entropy,
    lambda rng, shape: {"inputs": {"y": shape[:1]}, "classes": shape[1]},
    ranks=(2,),
    types=("int64_t",),
)
