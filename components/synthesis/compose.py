"""Composing tasks: a chain of torch operators whose shapes and dtypes fit, written out as a self-contained module.

Whether an operator matters is asked of the operators themselves, on a small probe: a chain is kept only if its output
varies and changes when any one operator is left out. So relu after a square, softmax before a sum, or a shift before
a softmax never become tasks; the rubric catches what a probe cannot see.
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

from components.config import BadInput, Data, Device
from components.synthesis.seeds import BY_NAME, COLS, ROWS, SEEDS, Seed
from components.task import KernelTask

HELD_OUT_SHARE = 0.2
"""Share of operator sequences that no stage of training ever sees."""
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
    """Whether this operator sequence is reserved for held-out tasks. A hash of (seed, sequence) decides, so every part
    of the pipeline agrees without a list to pass around."""
    digest = hashlib.sha256(f"{seed}:{'>'.join(ops)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def write_source(steps: STEPS, rows: int, cols: int) -> str:
    """The task's source for a chain on inputs [rows, cols]."""
    seeds = [BY_NAME[name] for name, _ in steps]
    init = "".join(f"        {seed.init.format(cols=cols)}\n" for seed in seeds if seed.init)
    lines = "\n".join(f"        x = {BY_NAME[name].line.format(*constants)}" for name, constants in steps)
    two = any(seed.kind == "second_input" for seed in seeds)
    return SOURCE.format(init=init, lines=lines, arguments="x, y" if two else "x", inputs=", ".join([f"torch.randn({rows}, {cols})"] * (2 if two else 1)))


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


@torch.no_grad()
def fits(steps: STEPS, rows: int, cols: int) -> bool:
    """Whether shapes and dtypes fit, on meta tensors: float32 all along, and an output of [rows, cols] or [rows, 1]."""
    x = torch.empty(rows, cols, device="meta")
    y = torch.empty(rows, cols, device="meta")
    try:
        out = _apply(steps, x, y, _modules(cols, "meta", torch.float32))
    except RuntimeError:
        return False
    return out.dtype == torch.float32 and tuple(out.shape) in ((rows, cols), (rows, 1))


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


@torch.no_grad()
def matters(steps: STEPS) -> bool:
    """Whether the output varies, float32 suffices for it, and it changes by more than 1 % (RMS) when any one operator is
    left out."""
    x, y, modules = _probe(torch.float32)
    out = _apply(steps, x, y, modules)
    size = _rms(out)
    # A quarter of the values (of one value a row: three in five) must be distinct at a resolution of 1/1000 of the
    # output's scale; saturated outputs are not.
    distinct = torch.unique((out / max(size, 1e-30) * 1000).round()).numel()
    if not 1e-4 < size < 1e4 or out.std().item() < 3e-3 * size or distinct < (100 if out.numel() > PROBE[0] else 0.6 * PROBE[0]):
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


def _legal(seeds: Sequence[Seed]) -> bool:
    """Rules of form: each operator with state once, one second input, two row operators, only unary elementwise ones
    after a reduction, and nothing twice in a row."""
    names = [seed.name for seed in seeds]
    kinds = [seed.kind for seed in seeds]
    once = [seed.name for seed in seeds if seed.kind in ("row", "parameter")]
    if len(set(once)) != len(once) or kinds.count("second_input") > 1 or kinds.count("reduction") > 1:
        return False
    if kinds.count("row") + kinds.count("reduction") > 2 or any(a == b for a, b in itertools.pairwise(names)):
        return False
    return "reduction" not in kinds or all(kind == "elementwise" for kind in kinds[kinds.index("reduction") + 1 :])


def _steps(rng: random.Random, count: int) -> STEPS:
    while True:
        seeds = [rng.choice(SEEDS) for _ in range(count)]
        if not _legal(seeds):
            continue
        steps = tuple((seed.name, tuple(rng.choice(palette) for palette in seed.constants)) for seed in seeds)
        if matters(steps):
            return steps


def _shape(rng: random.Random, steps: STEPS, data: Data, device: Device) -> tuple[int, int]:
    """Rows and columns inside data.numel, and where possible of a size whose eager time falls into data.eager_seconds."""
    low, high = data.numel
    shapes = [(rows, cols) for cols in COLS for rows in ROWS if low <= rows * cols <= high]
    if not shapes:
        raise BadInput(f"data.numel: no shape between {low} and {high} elements ({ROWS[0]}x{COLS[0]} to {ROWS[-1]}x{COLS[-1]} are composed); widen it.")
    cut = next((i for i, (name, _) in enumerate(steps) if BY_NAME[name].kind == "reduction"), len(steps))
    # On a GPU every eager operator costs one read and one write, at about 3 TB/s.
    each = [BY_NAME[name].cost if device == "cpu" else 8 / 3000 for name, _ in steps[: cut + 1]]
    fastest, slowest = data.eager_seconds[0] * 1.3, data.eager_seconds[1] / 1.3
    inside = [shape for shape in shapes if fastest <= shape[0] * shape[1] * sum(each) * 1e-9 <= slowest]
    if not inside:
        too_fast = max(rows * cols for rows, cols in shapes) * sum(each) * 1e-9 < fastest
        edge = (max if too_fast else min)(rows * cols for rows, cols in shapes)
        inside = [shape for shape in shapes if shape[0] * shape[1] == edge]
    return rng.choice(inside)


def compose(rng: random.Random, data: Data, device: Device = "cpu") -> KernelTask:
    """One composed task. `ops` are the operators in order, `data_source` is torch#N, `split` says whether the sequence
    is reserved. BadInput when data.numel holds no shape."""
    mix = data.operator_mix
    count = rng.choices(list(mix), weights=list(mix.values()))[0]
    while True:
        steps = _steps(rng, count)
        rows, cols = _shape(rng, steps, data, device)
        if fits(steps, rows, cols):
            break
    ops = tuple(name for name, _ in steps)
    reserved = is_held_out(ops, data.seed)
    return KernelTask(code=write_source(steps, rows, cols), ops=ops, data_source=f"torch#{count}", split="held_out" if reserved else "train")


def stream(seed: int, data: Data, device: Device = "cpu") -> Iterator[KernelTask]:
    """Composed tasks without end; equal arguments give equal tasks."""
    rng = random.Random(seed)
    while True:
        yield compose(rng, data, device)
