"""Access to one device, for many preparations at once or for one measurement, and reservations of its memory.

On cpu a measurement reads the CPU clocks of its runners. Runners start, are checked and compile beside it,
and only measurements exclude each other. On cuda the clock is wall time. A measurement begins when no
preparation runs, and preparations that come later wait for the measurements that are already waiting. Long
work that a runner does without the judge, such as starting or compiling, is background work; it is paused
during measurements instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from components.core.config import Device
from components.sandbox.runner_process import Runner

MEMORY_SHARE = 0.85
"""Share of the device's memory that can be reserved; the rest is a margin for low estimates."""
CACHED_SHARE = 0.1
"""Share of the device's memory that torch may cache in this process, where no other process can use it."""
TRIM_SECONDS = 5
"""Seconds between two checks of torch's cache; each check holds the interpreter's lock."""
RETRY_SECONDS = 0.2
"""Seconds between two attempts to release memory of idle task benches."""
MIN_CORES = 4
"""Fewest cores of a machine on which timed rounds on cuda get a core of their own."""


@functools.cache
def cores(device: Device) -> tuple[frozenset[int], frozenset[int]]:
    """Return the cores for timed rounds and those for everything else, and move this process to the latter.

    On a GPU a small kernel takes as long as its launch, and the cores of one machine differ in speed, so all
    timed rounds use one core (docs/judge.md). The other hardware threads of that core stay idle, since they
    would slow it down.
    """
    available = frozenset(os.sched_getaffinity(0))
    if device == "cpu" or len(available) < MIN_CORES:
        return available, available
    physical = sorted({available & _hardware_threads(core) for core in available}, key=max)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]  # each GPU's judge has a core of its own
    number = int(first) if first.isdecimal() else 0
    timed = physical[-1 - number % max(1, len(physical) // 2)]
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


class DeviceScheduler:
    """Shared and exclusive access to one device; the thread that measures may also do everything else."""

    def __init__(self, device: Device):
        self.is_exclusive = device == "cuda"
        """Whether a measurement excludes preparations, which holds on cuda."""
        self.device_bytes: int = torch.cuda.get_device_properties(0).total_memory if self.is_exclusive else 0
        """Bytes of the GPU's memory; 0 on cpu."""
        self.timed_cores, self.other_cores = cores(device)
        self.reservable_bytes = int(MEMORY_SHARE * self.device_bytes)
        self.free_bytes = self.reservable_bytes
        self.memory_queue: deque[object] = deque()
        """One ticket for each thread that waits for memory; they are served in order."""
        self.release_idle_memory: Callable[[], None] = lambda: None
        """Function that frees memory of idle task benches; called while a thread waits for memory."""
        self.condition = threading.Condition()
        self.trimmed_at = 0.0
        self.preparations = 0
        self.background_runners: list[Runner] = []
        self.waiting_measurements = 0
        self.measuring_thread: int | None = None

    @property
    def _is_measuring(self) -> bool:
        return self.measuring_thread == threading.get_ident()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Hold shared access for preparation; the holder must not wait for anything else meanwhile."""
        if not self.is_exclusive or self._is_measuring:
            yield
            return
        with self.condition:
            self.condition.wait_for(lambda: self.measuring_thread is None and not self.waiting_measurements)
            self.preparations += 1
        try:
            yield
        finally:
            with self.condition:
                self.preparations -= 1
                self.condition.notify_all()

    @contextlib.contextmanager
    def background_work(self, runner: Runner) -> Iterator[None]:
        """Let `runner` work while the judge waits for its answer.

        On cuda the runner is paused whenever another thread measures.
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
        """Block until this thread has exclusive access for a measurement, and hold it; reentrant."""
        if self._is_measuring:
            yield
            return
        with self.condition:
            self.waiting_measurements += 1
            try:
                self.condition.wait_for(lambda: self.measuring_thread is None and not self.preparations)
            finally:
                self.waiting_measurements -= 1
            self.measuring_thread = threading.get_ident()
            for runner in self.background_runners:
                runner.pause()
        try:
            yield
        finally:
            with self.condition:
                self.measuring_thread = None
                for runner in self.background_runners:
                    runner.resume()
                self.condition.notify_all()

    @contextlib.contextmanager
    def exclusive_device(self) -> Iterator[None]:
        """Hold a GPU exclusively while a candidate exists; do nothing on cpu.

        Kernels that the candidate launched on the GPU continue while its process is stopped.
        """
        with self.measuring() if self.is_exclusive else contextlib.nullcontext():
            yield

    def trim_cache(self) -> None:
        """Return the device memory that torch caches if it exceeds `CACHED_SHARE`."""
        with self.condition:
            if not self.is_exclusive or time.monotonic() < self.trimmed_at + TRIM_SECONDS:
                return
            self.trimmed_at = time.monotonic()
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > CACHED_SHARE * self.device_bytes:
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def reserve_memory(self, size: int) -> Iterator[None]:
        """Block until `size` bytes of device memory are free, and hold them.

        A request for more than can be reserved holds all of it. On cpu nothing is reserved.
        """
        wanted = min(size, self.reservable_bytes)  # 0 on cpu
        ticket = object()
        with self.condition:
            self.memory_queue.append(ticket)
        try:
            while not self._take_memory(ticket, wanted):
                if self.memory_queue[0] is ticket:
                    self.release_idle_memory()
        except BaseException:
            with self.condition:
                self.memory_queue.remove(ticket)
            raise
        try:
            yield
        finally:
            with self.condition:
                self.free_bytes += wanted
                self.condition.notify_all()

    def _take_memory(self, ticket: object, wanted: int) -> bool:
        """Take the memory if it is free and the ticket is next; otherwise wait briefly and return False."""
        with self.condition:
            if self.memory_queue[0] is not ticket or self.free_bytes < wanted:
                self.condition.wait(RETRY_SECONDS)
                return False
            self.memory_queue.popleft()
            self.free_bytes -= wanted
            self.condition.notify_all()
            return True
