"""Threads that judge candidates, shared between tasks so that several tasks are prepared at the same time.

A candidate is an implementation of a task's module that is judged.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
# Threads that the calls for one task occupy while calls for other tasks wait: one candidate of a task is
# measured at a time, and the next one is built meanwhile. Without a limit, the samples of one task, which
# come one after another, would occupy all threads, and no other task would be prepared while they wait for
# their reference data and for each other.
THREADS_PER_TASK = 2


class TaskThreads:
    """A number of threads that make calls, each on behalf of a task, in the order of their submission.

    A call is put off while `THREADS_PER_TASK` calls for its task are running and a later call waits whose
    task has fewer.
    """

    def __init__(self, threads: int):
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="judge")
        self.lock = threading.Lock()
        # Calls that wait, in order: the task's name, the future of the result, and the function.
        self.waiting: list[tuple[str, Future[Any], Callable[[], Any]]] = []
        self.running: Counter[str] = Counter()

    def submit(self, task: str, call: Callable[[], T]) -> Future[T]:
        """Return a future of the result of `call`, which is called in a thread on behalf of the task `task`.

        Raises RuntimeError after `close`.
        """
        future: Future[T] = Future()
        with self.lock:
            self.executor.submit(self._make_next)
            self.waiting.append((task, future, call))
        return future

    def _make_next(self) -> None:
        with self.lock:
            if not self.waiting:  # closed
                return
            chosen = next(
                (i for i, (task, _, _) in enumerate(self.waiting) if self.running[task] < THREADS_PER_TASK), 0
            )
            task, future, call = self.waiting.pop(chosen)
            self.running[task] += 1
        try:
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        finally:
            with self.lock:
                self.running[task] -= 1
                self.running += Counter()  # forget tasks without running calls

    def close(self) -> None:
        """Cancel the calls that wait, and wait for those that are running."""
        self.executor.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            waiting, self.waiting = self.waiting, []
        for _, future, _ in waiting:
            future.cancel()
        self.executor.shutdown(wait=True)
