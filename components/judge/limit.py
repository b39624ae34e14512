"""Lower bound of the time that one call of a task takes on this device, from the device's measured speed.

A task is a PyTorch module with its inputs. The bound is that of the roofline model: each input, parameter and
output is moved once at the measured bandwidth, and the operations of the task's matrix products and
convolutions run at the measured rate of a matrix product. A kernel that needs less can be faster: one that
uses the structure of an operand, or that computes a convolution by Winograd's algorithm or an FFT.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from components.core.params import JudgeParams
from components.core.records import Device, Precision
from components.judge.task_layout import TaskLayout
from components.judge.task_reference import TaskReference
from components.judge.verdict import Rejected

# Sizes in bytes of the data that `bandwidth` moves: at least so much that a GPU needs longer for it than to
# start a kernel, and at most so much that no cache holds it. With 2^28 bytes an H200 does not reach the
# bandwidth that kernels on large tensors have.
LEAST_BYTES: dict[Device, int] = {"cpu": 1 << 20, "cuda": 1 << 25}
MOST_BYTES: dict[Device, int] = {"cpu": 1 << 28, "cuda": 1 << 29}
MATRIX_SIZE: dict[Device, int] = {"cpu": 1024, "cuda": 4096}  # rows and columns
REPETITIONS, CALLS = 5, 10
# Number of measurements of each rate, at successive calls, of which the largest is taken. On a GPU another
# process, such as a sampler, may have used the device during some of them.
MEASUREMENTS: dict[Device, int] = {"cpu": 1, "cuda": 8}
# Share of the time that writing the outputs takes below which a candidate's time is not believed.
POSSIBLE = 0.9


@dataclass(frozen=True)
class Limit:
    """What a call of a task moves and computes at least, and how fast the device does it.

    A task is a PyTorch module with its inputs. `bytes` are those of the inputs, parameters and outputs of one
    call. `operations` are the floating-point operations of the call's matrix products and convolutions.
    `bandwidth`, in bytes per second, was measured with a copy of as many bytes as all calls of a round (a
    series of timed calls) move together, because each call of a round has inputs of its own.
    `operations_per_second` is the rate of a large matrix product, or 0 if the task has no matrix products and
    convolutions. `output_seconds` is the time of writing the outputs of one call alone, to memory that a
    cache may hold. `seconds` is the limit itself, the least time of one call: the larger of the times for
    moving and computing.
    """

    bytes: int
    operations: int
    bandwidth: float
    operations_per_second: float
    output_seconds: float

    @property
    def seconds(self) -> float:
        products = self.operations / self.operations_per_second if self.operations else 0.0
        return max(self.bytes / self.bandwidth, products)


def limit_of(layout: TaskLayout, device: Device, precision: Precision) -> Limit:
    """Return the least time of a call of the task with this layout, from measurements of the device.

    `layout` has the shapes and dtypes of the task, and with `precision` tf32, products of float32 may use
    TF32. The measurements are kept for later calls in this process (`MEASUREMENTS`); `forget_bandwidth` drops
    those of bandwidth. The calling thread must have exclusive access to the device
    (`DeviceScheduler.measuring`), because other work would make the device look slower than it is.
    """
    description = layout.description
    outputs = sum(slot.bytes for slot in layout.outputs.slots)
    moved = outputs + sum(slot.bytes for slot in (*layout.inputs.slots, *layout.parameters.slots))
    used = {dtype for spec in (*description.inputs, *description.outputs) if spec for dtype in spec[1:]}
    dtypes = used & {"float64", "bfloat16", "float16"} or {"float32"}
    return Limit(
        moved,
        description.operations,
        bandwidth(device, layout.calls * moved),
        max(operation_rate(device, name, precision) for name in dtypes) if description.operations else 0.0,
        outputs / bandwidth(device, outputs),
    )


def checked_limit(params: JudgeParams, reference: TaskReference, medians: dict[str, float]) -> Limit:
    """Return the least time of a call; raise Rejected if the candidate takes less than writing its outputs.

    The error is raised if the candidate takes less than `POSSIBLE` times the measured time of writing its
    outputs. `medians` has the median seconds per call of each process, under names such as `candidate` and
    `eager`. Nothing is refused if eager too is faster than its outputs can be written, because they are then
    views of its inputs. What a candidate reads is not counted, because a part of an input may be unused. The
    device is measured again before a candidate is refused, because other work can have made it look slow.
    """
    for _ in range(2):
        with reference.scheduler.measuring():
            limit = limit_of(reference.layout, params.device, params.precision)
        if not medians["candidate"] < POSSIBLE * limit.output_seconds <= medians["eager"]:
            return limit
        forget_bandwidth()
    raise Rejected(
        "wrong_output",
        "impossible_time",
        f"a call took {medians['candidate'] * 1e6:.2f} us, and to write its outputs takes at least "
        f"{limit.output_seconds * 1e6:.2f} us, as measured with a copy of as many bytes.",
    )


def bandwidth(device: Device, size: int) -> float:
    """Return the bytes per second at which about `size` bytes together are read and written.

    It is that of a copy or of a negation, whichever is faster. The size is rounded down to a power of two,
    and limited to at least `LEAST_BYTES` and at most `MOST_BYTES`.
    """
    rounded = 1 << max(0, size.bit_length() - 1)  # outputs may have no element
    moved = min(max(rounded, LEAST_BYTES[device]), MOST_BYTES[device])

    def measure() -> float:
        source = torch.ones(moved // 8, device=device)
        target = torch.empty_like(source)
        copy = _seconds(lambda: target.copy_(source), device)
        return moved / min(copy, _seconds(lambda: torch.neg(source, out=target), device))

    return _largest(_bandwidths[device, moved], device, measure)


def operation_rate(device: Device, dtype: str, precision: Precision) -> float:
    """Return the floating-point operations per second of a product of square matrices of type `dtype`.

    `dtype` is a name such as `float32`. Products of float32 use TF32 on cuda if `precision` is tf32.
    """
    side = MATRIX_SIZE[device]

    def measure() -> float:
        a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        try:
            return 2 * side**3 / _seconds(lambda: torch.mm(a, b), device, calls=1)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed

    return _largest(_operation_rates[device, dtype, precision], device, measure)


# What has been measured, by device and bytes that were moved, and by the arguments of `operation_rate`.
_bandwidths: defaultdict[tuple[Device, int], list[float]] = defaultdict(list)
_operation_rates: defaultdict[tuple[Device, str, Precision], list[float]] = defaultdict(list)
forget_bandwidth = _bandwidths.clear


def _largest(measured: list[float], device: Device, measure: Callable[[], float]) -> float:
    """Return the largest of `measured`, to which up to `MEASUREMENTS` results of `measure` are added first.

    Each call adds one.
    """
    if len(measured) < MEASUREMENTS[device]:
        measured.append(measure())
    return max(measured)


def _seconds(work: Callable[[], Any], device: Device, calls: int = CALLS) -> float:
    """Return the seconds of one call of `work`: the least of `REPETITIONS` averages over `calls` calls.

    On cpu the seconds are those that one thread computes, and on cuda those that pass.
    """
    from torch.utils import benchmark  # its import takes 0.2 s

    clock = time.thread_time if device == "cpu" else benchmark.timer
    timer = benchmark.Timer("work()", globals={"work": work}, timer=clock)
    return min(timer.timeit(calls).mean for _ in range(REPETITIONS))
