"""One task prepared for its admission: reference data and baselines in a single process, and no candidate."""

from __future__ import annotations

from components.core.config import Params
from components.judge.device_scheduler import DeviceScheduler
from components.judge.measurement import TimedRunner
from components.judge.role_processes import OneProcess
from components.judge.task_bench import Baseline, start_baseline
from components.judge.task_layout import Sizing
from components.judge.task_reference import TaskReference
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_protocol import ZygoteKind

ROUND_SHARE = 0.25
"""Share of a round's calls and bytes on a GPU, where everything else stops meanwhile and memory limits
parallelism.

A window of eager times and headroom need less precision than a reward.
"""


class AdmissionBench:
    """One task, ready to be examined after `fill`."""

    def __init__(
        self,
        params: Params,
        runner_factory: RunnerFactory,
        scheduler: DeviceScheduler,
        code: str,
        *,
        compiles: bool,
        memory_share: float,
    ):
        """Describe the task; `compiles` allows the compile baseline, `memory_share` limits the process on a
        GPU.
        """
        zygote: ZygoteKind = "compile" if compiles else "plain"
        self.processes = OneProcess(params.device, runner_factory, zygote, memory_share)
        self.scheduler = scheduler
        sizing = Sizing(
            round_share=ROUND_SHARE if scheduler.is_exclusive else 1.0,
            min_correctness_sets=2,  # the outputs of two seeds are compared
            timed_sets=2,
            keep_references=False,
        )
        self.reference = TaskReference(params, scheduler, code, self.processes, sizing)

    @property
    def bytes(self) -> int:
        """Estimated device memory for all that the bench and its process hold at once."""
        layout, share = self.reference.layout, self.processes.memory_share
        results = layout.outputs.stride * layout.capacity
        return layout.bank_bytes + max(
            layout.reference_runner_bytes(int(share * self.scheduler.device_bytes)),
            layout.staged_bytes + layout.timed_runner_bytes + results,
        )

    def fill(self, extra_bytes: int) -> None:
        """Make the reference data, with `extra_bytes` of device memory reserved besides; raises TaskError."""
        self.reference.fill(self.bytes + extra_bytes)

    def start(self, baseline: Baseline) -> TimedRunner:
        """Have the process play `baseline`; the runner returned before it is of no use then. Raises
        TaskError.
        """
        limit = self.reference.params.sandbox.run_seconds
        return start_baseline(self.reference, self.processes, baseline, warm_up_seconds=limit)

    def close(self) -> None:
        with self.scheduler.preparing():
            self.reference.end_runner()
            self.processes.close()
        self.reference.close()
