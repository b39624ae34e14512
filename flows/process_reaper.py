"""The reaper: a process that kills everything that a run has started, after the run's own process has ended.

A killed process cannot stop its children (DVC and the programs that DVC runs, Prefect's server, compile
workers). They would continue, hold locks, and write files that the resumed run uses. So the run first starts
this file as a process:

    python process_reaper.py MARK

The standard input of the reaper is a pipe whose other end only the run holds. The pipe closes when the run
ends. Then the reaper kills every process that has MARK in the environment variable CUDA_AGENT_LEASH.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

VARIABLE = "CUDA_AGENT_LEASH"


def start_reaper() -> None:
    """Start the process that kills all later children of the current process when the current process ends.

    A second call does nothing.
    """
    if VARIABLE in os.environ and os.environ[VARIABLE].startswith(f"{os.getpid()}-"):
        return
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    read_end, write_end = os.pipe()
    # The reaper gets a session of its own, so that Ctrl-C in the terminal does not end it. The options -S
    # and -E shorten the start to a few milliseconds.
    subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, mark],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_end)
    # `write_end` is never closed and never inherited, so the pipe closes exactly when this process ends.
    assert not os.get_inheritable(write_end)
    os.environ[VARIABLE] = mark


def processes_with_mark(mark: str) -> list[int]:
    """Return the ids of the processes in whose environment CUDA_AGENT_LEASH has the value `mark`."""
    needle = f"{VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            # OSError means that the process has ended meanwhile, or that it belongs to another user.
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def main(mark: str) -> None:
    """Block until standard input closes, then kill every process with the mark."""
    while os.read(0, 1):
        pass
    # A process may start another one after the list was made and before it is killed, so repeat until the
    # list is empty.
    for _ in range(20):
        found = processes_with_mark(mark)
        if not found:
            return
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
