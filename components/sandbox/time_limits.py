"""Limits of wall time that do not count the time in which the machine or this process was suspended.

Examples are a closed laptop, a paused virtual machine and a stopped process. A waiting function polls every
second. If a poll returns much later than requested, the machine was suspended meanwhile, so the delay is not
counted.
"""

import subprocess
import time

# Maximum time between two polls.
POLL_SECONDS = 1.0
# Maximum delay of a poll that is counted; the part of a delay beyond it is not.
SUSPEND_SECONDS = 1.0


def charged_seconds(elapsed: float, requested: float) -> float:
    """Return how many of the `elapsed` seconds of a poll are included in a time limit.

    `requested` is the number of seconds for which the poll was requested to wait.
    """
    return min(elapsed, requested + SUSPEND_SECONDS)


def wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for `process` and return its exit status.

    After `seconds`, the process is killed and subprocess.TimeoutExpired is raised.
    """
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
