"""Measure wall time for limits, without the time in which the machine or this process was suspended.

A machine or a process is suspended in a paused virtual machine, on a closed laptop or by SIGSTOP. A thread
reads the time every `TICK_SECONDS`. If the last reading is long ago, the process was suspended meanwhile, and
at most `MOST_SECONDS` of this time are counted.
"""

import threading
import time

TICK_SECONDS = 0.25
MOST_SECONDS = 1.0


class _UnsuspendedClock:
    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        # The time of this clock at the last tick, and the time.monotonic() of that tick.
        self.tick = (now := time.monotonic(), now)

    def seconds(self) -> float:
        if self.thread is None or not self.thread.is_alive():  # a forked process has none; two do no harm
            thread = threading.Thread(target=self._run, daemon=True, name="unsuspended time")
            thread.start()
            self.thread = thread
        return self._at(time.monotonic())

    def _at(self, now: float) -> float:
        seconds, tick = self.tick
        return seconds + min(now - tick, MOST_SECONDS)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            self.tick = (self._at(now), now)
            time.sleep(TICK_SECONDS)


_clock = _UnsuspendedClock()


def unsuspended_seconds() -> float:
    """Return the seconds since an arbitrary moment in which this process was not suspended."""
    return _clock.seconds()
