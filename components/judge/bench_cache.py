"""Task benches kept warm, so that the candidates of one task share its reference and baselines."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator

from components.judge.task_bench import TaskBench


class BenchCache:
    """Benches by task, at most `capacity` while others are unused; the least recently used ones are closed."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.benches: OrderedDict[str, TaskBench] = OrderedDict()
        self.users: Counter[str] = Counter()
        self.task_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def use(self, task_id: str, make: Callable[[], TaskBench]) -> Iterator[TaskBench]:
        """Return the task's bench, made if need be, and keep it from being closed meanwhile.

        What `make` raises is not kept: the fault may have been the machine's.
        """
        with self.lock:
            self.users[task_id] += 1
            task_lock = self.task_locks[task_id]
        try:
            with task_lock:
                bench = self.benches.get(task_id) or make()
                with self.lock:
                    self.benches[task_id] = bench
                    self.benches.move_to_end(task_id)
                    surplus = len(self.benches) - self.capacity
            for _ in range(surplus):
                self.close_unused()
            yield bench
        finally:
            with self.lock:
                self.users[task_id] -= 1

    def close_unused(self) -> None:
        """Close the unused bench that was used longest ago, if there is one."""
        with self.lock:
            unused = next((task_id for task_id in self.benches if self.users[task_id] == 0), None)
            bench = None if unused is None else self.benches.pop(unused)
        if bench is not None:
            bench.close()

    def close(self) -> None:
        for bench in self.benches.values():
            bench.close()
        self.benches.clear()
