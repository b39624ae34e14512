"""The judge's side of the runners: one zygote inside bubblewrap, and runners forked from it on demand."""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config import Device, Sandbox
from components.sandbox import isolation

MESSAGE_BYTES = 1 << 20
HEADER_BYTES = 180_000
"""Longest message to the zygote: one packet of a local socket holds 208 KiB by default (net.core.wmem_default)."""
START_SECONDS = 300
TEMPORARY_BYTES = 1 << 29
HERE = Path(__file__).resolve().parent


class InfrastructureError(Exception):
    """The judge's own fault: the job is retried and never charged to the candidate."""


class RunnerError(Exception):
    """A runner said or did something that ends it: `kind` is crashed, timed_out, error, out_of_memory, wrong or forbidden."""

    def __init__(self, kind: str, text: str = ""):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


KINDS = {b"E": "error", b"M": "out_of_memory", b"W": "wrong", b"F": "forbidden"}


@dataclass
class Runner:
    """One forked runner. `pid` is the host's, vouched for by the kernel; `process` is its descriptor, which no other process inherits."""

    connection: socket.socket
    pid: int
    process: int
    deadline: float

    def send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        try:
            send(self.connection, message, descriptors)
        except OSError as error:
            raise RunnerError("crashed", str(error)) from error

    def receive(self) -> bytes:
        """Text after the letter of an expected reply (R or D); RunnerError for anything else."""
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise RunnerError("timed_out")
        self.connection.settimeout(remaining)
        try:
            data = self.connection.recv(MESSAGE_BYTES)
        except TimeoutError as error:
            raise RunnerError("timed_out") from error
        except OSError as error:
            raise RunnerError("crashed", str(error)) from error
        if not data:
            raise RunnerError("crashed", "the process ended without a word")
        letter = data[:1]
        if letter in (b"R", b"D"):
            return data[1:]
        raise RunnerError(KINDS.get(letter, "crashed"), data[1:].decode(errors="replace"))

    def ask(self, message: dict[str, Any]) -> bytes:
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
            signal.pidfd_send_signal(self.process, number)

    def close(self) -> None:
        """End the runner and everything it started: it is the first process of its PID namespace."""
        self.signal(signal.SIGKILL)
        os.close(self.process)
        self.connection.close()


def send(connection: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], rights)


class Nursery:
    """Starts the zygote once (seconds) and forks runners from it (milliseconds)."""

    def __init__(self, sandbox: Sandbox, device: Device, folder: Path):
        self.sandbox = sandbox
        self.device = device
        self.folder = folder.resolve()
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.empty = os.memfd_create("empty")  # stands for "no library"
        if sandbox.isolation == "bubblewrap":
            isolation.check_available()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        walled = self.sandbox.isolation == "bubblewrap"
        cache = self.folder / "inductor"
        cache.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-I",
            str(HERE / "runner.py"),
            str(theirs.fileno()),
            self.device,
            "walled" if walled else "open",
            "/cache" if walled else str(cache),
        ]
        environment = None
        if walled:
            paths = [*isolation.python_paths(), str(HERE)]
            command = [
                *isolation.bubblewrap(device=self.device, read_only=paths, writable=[], temporary_bytes=TEMPORARY_BYTES, keep_capabilities=True, cache=cache),
                *command,
            ]
        else:
            environment = isolation.environment(self.device) | {"HOME": str(self.folder), "TMPDIR": str(self.folder), "PATH": os.environ["PATH"]}
        log = (self.folder / "zygote.log").open("wb")
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        theirs.close()
        log.close()
        return ours

    def spawn(self, header: dict[str, Any], descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Fork a runner that plays `header['role']`; it has `seconds` of wall time for all that it does."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES)
        candidate = header["role"] == "candidate"
        limits = {
            "RLIMIT_FSIZE": TEMPORARY_BYTES,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_NPROC": 2048 if candidate else 4096,
            "RLIMIT_CPU": int(self.sandbox.run_seconds * 4) + 10,
        }
        if self.device == "cpu":
            limits["RLIMIT_AS"] = self.sandbox.memory_bytes
        walls = {
            "limits": limits,
            "temporary_bytes": TEMPORARY_BYTES,
            "seccomp": isolation.seccomp_program("candidate" if candidate else "baseline", self.device).hex() if self.sandbox.isolation == "bubblewrap" else "",
            "folder": str(self.folder / f"runner-{os.urandom(8).hex()}"),
            "device": self.device,
        }
        if len(json.dumps(header | walls)) > HEADER_BYTES:
            ours.close()
            theirs.close()
            raise RunnerError("error", f"sources and shapes are longer than {HEADER_BYTES} bytes")
        with theirs, self.lock:
            if self.process is None or self.process.poll() is not None or self.control is None:
                self.control = self._start()
            try:
                send(self.control, header | walls, (theirs.fileno(), *descriptors))
            except OSError as error:
                ours.close()
                self.control = None
                raise InfrastructureError(f"the zygote is gone: {error}") from error
        ours.settimeout(START_SECONDS)
        try:
            data, ancillary, _, _ = ours.recvmsg(16, socket.CMSG_SPACE(struct.calcsize("3i")))
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"a runner did not start: {error}") from error
        credentials = [payload for _, kind, payload in ancillary if kind == socket.SCM_CREDENTIALS]
        if data != b"H" or not credentials:
            ours.close()
            log = (self.folder / "zygote.log").read_text(errors="replace")[-500:]
            raise InfrastructureError(f"a runner could not be walled off: {data[:200]!r} {log}")
        pid = struct.unpack("3i", credentials[0])[0]
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"a runner ended at once: {error}") from error
        return Runner(ours, pid, process, time.monotonic() + seconds)

    def close(self) -> None:
        with self.lock:
            if self.control is not None:
                self.control.close()
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            self.process = self.control = None
        os.close(self.empty)
