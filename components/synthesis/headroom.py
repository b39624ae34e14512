"""Compute the headroom of a task: the time of torch.compile divided by a lower bound of any kernel's time.

    headroom = compile seconds / max(compulsory bytes / bandwidth, operations / rate)

Compulsory bytes are the bytes of inputs, parameters and outputs, each counted once. Operations are counted on
meta tensors for composed chains. For other sources they are unknown, and the headroom is only an upper bound.
The bandwidth (bytes per second) and the rate (operations per second) are measured on the present device. The
headroom can be below 1 if the data fit into a cache.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from components.core.task import KernelTask

# Largest number of times that a task occurs in one pass of training.
MAX_REPEATS = 4


def compute_headroom(evidence: Mapping[str, Any], flops: int | None) -> dict[str, Any]:
    """Return the entries `headroom` and `operations` for the evidence of a task.

    `evidence` is that of the task's admission. `flops` is the number of floating-point operations of one
    call, or None if it is unknown, and becomes `operations`. The result is empty if the time of torch.compile
    was not measured.
    """
    if "compile_seconds" not in evidence:
        return {}
    rates = evidence["rates"]
    floor = max(evidence["compulsory_bytes"] / rates["bandwidth"], (flops or 0) / rates["flops"])
    return {"headroom": round(evidence["compile_seconds"] / floor, 4), "operations": flops}


def repeat_by_headroom(tasks: Iterable[KernelTask]) -> list[KernelTask]:
    """Return the tasks of one pass of training, with repetitions according to their headroom.

    A task occurs once, and once more for each doubling of its headroom above 1, but at most MAX_REPEATS
    times. A task with unknown headroom occurs once.
    """
    return [
        task
        for task in tasks
        for _ in range(min(MAX_REPEATS, 1 + int(math.log2(max(task.evidence.get("headroom", 1.0), 1.0)))))
    ]
