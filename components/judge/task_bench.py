"""Task bench: the reference data and running baselines with which the candidates of one task are judged."""

import threading

from components.core.errors import TaskError
from components.core.params import Params
from components.judge.baselines import Baseline, BaselineCache
from components.judge.device_scheduler import DeviceScheduler
from components.judge.exact_runner import ExactRunner
from components.judge.role_processes import ProcessPerRole
from components.judge.task_layout import Sizing
from components.judge.task_reference import TaskReference
from components.sandbox.runner_factory import RunnerFactory


class TaskBench:
    """Reference data and baselines with which the candidates of one task are judged.

    `fill` must be called before the bench is used.
    """

    def __init__(self, params: Params, runner_factory: RunnerFactory, scheduler: DeviceScheduler, code: str):
        processes = ProcessPerRole(params.device, runner_factory)
        self.processes = processes
        self.scheduler = scheduler
        self.reference = TaskReference(params, scheduler, code, processes, Sizing())
        self.baselines = BaselineCache(self.reference, processes)
        self.exact = ExactRunner(self.reference, processes)
        # Seconds of one call by mode of torch.compile, which is empty until the modes have been compared.
        self.mode_seconds: dict[Baseline, float] = {}
        # Whether to start torch.compile before a candidate needs it; False after such a start failed.
        self.starts_compile_early = True
        # Lock that is held on a GPU while a candidate of this task is measured.
        self.candidate_lock = threading.Lock()

    def fill(self) -> None:
        """Make the reference data, and then end the runner that makes them.

        The runner is ended so that it does not exist while candidates run. Raises TaskError if the task's
        source fails.
        """
        self.reference.fill()
        self.reference.end_runner(wait=self.reference.layout.placement.shares_buffers)

    def wrong_deferred_call(self) -> str | None:
        """Return the reason why a deferred call is wrong, or None if no deferred call is wrong.

        Deferred calls are timed calls whose outputs are compared with float64 outputs only after the
        candidate's runner has ended (`ExactRunner`). If there are any, the runners of the baselines are ended
        first. The comparison needs the memory that these runners share and that torch caches, so it is freed.
        """
        if not self.exact.deferred:
            return None
        self.baselines.close()
        with self.scheduler.preparing():
            self.processes.close()
            self.scheduler.release_cache()
        return self.exact.wrong_deferred_call()

    def close(self) -> None:
        self.baselines.close()
        self.exact.close()
        with self.scheduler.preparing():
            self.processes.close()
        self.reference.close()


def open_bench(
    params: Params, runner_factory: RunnerFactory, scheduler: DeviceScheduler, code: str
) -> TaskBench:
    """Make a bench of the task with source `code` and its reference data, and return it.

    Raises TaskError if the task's source fails.
    """
    # If the device memory is too small beside other tasks, the second attempt reserves all of it.
    for reserved in (0, scheduler.reservable_bytes):
        try:
            with scheduler.reserve_memory(reserved):
                bench = TaskBench(params, runner_factory, scheduler, code)
            break
        except TaskError as error:
            if not error.out_of_memory or reserved == scheduler.reservable_bytes:
                raise
    bench.fill()
    return bench
