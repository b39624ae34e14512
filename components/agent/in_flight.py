"""Run many trajectories, which are attempts of a policy at tasks, at the same time in coroutines.

Blocking parts of a trajectory, such as tool calls, run in threads, of which there are as many as needed,
because a waiting thread costs little. Scarce resources are limited elsewhere: sequences by the capacity of
the sampler, jobs of the judge by the pool of judges, and shell commands by the number of cores (`shell.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from components.core.errors import StageFailed
from components.sandbox.unsuspended_time import unsuspended_seconds

if TYPE_CHECKING:
    from components.agent.trajectory import Trajectory

# Largest number of threads for the blocking parts of trajectories; they are started when they are needed.
MAX_THREADS = 8192


class BusyMeter:
    """Meter of the time during which at least one thread or coroutine is inside the context `busy()`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.since = 0.0
        self.total = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        with self.lock:
            if self.count == 0:
                self.since = unsuspended_seconds()
            self.count += 1
        try:
            yield
        finally:
            with self.lock:
                self.count -= 1
                if self.count == 0:
                    self.total += unsuspended_seconds() - self.since

    def seconds(self) -> float:
        """Return the seconds so far during which something was inside the context `busy()`."""
        with self.lock:
            return self.total + (unsuspended_seconds() - self.since if self.count else 0.0)


async def keep_in_flight(
    start: Callable[[], Coroutine[Any, Any, None] | None],
    capacity: Callable[[], int],
    changed: asyncio.Event | None = None,
) -> None:
    """Run the coroutines that `start` returns, at most `max(1, capacity())` at a time, each until its end.

    `start` is called for one coroutine at a time and returns None if there is none to start at present.
    Without `changed`, this function returns when no coroutine runs and `start` returns None. If the event
    `changed` is given, the function does not return but waits for the event or the end of a coroutine, and
    then calls `start` again. If a coroutine raises an error, the other coroutines are cancelled and the error
    is raised. A coroutine that ends because it was cancelled, for instance because the judge cancelled its
    job, counts as one that raised StageFailed. The running event loop gets a default executor of at most
    `MAX_THREADS` threads.
    """
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="trajectory")
    )
    running: set[asyncio.Task[None]] = set()
    signal: asyncio.Task[None] | None = None
    try:
        while True:
            if changed is not None and (signal is None or signal.done()):
                signal = asyncio.create_task(_wait_and_clear(changed))
                running.add(signal)
            while len(running - {signal}) < max(1, capacity()) and (coroutine := start()) is not None:
                running.add(asyncio.create_task(coroutine))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    raise StageFailed("rollout: a trajectory was cancelled before its end; run again.")
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _wait_and_clear(event: asyncio.Event) -> None:
    await event.wait()
    event.clear()


def run_all(
    count: int,
    run: Callable[[int], Coroutine[Any, Any, Trajectory]],
    capacity: Callable[[], int] | None = None,
    *,
    on_progress: Callable[[int, int], None],
    stop: Callable[[], None],
) -> list[Trajectory]:
    """Run the coroutine `run(index)` for every index below `count`, and return their trajectories in order.

    At most `capacity()` coroutines, but at least one, run at a time; all of them if `capacity` is None.
    `on_progress` is called with the numbers of finished and of all trajectories. If a coroutine raises an
    error, or this call is interrupted, `stop` is called, which cancels the judge jobs that have not begun,
    and the other coroutines are cancelled. The error is raised when the threads of the coroutines have ended,
    which wait for the judge jobs that have begun.
    """
    found: dict[int, Trajectory] = {}
    indices = iter(range(count))

    async def one(index: int) -> None:
        found[index] = await run(index)
        on_progress(len(found), count)

    async def every() -> None:
        try:
            await keep_in_flight(
                lambda: next((one(index) for index in indices), None), capacity or (lambda: count)
            )
        except BaseException:
            stop()
            raise

    asyncio.run(every())
    return [found[index] for index in range(count)]
