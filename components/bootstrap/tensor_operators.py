"""The tensor operators: a table of what single operators and short chains of KernelBench's kind are made of.

Each row has the operator's line in the layout of composed tasks (TASK_LAYOUT), the loop nests that compute
it, and the arguments that a composer draws for it. `read_program` reads a source in that layout, and
nest_writer.py writes its kernels. Inputs have any rank, and dimensions any size.
"""

import ast
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

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
    attach,
    over_dims,
    sliding,
    strides_of,
)
from components.bootstrap.operator_chain import CORE_OPERATORS, PALETTE, SLOPES, SOURCE
from components.bootstrap.operator_code import ELEMENTWISE

Parts = Sequence[Nest | Line]
# Values of the arguments in an operator's source, by name. In what a composer draws, `inputs` has the shapes
# of the task's further inputs.
Arguments = dict[str, Any]
Draw = Callable[[random.Random, Shape], Arguments | None]
Drawn = Callable[[random.Random, Shape], Arguments]


@dataclass(frozen=True)
class TensorOperator:
    """One row of the table.

    `line` is the right-hand side of `x = …`, in which `{self}` is the attribute that the statement `init`
    creates, and the other fields are arguments. `build` is called with the shape of x, the shapes of the
    task's further inputs by name, the name of the attribute, and the arguments by name. It returns what
    computes the operator: nests, and lines for elementwise operators. `draw` returns arguments for an x of
    some shape, or None if the operator does not fit it; without it the operator is not composed.
    """

    line: str
    build: Callable[..., Parts]
    draw: Draw | None
    init: str = ""
    # Endings of the names of the entries of the state dict, in their order.
    state: tuple[str, ...] = ()
    # Ranks of x for which arguments can be drawn.
    ranks: tuple[int, ...] = (2, 3, 4, 5)


@dataclass(frozen=True)
class Program:
    """The computation of a task: its nests and lines, the shape of its first input, and its tensors.

    `tensors` has the names of the kernel's arguments in their order, and `types` the C++ types of those that
    are not float.
    """

    parts: tuple[Nest | Line, ...]
    shape: Shape
    tensors: tuple[str, ...]
    types: dict[str, str]


# --- elementwise operators ----------------------------------------------------------------------------------


def _line(code: str, operand: str = "") -> Callable[..., Parts]:
    """Return the builder of an elementwise operator with this C++ line.

    In the line, `{NAME}` is a constant and `NAME@` the operand: an input, or a parameter, whose name begins
    with `self`.
    """

    def build(shape: Shape, inputs: dict[str, Shape], name: str, **constants: Any) -> Parts:
        of = constants.pop("size", constants.pop("channels", inputs.get(operand, ())))
        if isinstance(of, int):
            of = (of, *(1,) * (len(shape) - 2))
        values = {key: f"{float(value)!r}f" for key, value in constants.items()}
        text = re.sub(r"\{(\w+)\}f?", lambda match: values[match[1]], code)
        own = f"{name}{operand.removeprefix('self')}" if operand.startswith("self") else operand
        return [Line(text.replace(f"{operand}@", f"{own}@") if operand else text, own, of)]

    return build


def _constants(**palettes: Sequence[str]) -> Drawn:
    """Return the function that draws a constant from each palette."""
    return lambda rng, shape: {name: float(rng.choice(values)) for name, values in palettes.items()}


def _parameter(rng: random.Random, shape: Shape) -> Arguments:
    """Draw the shape of a parameter: of the channels of images, or of the last dimension of rows."""
    return {"size": (shape[1], *(1,) * (len(shape) - 2)) if len(shape) > 3 else (shape[-1],)}


def _same_shape(rng: random.Random, shape: Shape) -> Arguments:
    """Draw a second input with the shape of the first."""
    return {"inputs": {"y": shape}}


def _channels(rng: random.Random, shape: Shape) -> Arguments:
    return {"channels": shape[1]}


_ALL_RANKS = (1, 2, 3, 4, 5)
_PARAMETER = "nn.Parameter(torch.randn({size}))"
LINES: dict[str, TensorOperator] = {
    core.name: TensorOperator(
        re.sub(r"\{(\d)\}", r"{c\1}", core.line),
        _line(re.sub(r"\{(\d)\}", r"{c\1}", ELEMENTWISE[core.name])),
        _constants(**{f"c{index}": palette for index, palette in enumerate(core.constants)}),
        ranks=_ALL_RANKS,
    )
    for core in CORE_OPERATORS
    if core.kind == "elementwise"
}
LINES |= {
    name: TensorOperator(line, _line(code), _constants(**palettes), ranks=_ALL_RANKS)
    for name, line, code, palettes in (
        (
            "selu",
            "F.selu(x)",
            "v = 1.05070099f * (v < 0 ? 1.67326324f * (vexp(v) - 1) : v);",
            {},
        ),
        ("celu", "F.celu(x, alpha={a})", "v = v < 0 ? {a} * (vexp(v / {a}) - 1) : v;", {"a": SLOPES}),
        ("hardtanh", "F.hardtanh(x)", "v = vmin(vmax(v, -1), 1);", {}),
        ("hardshrink", "F.hardshrink(x, {a})", "v = vabs(v) > {a} ? v : 0;", {"a": SLOPES}),
        (
            "gelu_tanh",
            'F.gelu(x, approximate="tanh")',
            "v = v * (1 + vtanh(0.79788456f * (v + 0.044715f * v * v * v))) / 2;",
            {},
        ),
        ("div_constant", "x / {a}", "v = v / {a};", {"a": PALETTE}),
        ("sub_constant", "x - {a}", "v = v - {a};", {"a": PALETTE}),
        ("clamp_min", "torch.clamp(x, min={a})", "v = vmax(v, {a});", {"a": SLOPES}),
        ("sin", "torch.sin(x)", "v = std::sin(v);", {}),
        ("cos", "torch.cos(x)", "v = std::cos(v);", {}),
        ("exp_of_minus_abs", "torch.exp(-torch.abs(x))", "v = vexp(-vabs(v));", {}),
    )
}
LINES |= {
    name: TensorOperator(f"x {sign} {{self}}", _line(code, "self"), _parameter, _PARAMETER, ("",), _ALL_RANKS)
    for name, sign, code in (
        ("bias", "+", "v = v + self@;"),
        ("minus_bias", "-", "v = v - self@;"),
        ("scaling", "*", "v = v * self@;"),
    )
}
LINES |= {
    name: TensorOperator(f"x {sign} y", _line(code, "y"), _same_shape, ranks=_ALL_RANKS)
    for name, sign, code in (
        ("add_input", "+", "v = v + y@;"),
        ("mul_input", "*", "v = v * y@;"),
        ("sub_input", "-", "v = v - y@;"),
    )
}
LINES["prelu"] = TensorOperator(
    "{self}(x)",
    _line("v = v < 0 ? v * self_weight@ : v;", "self_weight"),
    _channels,
    "nn.PReLU({channels})",
    ("_weight",),
)


# --- reductions, softmax and scans --------------------------------------------------------------------------


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


def _sum(name: str, term: str, *values: tuple[str, str]) -> Loop:
    """Return a loop that adds up an expression, with values that follow from the sum."""
    return Loop((("sum", name, term),), values)


def _reduction(code: Code) -> Callable[..., Parts]:
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


_TOP = Loop((("max", "top", "v"),))
_LOW = Loop((("min", "low", "v"),))
_MASS = _sum("total", "vexp(v - top)", ("level", "std::log(total)"))
_MEAN = _sum("first", "v", ("mean", "first / COUNT"))
_SQUARES = _sum("second", "(v - mean) * (v - mean)")
_EXTREME = "torch.{0}(x, dim={{dim}}, keepdim={{keepdim}})"
REDUCTIONS: dict[str, TensorOperator] = {
    name: TensorOperator(_EXTREME.format(name), _reduction(code), _dims)
    for name, code in {
        "sum": Code((_sum("total", "v"),), "total"),
        "mean": Code((_sum("total", "v"),), "total / COUNT"),
        "amax": Code((_TOP,), "top"),
        "amin": Code((_LOW,), "low"),
        "logsumexp": Code((_TOP, _MASS), "top + level"),
        "var": Code((_MEAN, _SQUARES), "second / (COUNT - 1)"),
        "std": Code((_MEAN, _SQUARES), "std::sqrt(second / (COUNT - 1))"),
    }.items()
}
REDUCTIONS |= {
    name: TensorOperator(line, _reduction(code), draw)
    for name, line, code, draw in (
        (
            "prod",
            "torch.prod(x, dim={dim}, keepdim={keepdim})",
            Code((Loop((("prod", "total", "v"),)),), "total"),
            _one_dim,
        ),
        ("max", "torch.max(x, dim={dim}, keepdim={keepdim})[0]", Code((_TOP,), "top"), _one_dim),
        ("min", "torch.min(x, dim={dim}, keepdim={keepdim})[0]", Code((_LOW,), "low"), _one_dim),
        (
            "argmax",
            "torch.argmax(x, dim={dim}, keepdim={keepdim})",
            Code(
                (_TOP, Loop((("min", "index", "v == top ? (float)<axis> : INFINITY"),))),
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
            Code((_sum("total", "vabs(v)"),), "total"),
            _dims,
        ),
        (
            "l2",
            "torch.linalg.vector_norm(x, ord=2, dim={dim}, keepdim={keepdim})",
            Code((_sum("total", "v * v"),), "std::sqrt(total)"),
            _dims,
        ),
        (
            "cosine_similarity",
            "F.cosine_similarity(x, y, dim={dim})",
            Code(
                (Loop((("sum", "dot", "v * y@"), ("sum", "left", "v * v"), ("sum", "right", "y@ * y@"))),),
                "dot / (vmax(std::sqrt(left), 1e-8f) * vmax(std::sqrt(right), 1e-8f))",
            ),
            lambda rng, shape: {**_dim(rng, shape), **_same_shape(rng, shape)},
        ),
    )
}
_SQUARE_MEAN = _sum("power", "v * v", ("rms", "1 / std::sqrt(power / COUNT + <eps>)"))
ALONG: dict[str, TensorOperator] = {
    name: TensorOperator(line, _reduction(code), draw)
    for name, line, code, draw in (
        (
            "softmax",
            "torch.softmax(x, dim={dim})",
            Code(
                (_TOP, _sum("total", "vexp(v - top)", ("part", "1 / total"))),
                apply=("v = vexp(v - top) * part;",),
            ),
            _dim,
        ),
        (
            "log_softmax",
            "torch.log_softmax(x, dim={dim})",
            Code((_TOP, _MASS), apply=("v = v - top - level;",)),
            _dim,
        ),
        (
            "softmin",
            "F.softmin(x, dim={dim})",
            Code(
                (_LOW, _sum("total", "vexp(low - v)", ("part", "1 / total"))),
                apply=("v = vexp(low - v) * part;",),
            ),
            _dim,
        ),
        (
            "normalize",
            "F.normalize(x, dim={dim})",
            Code(
                (_sum("length", "v * v", ("unit", "1 / vmax(std::sqrt(length), 1e-12f)")),),
                apply=("v = v * unit;",),
            ),
            _dim,
        ),
        (
            "l1_norm",
            "x / torch.mean(torch.abs(x), dim={dim}, keepdim=True)",
            Code((_sum("length", "vabs(v)", ("unit", "COUNT / length")),), apply=("v = v * unit;",)),
            _dim,
        ),
        (
            "frobenius_norm",
            "x / torch.norm(x)",
            Code((_sum("length", "v * v", ("unit", "1 / std::sqrt(length)")),), apply=("v = v * unit;",)),
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
            lambda rng, shape: {**_dim(rng, shape), **_same_shape(rng, shape)},
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
    (_MEAN, _sum("second", "(v - mean) * (v - mean)", ("inverse", "1 / std::sqrt(second / COUNT + <eps>)"))),
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


def _groups(rng: random.Random, shape: Shape) -> Arguments | None:
    counts = [count for count in (2, 4, 8) if shape[1] % count == 0 and prod(shape[1:]) > 4 * count]
    return {"groups": rng.choice(counts), "channels": shape[1]} if counts else None


_AFFINE = ("_weight", "_bias")
NORMS: dict[str, TensorOperator] = {
    "layer_norm": TensorOperator("{self}(x)", _norm("last"), _last, "nn.LayerNorm({size})", _AFFINE),
    "rms_norm": TensorOperator(
        "{self}(x)",
        _norm("last", code=Code((_SQUARE_MEAN,), apply=("v = v * rms;",))),
        lambda rng, shape: {"size": shape[-1:], "eps": 1e-5},
        "nn.RMSNorm({size}, eps={eps})",
        ("_weight",),
    ),
    "group_norm": TensorOperator(
        "{self}(x)", _norm("group"), _groups, "nn.GroupNorm({groups}, {channels})", _AFFINE
    ),
}
for _count, _ranks in ((1, (2, 3)), (2, (4,)), (3, (5,))):
    NORMS |= {
        f"batch_norm_{_count}": TensorOperator(
            "{self}(x)",
            _norm("batch"),
            _channels,
            f"nn.BatchNorm{_count}d({{channels}}, track_running_stats=False)",
            _AFFINE,
            _ranks,
        ),
        f"running_batch_norm_{_count}": TensorOperator(
            "{self}(x)",
            _running,
            None,  # its counter of batches never matters
            f"nn.BatchNorm{_count}d({{channels}})",
            (*_AFFINE, "_running_mean", "_running_var", "_num_batches_tracked"),
        ),
        f"instance_norm_{_count}": TensorOperator(
            "{self}(x)",
            _norm("instance", affine=False),
            _channels,
            f"nn.InstanceNorm{_count}d({{channels}})",
            ranks=_ranks[-1:],
        ),
        f"affine_instance_norm_{_count}": TensorOperator(
            "{self}(x)",
            _norm("instance"),
            _channels,
            f"nn.InstanceNorm{_count}d({{channels}}, affine=True)",
            _AFFINE,
            _ranks[-1:],
        ),
    }


# --- losses -------------------------------------------------------------------------------------------------


def _loss(code: Code, *, elements: bool = True) -> Callable[..., Parts]:
    """Return the builder of a loss: one value for each row by the code, and the sum of these over a count.

    The count is that of all elements if `elements` is true, and else that of rows.
    """

    def build(shape: Shape, inputs: dict[str, Shape], name: str, **numbers: Any) -> Parts:
        rows, total = shape[0], prod(shape) if elements else shape[0]
        (nest,) = _reduction(code)(
            shape,
            {key: of if len(of) > 1 or elements else (*of, 1) for key, of in inputs.items()},
            name,
            dim=tuple(range(1, len(shape))),
            **numbers,
        )
        mean = Code((_sum("total", "v"),), f"total / {total}.0f")
        return [nest, over_dims((rows,), (0,), mean)]

    return build


def _rows_and(*names: str, **palettes: Sequence[str]) -> Drawn:
    """Return the function that draws further inputs of the same shape, and constants, for a loss."""

    def draw(rng: random.Random, shape: Shape) -> Arguments:
        return {"inputs": dict.fromkeys(names, shape), **_constants(**palettes)(rng, shape)}

    return draw


def _elements(term: str) -> Code:
    return Code((_sum("total", term),), "total")


_D = "(v - y@)"
_ANY_RANK = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "hinge_loss")
LOSSES: dict[str, TensorOperator] = {
    name: TensorOperator(
        line, _loss(code, elements=elements), draw, ranks=(2, 3, 4, 5) if name in _ANY_RANK else (2,)
    )
    for name, line, code, elements, draw in (
        ("mse_loss", "F.mse_loss(x, y)", _elements(f"{_D} * {_D}"), True, _rows_and("y")),
        ("l1_loss", "F.l1_loss(x, y)", _elements(f"vabs{_D}"), True, _rows_and("y")),
        (
            "smooth_l1_loss",
            "F.smooth_l1_loss(x, y)",
            _elements(f"vabs{_D} < 1 ? 0.5f * {_D} * {_D} : vabs{_D} - 0.5f"),
            True,
            _rows_and("y"),
        ),
        (
            "huber_loss",
            "F.huber_loss(x, y, delta={delta})",
            _elements(f"vabs{_D} < <delta> ? 0.5f * {_D} * {_D} : <delta> * (vabs{_D} - 0.5f * <delta>)"),
            True,
            _rows_and("y", delta=SLOPES),
        ),
        (
            "kl_div",
            'F.kl_div(x, y, reduction="batchmean", log_target=True)',
            _elements("vexp(y@) * (y@ - v)"),
            False,
            _rows_and("y"),
        ),
        (
            "hinge_loss",
            "torch.mean(torch.clamp(1.0 - x * y, min=0.0))",
            _elements("vmax(1 - v * y@, 0)"),
            True,
            _rows_and("y"),
        ),
        (
            "cross_entropy",
            "F.cross_entropy(x, y)",
            Code(
                (
                    _TOP,
                    Loop(
                        (("sum", "total", "vexp(v - top)"), ("sum", "chosen", "<axis> == y@ ? v : 0")),
                        (("level", "std::log(total)"),),
                    ),
                ),
                "top - chosen + level",
            ),
            False,
            lambda rng, shape: {"inputs": {"y": shape[:1]}, "classes": shape[1]},
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
            _rows_and("y", "z", margin=PALETTE),
        ),
    )
}


# --- pooling and convolutions -------------------------------------------------------------------------------


def _each(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * count


def _pool(code: Code) -> Callable[..., Parts]:
    """Return the builder of a pooling with these arguments of torch, over all dimensions but the first two."""

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


def _convolution(*, transposed: bool) -> Callable[..., Parts]:
    """Return the builder of a convolution with these arguments of torch."""

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
            slides, lead, {weight: 1}, Code((_sum("total", f"v * {weight}@"),), "total"), out_shape
        )
        parts: list[Nest | Line] = [replace(nest, rows="c" if out > 1 else "")]
        if bias:
            parts.append(Line(f"v = v + {name}_bias@;", f"{name}_bias", (outs, *(1,) * count)))
        return parts

    return build


def _sides(rng: random.Random, shape: Shape, kernels: Sequence[int]) -> list[int]:
    """Draw the sizes of a kernel, which are equal in two thirds of all cases."""
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
            _pool(Code((_TOP,), "top")),
            _draw_pool(dilated=True),
            ranks=(_count + 2,),
        ),
        f"avg_pool_{_count}": TensorOperator(
            f"F.avg_pool{_count}d(x, kernel_size={{kernel}}, stride={{stride}}, padding={{padding}})",
            _pool(Code((_sum("total", "v"),), "total / COUNT")),
            _draw_pool(dilated=False),
            ranks=(_count + 2,),
        ),
        f"conv_{_count}": TensorOperator(
            "{self}(x)",
            _convolution(transposed=False),
            _draw_convolution(transposed=False),
            f"nn.Conv{_count}d({{ins}}, {{outs}}, {{kernel}}, {_SIDES}, groups={{groups}}, bias={{bias}})",
            _AFFINE,
            (_count + 2,),
        ),
        f"conv_transpose_{_count}": TensorOperator(
            "{self}(x)",
            _convolution(transposed=True),
            _draw_convolution(transposed=True),
            f"nn.ConvTranspose{_count}d({{ins}}, {{outs}}, {{kernel}}, {_SIDES}, "
            "output_padding={output_padding}, groups={groups}, bias={bias})",
            _AFFINE,
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
    lines: tuple[str, ...] = (),
) -> Nest:
    """Return the nest of the product of `a` and the operand `name`, which have these shapes.

    `transposed` says of each factor whether its last two dimensions are exchanged. An operand of rank 2 is
    the same for all matrices of `a`, and `lines` change each element of the output.
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
    code = Code((_sum("total", f"v * {name}@"),), "total")
    rows = "" if windows else PRODUCT_ROWS
    return Nest(tuple(axes), code, out, windows, after=lines, rows=rows)


def _product(*, left: bool = False, right: bool = False) -> Callable[..., Parts]:
    """Return the builder of the product of x and y, each of which may be transposed."""
    return lambda shape, inputs, name: [_matrices(shape, inputs["y"], "y", transposed=(left, right))]


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
    """Return the row of a product whose factors (`inside`) or whose result is an upper or lower triangle."""
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
    """Return the nest of the product of a diagonal matrix and y."""
    rows, cols = inputs["y"]
    axes = (
        Axis("i", rows, False, {"a": 1, "o": cols, "y": cols}),
        Axis("j", cols, False, {"o": 1, "y": 1}),
    )
    return [Nest(axes, Code(apply=("v = v * y@;",)), (rows, cols))]


def _linear(shape: Shape, inputs: dict[str, Shape], name: str, ins: int, outs: int, bias: bool) -> Parts:
    """Return the parts of nn.Linear."""
    weight = f"{name}_weight"
    parts: list[Nest | Line] = [_matrices(shape, (outs, ins), weight, transposed=(False, True))]
    return [*parts, Line(f"v = v + {name}_bias@;", f"{name}_bias", (outs,))] if bias else parts


def _draw_linear(rng: random.Random, shape: Shape) -> Arguments | None:
    outs = rng.choice((shape[-1], max(shape[-1] // 2, 1), 2 * shape[-1], 100))
    return {"ins": shape[-1], "outs": outs, "bias": rng.random() < 0.7} if 8 <= shape[-1] <= 8192 else None


def _attention(shape: Shape, inputs: dict[str, Shape], name: str) -> Parts:
    """Return the nests of the attention of x to the keys y and the values z."""
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
    "diagonal": TensorOperator(
        "torch.matmul(torch.diag(x), y)",
        _diagonal,
        lambda rng, shape: {"inputs": {"y": (shape[0], rng.choice((512, 1000)))}},
        ranks=(1,),
    ),
    "linear": TensorOperator(
        "{self}(x)", _linear, _draw_linear, "nn.Linear({ins}, {outs}, bias={bias})", _AFFINE, (2, 3, 4)
    ),
    "attention": TensorOperator(
        "F.scaled_dot_product_attention(x, y, z)",
        _attention,
        _rows_and("y", "z"),
        ranks=(4,),
    ),
}

OPERATORS = LINES | REDUCTIONS | ALONG | NORMS | LOSSES | SLIDING | PRODUCTS


# --- reading ------------------------------------------------------------------------------------------------


def _pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of a line or a statement, with a group for each field."""
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return rf"(?P<{name}>self[.]\w+)" if name == "self" else f"(?P<{name}>.+?)"

    return re.compile(re.sub(r"\\\{(\w+)\\\}", group, re.escape(template)))


PATTERNS = {name: (_pattern(row.line), _pattern(row.init)) for name, row in OPERATORS.items()}
INPUT = re.compile(r"torch\.(randn?|randint)\((?:0, \d+, )?\(?([\d, ]+?),?\)?\)")


def read_program(code: str) -> Program | None:
    """Return the program of a source in the layout of composed tasks, or None for another source."""
    source = SOURCE.fullmatch(code)
    if source is None:
        return None
    names = source["arguments"].split(", ")
    texts = [INPUT.fullmatch(text) for text in re.split(r", (?=torch\.)", source["inputs"])]
    created = dict(line.strip().split(" = ", 1) for line in source["init"].splitlines() if " = " in line)
    if None in texts or len(texts) != len(names):
        return None
    found = [match for match in texts if match is not None]
    shapes = {name: ast.literal_eval(f"({match[2]},)") for name, match in zip(names, found, strict=True)}
    types = {name: "int64_t" for name, match in zip(names, found, strict=True) if match[1] == "randint"}
    shape, parts, state = shapes["x"], [], {}
    for line in source["lines"].splitlines():
        step = _read_operator(line.strip().removeprefix("x = "), created)
        if step is None:
            return None
        operator, attribute, arguments = step
        name = attribute.removeprefix("self.")
        new = operator.build(shape, {key: of for key, of in shapes.items() if key != "x"}, name, **arguments)
        state[attribute] = [
            f"{name}{end}" for end in operator.state if end != "_bias" or arguments.get("bias", True)
        ]
        parts += new
        for part in new:
            if isinstance(part, Nest):
                shape = part.shape
                types |= {"out": part.code.type} if part.code.type != "float" else {}
    direct = sorted(created, key=lambda key: not created[key].startswith("nn.Parameter"))
    tensors = (*names, *(entry for key in direct for entry in state.get(key, ())), "out")
    return Program(tuple(parts), shapes["x"], tensors, types)


def uses_operator(code: str, name: str) -> bool:
    """Return whether a line of a source is that of the tensor operator `name`."""
    line, init = PATTERNS.get(name, (None, None))
    texts = [text.strip().partition(" = ")[2] for text in code.splitlines()]
    return all(any(map(pattern.fullmatch, texts)) for pattern in (line, init) if pattern) and line is not None


def _read_operator(line: str, created: dict[str, str]) -> tuple[TensorOperator, str, Arguments] | None:
    """Return the row, the attribute and the arguments of a line, or None if it is not that of an operator.

    `created` has the statements of the constructor by attribute.
    """
    for name, (pattern, init) in PATTERNS.items():
        match = pattern.fullmatch(line)
        if match is None:
            continue
        values = match.groupdict()
        attribute = values.pop("self", "")
        made = init.fullmatch(created.get(attribute, ""))
        if made is None:
            continue
        try:
            arguments = {key: ast.literal_eval(text) for key, text in {**values, **made.groupdict()}.items()}
        except (ValueError, SyntaxError):
            continue
        return OPERATORS[name], attribute, arguments
    return None
