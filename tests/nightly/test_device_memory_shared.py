"""Threads that judge more tasks than a GPU's memory holds do not wait for each other forever."""

import contextlib
import faulthandler
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import judge_fixtures as corpus

from components.core.config import resolve
from components.core.task import KernelTask
from components.judge.device_scheduler import DeviceScheduler
from components.judge.judge import Judge

TASKS, CANDIDATES, ROUNDS = 6, ("simd", "naive"), 2


class SmallDevice(DeviceScheduler):
    """A scheduler with the rules of a GPU, memory for two tasks at a time, and slow preparations."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.is_exclusive, self.device_bytes = True, 1 << 41
        self.free_bytes = self.reservable_bytes = 1 << 40

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        with super().preparing():
            time.sleep(0.05)
            yield

    @contextlib.contextmanager
    def reserve_memory(self, size: int) -> Iterator[None]:
        with super().reserve_memory(self.reservable_bytes // 2):
            yield


def test_tasks_that_wait_for_memory_and_for_the_device_all_end(tmp_path: Path) -> None:
    judge = Judge(resolve("ci").params, tmp_path, scheduler=SmallDevice())
    judge.scheduler.release_idle_memory = judge.bench_cache.close_unused
    tasks = [KernelTask(code=f"{corpus.CODE}\n# {number}\n") for number in range(TASKS)]
    asked = [*itertools.product(range(ROUNDS), CANDIDATES, tasks)]
    # A thread that waits forever ends the test with the stacks of all threads.
    faulthandler.dump_traceback_later(600, exit=True)
    try:
        with contextlib.closing(judge), ThreadPoolExecutor(8) as workers:
            found = workers.map(
                lambda one: judge.verdict(one[2], corpus.files("honest", one[1]), compare_compile=None), asked
            )
            assert {verdict.status for verdict in found} == {"correct"}
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert judge.scheduler.free_bytes == judge.scheduler.reservable_bytes
