"""Limits of wall time do not count the time in which the process was suspended."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from components.core.config import PROJECT
from components.sandbox.unsuspended_time import _UnsuspendedClock

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


def test_threads_that_ask_for_the_time_first_start_it_together() -> None:
    class Slow(_UnsuspendedClock):
        @property
        def thread(self) -> threading.Thread | None:
            return self.known

        @thread.setter
        def thread(self, thread: threading.Thread | None) -> None:
            self.known = thread
            time.sleep(0.05)

    clock, together = Slow(), threading.Barrier(2)

    def ask(_: int) -> float:
        together.wait(60)
        return clock.seconds()

    with ThreadPoolExecutor(2) as threads:
        assert len(list(threads.map(ask, range(2)))) == 2
