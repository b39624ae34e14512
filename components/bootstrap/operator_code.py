"""Define the C++ code of each core operator, which the kernels for cpu and cuda share.

The core operators are the torch operators in operator_chain.py, for which kernels can be written by rules.
The code of an elementwise operator is one line that changes the element `float v`, with functions of vec.h
(agent_workdir/vec.h, mathematical functions that compilers can vectorise). All text except constants and
shapes is equal in every kernel, so that the tokenizer merges it into one or two tokens.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.bootstrap.operator_chain import Step

# C++ line of each elementwise operator. {0} and {1} are replaced by the operator's constants.
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
class Sweep:
    """C++ code of one loop over the elements of a row.

    `declare` are the declarations of the accumulators, `clause` is their OpenMP reduction clause, `each` are
    the lines for each element `v`, and `finish` are the lines after the loop. The line `b[i] = v;` of `each`,
    if there is one, stores the element. The clause is empty if the loop cannot be vectorised.
    """

    declare: tuple[str, ...]
    clause: str
    each: tuple[str, ...]
    finish: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowOperator:
    """C++ code of an operator on whole rows, such as softmax.

    The loops `sweeps` over the row come first. They are followed by the lines `apply` for every element, or
    by the expression `result` if the operator returns one value for each row.
    """

    sweeps: tuple[Sweep, ...]
    apply: tuple[str, ...] = ()
    result: str = ""


def _maximum(name: str) -> Sweep:
    """Return the code of a loop that computes the maximum of a row in the C++ variable `name`."""
    return Sweep((f"float {name} = -INFINITY;",), f"max : {name}", (f"{name} = vmax({name}, v);",))


def _sum(name: str, term: str, *finish: str) -> Sweep:
    """Return the code of a loop that adds up the C++ expression `term` over the elements of a row.

    `name` is the C++ variable that gets the sum. `finish` are the lines after the loop.
    """
    return Sweep((f"double {name} = 0;",), f"+ : {name}", (f"{name} += {term};",), finish)


def _online(top: str, total: str, *finish: str) -> Sweep:
    """Return the code of one loop that computes the maximum of a row and a sum of exponentials.

    The sum is that of exp(v - maximum) over the elements v. `top` and `total` are the names of the C++
    variables of the maximum and of the sum. `finish` are the lines after the loop.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """
    return Sweep(
        (f"float {top} = -INFINITY;", f"double {total} = 0;"),
        "",
        (
            f"const float high = vmax({top}, v);",
            f"{total} = {total} * vexp({top} - high) + vexp(v - high);",
            f"{top} = high;",
        ),
        finish,
    )


# Lines after the loops of several operators.
PART, LEVEL = "const float part = 1 / total;", "const float level = std::log(mass);"
INVERSE = "const float inverse = 1 / std::sqrt({} + 1e-5);"
# The loops of each operator on rows, which are used unless a schedule asks for an algorithm that ALGORITHMS
# has for the operator. Sums are declared as double; a schedule may make them float.
ROW = {
    "softmax": RowOperator(
        (
            _maximum("top"),
            Sweep(
                ("double total = 0;",),
                "+ : total",
                ("v = vexp(v - top);", "b[i] = v;", "total += v;"),
                (PART,),
            ),
        ),
        ("v = v * part;",),
    ),
    "log_softmax": RowOperator(
        (_maximum("peak"), _sum("mass", "vexp(v - peak)", LEVEL)), ("v = v - peak - level;",)
    ),
    "layer_norm": RowOperator(
        (
            Sweep(
                ("double first = 0, second = 0;",),
                "+ : first, second",
                ("first += v;", "second += (double)v * v;"),
                (
                    "const float mean = first / cols;",
                    INVERSE.format("second / cols - first / cols * first / cols"),
                ),
            ),
        ),
        ("v = (v - mean) * inverse * weight[i] + bias[i];",),
    ),
    "rms_norm": RowOperator(
        (_sum("power", "(double)v * v", "const float rms = 1 / std::sqrt(power / cols + 1e-5);"),),
        ("v = v * rms * gain[i];",),
    ),
    "normalize": RowOperator(
        (_sum("length", "(double)v * v", "const float unit = 1 / vmax(std::sqrt(length), 1e-12);"),),
        ("v = v * unit;",),
    ),
    "sum": RowOperator((_sum("sum", "v"),), result="sum"),
    "mean": RowOperator((_sum("sum", "v"),), result="sum / cols"),
    "amax": RowOperator((_maximum("best"),), result="best"),
    "logsumexp": RowOperator(
        (_maximum("high"), _sum("sum", "vexp(v - high)")), result="high + std::log(sum)"
    ),
}
# Other algorithms of operators on rows, by the name of the algorithm and the operator.
ALGORITHMS = {
    "recompute": {
        "softmax": RowOperator(
            (_maximum("top"), _sum("total", "vexp(v - top)", PART)), ("v = vexp(v - top) * part;",)
        ),
        "layer_norm": RowOperator(
            (
                _sum("first", "v", "const float mean = first / cols;"),
                _sum("second", "(v - mean) * (v - mean)", INVERSE.format("second / cols")),
            ),
            ROW["layer_norm"].apply,
        ),
    },
    "online": {
        "softmax": RowOperator((_online("top", "total", PART),), ("v = vexp(v - top) * part;",)),
        "log_softmax": RowOperator((_online("peak", "mass", LEVEL),), ROW["log_softmax"].apply),
        "logsumexp": RowOperator((_online("best", "sum"),), result="best + std::log(sum)"),
    },
}
# Functions of libm, by the names of the functions of vec.h that compute the same.
LIBM = {f"v{name}": f"std::{name}" for name in ("exp", "log", "log1p", "tanh", "erf", "sqrt")} | {
    f"v{name}": f"std::f{name}" for name in ("abs", "max", "min")
}


def elementwise(step: Step) -> str:
    """Return the C++ line of an elementwise operator, which changes the variable `v`."""
    return ELEMENTWISE[step.name].format(*step.constants)


@dataclass(frozen=True)
class FusedRow:
    """C++ code of a chain of operators of which some work on whole rows, for one row in the array `a`.

    `lines` are all loops over the row. After them, the array named `source` contains the row. If the chain
    ends with one value for each row, `tail` are the lines that compute it as `v`. Otherwise `pending` are the
    lines that are still to be computed for every element `v`.
    """

    lines: list[str]
    source: str
    pending: list[str]
    tail: list[str]


def fuse_row(
    steps: Sequence[Step], write_sweep: Callable[[Sweep, str, list[str]], list[str]], algorithm: str = ""
) -> FusedRow:
    """Return the code of a chain, in which elementwise operators are computed in the row's next loop.

    `steps` are the operators of the chain. A sweep is one loop over a row. `write_sweep` returns the lines of
    a sweep from the sweep, the array that contains the row, and the lines for each element. A changed row is
    stored in the array `b`, unless no later loop reads it. The code of an operator on rows is that in
    ALGORITHMS[algorithm] if there is one, and else that in ROW.
    """
    row_operators = ROW | ALGORITHMS.get(algorithm, {})
    lines: list[str] = []
    pending: list[str] = []
    tail: list[str] = []
    source = "a"
    for step in steps:
        operator = row_operators.get(step.name)
        if operator is None:
            (tail or pending).append(elementwise(step).replace("y[i]", "s[i]"))
            continue
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
            pending = [*operator.apply]
    return FusedRow(lines, source, pending, tail)


def replace_functions(text: str) -> str:
    """Return C++ code with the functions of vec.h replaced by those of libm.

    Before that, `vsigmoid(v)` is replaced by its formula with `vexp`, because libm has no such function.
    """
    text = text.replace("vsigmoid(v)", "1 / (1 + vexp(-v))").replace("v * 1 /", "v /")
    return re.sub(r"\bv[a-z0-9]+(?=\()", lambda match: LIBM[match.group()], text)
