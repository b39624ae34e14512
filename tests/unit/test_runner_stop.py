"""A stopped runner computes nothing, and its CPU time is exact from then on."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from components.sandbox.runner_process import Runner, wait_for_exit

# Threads that compute in parallel, since hashing does not hold the interpreter's lock.
BUSY = """
import hashlib, os, signal, threading, time
def compute(block=bytes(1 << 16)):
    while True:
        hashlib.sha256(block)
for _ in range(3):
    threading.Thread(target=compute, daemon=True).start()
"""
CHILD = (
    BUSY
    + """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        compute()
    os._exit(0)
os.wait()
"""
)
STORM = (
    BUSY
    + """
def resume():
    until = time.monotonic() + 1
    while time.monotonic() < until:
        os.kill(os.getpid(), signal.SIGCONT)
threading.Thread(target=resume, daemon=True).start()
"""
)


@contextlib.contextmanager
def running(program: str) -> Iterator[Runner]:
    """Start a process that orphans of its own belong to, as to the first process of a namespace."""
    ours, theirs = socket.socketpair()
    adopt = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"  # PR_SET_CHILD_SUBREAPER
    command = [sys.executable, "-c", f"{adopt}{program}\nprint('ready', flush=True)\ncompute()"]
    with theirs, subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        runner = Runner(ours, process.pid, os.pidfd_open(process.pid), time.monotonic() + 60)
        children = psutil.Process(process.pid).children(recursive=True)
        try:
            yield runner
        finally:
            runner.close()
            for child in children:
                child.kill()


def seconds_of_all(runner: Runner) -> float:
    main = psutil.Process(runner.pid)
    return sum(sum(process.cpu_times()[:2]) for process in (main, *main.children(recursive=True)))


@pytest.mark.parametrize("program", [BUSY, CHILD, STORM], ids=["threads", "orphan", "storm_of_sigcont"])
def test_a_stopped_runner_computes_nothing_and_all_it_did_is_on_its_clock(program: str) -> None:
    with running(program) as runner:
        for _ in range(5):
            runner.stop()
            everyone = seconds_of_all(runner)
            time.sleep(0.03)
            assert runner.cpu_seconds() - runner.stopped_cpu_seconds < 1e-4
            assert seconds_of_all(runner) == everyone
            runner.resume()
            deadline = time.monotonic() + 60
            while runner.cpu_seconds() - runner.stopped_cpu_seconds < 1e-3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert seconds_of_all(runner) > everyone


def test_processes_that_a_runner_started_go_on_with_it() -> None:
    with running(CHILD) as runner:
        (orphan,) = psutil.Process(runner.pid).children(recursive=True)
        runner.pause()
        assert orphan.status() == psutil.STATUS_STOPPED
        runner.resume()
        assert orphan.status() != psutil.STATUS_STOPPED


def test_a_process_that_takes_too_long_leaves_none_that_it_started() -> None:
    command = ["/bin/sh", "-c", "sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        with pytest.raises(subprocess.TimeoutExpired):
            wait_for_exit(process, 0.1)
        has_ended = select.select([process.stdout], [], [], 10)[0]  # nobody can write to it
        if not has_ended:
            os.kill(child, signal.SIGKILL)
    assert has_ended
