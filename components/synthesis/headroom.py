"""Headroom: how far torch.compile stands above what the device could reach at all (DESIGN §6).

    headroom = compile seconds / max(compulsory bytes / bandwidth, operations / rate)

Compulsory bytes are inputs, parameters and outputs, each once; operations are counted on meta tensors where a chain was
composed here, and are unknown for sources of others, whose headroom is then an upper bound. Bandwidth and rate are
measured on the present device. A working set that fits a cache can beat the floor: a headroom below 1 is possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from components.core.task import KernelTask

LIKED = 4
"""How often the tasks with the most headroom come in one pass of training."""


def compute_headroom(evidence: Mapping[str, Any], flops: int | None) -> dict[str, Any]:
    """`headroom`, and the operations that it counts (None: unknown), from an admission's evidence; {} where the compile
    baseline was not measured."""
    if "compile_seconds" not in evidence:
        return {}
    rates = evidence["rates"]
    floor = max(evidence["compulsory_bytes"] / rates["bandwidth"], (flops or 0) / rates["flops"])
    return {"headroom": round(evidence["compile_seconds"] / floor, 4), "operations": flops}


def repeat_by_headroom(tasks: Iterable[KernelTask]) -> list[KernelTask]:
    """Tasks as often as they are worth in one pass of training: once where nothing is to be won or nothing is known, once
    more with every doubling of the headroom, four times at most."""
    return [
        task
        for task in tasks
        for _ in range(min(LIKED, 1 + int(math.log2(max(task.evidence.get("headroom", 1.0), 1.0)))))
    ]
