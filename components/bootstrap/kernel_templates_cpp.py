"""C++ code of each core operator, which the kernel templates for cpu and cuda share.

The code of an elementwise operator is one or two lines that change `float v` with functions of vec.h. All
text except constants and shapes is equal in every kernel, so that the tokenizer merges it into one or two
tokens.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from components.bootstrap.chain_parser import OperatorChain, Step

ELEMENTWISE = {
    "relu": "v = v < 0 ? 0 : v;",
    "leaky_relu": "v = v < 0 ? v * {0}f : v;",
    "elu": "v = v < 0 ? vexp(v) - 1 : v;",
    "gelu": "v = v * (1 + verf(v * 0.70710678f)) / 2;",
    "silu": "v = v * vsigmoid(v);",
    "sigmoid": "v = vsigmoid(v);",
    "tanh": "v = vtanh(v);",
    "softplus": "v = v > 20 ? v : vlog1p(vexp(v));",
    "hardswish": "v = v * vmin(vmax(v + 3, 0), 6) / 6;",
    "hardsigmoid": "v = vmin(vmax(v + 3, 0), 6) / 6;",
    "clamp": "v = vmin(vmax(v, {0}f), {1}f);",
    "relu6": "v = vmin(vmax(v, 0), 6);",
    "mish": "v = v * vtanh(vlog1p(vexp(v)));",
    "softsign": "v = v / (1 + vabs(v));",
    "abs": "v = vabs(v);",
    "square": "v = v * v;",
    "sqrt_abs": "v = vsqrt(vabs(v) + 1);",
    "log1p_abs": "v = vlog1p(vabs(v));",
    "erf": "v = verf(v);",
    "logsigmoid": "v = vmin(v, 0) - vlog1p(vexp(-vabs(v)));",
    "tanhshrink": "v = v - vtanh(v);",
    "softshrink": "v = v - vmin(vmax(v, -{0}f), {0}f);",
    "mul_constant": "v = v * {0}f;",
    "add_constant": "v = v + {0}f;",
    "scale": "v = v * scale[i];",
    "shift": "v = v + shift[i];",
    "add_input": "v = v + y[i];",
    "mul_input": "v = v * y[i];",
}


@dataclass(frozen=True)
class Reduction:
    """C++ code of one loop over a row that computes accumulators.

    `declare` are the declarations of the accumulators, `clause` is their OpenMP reduction clause, `each` are
    the lines for each element, and `finish` are the lines after the loop.
    """

    declare: tuple[str, ...]
    clause: str
    # Lines for each element `v` of the row. The line `b[i] = v;`, if it is included, stores the element.
    each: tuple[str, ...]
    finish: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowOperator:
    """C++ code of an operator on whole rows.

    The loops `sweeps` are followed by the line `apply` for every element, or by the expression `result` if
    the operator returns one value for each row.
    """

    sweeps: tuple[Reduction, ...]
    apply: str = ""
    result: str = ""


# Sums are computed in double, because a sequential sum of 4,096 terms in float is less exact than torch's
# sum.
ROW = {
    "softmax": RowOperator(
        (
            Reduction(("float top = -INFINITY;",), "max : top", ("top = vmax(top, v);",)),
            Reduction(
                ("double total = 0;",),
                "+ : total",
                ("v = vexp(v - top);", "b[i] = v;", "total += v;"),
                ("const float part = 1 / total;",),
            ),
        ),
        "v = v * part;",
    ),
    "log_softmax": RowOperator(
        (
            Reduction(("float peak = -INFINITY;",), "max : peak", ("peak = vmax(peak, v);",)),
            Reduction(
                ("double mass = 0;",),
                "+ : mass",
                ("mass += vexp(v - peak);",),
                ("const float level = std::log(mass);",),
            ),
        ),
        "v = v - peak - level;",
    ),
    "layer_norm": RowOperator(
        (
            Reduction(
                ("double first = 0, second = 0;",),
                "+ : first, second",
                ("first += v;", "second += (double)v * v;"),
                (
                    "const float mean = first / cols;",
                    "const float inverse = "
                    "1 / std::sqrt(second / cols - first / cols * first / cols + 1e-5);",
                ),
            ),
        ),
        "v = (v - mean) * inverse * weight[i] + bias[i];",
    ),
    "rms_norm": RowOperator(
        (
            Reduction(
                ("double power = 0;",),
                "+ : power",
                ("power += (double)v * v;",),
                ("const float rms = 1 / std::sqrt(power / cols + 1e-5);",),
            ),
        ),
        "v = v * rms * gain[i];",
    ),
    "normalize": RowOperator(
        (
            Reduction(
                ("double length = 0;",),
                "+ : length",
                ("length += (double)v * v;",),
                ("const float unit = 1 / vmax(std::sqrt(length), 1e-12);",),
            ),
        ),
        "v = v * unit;",
    ),
    "sum": RowOperator((Reduction(("double sum = 0;",), "+ : sum", ("sum += v;",)),), result="sum"),
    "mean": RowOperator((Reduction(("double sum = 0;",), "+ : sum", ("sum += v;",)),), result="sum / cols"),
    "amax": RowOperator(
        (Reduction(("float best = -INFINITY;",), "max : best", ("best = vmax(best, v);",)),), result="best"
    ),
    "logsumexp": RowOperator(
        (
            Reduction(("float high = -INFINITY;",), "max : high", ("high = vmax(high, v);",)),
            Reduction(("double sum = 0;",), "+ : sum", ("sum += vexp(v - high);",)),
        ),
        result="high + std::log(sum)",
    ),
}
LIBM = {"vexp": "std::exp", "vlog1p": "std::log1p", "vtanh": "std::tanh", "verf": "std::erf"}
LIBM |= {"vsqrt": "std::sqrt", "vabs": "std::fabs", "vmax": "std::fmax", "vmin": "std::fmin"}
CUDA_MATH = {"vexp": "expf", "vlog1p": "log1pf", "vtanh": "tanhf", "verf": "erff"}
CUDA_MATH |= {"vsqrt": "sqrtf", "vabs": "fabsf", "vmax": "fmaxf", "vmin": "fminf"}
"""CUDA functions that replace the functions of vec.h, because nvcc refuses std::fmax in device code."""


def elementwise(step: Step) -> str:
    return ELEMENTWISE[step.name].format(*step.constants)


@dataclass(frozen=True)
class FusedRow:
    """C++ code of a chain with row operators, for one row in the array `a`.

    `lines` are the loops of all sweeps. After them, the array `source` contains the row. If the chain ends
    with one value for each row, `tail` are the lines that compute it as `v`. Otherwise `pending` are the
    lines that are still to be computed for every element `v`.
    """

    lines: list[str]
    source: str
    pending: list[str]
    tail: list[str]


def fuse_row(chain: OperatorChain, write_sweep: Callable[[Reduction, str, list[str]], list[str]]) -> FusedRow:
    """Fuse the operators of a chain, so that elementwise operators are computed in the row's next loop.

    `write_sweep` returns the lines of one sweep from the sweep, the array that contains the row, and the
    lines for each element. A changed row is stored in the array `b`, unless no later loop reads it.
    """
    lines: list[str] = []
    pending: list[str] = []
    tail: list[str] = []
    source = "a"
    for step in chain.steps:
        if step.name not in ROW:
            (tail or pending).append(elementwise(step).replace("y[i]", "s[i]"))
            continue
        operator = ROW[step.name]
        for sweep in operator.sweeps:
            rewrites = "b[i] = v;" in sweep.each
            last = operator.result and sweep is operator.sweeps[-1]
            store = ["b[i] = v;"] if pending and not rewrites and not last else []
            lines += write_sweep(sweep, source, [*pending, *store, *sweep.each])
            if store or rewrites:
                source = "b"
            pending = []
        if operator.result:
            tail = [f"float v = {operator.result};"]
        else:
            pending = [operator.apply]
    return FusedRow(lines, source, pending, tail)


def replace_functions(text: str, names: dict[str, str]) -> str:
    """Return C++ code with the functions of vec.h replaced according to `names` (LIBM or CUDA_MATH).

    `vsigmoid(v)` is replaced by its formula with `vexp` first.
    """
    text = text.replace("vsigmoid(v)", "1 / (1 + vexp(-v))").replace("v * 1 /", "v /")
    return re.sub(r"\bv[a-z0-9]+(?=\()", lambda match: names[match.group()], text)
