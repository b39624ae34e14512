"""Headroom: the time of torch.compile over the least time that the device needs.

    headroom = compile seconds / max(compulsory bytes / bandwidth, operations / rate)

Compulsory bytes are those of inputs, parameters and outputs, each counted once. Operations are counted on
meta tensors for composed chains; for other sources they are unknown, and the headroom is an upper bound.
Bandwidth and rate are measured on the present device. The headroom can be below 1 when the working set fits
into a cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from components.core.task import KernelTask

MAX_REPEATS = 4
"""Number of occurrences of a task with the most headroom in one pass of training."""


def compute_headroom(evidence: Mapping[str, Any], flops: int | None) -> dict[str, Any]:
    """Return `headroom` and `operations` (None if unknown) from an admission's evidence.

    The result is {} when the compile baseline was not measured.
    """
    if "compile_seconds" not in evidence:
        return {}
    rates = evidence["rates"]
    floor = max(evidence["compulsory_bytes"] / rates["bandwidth"], (flops or 0) / rates["flops"])
    return {"headroom": round(evidence["compile_seconds"] / floor, 4), "operations": flops}


def repeat_by_headroom(tasks: Iterable[KernelTask]) -> list[KernelTask]:
    """Repeat tasks for one pass of training by their headroom.

    A task occurs once more for each doubling of its headroom, at most MAX_REPEATS times. Tasks of unknown
    headroom occur once.
    """
    return [
        task
        for task in tasks
        for _ in range(min(MAX_REPEATS, 1 + int(math.log2(max(task.evidence.get("headroom", 1.0), 1.0)))))
    ]
