"""Preparation of one task for its admission: reference data and baselines in one process."""

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
"""Share of a round's usual calls and bytes that an admission uses on a GPU.

Nothing else runs on the GPU during a timed round, and its memory limits how many tasks are admitted at once.
The limits of the eager time and the estimate of headroom need less precision than a reward.
"""


class AdmissionBench:
    """Reference data and baselines of one task whose admission is decided; usable after `fill`."""

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
        """Start the process and have the task's source describe itself; raises TaskError.

        `compiles` allows the compile baseline. `memory_share` is the share of a GPU's memory that the process
        may allocate.
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
        """Estimated bytes of device memory that the bench and its process use at once."""
        layout, share = self.reference.layout, self.processes.memory_share
        results = layout.outputs.stride * layout.capacity
        return layout.bank_bytes + max(
            layout.reference_runner_bytes(int(share * self.scheduler.device_bytes)),
            layout.staged_bytes + layout.timed_runner_bytes + results,
        )

    def fill(self, extra_bytes: int) -> None:
        """Make the reference data, with `extra_bytes` more of device memory reserved; raises TaskError."""
        self.reference.fill(self.bytes + extra_bytes)

    def start(self, baseline: Baseline) -> TimedRunner:
        """Switch the process to the role of `baseline` and return its timed runner; raises TaskError.

        The timed runner that an earlier call returned can no longer be used.
        """
        limit = self.reference.params.sandbox.run_seconds
        return start_baseline(self.reference, self.processes, baseline, warm_up_seconds=limit)

    def close(self) -> None:
        with self.scheduler.preparing():
            self.reference.end_runner()
            self.processes.close()
        self.reference.close()
