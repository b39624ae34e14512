"""Composing tasks: a chain of torch operators whose shapes and dtypes fit, written out as a self-contained module.

Whether an operator every_operator_matters is asked of the operators themselves, on a small probe: a chain is kept only if its output
varies and changes when any one operator is left out. So relu after a square, softmax before a sum, or a shift before
a softmax never become tasks; the task_filter catches what a probe cannot see.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.core.config import Data, Device
from components.core.errors import UserError
from components.core.task import KernelTask
from components.synthesis.core_operators import BY_NAME, COLS, CORE_OPERATORS, ROWS, CoreOperator, canonical

HELD_OUT_SHARE = 0.2
"""Share of operator sequences that no stage of training ever sees."""
TRIES = 200
"""Chains drawn for one whose eager time should be measurable; after that any will do, and the task_filter has its say."""
PROBE = (8, 256)
STEPS = tuple[tuple[str, tuple[str, ...]], ...]
"""A chain: operator name and its constants as written, in order."""

SOURCE = """import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{init}
    def forward(self, {arguments}):
{lines}
        return x


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


def is_held_out(ops: Sequence[str], seed: int) -> bool:
    """Whether this operator sequence is reserved for held-out tasks, however its operators are written. A hash of (seed,
    sequence) decides, so every part of the pipeline agrees without a list to pass around."""
    digest = hashlib.sha256(f"{seed}:{'>'.join(map(canonical, ops))}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def write_source(steps: STEPS, rows: int, cols: int) -> str:
    """The task's source for a chain on inputs [rows, cols]."""
    seeds = [BY_NAME[name] for name, _ in steps]
    init = "".join(f"        {seed.init.format(cols=cols)}\n" for seed in seeds if seed.init)
    lines = "\n".join(f"        x = {BY_NAME[name].line.format(*constants)}" for name, constants in steps)
    two = any(seed.kind == "second_input" for seed in seeds)
    return SOURCE.format(
        init=init,
        lines=lines,
        arguments="x, y" if two else "x",
        inputs=", ".join([f"torch.randn({rows}, {cols})"] * (2 if two else 1)),
    )


@functools.cache
def _function(name: str, constants: tuple[str, ...]) -> Callable[[Tensor, Tensor, SimpleNamespace], Tensor]:
    """The operator itself, from the very line that the task will hold (our own table, so it may be evaluated here)."""
    line = BY_NAME[name].line.format(*constants)
    return eval(f"lambda x, y, self: {line}", {"torch": torch, "F": F})


def _apply(steps: STEPS, x: Tensor, y: Tensor, modules: SimpleNamespace) -> Tensor:
    for name, constants in steps:
        x = _function(name, constants)(x, y, modules)
    return x


@functools.cache
def _modules(cols: int, device: str, dtype: torch.dtype) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(cols) if device == "cpu" else None
    return SimpleNamespace(
        layer_norm=nn.LayerNorm(cols, device=device, dtype=dtype),
        rms_norm=nn.RMSNorm(cols, eps=1e-5, device=device, dtype=dtype),
        scale=torch.randn(cols, device=device, generator=generator).to(dtype),
        shift=torch.randn(cols, device=device, generator=generator).to(dtype),
    )


@functools.cache
def _probe(dtype: torch.dtype) -> tuple[Tensor, Tensor, SimpleNamespace]:
    generator = torch.Generator().manual_seed(20260227)
    x, y = torch.randn(PROBE, generator=generator), torch.randn(PROBE, generator=generator)
    return x.to(dtype), y.to(dtype), _modules(PROBE[1], "cpu", dtype)


@functools.cache
def _width_after(name: str, width: int, cols: int) -> int:
    """Columns after one operator on float32 [rows, width] in a task of `cols` columns, asked of a meta tensor; 0 where the
    operator does not fit. Asked once a case: neither constants nor the number of rows change the answer."""
    seed, rows = BY_NAME[name], ROWS[0]
    x, y = torch.empty(rows, width, device="meta"), torch.empty(rows, cols, device="meta")
    try:
        with torch.no_grad():
            out = _function(name, tuple(palette[0] for palette in seed.constants))(
                x, y, _modules(cols, "meta", torch.float32)
            )
    except RuntimeError:
        return 0
    return out.shape[1] if out.dtype == torch.float32 and out.dim() == 2 and out.shape[0] == rows else 0


def fits(steps: STEPS, cols: int) -> bool:
    """Whether shapes and dtypes fit all along, on meta tensors."""
    width = cols
    for name, _ in steps:
        width = _width_after(name, width, cols)
        if not width:
            return False
    return True


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


@torch.no_grad()
def every_operator_matters(steps: STEPS) -> bool:
    """Whether the output varies, float32 suffices for it, and it changes by more than 1 % (RMS) when any one operator is
    left out."""
    x, y, modules = _probe(torch.float32)
    out = _apply(steps, x, y, modules)
    size = _rms(out)
    # A quarter of the values (of one value a row: three in five) must be distinct at a resolution of 1/1000 of the
    # output's scale; saturated outputs are not.
    distinct = torch.unique((out / max(size, 1e-30) * 1000).round()).numel()
    if (
        not 1e-4 < size < 1e4
        or out.std().item() < 3e-3 * size
        or distinct < (100 if out.numel() > PROBE[0] else 0.6 * PROBE[0])
    ):
        return False
    # A float32 result that is itself off (log_softmax, then gelu) leaves no room to tell a right kernel from a wrong one.
    if _rms(out.double() - _apply(steps, *_probe(torch.float64))) > 1e-6 * size:
        return False
    for index in range(len(steps)):
        rest = steps[:index] + steps[index + 1 :]
        without = _apply(rest, x, y, modules)
        if without.shape == out.shape and _rms(without - out) < 1e-2 * size:
            return False
    return True


def _legal(seeds: Sequence[CoreOperator]) -> bool:
    """Rules of form: each operator with state once, one second input, two row operators, only unary elementwise ones
    after a reduction, and nothing twice in a row."""
    names = [seed.name for seed in seeds]
    kinds = [seed.kind for seed in seeds]
    once = [seed.name for seed in seeds if seed.kind in ("row", "parameter")]
    if len(set(once)) != len(once) or kinds.count("second_input") > 1 or kinds.count("reduction") > 1:
        return False
    if kinds.count("row") + kinds.count("reduction") > 2 or any(a == b for a, b in itertools.pairwise(names)):
        return False
    return "reduction" not in kinds or all(
        kind == "elementwise" for kind in kinds[kinds.index("reduction") + 1 :]
    )


def _shapes(data: Data) -> list[tuple[int, int]]:
    """Rows and columns inside data.numel."""
    low, high = data.numel
    shapes = [(rows, cols) for cols in COLS for rows in ROWS if low <= rows * cols <= high]
    if not shapes:
        raise UserError(
            f"data.numel: no shape between {low} and {high} elements ({ROWS[0]}x{COLS[0]} to {ROWS[-1]}x{COLS[-1]} are composed); widen it."
        )
    return shapes


def eager_seconds(steps: STEPS, numel: int, device: Device) -> float:
    """A guess of the eager time: only to choose a size, the judge measures."""
    cut = next((i for i, (name, _) in enumerate(steps) if BY_NAME[name].kind == "reduction"), len(steps))
    # On a GPU every eager operator costs one read and one write, at about 3 TB/s.
    return (
        numel
        * 1e-9
        * sum(BY_NAME[name].cost if device == "cpu" else 8 / 3000 for name, _ in steps[: cut + 1])
    )


def compose_task(rng: random.Random, data: Data, device: Device = "cpu") -> KernelTask:
    """One composed task, of a size whose eager time should fall into data.eager_seconds. `ops` are the operators in
    order, `data_source` is torch#N, `split` says whether the sequence is reserved. UserError when data.numel holds no
    shape."""
    shapes, mix = _shapes(data), data.operator_mix
    fastest, slowest = data.eager_seconds[0] * 1.3, data.eager_seconds[1] / 1.3
    count = rng.choices(list(mix), weights=list(mix.values()))[0]
    for draw in itertools.count():
        seeds = [rng.choice(CORE_OPERATORS) for _ in range(count)]
        if not _legal(seeds):
            continue
        steps = tuple((seed.name, tuple(rng.choice(palette) for palette in seed.constants)) for seed in seeds)
        measurable = [
            shape
            for shape in shapes
            if fastest <= eager_seconds(steps, shape[0] * shape[1], device) <= slowest
        ]
        if not measurable and draw < TRIES:
            continue
        rows, cols = rng.choice(measurable or shapes)
        if every_operator_matters(steps) and fits(steps, cols):
            break
    ops = tuple(name for name, _ in steps)
    reserved = is_held_out(ops, data.seed)
    return KernelTask(
        code=write_source(steps, rows, cols),
        ops=ops,
        data_source=f"torch#{count}",
        split="held_out" if reserved else "train",
    )


def compose_tasks(seed: int, data: Data, device: Device = "cpu") -> Iterator[KernelTask]:
    """Composed tasks without end; equal arguments give equal tasks."""
    rng = random.Random(seed)
    while True:
        yield compose_task(rng, data, device)
