"""Cache of task benches, so that the candidates of one task share its reference data and baselines."""

import contextlib
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator

from components.judge.task_bench import TaskBench


class BenchCache:
    """Cache of task benches by task id.

    If there are more benches than `capacity`, the least recently used benches that are not in use are closed.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.benches: OrderedDict[str, TaskBench] = OrderedDict()
        self.users: Counter[str] = Counter()
        self.task_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def use(self, task_id: str, make: Callable[[], TaskBench]) -> Iterator[TaskBench]:
        """Yield the bench of a task, and keep it open until the context ends.

        If the cache has no bench for the task, `make` is called. An error of `make` is raised and not cached,
        because the machine may have caused it and the next call may succeed.
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
                self._forget(task_id)

    def _forget(self, task_id: str) -> None:
        """Drop the lock and the user count of a task if it has no bench and no call uses it.

        The caller holds the lock of the cache.
        """
        if task_id not in self.benches and self.users[task_id] == 0:
            del self.users[task_id]
            self.task_locks.pop(task_id, None)

    def close_unused(self) -> None:
        """Close the least recently used bench that is not in use, if there is one."""
        with self.lock:
            unused = next((task_id for task_id in self.benches if self.users[task_id] == 0), None)
            bench = None if unused is None else self.benches.pop(unused)
            if unused is not None:
                self._forget(unused)
        if bench is not None:
            bench.close()

    def close(self) -> None:
        for bench in self.benches.values():
            bench.close()
        self.benches.clear()
