"""What a form costs, read off meta tensors: floating-point operations, and bytes that eager mode reads and writes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from components.config import Device
from components.synthesis.operators import Form, apply
from components.synthesis.seeds import SEEDS, canonical

VIEWS = frozenset("view _unsafe_view reshape expand permute transpose t unsqueeze squeeze select slice alias detach as_strided split unbind".split())
NANOSECONDS = {canonical(f"F.{seed.name}"): seed.cost for seed in SEEDS}
"""Eager time for an element on one CPU core, where it was measured."""
OTHER_NANOSECONDS = 0.5
CPU_FLOPS = 4e10
GPU_FLOPS, GPU_BANDWIDTH, GPU_LAUNCH = 4e13, 3e12, 4e-6


class Meter(TorchDispatchMode):
    """Counts while it is active. Work is only counted: tensors may be meta."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.bytes = 0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            self.calls += 1
            self.bytes += sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
            counter = flop_registry.get(func.overloadpacket)
            self.flops += counter(*args, **(kwargs or {}), out_val=out) if counter is not None else 0
        return out


@functools.lru_cache(maxsize=65536)
def metered(form: Form, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, int, int]:
    """Operations, bytes and kernel launches of a form that fits this input."""
    x = torch.empty_strided(shape, stride, device="meta")
    with torch.no_grad():
        y = torch.empty(shape, device="meta") if form.second else None
        with Meter() as meter:
            apply(form, x, y)
    return meter.flops, meter.bytes, meter.calls


def eager_seconds(form: Form, shape: tuple[int, ...], stride: tuple[int, ...], device: Device) -> float:
    """A guess of the eager time: only to choose a size, the judge measures."""
    flops, moved, calls = metered(form, shape, stride)
    if device == "cuda":
        return flops / GPU_FLOPS + moved / GPU_BANDWIDTH + calls * GPU_LAUNCH
    return flops / CPU_FLOPS + moved / 8e9 * NANOSECONDS.get(canonical(form.name), OTHER_NANOSECONDS)
