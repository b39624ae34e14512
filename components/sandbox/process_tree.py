"""The threads of a process and of all its descendants, as the kernel lists them in /proc."""

import contextlib
import os

# States of a thread that executes no code of its program: stopped, traced, ended, or inside a call of the
# kernel that no signal interrupts, after which it stops.
HALTED_STATES = b"TtZXD"
# Bytes of a file that are read at once.
READ_BYTES = 1 << 16


def halted_by_pid(pid: int) -> dict[int, bool]:
    """Return, for a process and each of its descendants, whether every thread of it is halted.

    The list is complete if all of them are halted, because a halted process starts no other. Processes that
    end meanwhile are left out; the result is empty if the process `pid` has ended.
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


def _read(path: str) -> bytes:
    # Without a file object, which takes longer than the kernel: a runner is looked at in every round.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, READ_BYTES), b""))
    finally:
        os.close(descriptor)
