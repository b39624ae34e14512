"""Find out from /proc whether processes still execute code, and which removed files they hold open."""

import contextlib
import os
import stat
from collections.abc import Iterable

# States of a thread that executes no code of its program: stopped, traced, ended, or inside a call of the
# kernel that no signal interrupts, after which it stops.
HALTED_STATES = b"TtZXD"
# Bytes of a file that are read at once.
READ_BYTES = 1 << 16


def halted_by_pid(pid: int) -> dict[int, bool]:
    """Return a dictionary from the PID of a process and of each descendant to whether that process is halted.

    A process is halted if each of its threads is stopped, traced, ended, or inside a system call that no
    signal interrupts. If all values are True, no descendant is missing, because a halted process starts no
    other. A process that no longer exists when its threads are listed is left out, so the result is empty if
    there is no process `pid`.
    """
    found, waiting = dict[int, bool](), [pid]
    while waiting:
        process = waiting.pop()
        # A file that is missing belongs to a thread that has ended.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            threads = os.listdir(f"/proc/{process}/task")
            found[process] = True
            for thread in threads:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    # The state follows the name of the program, which may hold any character.
                    state = _read(f"/proc/{process}/task/{thread}/stat").rpartition(b") ")[2][:1]
                    found[process] &= state in HALTED_STATES
                    waiting += map(int, _read(f"/proc/{process}/task/{thread}/children").split())
    return found


def children(pid: int) -> list[int]:
    """Return the PIDs of the child processes of the process `pid`; there are none if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [
            int(child)
            for thread in os.listdir(f"/proc/{pid}/task")
            for child in _read(f"/proc/{pid}/task/{thread}/children").split()
        ]
    return []


def process_descriptor(pid: int) -> int | None:
    """Return a descriptor of the process `pid`, or None if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None


def removed_bytes(pids: Iterable[int], device: int) -> int:
    """Return the bytes on disk of the removed files of a file system that these processes hold open.

    `device` is the number of the file system's device, as in `os.stat_result.st_dev`.
    """
    sizes: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(status.st_mode) and not status.st_nlink and status.st_dev == device:
                        sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _read(path: str) -> bytes:
    # Without a file object, which takes longer than the kernel: a runner is looked at in every round.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, READ_BYTES), b""))
    finally:
        os.close(descriptor)
