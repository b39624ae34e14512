"""Limits in wall time that do not count while the machine stands still: a closed laptop, a paused virtual machine, a stopped process.

Whoever waits looks every second. A look that comes much later than it was asked for says that nothing ran meanwhile.
"""

from __future__ import annotations

import subprocess
import time

POLL_SECONDS = 1.0
"""How long at most to wait between two looks."""
SUSPEND_SECONDS = 1.0
"""How much later than asked for a look may come, and still be charged in full."""


def charged_seconds(elapsed: float, asked: float) -> float:
    """How many of the `elapsed` seconds of a wait of `asked` seconds count."""
    return min(elapsed, asked + SUSPEND_SECONDS)


def wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit status of `process`; after `seconds` it is killed and subprocess.TimeoutExpired raised."""
    left = seconds
    while True:
        began, asked = time.monotonic(), min(left, POLL_SECONDS)
        try:
            return process.wait(asked)
        except subprocess.TimeoutExpired:
            left -= charged_seconds(time.monotonic() - began, asked)
            if left <= 0:
                process.kill()
                process.wait()
                raise subprocess.TimeoutExpired(process.args, seconds) from None
