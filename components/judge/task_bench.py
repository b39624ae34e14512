"""Task bench: the reference data and running baselines with which the candidates of one task are judged.

A candidate is an implementation of the task's module, reference data are secret inputs, parameters and
reference outputs, and baselines are eager, torch.compile and the no-op (which computes nothing).
"""

import contextlib
import functools
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator

import torch

from components.core.errors import TaskError
from components.core.params import JudgeParams
from components.judge.admission import find_trivial_answer
from components.judge.baselines import BaselineCache
from components.judge.compile_cache import compile_large
from components.judge.device_scheduler import DeviceScheduler
from components.judge.input_mixing import as_bits
from components.judge.role_processes import ProcessPerRole
from components.judge.task_layout import Sizing
from components.judge.task_reference import TaskReference
from components.judge.timed_output_check import TimedOutputCheck
from components.sandbox.runner_factory import RunnerFactory


def make_reference(
    params: JudgeParams,
    runner_factory: RunnerFactory,
    scheduler: DeviceScheduler,
    code: str,
    *,
    makes_data: bool = True,
    before_data: Callable[[TaskReference], None] | None = None,
) -> TaskReference:
    """Return the inputs, parameters and reference outputs that judging candidates of a task needs.

    `code` is the task's source, `params` are the judge's settings, `runner_factory` starts the sandboxed
    processes that run the source, and `scheduler` reserves device memory. If the task runs out of a GPU's
    memory, a second attempt first reserves all reservable device memory, so that no other task uses any. If
    `makes_data` is false, only the layout of the data is determined; otherwise `before_data` is called before
    the memory for them is reserved. Raises TaskError if the task's source
    fails, and TaskTooLarge if judging the task takes more memory than there is.
    """
    processes = ProcessPerRole(params.device, runner_factory)
    make = functools.partial(
        TaskReference,
        params,
        scheduler,
        code,
        processes,
        Sizing(),
        makes_data=makes_data,
        before_data=before_data,
    )
    try:
        return make()
    except TaskError as error:
        if not (error.out_of_memory and scheduler.is_exclusive):
            raise
    return make(describing_bytes=scheduler.reservable_bytes)


class TaskBench:
    """Reference data and baselines with which the candidates of one task are judged."""

    def __init__(
        self, params: JudgeParams, runner_factory: RunnerFactory, scheduler: DeviceScheduler, code: str
    ):
        """Make the reference data of the task with source `code`, and end the runner that makes them.

        The reference data are secret inputs, parameters and reference outputs. The runner, a sandboxed
        process, is ended so that it does not exist while candidates run. `params` are the judge's settings,
        `runner_factory` starts runners, and `scheduler` gives access to the device. Raises TaskError if the
        task's source fails, or if its inputs do not depend on the random seed.
        """
        self.scheduler = scheduler
        self.reference = make_reference(params, runner_factory, scheduler, code, before_data=compile_large)
        self.reference.end_runner(wait=self.reference.layout.placement.shares_buffers)
        self._refuse_repeated_inputs()
        self.baselines = BaselineCache(self.reference)
        self.timed_output_check = TimedOutputCheck(self.reference)
        # Lock that is held on a GPU while a candidate of this task is measured.
        self.candidate_lock = threading.Lock()

    def _refuse_repeated_inputs(self) -> None:
        """Raise TaskError if no input depends on the random seed, after closing the reference data.

        A candidate that keeps its answer from an earlier call would be right on such a task.
        """
        first, second = self.reference.inputs.sets[-2:]
        if all(torch.equal(as_bits(one), as_bits(other)) for one, other in zip(first, second, strict=True)):
            self.reference.close()
            raise TaskError(
                "get_inputs() returns no tensor that differs between two seeds, so a kept answer could not "
                "be told from a computed one; let it draw a tensor at random, without fixing the seed"
            )

    @functools.cached_property
    def trivial_answer(self) -> str:
        """Name of a trivial answer that is correct on this task, such as `zeros_pass`, or "" if none is.

        A trivial answer is an output that is made without the task's computation, for example zeros. The
        property looks for one only with KernelBench's tolerances (sandbox.tolerance=kernelbench), which do
        not depend on the magnitude of the outputs, and only if the task has at least two correctness sets
        (input sets with reference outputs). Otherwise it is "".
        """
        if self.reference.params.sandbox.tolerance == "strict" or len(self.reference.distributions) < 2:
            return ""
        with self.scheduler.preparing():
            found = find_trivial_answer(self.reference) or ""
        return found if found.endswith(("pass", "passes", "agree")) else ""

    def wrong_deferred_call(self) -> str | None:
        """Return the reason why a deferred call is wrong, or None if no deferred call is wrong.

        Deferred calls are timed calls whose outputs are compared with float64 outputs only after the
        candidate's process has ended (`TimedOutputCheck`). If there are any, the processes of the baselines
        are ended first, and the memory that they shared and that torch caches is freed, because the
        comparison needs it. The reason ends with the name of the input distribution (the change that was made
        to the inputs), as in `max_error:given`, where `given` means none. Raises TaskError if eager is too
        inexact to tell, and InfrastructureError if the float64 outputs cannot be computed.
        """
        if not self.timed_output_check.deferred:
            return None
        self.baselines.close()
        with self.scheduler.preparing():
            self.reference.drawing.close()
            self.reference.processes.close()
            torch.cuda.empty_cache()
        return self.timed_output_check.wrong_deferred_call()

    def close(self) -> None:
        self.baselines.close()
        self.timed_output_check.source.close()
        self.reference.close()


class BenchCache:
    """Cache of the reference data and baselines of tasks, by a key that identifies the task's source.

    A bench has those of one task: its inputs and reference outputs, and the running processes of eager,
    torch.compile and the no-op (`TaskBench`). If there are more benches than `capacity`, the least recently
    used benches that are not in use are closed.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.benches: OrderedDict[str, TaskBench] = OrderedDict()
        self.users: Counter[str] = Counter()
        self.task_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def use(self, key: str, make: Callable[[], TaskBench]) -> Iterator[TaskBench]:
        """Yield the bench of the task with the key `key`, and keep it open until the context ends.

        A bench has the reference data and running baselines of one task. If the cache has no bench for the
        task, `make` is called to make one. An error of `make` is raised and not cached, because the machine
        may have caused it and the next call may succeed.
        """
        with self.lock:
            self.users[key] += 1
            task_lock = self.task_locks[key]
        try:
            with task_lock:
                bench = self.benches.get(key) or make()
                with self.lock:
                    self.benches[key] = bench
                    self.benches.move_to_end(key)
                    surplus = len(self.benches) - self.capacity
            for _ in range(surplus):
                self.close_unused()
            yield bench
        finally:
            with self.lock:
                self.users[key] -= 1
                self._forget(key)

    def _forget(self, key: str) -> None:
        """Drop the lock and the user count of a task whose bench is closed and that no call uses.

        A bench has the reference data and running baselines of one task. Nothing is done if the bench is open
        or in use. The caller holds the lock of the cache.
        """
        if key not in self.benches and self.users[key] == 0:
            del self.users[key]
            self.task_locks.pop(key, None)

    def close_unused(self) -> None:
        """Close the least recently used bench that is not in use, if there is one.

        A bench has the reference data and running baselines of one task.
        """
        with self.lock:
            unused = next((key for key in self.benches if self.users[key] == 0), None)
            bench = None if unused is None else self.benches.pop(unused)
            if unused is not None:
                self._forget(unused)
        if bench is not None:
            bench.close()

    def close(self) -> None:
        with self.lock:
            benches = list(self.benches.values())
            self.benches.clear()
        for bench in benches:
            bench.close()
