"""The threads of a pool: how they are shared between tasks, and what becomes of calls that never begin."""

import threading
import time
from concurrent.futures import CancelledError, Future

import pytest

from components.judge.pool.task_threads import TaskThreads


class Calls:
    """Calls that say that they have begun, and end when they are told to."""

    def __init__(self, threads: TaskThreads):
        self.threads = threads
        self.begun: list[str] = []
        self.end: dict[str, threading.Event] = {}

    def submit(self, *names: str) -> list[Future[str]]:
        """Submit a call for each name, whose first letter is its task."""
        for name in names:
            self.end[name] = threading.Event()
        return [self.threads.submit(name[0], lambda name=name: self.call(name)) for name in names]

    def call(self, name: str) -> str:
        self.begun.append(name)
        assert self.end[name].wait(60)
        return name

    def await_begun(self, *names: str) -> None:
        for _ in range(6000):
            if len(self.begun) >= len(names):
                break
            time.sleep(0.01)
        assert sorted(self.begun) == sorted(names)


def test_the_samples_of_a_task_leave_threads_for_other_tasks() -> None:
    threads = TaskThreads(5)
    calls = Calls(threads)
    before = ("z1", "z2", "z3", "z4", "z5")
    calls.submit(*before)
    calls.await_begun(*before)
    names = ("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    futures = calls.submit(*names)
    for name in before:
        calls.end[name].set()
    calls.await_begun(*before, "a1", "a2", "b1", "b2", "c1")
    calls.end["a1"].set()
    calls.await_begun(*before, "a1", "a2", "b1", "b2", "c1", "a3")
    calls.end["b1"].set()  # only a4 waits, so it begins although two calls of its task are running
    calls.await_begun(*before, *names)
    for event in calls.end.values():
        event.set()
    assert [future.result(60) for future in futures] == list(names)
    threads.close()
    assert not threads.running and not threads.waiting


def test_one_task_may_have_all_threads_if_no_other_waits() -> None:
    threads = TaskThreads(4)
    calls = Calls(threads)
    futures = calls.submit("a1", "a2", "a3", "a4")
    calls.await_begun("a1", "a2", "a3", "a4")
    for event in calls.end.values():
        event.set()
    assert [future.result(60) for future in futures] == ["a1", "a2", "a3", "a4"]
    threads.close()


def test_errors_are_results_and_calls_that_wait_are_cancelled() -> None:
    threads = TaskThreads(1)
    calls = Calls(threads)

    def fail() -> None:
        raise ValueError("of the call")

    with pytest.raises(ValueError, match="of the call"):
        threads.submit("a", fail).result(60)
    running, dropped, waiting = calls.submit("a1", "a2", "b1")
    calls.await_begun("a1")
    assert dropped.cancel()
    closing = threading.Thread(target=threads.close)
    closing.start()
    with pytest.raises(CancelledError):
        waiting.result(60)
    calls.end["a1"].set()
    closing.join(60)
    assert running.result(60) == "a1" and calls.begun == ["a1"]
    with pytest.raises(RuntimeError):
        threads.submit("a", fail)
