"""Limits in wall time that do not count while the machine is suspended.

A closed laptop, a paused virtual machine, a stopped process.

Whoever waits polls every second. A poll that returns much later than requested shows that nothing ran
meanwhile.
"""

from __future__ import annotations

import subprocess
import time

POLL_SECONDS = 1.0
"""Longest wait between two polls."""
SUSPEND_SECONDS = 1.0
"""Largest delay of a poll that is still charged in full."""


def charged_seconds(elapsed: float, requested: float) -> float:
    """Return how many of the `elapsed` seconds of a poll of `requested` seconds count towards a limit."""
    return min(elapsed, requested + SUSPEND_SECONDS)


def wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Return the exit status of `process`; after `seconds` kill it and raise subprocess.TimeoutExpired."""
    remaining = seconds
    while True:
        start, timeout = time.monotonic(), min(remaining, POLL_SECONDS)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            remaining -= charged_seconds(time.monotonic() - start, timeout)
            if remaining <= 0:
                process.kill()
                process.wait()
                raise subprocess.TimeoutExpired(process.args, seconds) from None
