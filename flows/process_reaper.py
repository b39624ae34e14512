"""A process that kills everything that a run has started, once the run's own process has ended.

A killed process cannot clean up, and its children (DVC and what DVC runs, Prefect's server, compile workers)
would go on, hold locks and write files that the resumed run uses. So the run first starts this file as a
process of its own, with one end of a pipe. When the other end closes, the run has ended, and every process
that has the run's mark in its environment is killed.

    python process_reaper.py MARK        (standard input is the pipe)
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

VARIABLE = "CUDA_AGENT_LEASH"


def start_reaper() -> None:
    """Mark every process that this one starts from now on, to be killed when this one ends.

    A second call does nothing.
    """
    if VARIABLE in os.environ and os.environ[VARIABLE].startswith(f"{os.getpid()}-"):
        return
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    read_end, write_end = os.pipe()
    # A session of its own: Ctrl-C in the terminal must reach the run, not the leash. -S -E: up in a few
    # milliseconds.
    subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, mark],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_end)
    # `write_end` stays open, uninherited, for as long as this process lives.
    assert not os.get_inheritable(write_end)
    os.environ[VARIABLE] = mark


def processes_with_mark(mark: str) -> list[int]:
    """Return the ids of the processes that have the mark in their environment."""
    needle = f"{VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                # It ended meanwhile, or belongs to another user.
                continue
    return found


def main(mark: str) -> None:
    while os.read(0, 1):
        pass
    # A process may start another one between the look and the kill: look until there are none.
    for _ in range(20):
        found = processes_with_mark(mark)
        if not found:
            return
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:
                continue


if __name__ == "__main__":
    main(sys.argv[1])
