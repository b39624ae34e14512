"""The judge's handle of one runner: its messages, its deadline, its clock, and reading its memory from outside."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.core.errors import InfrastructureError
from components.sandbox.clock import POLL_SECONDS, charged_seconds

MESSAGE_BYTES = 1 << 20


class RunnerError(Exception):
    """A runner said or did something that ends it: `kind` is crashed, timed_out, protocol, error, out_of_memory, wrong or forbidden."""

    def __init__(self, kind: str, text: str = ""):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class _Vectors(ctypes.Structure):
    """struct iovec of process_vm_readv(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


KINDS = {b"E": "error", b"M": "out_of_memory", b"W": "wrong", b"F": "forbidden"}


@dataclass
class Runner:
    """One forked runner. `pid` is the host's, vouched for by the kernel; `pidfd` is its descriptor, which no other process inherits."""

    connection: socket.socket
    pid: int
    pidfd: int
    deadline: float
    paused_since: float | None = None
    """Since when others measure and this one stands still: its time does not run meanwhile."""

    def send(self, message: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
        try:
            send(self.connection, message, descriptors)
        except OSError as error:
            raise RunnerError("crashed", str(error)) from error

    def receive(self, expected: bytes = b"RD") -> bytes:
        """What follows the letter of a reply, one of `expected`; RunnerError for anything else."""
        data = None
        while data is None:
            since = self.paused_since
            remaining = self.deadline - (time.monotonic() if since is None else since)
            if remaining <= 0:
                raise RunnerError("timed_out")
            began, asked = time.monotonic(), min(remaining, POLL_SECONDS)
            self.connection.settimeout(asked)
            try:
                data = self.connection.recv(MESSAGE_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                raise RunnerError("crashed", str(error)) from error
            finally:
                elapsed = time.monotonic() - began
                self.deadline += elapsed - charged_seconds(elapsed, asked)
        if not data:
            raise RunnerError("crashed", "the process ended without a word")
        letter = data[:1]
        if letter in expected:
            return data[1:]
        raise RunnerError(KINDS.get(letter, "protocol"), data[1:].decode(errors="replace"))

    def receive_addresses(self, count: int) -> list[int]:
        """Where the runner says that `count` results of a call lie in its own memory."""
        data = self.receive(b"O")
        if len(data) != 7 + 8 * count:  # a letter, padding to eight bytes, the addresses
            raise RunnerError("wrong", "wrong_number_of_outputs")
        return list(struct.unpack(f"{count}Q", data[7:]))

    def read_memory(self, addresses: list[int], into: list[int], sizes: list[int]) -> None:
        """Copy memory of the runner to memory of this process (process_vm_readv(2)); the runner waits meanwhile."""
        count, total = len(sizes), sum(sizes)
        local, remote = ((_Vectors * count)(*map(_Vectors, places, sizes)) for places in (into, addresses))
        done = _libc.process_vm_readv(self.pid, local, count, remote, count, 0)
        if done != total:
            problem = ctypes.get_errno() if done < 0 else errno.EFAULT
            if problem == errno.EPERM:
                raise InfrastructureError(
                    "the judge may not read its runners' memory: run it as root or with the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE)."
                )
            if problem == errno.ESRCH:
                raise RunnerError("crashed", "the process is gone")
            raise RunnerError("wrong", "unreadable_output")

    def is_private_memory(self, address: int, size: int) -> bool:
        """Whether these bytes are private memory without a file behind it, so that no two of their pages are one."""
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

    def is_waiting(self) -> bool:
        """Whether the runner has said nothing that was not read: who speaks ahead is not waiting for the judge's word."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return all(events & select.POLLHUP for _, events in poll.poll(0))

    def acknowledge(self) -> None:
        """Let the runner go on after a result."""
        if not self.is_waiting():
            raise RunnerError("protocol", "it spoke before it was asked")
        try:
            self.connection.send(b"A")
        except OSError as error:
            raise RunnerError("crashed", str(error)) from error

    def request(self, message: Mapping[str, object]) -> bytes:
        self.send(message)
        return self.receive()

    def cpu_seconds(self) -> float:
        """CPU time of the runner, all its threads together, read from outside (clock_getcpuclockid(3))."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError as error:
            raise RunnerError("crashed", "the process is gone") from error

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP freezes every thread of the runner, SIGCONT thaws it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, number)

    def pause(self) -> None:
        """Stand still while others measure."""
        self.signal(signal.SIGSTOP)
        self.paused_since = self.paused_since or time.monotonic()

    def resume(self) -> None:
        self.extend_deadline()
        self.signal(signal.SIGCONT)

    def extend_deadline(self) -> None:
        """Give back the time that it stood still."""
        if self.paused_since is not None:
            self.deadline += time.monotonic() - self.paused_since
            self.paused_since = None

    def set_cores(self, cores: frozenset[int]) -> None:
        """Where the runner's first thread, which calls what is measured, may run from now on."""
        with contextlib.suppress(OSError):
            os.sched_setaffinity(self.pid, cores)

    def close(self) -> None:
        """End the runner and everything it started: it is the first process of its PID namespace."""
        self.signal(signal.SIGKILL)
        os.close(self.pidfd)
        self.connection.close()


def send(connection: socket.socket, message: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], rights)
