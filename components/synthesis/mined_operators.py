"""The mined operators: how each may be written, on which tensors, and why the others were left out.

A form is a template: `{x}` is its input, `{y}` a second input of the same shape, `{self}` the module that `init` makes,
and the sizes of its input stand for numbers ({channels}, {last}, …; see `sizes`). So the same form is written for the
small tensors that it is tried on and for the large ones of a task.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.core.files import atomic_write, read_json
from components.synthesis.core_operators import canonical

SMALL: dict[int, tuple[int, ...]] = {2: (8, 64), 3: (2, 16, 64), 4: (2, 16, 12, 12), 5: (2, 8, 8, 8, 8)}
"""Shapes by rank on which forms are tried: rows, sequences or signals, images, volumes."""
FAULTS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AssertionError,
    NotImplementedError,
    AttributeError,
    ZeroDivisionError,
)
"""What torch raises where arguments do not fit."""
SCOPE: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}


@dataclass(frozen=True)
class OperatorTemplate:
    """One way to write an operator."""

    name: str
    """The public name as the task's source writes it: nn.Conv2d, F.gelu, torch.cumsum."""
    call: str
    ranks: tuple[int, ...]
    """Ranks of input that it was seen to work on."""
    init: str = ""
    """The expression in `__init__` that makes its module or parameter; empty for a function of its inputs alone."""

    @property
    def second(self) -> bool:
        return "{y}" in self.call


@dataclass(frozen=True)
class TransformersModule:
    """A module of transformers, self-contained: its source with everything that it needs, and how it is made and called.

    `inputs` are expressions with `{batch}`, `{length}`, `{hidden}` and what follows from them for sizes."""

    name: str
    family: str
    """The folder of its model in the library."""
    code: str
    config: dict[str, Any]
    """The configuration's values that the source reads, as the library has them."""
    init: str
    call: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Skipped:
    name: str
    reason: str


@dataclass(frozen=True)
class OperatorTable:
    """What was mined from one pair of versions."""

    torch: str
    transformers: str
    templates: tuple[OperatorTemplate, ...]
    modules: tuple[TransformersModule, ...]
    left_out: tuple[Skipped, ...]

    @property
    def operators(self) -> tuple[str, ...]:
        """Distinct operators: nn.LeakyReLU and F.leaky_relu are one."""
        return tuple(sorted({canonical(form.name) for form in self.templates}))


def sizes(shape: Sequence[int]) -> dict[str, int]:
    """The numbers that templates may name, from the shape of the input they are written for."""
    return {
        "channels": shape[1],
        "last": shape[-1],
        "before_last": shape[-2],
        "twice_channels": 2 * shape[1],
        "half_channels": max(shape[1] // 2, 1),
        "twice_last": 2 * shape[-1],
        "half_last": max(shape[-1] // 2, 1),
    }


def written(form: OperatorTemplate, shape: Sequence[int], place: str = "self.op") -> tuple[str, str]:
    """`init` and `call` for an input of this shape; `place` is the attribute that holds the module."""
    values = sizes(shape)
    return form.init.format(**values), form.call.format(x="x", y="y", self=place, **values)


class Holder:
    """Stands for the task's module while a form is tried: `self.op` is what its `init` makes."""

    def __init__(self, op: Any = None):
        self.op = op


@functools.lru_cache(maxsize=65536)
def function_of(call: str) -> Any:
    """The call as a function of (x, y, self). Our own templates alone come here, so they may be evaluated."""
    return eval(f"lambda x, y, self: {call}", dict(SCOPE))


def make_module(form: OperatorTemplate, x: Tensor) -> Holder:
    """What the form's `init` makes for an input like `x`, on its device and in its dtype; equal parameters each time."""
    init, _ = written(form, x.shape)
    if not init:
        return Holder()
    with torch.device(x.device):
        made = eval(init, dict(SCOPE))
    if isinstance(made, nn.Module):
        made = made.eval().to(x.dtype)
        parameters = list(made.named_parameters())
    else:
        made = nn.Parameter(made.data.to(x.dtype))
        parameters = [("weight", made)]
    if x.device.type == "cpu":
        _fill(parameters)
    return Holder(made)


@torch.no_grad()
def _fill(parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Fixed random values, by a generator of its own: other threads draw from the global one."""
    generator = torch.Generator().manual_seed(20260227)
    for name, parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            values = noise * (parameter.shape[0] / parameter.numel()) ** 0.5
        elif "bias" in name:
            values = 0.1 * noise
        else:
            # The scale of a norm stands near 1, the slope of a PReLU near its default.
            constant = parameter.numel() > 0 and bool((parameter == parameter[0]).all())
            values = (parameter[0].item() if constant else 0.25) * (1 + 0.1 * noise)
        parameter.copy_(values)


def apply(form: OperatorTemplate, x: Tensor, y: Tensor | None, holder: Holder | None = None) -> Tensor:
    """The form on real or meta tensors, with what `make_module` made."""
    return function_of(written(form, x.shape)[1])(x, y, holder or make_module(form, x))


@functools.lru_cache(maxsize=65536)
def output_layout(
    form: OperatorTemplate, shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of the output for a float32 input of this shape and layout, asked of meta tensors; None where the
    form does not fit: it raises, changes the dtype, or leaves a rank that no task has."""
    x = torch.empty_strided(shape, stride, device="meta")
    y = torch.empty(shape, device="meta") if form.second else None
    try:
        with torch.no_grad():
            out = apply(form, x, y)
    except FAULTS:
        return None
    if (
        not isinstance(out, Tensor)
        or out.dtype != torch.float32
        or not 2 <= out.dim() <= 5
        or not out.numel()
        or out.is_nested
    ):
        return None
    return tuple(out.shape), tuple(out.stride())


# --- the table as files ------------------------------------------------------------------------------------------------


def write_table(folder: Path, table: OperatorTable) -> None:
    """operators.json, and left_out.csv for people."""
    atomic_write(folder / "operators.json", json.dumps(asdict(table), indent=1, ensure_ascii=False) + "\n")
    rows = [
        "name,reason",
        *(f'{item.name},"{item.reason.replace(chr(34), chr(39))}"' for item in table.left_out),
    ]
    atomic_write(folder / "left_out.csv", "\n".join(rows) + "\n")


def read_table(folder: Path) -> OperatorTable:
    """The table that `write_table` left in the folder; OSError when there is none."""
    values = read_json(folder / "operators.json")
    return OperatorTable(
        torch=values["torch"],
        transformers=values["transformers"],
        templates=tuple(
            OperatorTemplate(**{**form, "ranks": tuple(form["ranks"])}) for form in values["templates"]
        ),
        modules=tuple(
            TransformersModule(**{**module, "inputs": tuple(module["inputs"])})
            for module in values["modules"]
        ),
        left_out=tuple(Skipped(**item) for item in values["left_out"]),
    )
