"""The schedule space: the independent choices by which kernels for one chain of operators differ.

A schedule changes how a kernel computes, not what. Which one is the fastest depends on the operators and the
shape of a task, and some are too inexact for some tasks, for example float accumulators for long rows. A
choice that does not concern a chain leaves its kernel unchanged.
"""

import itertools
import random
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from components.core.records import Device


@dataclass(frozen=True)
class CpuSchedule:
    """The choices for a C++ kernel.

    `fusion` says whether all operators share a pass over the memory or each has its own, `math` whether
    functions such as exp are those of libm or of vec.h, `loops` whether loops are vectorised, `accumulator`
    the type of sums, and `algorithm` how softmax and norms are computed (ALGORITHMS in operator_code.py).
    """

    fusion: Literal["none", "all"]
    math: Literal["libm", "vec"]
    loops: Literal["scalar", "simd"]
    accumulator: Literal["float", "double"]
    algorithm: Literal["store", "recompute", "online"]


@dataclass(frozen=True)
class CudaSchedule:
    """The choices for a CUDA kernel.

    `fusion` says which operators share a launch, `threads` the size of a block, `width` the elements of one
    memory access of an elementwise kernel, and `combine` how the threads of a block combine their sums: in
    shared memory or, within a warp, by shuffles.
    """

    fusion: Literal["none", "all"]
    threads: Literal[128, 256, 512]
    width: Literal[1, 4]
    combine: Literal["shared", "shuffle"]


Schedule = CpuSchedule | CudaSchedule
TYPES: dict[Device, type[CpuSchedule] | type[CudaSchedule]] = {"cpu": CpuSchedule, "cuda": CudaSchedule}


@cache
def choices(device: Device) -> dict[str, tuple[Any, ...]]:
    """Return the possible values of each choice in the schedules of a device, by the name of the choice."""
    hints = get_type_hints(TYPES[device])
    return {field.name: get_args(hints[field.name]) for field in fields(TYPES[device])}


@cache
def all_schedules(device: Device) -> tuple[Schedule, ...]:
    """Return all schedules of a device, in a fixed order."""
    return tuple(TYPES[device](*values) for values in itertools.product(*choices(device).values()))


def draw_schedule(rng: random.Random, device: Device) -> Schedule:
    """Return a random schedule; every one has the same probability."""
    return rng.choice(all_schedules(device))


# Three schedules of a chain from slow to fast, as examples: one loop or launch for each operator, one for the
# chain, and one with vector instructions or wide accesses and faster functions.
SEPARATE: dict[Device, Schedule] = {
    "cpu": CpuSchedule("none", "libm", "scalar", "double", "store"),
    "cuda": CudaSchedule("none", 256, 1, "shared"),
}
FUSED: dict[Device, Schedule] = {
    "cpu": CpuSchedule("all", "libm", "scalar", "double", "store"),
    "cuda": CudaSchedule("all", 256, 1, "shared"),
}
VECTORISED: dict[Device, Schedule] = {
    "cpu": CpuSchedule("all", "vec", "simd", "double", "store"),
    "cuda": CudaSchedule("all", 256, 4, "shuffle"),
}
