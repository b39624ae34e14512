"""What a form costs, read off meta tensors: floating-point operations, and bytes that eager mode reads and writes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from components.core.config import Device
from components.synthesis.core_operators import CORE_OPERATORS, canonical
from components.synthesis.mined_operators import OperatorTemplate, output_layout

VIEWS = frozenset(
    "view _unsafe_view reshape expand permute transpose t unsqueeze squeeze select slice alias detach as_strided split unbind".split()
)
NANOSECONDS = {canonical(f"F.{seed.name}"): seed.cost for seed in CORE_OPERATORS}
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
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            self.calls += 1
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self.bytes += sum(t.nbytes for t in tensors)
            self.largest = max(self.largest, *(t.nbytes for t in tensors), 0)
            counter = flop_registry.get(func.overloadpacket)
            self.flops += counter(*args, **(kwargs or {}), out_val=out) if counter is not None else 0
        return out


@dataclass(frozen=True)
class OperatorCost:
    """A form on one input: shape and strides of its output, operations, bytes, kernel launches, and bytes of the largest tensor, parameters too."""

    after: tuple[tuple[int, ...], tuple[int, ...]]
    flops: int
    bytes: int
    calls: int
    largest: int


@functools.lru_cache(maxsize=65536)
def operator_cost(
    form: OperatorTemplate, shape: tuple[int, ...], stride: tuple[int, ...]
) -> OperatorCost | None:
    """None where the form does not fit this input."""
    with Meter() as meter:
        after = output_layout.__wrapped__(form, shape, stride)
    return (
        None if after is None else OperatorCost(after, meter.flops, meter.bytes, meter.calls, meter.largest)
    )


def eager_seconds(form: OperatorTemplate, met: OperatorCost, device: Device) -> tuple[float, float]:
    """A guess of the eager time, only to choose a size, since the judge measures: what it takes at any size, and what grows with
    the size. On a GPU launches are nearly all that a small input takes."""
    if device == "cuda":
        return met.calls * GPU_LAUNCH, met.flops / GPU_FLOPS + met.bytes / GPU_BANDWIDTH
    return 0.0, met.flops / CPU_FLOPS + met.bytes / 8e9 * NANOSECONDS.get(
        canonical(form.name), OTHER_NANOSECONDS
    )
