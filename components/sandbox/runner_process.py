"""The judge's interface to one runner: messages, deadline, CPU time, and reading the runner's memory.

A runner is a sandboxed process. Limits of its wall time do not count the time in which the machine or this
process was suspended (unsuspended_time.py).
"""

import contextlib
import ctypes
import errno
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from components.core.errors import InfrastructureError
from components.sandbox.process_tree import halted_by_pid
from components.sandbox.unsuspended_time import unsuspended_seconds

# Maximum time between two polls.
POLL_SECONDS = 1.0
# Maximum length of a runner's message; the rest of a longer message is ignored.
MESSAGE_BYTES = 1 << 20
# Maximum time to wait until killed runners have ended.
EXIT_SECONDS = 20
# Maximum time to wait until the threads of a runner have stopped.
STOP_SECONDS = 10
# Pause between two looks at threads that have not stopped yet.
LOOK_SECONDS = 2e-5
# Number of pages of an output that are looked at, and the bits of an entry of /proc/PID/pagemap for a page
# that only this process has, or that is swapped out (Linux, Documentation/admin-guide/mm/pagemap.rst).
SAMPLED_PAGES, PAGE_WRITTEN = 32, 1 << 56 | 1 << 62
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
RunnerErrorKind = Literal[
    "crashed",
    "timed_out",
    "protocol",
    "error",
    "out_of_memory",
    "wrong",
    "forbidden",
    "unknown_result",
    "not_built",
]
# Kinds of errors that runners report, by the first letter of the message.
ERROR_LETTERS: dict[bytes, RunnerErrorKind] = {
    b"E": "error",
    b"M": "out_of_memory",
    b"W": "wrong",
    b"F": "forbidden",
    b"U": "unknown_result",
    b"B": "not_built",
}


class RunnerError(Exception):
    """Error raised if a runner, a sandboxed process, fails.

    `kind` says how: the runner ended ("crashed"), exceeded its time ("timed_out") or memory
    ("out_of_memory"), sent a message that was not expected ("protocol") or reported an exception ("error").
    The kind "wrong" means an output that cannot be read or written, or whose tensors have another number,
    shapes, dtypes, devices or place in memory than they must have. The kind "forbidden" means a call of a
    blocked operator of torch. The kind "unknown_result" means that a constructor called an operator whose
    result has not been recorded (inside/operator_modes.py), and "not_built" that Triton could not compile a
    kernel. `text` is the detail, such as a traceback.
    """

    def __init__(self, kind: RunnerErrorKind, text: str = ""):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class _IoVector(ctypes.Structure):
    """The structure iovec of process_vm_readv(2) and process_vm_writev(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.process_vm_readv, _libc.process_vm_writev):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    ]


def send(connection: socket.socket, message: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
    """Send a JSON message together with file descriptors; raise OSError if the other side has closed."""
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors)


def wait_for_exit(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for `process` and return its exit status.

    The process must lead a process group of its own. After `seconds`, in which time of a suspended machine
    does not count, all processes of the group are killed and subprocess.TimeoutExpired is raised.
    """
    deadline = unsuspended_seconds() + seconds
    while True:
        try:
            return process.wait(min(max(deadline - unsuspended_seconds(), 0.0), POLL_SECONDS))
        except subprocess.TimeoutExpired:
            if unsuspended_seconds() >= deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise subprocess.TimeoutExpired(process.args, seconds) from None


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def has_ended(pidfd: int, seconds: float) -> bool:
    """Return whether the process with the descriptor `pidfd` has ended.

    Wait for its end first, for at most `seconds`.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, seconds)))


@dataclass
class Runner:
    """One sandboxed process, to which the judge sends messages and whose memory and CPU time it reads.

    `connection` is the socket to the process, and `pidfd` its process descriptor. Methods raise RunnerError
    if the process caused the failure, and InfrastructureError if the machine did.
    """

    connection: socket.socket
    # The PID of the process on the host, which the kernel has reported.
    pid: int
    pidfd: int
    # The value of unsuspended_seconds() at which the runner has used up its wall time.
    deadline: float
    # The descriptor of the runner's page table, or None if the kernel has none.
    pagemap: int | None = None
    # The value of unsuspended_seconds() when `pause` stopped the runner, or None if it is not paused. The
    # time of a pause is not included in the runner's wall time.
    paused_since: float | None = None
    # The CPU time of the runner when `stop` last stopped it.
    stopped_cpu_seconds: float = 0.0
    # The PIDs of the runner's child processes and their children, which `stop` stopped too.
    stopped_children: tuple[int, ...] = ()

    def send(self, message: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
        try:
            send(self.connection, message, descriptors)
        except OSError as error:
            raise RunnerError("crashed", str(error)) from error

    def receive(self, expected: bytes = b"RD") -> bytes:
        """Wait for a message and return its content after the first letter, which must be one of `expected`.

        The message comes from the runner, a sandboxed process. By default the letters are R (ready, or a
        result) and D (what the judge has ordered is done). Raises RunnerError if the message has another
        letter, the deadline passes, or the runner ends.
        """
        data = None
        while data is None:
            remaining = self.deadline - (self.paused_since or unsuspended_seconds())
            if remaining <= 0:
                raise RunnerError("timed_out")
            self.connection.settimeout(min(remaining, POLL_SECONDS))
            try:
                data = self.connection.recv(MESSAGE_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                raise RunnerError("crashed", str(error)) from error
        if not data:
            raise RunnerError("crashed", "the process ended without a result")
        letter = data[:1]
        if letter in expected:
            return data[1:]
        raise RunnerError(ERROR_LETTERS.get(letter, "protocol"), data[1:].decode(errors="replace"))

    def spin(self, seconds: float) -> None:
        """Wait for a message without sleeping, at most for `seconds`.

        A process that sleeps is woken some microseconds late, and by a different number each time.
        """
        poll, until = select.poll(), time.monotonic() + seconds
        poll.register(self.connection, select.POLLIN)
        while not poll.poll(0) and time.monotonic() < until:
            pass

    def receive_addresses(self, count: int) -> list[int]:
        """Return the addresses of the `count` outputs of a call in the runner's memory.

        The runner is a sandboxed process. It sends the addresses, so they are not trusted. Raises RunnerError
        if their number is wrong, and in the cases of `receive`.
        """
        data = self.receive(b"O")
        if len(data) != 7 + 8 * count:  # padding of the letter to eight bytes, then the addresses
            raise RunnerError("wrong", "wrong_number_of_outputs")
        return list(struct.unpack(f"{count}Q", data[7:]))

    def request(self, message: Mapping[str, object]) -> bytes:
        """Send one message to the runner, a sandboxed process, and return its reply after the first letter.

        Raises RunnerError in the cases of `receive`.
        """
        self.send(message)
        return self.receive()

    def is_waiting(self) -> bool:
        """Return whether the runner waits for the judge, that is, has sent no message that is still unread.

        The runner is a sandboxed process. After delivering a result, a runner must wait for the judge's
        acknowledgement. The result is also True if the runner has ended.
        """
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return all(events & select.POLLHUP for _, events in poll.poll(0))

    def acknowledge(self) -> None:
        """Allow the runner, a sandboxed process, to continue after it has delivered a result.

        Raises RunnerError if the runner has sent another message already, or has ended.
        """
        if not self.is_waiting():
            raise RunnerError("protocol", "it sent a message before it was allowed to")
        try:
            self.connection.send(b"A")
        except OSError as error:
            raise RunnerError("crashed", str(error)) from error

    def read_memory(self, addresses: list[int], targets: list[int], sizes: list[int]) -> None:
        """Copy ranges of the runner's memory to addresses in this process (process_vm_readv(2)).

        The runner is a sandboxed process. Range i has `sizes[i]` bytes at `addresses[i]` and is copied to
        `targets[i]`. Raises RunnerError if a range cannot be read, and InfrastructureError if the judge may
        not read it.
        """
        self._copy_memory(_libc.process_vm_readv, targets, addresses, sizes, "unreadable_output")

    def write_memory(self, addresses: list[int], sources: list[int], sizes: list[int]) -> None:
        """Copy ranges of this process's memory, at `sources`, to the runner's memory (process_vm_writev(2)).

        The runner is a sandboxed process. Range i has `sizes[i]` bytes at `sources[i]` and is copied to
        `addresses[i]`. Raises RunnerError if a range cannot be written, and InfrastructureError if the judge
        may not write.
        """
        self._copy_memory(_libc.process_vm_writev, sources, addresses, sizes, "output_is_read_only")

    def _copy_memory(
        self,
        copy: Callable[..., int],
        own: list[int],
        addresses: list[int],
        sizes: list[int],
        reason: str,
    ) -> None:
        count, total = len(sizes), sum(sizes)
        local, remote = ((_IoVector * count)(*map(_IoVector, starts, sizes)) for starts in (own, addresses))
        copied = copy(self.pid, local, count, remote, count, 0)
        if copied == total:
            return
        problem = ctypes.get_errno() if copied < 0 else errno.EFAULT
        if problem == errno.EPERM:
            raise InfrastructureError(
                "the judge may not access its runners' memory: run it as root or with the capability"
                " SYS_PTRACE (docker run --cap-add SYS_PTRACE)."
            )
        if problem == errno.ESRCH:
            raise RunnerError("crashed", "the process is gone")
        raise RunnerError("wrong", reason)

    def is_private_memory(self, address: int, size: int) -> bool:
        """Return whether `size` bytes at `address` in the runner are private memory that no file backs.

        The runner is a sandboxed process. Pages of such memory cannot be mapped at a second address. Raises
        RunnerError if the runner has ended, and InfrastructureError if the judge may not see the runner's
        memory map.
        """
        try:
            maps = Path(f"/proc/{self.pid}/maps").read_bytes()
        except (FileNotFoundError, ProcessLookupError) as error:
            raise RunnerError("crashed", "the process is gone") from error
        except OSError as error:
            raise InfrastructureError(
                f"the judge may not see where its runners' memory lies ({error}); run it as root."
            ) from error
        end = address + size
        for line in maps.splitlines():
            span, permissions, _, _, inode, *_ = line.split(maxsplit=5)
            low, high = (int(part, 16) for part in span.split(b"-"))
            if low <= address < high:
                if permissions[3:4] != b"p" or inode != b"0":
                    return False
                address = high
            if address >= end:
                return True
        return False

    def is_written(self, address: int, size: int, total: int) -> bool:
        """Return whether a random sample of the whole pages in `size` bytes at `address` was written.

        `total` is the number of bytes in all ranges that are looked at. A range gets its share of
        `SAMPLED_PAGES`, and at least one page.

        The pages are those of the runner, a sandboxed process. A page that was not written since it was
        mapped, or since its content was given back to the kernel, reads as zeros, but it is absent, or is the
        page of zeros that all processes share. The result is True if the kernel does not show the pages.
        """
        first = -(-address // PAGE_BYTES)
        count = (address + size) // PAGE_BYTES - first
        if count <= 0 or self.pagemap is None:
            return True
        for _ in range(-(-SAMPLED_PAGES * size // total)):
            entry = os.pread(self.pagemap, 8, 8 * (first + secrets.randbelow(count)))
            if len(entry) == 8 and not int.from_bytes(entry, sys.byteorder) & PAGE_WRITTEN:
                return False
        return True

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the runner's threads, child processes excluded (clock_getcpuclockid(3)).

        Raises RunnerError if it has ended.
        """
        try:
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError as error:
            raise RunnerError("crashed", "the process is gone") from error

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this sandboxed process; nothing happens if the process has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, number)

    def stop(self) -> None:
        """Stop the runner and its child processes until `resume`, and wait until no thread of them runs.

        The runner is a sandboxed process. Its CPU time is read afterwards (`stopped_cpu_seconds`), because
        the kernel adds the time of a running thread to it only at the next tick of the timer. A process can
        cancel its stop with SIGCONT while one of its threads still runs, so the signal is repeated, and all
        threads have to be seen stopped twice. The runner is killed and RunnerError raised if it does not stop
        in `STOP_SECONDS`.
        """
        self.signal(signal.SIGSTOP)
        deadline, seen = time.monotonic() + STOP_SECONDS, 0
        while seen < 2:
            halted = halted_by_pid(self.pid)
            if all(halted.values()):
                seen += 1
                continue
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise RunnerError("protocol", f"it did not stop within {STOP_SECONDS} s")
            seen = 0
            time.sleep(LOOK_SECONDS)
            self.signal(signal.SIGSTOP)
            _signal_all([pid for pid in halted if pid != self.pid], signal.SIGSTOP)
        self.stopped_children = tuple(pid for pid in halted if pid != self.pid)
        self.stopped_cpu_seconds = self.cpu_seconds()

    def pause(self) -> None:
        """Stop the runner (a sandboxed process) until `resume`, so that it disturbs no measurement.

        The time of the pause does not count toward the runner's limit of wall time. A runner that does not
        stop is killed.
        """
        with contextlib.suppress(RunnerError):
            self.stop()
        self.paused_since = self.paused_since or unsuspended_seconds()

    def resume(self) -> None:
        """Resume a stopped or paused runner (a sandboxed process) and its child processes.

        From then on, the runner's wall time counts again.
        """
        self.extend_deadline()
        _signal_all(self.stopped_children, signal.SIGCONT)
        self.stopped_children = ()
        self.signal(signal.SIGCONT)

    def extend_deadline(self) -> None:
        """Add the time since `pause` to the deadline of the runner, a sandboxed process.

        From then on, time counts toward its limit of wall time again. The process stays stopped. If the
        runner is not paused, nothing happens.
        """
        if self.paused_since is not None:
            self.deadline += unsuspended_seconds() - self.paused_since
            self.paused_since = None

    def set_cores(self, cores: frozenset[int]) -> None:
        """Restrict the runner's first thread, which makes the measured calls, to the given CPU cores.

        The runner is a sandboxed process. Nothing happens if the kernel refuses this, for example because the
        runner has ended.
        """
        with contextlib.suppress(OSError):
            os.sched_setaffinity(self.pid, cores)

    def close(self, *, wait: bool = False) -> None:
        """Kill the runner, a sandboxed process, and close the connection to it.

        An isolated runner is the first process of its PID namespace, so all processes that it started end
        too. If `wait` is set, wait until it has ended, so that its GPU memory is free, but at most
        `EXIT_SECONDS`.
        """
        self.signal(signal.SIGKILL)
        if wait:
            has_ended(self.pidfd, EXIT_SECONDS)
        os.close(self.pidfd)
        if self.pagemap is not None:
            os.close(self.pagemap)
        self.connection.close()
