"""Scheduler of access to one device, by many preparations or by one measurement, and of its memory.

A measurement times sandboxed processes, which are called runners, and a preparation is other work of the
judge on the device. On cpu a measurement reads the CPU clocks of its runners. Other runners may therefore
start, compile and be checked at the same time, and only measurements exclude each other. On cuda the clock is
wall time. A measurement begins when no preparation is running, and a preparation that comes later waits for
the measurements that are already waiting. Long work that a runner does without the judge, such as starting or
compiling, is background work, which is not waited for but paused during measurements.
"""

import contextlib
import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from components.core.records import Device
from components.sandbox.isolation import gpu_minor
from components.sandbox.runner_process import Runner
from components.sandbox.unsuspended_time import unsuspended_seconds

# Share of the device's memory that can be reserved; the rest is a margin for estimates that are too low.
MEMORY_SHARE = 0.85
# Share of the device's memory that torch may cache in this process, where no other process can use it.
CACHED_SHARE = 0.1
# Smallest number of seconds between two checks of torch's cache. The checks are rare, because each check
# holds the interpreter's lock.
TRIM_SECONDS = 5
# Seconds between two attempts to release memory of idle task benches.
RETRY_SECONDS = 0.2
# Smallest number of cores of a machine on which timed rounds on cuda get a core of their own.
MIN_CORES = 4


@functools.cache
def cores(device: Device) -> tuple[frozenset[int], frozenset[int]]:
    """Return the numbers of the CPU cores for timed rounds (series of calls), and of those for other work.

    Both sets have all cores that this process may use if `device` is cpu or if there are fewer than
    `MIN_CORES` of them. Otherwise the sets are disjoint, and all threads of this process are moved to the
    cores for other work. On a GPU a small kernel takes as long as its launch, and the cores of one machine
    differ in speed, so all timed rounds use one core (docs/judge.md). The other hardware threads of that core
    stay idle, because they would slow it down.
    """
    available = frozenset(os.sched_getaffinity(0))
    if device == "cpu" or len(available) < MIN_CORES:
        return available, available
    physical = sorted({available & _hardware_threads(core) for core in available}, key=max)
    timed = physical[-1 - gpu_minor() % max(1, len(physical) // 2)]  # each GPU's judge has a core of its own
    others = available - timed
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread may have ended
            os.sched_setaffinity(int(thread), others)
    return frozenset({max(timed)}), others


def _hardware_threads(core: int) -> frozenset[int]:
    """Return the hardware threads that share a physical core with `core`, including `core`."""
    try:
        listed = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return frozenset({core})
    spans = [[int(end) for end in span.split("-")] for span in listed.split(",")]
    return frozenset(number for span in spans for number in range(span[0], span[-1] + 1)) | {core}


class TimeLeft(threading.local):
    """Seconds of wall time for which a thread's sandboxed processes of a task's own source may still work.

    `seconds` is a value for each thread, and unlimited outside of `DeviceScheduler.limiting`. Work in a
    context of `DeviceScheduler.charged` uses these seconds up. Baselines and other processes of a task's own
    source work in such contexts, and processes of candidates (implementations that are judged) do not.
    """

    seconds: float = math.inf


class DeviceScheduler:
    """Scheduler of shared and exclusive access to one device, and of reservations of its memory.

    A preparation is work of the judge that shares the device with other preparations, such as making
    reference data, and a measurement has the device alone. On cpu, preparations may run during measurements.
    The thread that has exclusive access for a measurement may also take shared access.
    """

    def __init__(self, device: Device):
        # Whether a measurement excludes preparations, which is True on cuda and False on cpu.
        self.is_exclusive = device == "cuda"
        # Bytes of the GPU's memory; 0 on cpu.
        self.device_bytes: int = torch.cuda.get_device_properties(0).total_memory if self.is_exclusive else 0
        self.timed_cores, self.other_cores = cores(device)
        self.reservable_bytes = int(MEMORY_SHARE * self.device_bytes)
        self.free_bytes = self.reservable_bytes
        # Bytes of each reservation by its number: of those that wait, in their order, and of those that hold.
        self.memory_queue: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.reservations = itertools.count()
        # Function that frees memory of idle task benches, for a thread that waits for memory.
        self.release_idle_memory: Callable[[], None] = lambda: None
        self.condition = threading.Condition()
        self.trimmed_at = 0.0
        # Threads that have shared access (`preparing`).
        self.preparing_threads: set[int] = set()
        self.background_runners: list[Runner] = []
        # Caller of each thread that waits to measure, in order of arrival.
        self.measurement_queue: dict[int, str] = {}
        # Number of the last measurement for each caller, and the caller of each thread (`on_behalf_of`).
        self.last_turns: dict[str, int] = {}
        self.callers: dict[int, str] = {}
        self.left = TimeLeft()
        self.measuring_thread: int | None = None

    def leave(self, share: float, size: float = 0.0) -> None:
        """Leave `share` of the device's memory and `size` bytes to a sampler and a trainer on the same GPU.

        Call this before memory is reserved. Nothing is changed on cpu.
        """
        self.reservable_bytes = int(MEMORY_SHARE * ((1 - share) * self.device_bytes - size))
        # On a GPU, 0 would be no limit.
        self.reservable_bytes = max(1, self.reservable_bytes) if self.is_exclusive else 0
        self.free_bytes = self.reservable_bytes

    @property
    def _is_measuring(self) -> bool:
        return self.measuring_thread == threading.get_ident()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Block until no thread measures or waits to measure, and hold shared access to the device.

        Several threads can have shared access at the same time, for work that prepares judging. Inside the
        context the thread must not wait for anything else, because measurements wait for it. On cpu, and in a
        thread that is measuring itself or that has shared access already, this does nothing.
        """
        thread = threading.get_ident()
        if not self.is_exclusive or self._is_measuring or thread in self.preparing_threads:
            yield
            return
        with self.condition:
            self.condition.wait_for(lambda: self.measuring_thread is None and not self.measurement_queue)
            self.preparing_threads.add(thread)
        try:
            yield
        finally:
            with self.condition:
                self.preparing_threads.remove(thread)
                self.condition.notify_all()

    @contextlib.contextmanager
    def background_work(self, runner: Runner) -> Iterator[None]:
        """Let `runner`, a sandboxed process, work inside the context, while this thread waits for its answer.

        On cuda the runner is paused whenever another thread measures. The time of a pause does not count
        toward the runner's time limit.
        """
        with self.condition:
            may_run = not self.is_exclusive or self.measuring_thread is None or self._is_measuring
            runner.resume() if may_run else runner.pause()
            if self.is_exclusive and not self._is_measuring:
                self.background_runners.append(runner)
        try:
            yield
        finally:
            with self.condition:
                if runner in self.background_runners:
                    self.background_runners.remove(runner)
                runner.extend_deadline()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Block until this thread has exclusive access to the device for a measurement, and hold the access.

        Meanwhile other measurements wait, and on cuda also preparations, and background work is paused. A
        thread that already has the access may enter the context again.
        """
        if self._is_measuring:
            yield
            return
        thread = threading.get_ident()
        try:
            with self.condition:
                self.measurement_queue[thread] = caller = self.callers.get(thread, "")
                try:
                    self.condition.wait_for(lambda: self._is_next(thread))
                finally:
                    del self.measurement_queue[thread]
                self.last_turns[caller] = max(self.last_turns.values(), default=0) + 1
                self.measuring_thread = thread
                for runner in self.background_runners:
                    runner.pause()
            yield
        finally:
            with self.condition:
                if self._is_measuring:
                    self.measuring_thread = None
                    self.condition.notify_all()
                    for runner in self.background_runners:
                        runner.resume()

    def _is_next(self, thread: int) -> bool:
        """Return whether the device is free and the thread with the number `thread` is the next to measure.

        A caller is a user of the judge (`on_behalf_of`), for whom several threads may wait to measure. Of the
        callers that wait, the one whose last measurement was the longest ago is next, and of its threads the
        one that has waited longest.
        """
        if self.measuring_thread is not None or self.preparing_threads:
            return False
        callers = self.measurement_queue
        return thread == min(callers, key=lambda waiting: self.last_turns.get(callers[waiting], 0))

    @contextlib.contextmanager
    def on_behalf_of(self, caller: str) -> Iterator[None]:
        """Count this thread's measurements inside the context as those of the caller named `caller`.

        A caller is whoever requests verdicts, for example one user of a service. Callers that wait at the
        same time measure in turn, however many threads each of them has.
        """
        thread = threading.get_ident()
        self.callers[thread] = caller
        try:
            yield
        finally:
            del self.callers[thread]

    @contextlib.contextmanager
    def limiting(self, seconds: float) -> Iterator[None]:
        """Limit the time that this thread spends in contexts of `charged` to `seconds` in total.

        In these contexts, sandboxed processes of a task's own source (runners) work. The seconds are wall
        time, and the wait for the device is not among them. A runner that works when they are used up fails
        with a RunnerError of the kind `timed_out`. A separate limit for each series of timed calls would not
        be enough, because other callers wait for the device during all of them.
        """
        before, self.left.seconds = self.left.seconds, seconds
        try:
            yield
        finally:
            self.left.seconds = before

    @contextlib.contextmanager
    def charged(self, runner: Runner, seconds: float) -> Iterator[None]:
        """Give `runner` a deadline for its work in the context, and charge its time to this thread's limit.

        `runner` is a sandboxed process. The deadline is `seconds` seconds from now, or earlier if less is
        left of the limit that `limiting` set for this thread. After the deadline, waiting for the runner
        raises RunnerError.
        """
        limit = min(seconds, self.left.seconds)
        runner.deadline = unsuspended_seconds() + limit
        try:
            yield
        finally:
            # The deadline has been moved by the pauses of the runner.
            self.left.seconds -= limit - (runner.deadline - unsuspended_seconds())

    def trim_cache(self) -> None:
        """Release the device memory that torch caches if it exceeds `CACHED_SHARE` of the device's memory.

        Nothing is done on cpu, or within `TRIM_SECONDS` of the last check.
        """
        with self.condition:
            if not self.is_exclusive or time.monotonic() < self.trimmed_at + TRIM_SECONDS:
                return
            self.trimmed_at = time.monotonic()
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > CACHED_SHARE * self.device_bytes:
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def reserve_memory(self, size: int) -> Iterator[None]:
        """Block until `size` bytes of device memory are unreserved, and reserve them until the context ends.

        The thread that has waited longest is the next to get memory. Another thread gets memory before it
        only if the memory that is left for that purpose suffices: `reservable_bytes` less what the longest
        waiting thread needs and what threads hold that called after it did. So no later call delays it.
        While that thread waits, the data and baselines of tasks that no thread uses are freed
        (`release_idle_memory`). If `size` is larger than `reservable_bytes`, all reservable memory is
        reserved. On cpu nothing is reserved.
        """
        wanted = min(size, self.reservable_bytes)  # 0 on cpu
        with self.condition:
            number = next(self.reservations)
            self.memory_queue[number] = wanted
        try:
            while not self._take_memory(number, wanted):
                with self.condition:
                    lacks_memory = next(iter(self.memory_queue)) == number and self.free_bytes < wanted
                if lacks_memory:
                    self.release_idle_memory()
        finally:
            with self.condition:
                del self.memory_queue[number]
                self.condition.notify_all()
        try:
            yield
        finally:
            with self.condition:
                self.free_bytes += self.reserved.pop(number)
                self.condition.notify_all()

    def _take_memory(self, number: int, wanted: int) -> bool:
        """Reserve `wanted` bytes for the reservation `number` of `memory_queue`, if its turn has come.

        The bytes must be free. If the reservation is not the first of the queue, its bytes, those of the
        first and those that reservations after the first hold must together be at most `reservable_bytes`.
        Returns whether the bytes were reserved. If they were not, the call first waits for a change, at most
        `RETRY_SECONDS`.
        """
        with self.condition:
            first, needed = next(iter(self.memory_queue.items()))
            later = sum(size for other, size in self.reserved.items() if other > first)
            passes = number == first or later + wanted + needed <= self.reservable_bytes
            if not passes or self.free_bytes < wanted:
                self.condition.wait(RETRY_SECONDS)
                return False
            self.reserved[number] = wanted
            self.free_bytes -= wanted
            return True
