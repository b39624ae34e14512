"""Reference data and baselines with which the judge decides whether to admit a task.

A single sandboxed process makes the data and runs the baselines (`OneProcess`). Separate processes are not
needed, because no candidate runs in an admission.
"""

from components.core.params import Params
from components.judge.baselines import Baseline, start_baseline
from components.judge.device_scheduler import DeviceScheduler
from components.judge.role_processes import OneProcess
from components.judge.task_layout import Sizing
from components.judge.task_reference import TaskReference
from components.judge.timed_runner import TimedRunner
from components.sandbox.inside.runner_protocol import ZygoteKind
from components.sandbox.runner_factory import RunnerFactory

# Number of calls and bytes in a round of an admission on a GPU, as a share of the usual number. The rounds
# are short, because nothing else runs on the GPU during a round, and small, because the GPU's memory limits
# how many tasks are prepared at once. The times that an admission measures need less precision than a reward.
ROUND_SHARE = 0.25


class AdmissionBench:
    """Reference data and baselines of one task whose admission is decided.

    `reference.fill` must be called before `start`.
    """

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
        """Start a process with the task's source `code`, and compute the memory layout from its description.

        `compiles` determines whether the process can also take the role of torch.compile. `memory_share` is
        the share of a GPU's memory that the process may allocate. Raises TaskError if the task's source fails
        or its description is invalid.
        """
        zygote: ZygoteKind = "compile" if compiles else "plain"
        self.processes = OneProcess(params.device, runner_factory, zygote, memory_share)
        self.scheduler = scheduler
        sizing = Sizing(
            round_share=ROUND_SHARE if scheduler.is_exclusive else 1.0,
            min_correctness_sets=2,  # the outputs of two seeds are compared
            timed_sets=2,
            keep_references=False,
            one_process=True,
        )
        self.reference = TaskReference(params, scheduler, code, self.processes, sizing, memory_share)

    def start(self, baseline: Baseline) -> TimedRunner:
        """Switch the process to the role of `baseline`, and return its timed runner.

        The timed runner that an earlier call returned can no longer be used. Raises TaskError if the baseline
        fails or an output is wrong.
        """
        limit = self.reference.params.sandbox.run_seconds
        return start_baseline(self.reference, self.processes, baseline, warm_up_seconds=limit)

    def free_buffers(self) -> None:
        """Free the memory of timed runners and the device memory that torch caches.

        The next call of `start` allocates memory again. The process itself unmaps the memory when it leaves
        its role. Nothing is done unless the task's baselines share buffers (`Placement.shares_buffers`),
        because device memory is otherwise not scarce.
        """
        if self.reference.layout.placement.shares_buffers:
            with self.scheduler.preparing():
                self.processes.close()
                self.scheduler.release_cache()

    def close(self) -> None:
        with self.scheduler.preparing():
            self.reference.end_runner()
            self.processes.close()
        self.reference.close()
