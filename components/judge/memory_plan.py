"""Plan of the memory for judging a task: where the task's data are placed, so that they fit the device.

A task is a PyTorch module with its inputs, and its data are inputs, parameters and outputs. `available_bytes`
determines how much host memory this process can still use. This function considers the memory of the machine
and the limits of the process's control groups.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components.core.errors import TaskTooLarge
from components.core.params import JudgeParams
from components.judge.correctness import PART_NUMEL
from components.judge.device_scheduler import MEMORY_SHARE, DeviceScheduler
from components.judge.input_mixing import MAX_DOUBLED_BYTES
from components.judge.task_description import Description
from components.judge.task_layout import MAX_CALLS, MAX_ROUND_BYTES, PLACEMENTS, Sizing, TaskLayout

# Bytes of device memory that CUDA uses for each process.
CONTEXT_BYTES = 600 << 20
# Largest number of timed runners of a task: a candidate, eager, the no-op, two torch.compile modes.
TIMED_RUNNERS = 5
# If `sandbox.device_bytes` limits the budget, the rounds of a task have more than the least number of calls
# only if the task then needs at most this share of the budget. That leaves memory for other tasks.
ROUND_SHARE = 0.7
# Share of the available host memory that judging one task may take.
HOST_SHARE = 0.8
# Largest number of copies of one call's outputs that an admission makes at once to compare a trivial answer.
TRIVIAL_COPIES = 2
# Bytes that the judge needs to compare one part of an output, to examine or to mix one block of an input.
COMPARING_BYTES = 48 * PART_NUMEL
# Bytes of device memory that are used besides those of a task with shared buffers: the CUDA contexts of the
# judge's own process and of the runner that draws inputs, freed memory that torch caches in it, and what the
# driver takes (docs/judge.md).
JUDGE_BYTES = 5 << 30


@dataclass(frozen=True)
class MemoryBudget:
    """Memory that the judge of one device may use for a task (a PyTorch module that is to be made faster).

    `device_bytes` is the device memory that judging one task may take, or 0 if it is not limited, which is
    the case on cpu unless `sandbox.device_bytes` is set. `runner_bytes` is the device memory that one runner
    of the task's source (a sandboxed process) may allocate. `host_bytes` is the host memory that may be used.
    """

    device_bytes: int
    runner_bytes: int
    host_bytes: int

    @staticmethod
    def of(params: JudgeParams, scheduler: DeviceScheduler, runner_share: float = 1.0) -> "MemoryBudget":
        """Return the budget of the judge with the settings `params` on the device of `scheduler`.

        `runner_share` is the share of the device's memory that one sandboxed process of a task's source may
        allocate.
        """
        limit = int(MEMORY_SHARE * params.sandbox.device_bytes)
        sizes = [size for size in (scheduler.reservable_bytes, limit) if size > 0]
        return MemoryBudget(
            device_bytes=min(sizes, default=0),
            runner_bytes=int(runner_share * scheduler.device_bytes),
            host_bytes=int(HOST_SHARE * (params.sandbox.host_bytes or available_bytes())),
        )


@dataclass(frozen=True)
class MemoryNeed:
    """Estimated bytes that judging a task takes.

    `fill` bytes of device memory (on cpu, of host memory) are needed while the task's inputs, parameters and
    reference outputs are made, `timed` bytes while sandboxed processes are timed, `deferred` bytes while
    float64 outputs of timed calls are computed after the measurement, and `host` bytes of host memory on
    cuda. `deferred` and `host` are 0 unless the baselines (eager, torch.compile and the no-op) share buffers.
    """

    fill: int
    timed: int
    deferred: int
    host: int

    @property
    def device(self) -> int:
        """Estimated bytes of device memory that are used at once."""
        return max(self.fill, self.timed, self.deferred)


def memory_need(layout: TaskLayout, runner_bytes: int) -> MemoryNeed:
    """Return the estimated memory that judging a task with this layout takes.

    `runner_bytes` is the device memory that one runner of the task's source (a sandboxed process) may
    allocate.
    """
    return _sharing_need(layout) if layout.placement.shares_buffers else _separate_need(layout, runner_bytes)


def _separate_need(layout: TaskLayout, runner_bytes: int) -> MemoryNeed:
    inputs, outputs, expected = layout.inputs.stride, layout.outputs.stride, layout.expected.stride
    parameters, peak = layout.parameters.stride, layout.description.peak_bytes
    count = len(layout.distributions)
    doubled = 2 * (layout.input_sets - count) if inputs <= MAX_DOUBLED_BYTES else 0
    prepared = count if layout.keeps_references else 3  # one set, and memory for preparing it
    bank = (
        inputs * (layout.input_sets + doubled)
        + (outputs + expected) * count
        + expected * prepared
        + 8 * parameters
    )
    reference_runner = CONTEXT_BYTES + min(3 * peak, runner_bytes)
    staged = inputs * layout.capacity
    timed_runner = CONTEXT_BYTES + staged + inputs + 3 * outputs * layout.capacity + peak
    exact_runner = reference_runner + parameters + inputs + 6 * expected
    timed = (
        timed_runner + outputs * layout.capacity
        if layout.sizing.one_process
        else TIMED_RUNNERS * timed_runner + exact_runner
    )
    return MemoryNeed(fill=bank + reference_runner, timed=bank + staged + timed, deferred=0, host=0)


def _sharing_need(layout: TaskLayout) -> MemoryNeed:
    """Return the memory that judging a task takes with a layout in which the baselines share buffers.

    The baselines are eager, torch.compile and the no-op. The layout is for tasks whose data do not fit
    otherwise. Only one timed process at a time has more memory than its context, its parameters and its
    buffers. A process of the task's source computes outputs only while no timed process exists. When float64
    outputs are computed after the measurement, the buffers of the timed processes are freed too.
    """
    inputs, outputs, expected = layout.inputs.stride, layout.outputs.stride, layout.expected.stride
    parameters, peak = layout.parameters.stride, layout.description.peak_bytes
    count, capacity = len(layout.distributions), layout.capacity
    bank, host = JUDGE_BYTES + COMPARING_BYTES, parameters
    if layout.placement.inputs_on_host:
        host += inputs * layout.input_sets
    else:
        bank += inputs * layout.input_sets
    # Outputs of the correctness sets, and float64 outputs of a call that is compared after the measurement.
    references, exact = (outputs + expected) * count, 0 if layout.sizing.one_process else expected
    if layout.placement.references_on_host:
        # The trivial answers that an admission compares with the references are in host memory too.
        host += references + exact + (TRIVIAL_COPIES * outputs if layout.sizing.one_process else 0)
        references = exact = 0
    bank += references
    # The parameters in the task's own precision and their first values, the inputs, and the call in float64.
    float64_call = CONTEXT_BYTES + 2 * parameters + inputs + 2 * peak
    fill = bank + float64_call
    # The no-op's outputs are views of its inputs if these are larger.
    noop = outputs * capacity if outputs > inputs else 0
    # A runner in its round has what a call needs in addition to its inputs, and the outputs of all calls.
    working = max(peak - inputs, outputs + parameters) + outputs * (capacity - 1)
    if layout.sizing.one_process:
        # The judge's inputs of the round, and the runner's inputs, its outputs, and the results of the first
        # and of the latest round. When answers are compared, only the runner's buffers are left of these, and
        # when the task's source is called with changed inputs, none.
        rounds = (2 * inputs + 3 * outputs) * capacity + noop + working
        answers = (inputs + outputs) * capacity + TRIVIAL_COPIES * outputs
        probing = 2 * parameters + 2 * inputs + outputs + peak
        timed = bank + CONTEXT_BYTES + max(rounds, answers, probing)
        return MemoryNeed(fill, timed, deferred=0, host=host + parameters)
    # The judge's inputs of the round, the inputs, outputs and results of candidates and of baselines, and the
    # parameters of two torch.compile modes and one more runner that wait.
    buffers = (3 * inputs + 4 * outputs) * capacity + noop + 3 * parameters
    # Between rounds, the runner that draws inputs allocates those of one call. Its context is in JUDGE_BYTES.
    timed = bank + TIMED_RUNNERS * CONTEXT_BYTES + buffers + max(working, inputs)
    # The call's inputs and float64 outputs in shared memory, in addition to what the runner allocates.
    deferred = bank + exact + inputs + float64_call
    # The parameters of the candidate, the baselines and the runner of float64 outputs, and the outputs of two
    # runners in two calls that are compared after the measurement.
    return MemoryNeed(fill, timed, deferred, host + 3 * parameters + 4 * outputs)


def plan_layout(
    description: Description, params: JudgeParams, sizing: Sizing, budget: MemoryBudget
) -> TaskLayout:
    """Return the memory layout of a task with the fastest placement that fits the budget.

    A placement says which data are shared or in host memory (`task_layout.Placement`). `description` has the
    shapes of the task, and `sizing` says how much of it is prepared. With each placement, the full number of
    correctness sets (input sets with reference outputs) is tried first, and then as few as `sizing` allows.
    Without shared buffers, fewer calls in a round (a series of timed calls) are tried before fewer sets,
    because a round with shared buffers has fewer calls still and takes longer for each of them. If
    sandbox.device_bytes is set, which leaves the rest of the device to other processes, more than the least
    number of calls is planned only if the task then needs at most `ROUND_SHARE` of the budget.
    If the budget does not limit device memory, as on cpu, the fastest placement fits. Raises TaskTooLarge if
    nothing fits, or if one call has more inputs and outputs than can be measured on cpu, or the parameters
    there take more than `sandbox.memory_bytes`.
    """
    sandbox, most, needs = params.sandbox, MAX_CALLS[params.device], []
    # Limits of the calls of a round: the usual one, and its halves down to the least number of calls.
    limits = [most >> n for n in range(most.bit_length()) if most >> n >= sandbox.sets_per_round] or [most]
    round_share = ROUND_SHARE if sandbox.device_bytes else 1.0
    for placement in PLACEMENTS:
        tried = limits[:1] if placement.shares_buffers else limits
        for most_sets, most_calls, budget_share in (
            *((sandbox.correctness_sets, calls, round_share) for calls in tried[:-1]),
            (sandbox.correctness_sets, tried[-1], 1.0),
            (sizing.min_correctness_sets, tried[0], 1.0),
        ):
            layout = TaskLayout.of(
                description, sandbox, params.device, sizing, placement, most_sets, most_calls
            )
            if not budget.device_bytes:
                # A runner whose source took it over can report sizes for which it has no memory itself.
                for what, size, largest in (
                    ("one call's inputs and outputs", layout.call_bytes, MAX_ROUND_BYTES["cpu"]),
                    ("its parameters", layout.parameters.stride, sandbox.memory_bytes),
                ):
                    if size > largest:
                        raise TaskTooLarge(
                            f"{what} take {_gigabytes(size)}, and at most {_gigabytes(largest)} can be"
                            " measured on cpu"
                        )
                return layout
            need = memory_need(layout, budget.runner_bytes)
            if need.device <= budget_share * budget.device_bytes and need.host <= budget.host_bytes:
                return layout
            needs.append(need)
    least = min(needs, key=lambda need: need.device)
    raise TaskTooLarge(
        f"judging it takes {_gigabytes(least.device)} of device memory and {_gigabytes(least.host)} of host"
        f" memory, and {_gigabytes(budget.device_bytes)} and {_gigabytes(budget.host_bytes)} can be used"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that are available to this process.

    This is the smallest of the machine's available memory (`MemAvailable` of /proc/meminfo) and, for the
    process's control group (version 2, cgroups(7)) and each of its parents, the limit less the memory in use.
    Pages of files that are not in active use count as available. `root` is the folder that contains proc and
    sys. The result is too small on a virtual machine whose memory grows as it is used; callers then replace
    it by the parameter `sandbox.host_bytes`.
    """
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return min([1024 * int(meminfo["MemAvailable"].split()[0]), *_left_by_limits(root)])


def _left_by_limits(root: Path) -> Iterator[int]:
    """Yield, for each memory limit of this process's control group, the bytes that can still be used.

    The limits are those of the group itself and of its parents.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:  # the kernel has no control groups
        return
    mount = root / "sys/fs/cgroup"
    for path in (line.removeprefix("0::") for line in memberships if line.startswith("0::")):
        folder = mount / path.lstrip("/")
        # In a container the path may be the host's and the mount the container's own group. Then only the
        # last of these folders, the mount itself, exists.
        for group in (folder, *folder.parents)[: len(folder.relative_to(mount).parts) + 1]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                limit = (group / "memory.max").read_text().strip()
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                if limit != "max":
                    used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
                    yield max(0, int(limit) - used)
