"""Who may use the device: many that prepare, or one that measures; and how much of its memory preparations take together."""

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
"""Of the device's memory, for what is prepared side by side; the rest is for what was guessed too low."""

CACHED_SHARE = 0.1
"""Of the device's memory, what torch's allocator in the judge's process may keep of what was given back: no other process can use it."""
TIDY_SECONDS = 5
"""Between two looks at it. A look waits for the allocator with the interpreter's lock held: at each end of a bench it was more than
half of all that held the lock, and forty threads that admitted tasks waited for it."""
RELIEF_SECONDS = 0.2
"""Between two looks for memory that could be given back."""
CORES_TO_SPARE_ONE = 4
"""On a machine with fewer, timed rounds on cuda run where the system puts them."""


@functools.cache
def cores(device: Device) -> tuple[frozenset[int], frozenset[int]]:
    """The cores of timed rounds and those of everything else that this process does and starts; the first call takes the one from the other.

    A small kernel takes as long as its launch, and cores of one machine differ by up to a half for as long as it pleases their
    host: with arms on any core one kernel read 0.91 to 1.74 times as fast as eager on an H200, on one core 1.14 to 1.34. Two
    hardware threads of a core slow each other down, so the other ones of that core do nothing.
    """
    here = frozenset(os.sched_getaffinity(0))
    if device == "cpu" or len(here) < CORES_TO_SPARE_ONE:
        return here, here
    whole = sorted({here & _threads(core) for core in here}, key=max)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]  # each GPU's judge has a core of its own
    taken = whole[-1 - (int(first) if first.isdecimal() else 0) % max(1, len(whole) // 2)]
    others = here - taken
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it may have ended
            os.sched_setaffinity(int(thread), others)
    return frozenset({max(taken)}), others


def _threads(core: int) -> frozenset[int]:
    """The hardware threads of the core that this one belongs to, itself among them, as far as Linux tells."""
    try:
        listed = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return frozenset({core})
    spans = [[int(end) for end in span.split("-")] for span in listed.split(",")]
    return frozenset(number for span in spans for number in range(span[0], span[-1] + 1)) | {core}


class DeviceScheduler:
    """On cpu runners start, are checked and are compiled beside a measurement, which reads their own CPU clocks: only
    measurements take turns. On cuda the clock is the wall's: a measurement begins when nobody prepares, and who would prepare
    waits for the measurements that are waiting. What a runner does for long and without the judge, such as to start or to
    compile, is stopped during a measurement instead. A thread that measures may do everything else as well."""

    def __init__(self, device: Device):
        self.wall = device == "cuda"
        self.total: int = torch.cuda.get_device_properties(0).total_memory if self.wall else 0
        self.timed_cores, self.other_cores = cores(device)
        self.free = int(MEMORY_SHARE * self.total)
        self.whole = self.free
        self.takers: deque[object] = deque()
        """Those that wait for memory, in their order: who needs much is not passed by."""
        self.relieve: Callable[[], None] = lambda: None
        """Gives back memory that is only kept warm; asked while somebody waits for some."""
        self.condition = threading.Condition()
        self.tidied = 0.0
        self.preparers = 0
        self.runners: list[Runner] = []
        """Those that work aside."""
        self.waiting = 0
        self.measurer: int | None = None

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Beside others that prepare. Not to be held while waiting for anything else."""
        if not self.wall or self.measurer == threading.get_ident():
            yield
            return
        with self.condition:
            self.condition.wait_for(lambda: self.measurer is None and not self.waiting)
            self.preparers += 1
        try:
            yield
        finally:
            with self.condition:
                self.preparers -= 1
                self.condition.notify_all()

    @contextlib.contextmanager
    def background_work(self, runner: Runner) -> Iterator[None]:
        """While `runner`, thawed here, works and the judge only waits for its answer: it stands still whenever others measure."""
        with self.condition:
            mine = not self.wall or self.measurer in (None, threading.get_ident())
            runner.resume() if mine else runner.pause()
            if self.wall and self.measurer != threading.get_ident():
                self.runners.append(runner)
        try:
            yield
        finally:
            with self.condition:
                if runner in self.runners:
                    self.runners.remove(runner)
                runner.extend_deadline()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Alone."""
        me = threading.get_ident()
        if self.measurer == me:
            yield
            return
        with self.condition:
            self.waiting += 1
            try:
                self.condition.wait_for(lambda: self.measurer is None and not self.preparers)
            finally:
                self.waiting -= 1
            self.measurer = me
            for runner in self.runners:
                runner.pause()
        try:
            yield
        finally:
            with self.condition:
                self.measurer = None
                for runner in self.runners:
                    runner.resume()
                self.condition.notify_all()

    @contextlib.contextmanager
    def exclusive_device(self) -> Iterator[None]:
        """While a candidate lives. What it started on a GPU goes on while it is stopped and would slow down others: there it is alone."""
        with self.measuring() if self.wall else contextlib.nullcontext():
            yield

    def tidy(self) -> None:
        """Give back what torch's allocator keeps of the device's memory, where that is much."""
        with self.condition:
            if not self.wall or time.monotonic() < self.tidied + TIDY_SECONDS:
                return
            self.tidied = time.monotonic()
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > CACHED_SHARE * self.total:
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def reserve_memory(self, memory: int) -> Iterator[None]:
        """Once so many bytes of the device's memory are free; who needs more than there are takes all."""
        wanted = min(memory, self.whole)  # nothing on cpu
        place = object()
        with self.condition:
            self.takers.append(place)
        try:
            while not self._took(place, wanted):
                if self.takers[0] is place:
                    self.relieve()
        except BaseException:
            with self.condition:
                self.takers.remove(place)
            raise
        try:
            yield
        finally:
            with self.condition:
                self.free += wanted
                self.condition.notify_all()

    def _took(self, place: object, wanted: int) -> bool:
        """Whether it is `place`'s turn and the memory is there, taken then; if not, something may have changed since."""
        with self.condition:
            if self.takers[0] is not place or self.free < wanted:
                self.condition.wait(RELIEF_SECONDS)
                return False
            self.takers.popleft()
            self.free -= wanted
            self.condition.notify_all()
            return True
