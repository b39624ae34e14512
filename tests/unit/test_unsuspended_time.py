"""Limits of wall time do not count the time in which the process was suspended."""

import os
import signal
import subprocess
import sys
import time

from components.core.config import PROJECT

# Prints, for each line that it reads, the seconds since its start, in a process that was forked.
SECONDS = """
import os, sys
from components.sandbox.unsuspended_time import unsuspended_seconds
began = unsuspended_seconds()
if os.fork():
    os.wait()
else:
    for line in sys.stdin:
        print(os.getpid(), unsuspended_seconds() - began, flush=True)
"""


def test_time_of_a_suspended_process_counts_for_a_second_at_most() -> None:
    command = [sys.executable, "-c", SECONDS]
    with subprocess.Popen(
        command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def read() -> tuple[int, float]:
            process.stdin.write("\n")
            pid, seconds = process.stdout.readline().split()
            return int(pid), float(seconds)

        child, first = read()
        time.sleep(2.5)
        _, awake = read()
        os.kill(child, signal.SIGSTOP)
        time.sleep(4)
        os.kill(child, signal.SIGCONT)
        _, resumed = read()
        process.stdin.close()
    assert awake - first > 2
    assert resumed - awake < 2.5
