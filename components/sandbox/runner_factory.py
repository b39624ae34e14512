"""The judge's side of the runners: zygotes inside bubblewrap, and runners forked from them on demand."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import importlib.metadata
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from components.core.config import Device, Sandbox
from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_json, forget, user_cache
from components.sandbox import isolation
from components.sandbox.clock import LOOK_SECONDS, charged

MESSAGE_BYTES = 1 << 20
HEADER_BYTES = 180_000
"""Longest message to the zygote: one packet of a local socket holds 208 KiB by default (net.core.wmem_default)."""
START_SECONDS = 300
GONE_SECONDS = 20
MOST_FAILED_STARTS = 2
KEPT_SECONDS = 14 * 24 * 3600
"""How long a cached build that nobody asks for is kept, and what torch.compile made of a task: a night leaves tens of megabytes of each."""
TEMPORARY_BYTES = 1 << 29
HERE = Path(__file__).resolve().parent


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
    """One forked runner. `pid` is the host's, vouched for by the kernel; `process` is its descriptor, which no other process inherits."""

    connection: socket.socket
    pid: int
    process: int
    deadline: float
    stood_since: float | None = None
    """Since when others measure and this one stands still: its time does not run meanwhile."""

    def send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        try:
            send(self.connection, message, descriptors)
        except OSError as error:
            raise RunnerError("crashed", str(error)) from error

    def receive(self, expected: bytes = b"RD") -> bytes:
        """What follows the letter of a reply, one of `expected`; RunnerError for anything else."""
        data = None
        while data is None:
            since = self.stood_since
            remaining = self.deadline - (time.monotonic() if since is None else since)
            if remaining <= 0:
                raise RunnerError("timed_out")
            began, asked = time.monotonic(), min(remaining, LOOK_SECONDS)
            self.connection.settimeout(asked)
            try:
                data = self.connection.recv(MESSAGE_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                raise RunnerError("crashed", str(error)) from error
            finally:
                elapsed = time.monotonic() - began
                self.deadline += elapsed - charged(elapsed, asked)
        if not data:
            raise RunnerError("crashed", "the process ended without a word")
        letter = data[:1]
        if letter in expected:
            return data[1:]
        raise RunnerError(KINDS.get(letter, "protocol"), data[1:].decode(errors="replace"))

    def addresses(self, count: int) -> list[int]:
        """Where the runner says that `count` results of a call lie in its own memory."""
        data = self.receive(b"O")
        if len(data) != 7 + 8 * count:  # a letter, padding to eight bytes, the addresses
            raise RunnerError("wrong", "wrong_number_of_outputs")
        return list(struct.unpack(f"{count}Q", data[7:]))

    def read(self, addresses: list[int], into: list[int], sizes: list[int]) -> None:
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

    def owns(self, address: int, size: int) -> bool:
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

    def waits(self) -> bool:
        """Whether the runner has said nothing that was not read: who speaks ahead is not waiting for the judge's word."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return all(events & select.POLLHUP for _, events in poll.poll(0))

    def acknowledge(self) -> None:
        """Let the runner go on after a result."""
        if not self.waits():
            raise RunnerError("protocol", "it spoke before it was asked")
        try:
            self.connection.send(b"A")
        except OSError as error:
            raise RunnerError("crashed", str(error)) from error

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

    def stand(self) -> None:
        """Stand still while others measure."""
        self.signal(signal.SIGSTOP)
        self.stood_since = self.stood_since or time.monotonic()

    def work(self) -> None:
        self.extend_deadline()
        self.signal(signal.SIGCONT)

    def extend_deadline(self) -> None:
        """Give back the time that it stood still."""
        if self.stood_since is not None:
            self.deadline += time.monotonic() - self.stood_since
            self.stood_since = None

    def move(self, cores: frozenset[int]) -> None:
        """Where the runner's first thread, which calls what is measured, may run from now on."""
        with contextlib.suppress(OSError):
            os.sched_setaffinity(self.pid, cores)

    def close(self) -> None:
        """End the runner and everything it started: it is the first process of its PID namespace."""
        self.signal(signal.SIGKILL)
        os.close(self.process)
        self.connection.close()


def send(connection: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], rights)


@dataclass
class Zygote:
    """A process that has torch loaded and forks runners; `control` takes their headers."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    served: bool = False
    """Whether it has started a runner."""


Kind = Literal["plain", "compile", "probe"]
WARM_KINDS: tuple[Kind, ...] = ("plain", "compile")


def torch_cache(parent: Path) -> Path:
    """The folder below `parent` for what this installation of torch compiled; those of others that are not in use any more are removed.

    Inside a sandbox torch has the same path whichever it is, so what names it must be part of the folder's name.
    """
    stamp = digest_json(
        [importlib.metadata.version("torch"), sys.version, [str(path) for path in isolation.packages()]]
    )[:16]
    folder = parent / stamp
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    forget(parent, KEPT_SECONDS)
    return folder


def warm_folder() -> Path:
    """What warming up Inductor leaves, one folder for all homes of a user: 16 s of CPU time, 150 MB, mostly a precompiled header.

    Inductor names what it makes by a digest of sources, compiler and flags, and locks meanwhile. Only a zygote writes
    here, before it runs anything foreign; its runners see the folder read-only.
    """
    return torch_cache(user_cache("inductor"))


class RunnerFactory:
    """Starts two zygotes once (seconds) and forks runners from them (milliseconds).

    What torch.compile needs takes most of a minute to warm up and would make every fork slower, so its runners have a
    zygote of their own, and whoever needs no compile baseline never waits for it.
    """

    def __init__(self, sandbox: Sandbox, device: Device, folder: Path, native: Path):
        self.sandbox = sandbox
        self.device = device
        self.native = native
        """The folder of the runners' own native code (build.native)."""
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        self.zygotes: dict[str, Zygote] = {}
        # bubblewrap's --die-with-parent means the thread that started it: this one lives as long as the nursery.
        self.starter = ThreadPoolExecutor(1, thread_name_prefix="zygote")
        self.empty = os.memfd_create("empty")  # stands for "no library"
        self.failed: dict[Kind, int] = {}
        """How many zygotes of a kind have ended, one after another, without having started a runner."""
        self.watched: list[int] = []
        """Descriptors of the runners that may still live."""

    def prepare(self) -> None:
        """Start both zygotes without waiting for them."""
        with self.lock:
            for kind in WARM_KINDS:
                self._zygote(kind)

    def _zygote(self, kind: str) -> Zygote:
        zygote = self.zygotes.get(kind)
        if zygote is None or zygote.process.poll() is not None:
            zygote = self.zygotes[kind] = self.starter.submit(self._start, kind).result()
        return zygote

    def _start(self, kind: str) -> Zygote:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        walled = self.sandbox.isolation == "bubblewrap"
        self.folder.chmod(0o700)  # other users may not read or execute what a task's runners write below it
        caches = (
            {"/cache": torch_cache(self.folder / "inductor"), "/warm": warm_folder()}
            if kind == "compile"
            else {}
        )
        if caches and (tasks := caches["/cache"] / "tasks").is_dir():
            forget(tasks, KEPT_SECONDS)
        start, view, environment = [sys.executable, "-I"], isolation.NOWHERE, dict(isolation.OUTSIDE)
        if walled:
            view = isolation.python_view() | {HERE: "/sandbox", self.native: "/native"}
            start = isolation.bubblewrap(
                device=self.device,
                view=view,
                temporary_bytes=TEMPORARY_BYTES,
                keep_capabilities=True,
                caches=caches,
            )
            start += [isolation.interpreter(), "-I", "-S"]
        else:
            environment = isolation.environment(self.device) | {
                "HOME": str(self.folder),
                "TMPDIR": str(self.folder),
                "PATH": os.environ["PATH"],
            }
        command = [
            *start,
            view.inside(HERE / "zygote.py"),
            str(theirs.fileno()),
            self.device,
            kind,
            "isolated" if walled else "open",
            view.inside(self.native),
            os.pathsep.join(view.inside(path) for path in isolation.packages()) if walled else "",
            *(caches if walled else map(str, caches.values())),
        ]
        log = (self.folder / f"{kind}.log").open("wb")
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
        theirs.close()
        log.close()
        return Zygote(process, ours)

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
            "RLIMIT_NPROC": isolation.share_of_processes(2048 if candidate else 4096),
            "RLIMIT_CPU": int(self.sandbox.run_seconds * 4) + 10,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": isolation.PENDING_SIGNALS,
        }
        if self.device == "cpu":
            limits["RLIMIT_AS"] = self.sandbox.memory_bytes
        walls = {
            "limits": {
                name: isolation.within(getattr(resource, name), value) for name, value in limits.items()
            },
            "temporary_bytes": TEMPORARY_BYTES,
            "seccomp": isolation.seccomp_program("candidate" if candidate else "baseline", self.device).hex()
            if self.sandbox.isolation == "bubblewrap"
            else "",
            "folder": str(self.folder / f"runner-{os.urandom(8).hex()}"),
            "device": self.device,
        }
        if len(json.dumps(header | walls)) > HEADER_BYTES:
            ours.close()
            theirs.close()
            raise RunnerError("error", f"sources and shapes are longer than {HEADER_BYTES} bytes")
        kind: Kind = header.get("zygote") or ("compile" if header["role"] == "compile" else "plain")
        with theirs, self.lock:
            zygote = self._zygote(kind)
            try:
                send(zygote.control, header | walls, (theirs.fileno(), *descriptors))
            except OSError as error:
                ours.close()
                raise self._gone(kind, zygote, str(error)) from error
        ours.settimeout(START_SECONDS)
        try:
            data, ancillary, _, _ = ours.recvmsg(16, socket.CMSG_SPACE(struct.calcsize("3i")))
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"a runner did not start: {error}") from error
        credentials = [payload for _, kind, payload in ancillary if kind == socket.SCM_CREDENTIALS]
        if data != b"H" or not credentials:
            ours.close()
            with self.lock:
                raise self._gone(kind, zygote, "it started no runner")
        zygote.served = True
        pid = struct.unpack("3i", credentials[0])[0]
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"a runner ended at once: {error}") from error
        runner = Runner(ours, pid, process, time.monotonic() + seconds)
        try:
            with self.lock:
                self._left(0)
                self.watched.append(os.dup(process))
            ours.send(b"G")  # last: from here on it works, and without this word it ends
        except OSError as error:
            runner.close()
            raise InfrastructureError(f"a runner ended at once: {error}") from error
        return runner

    def _gone(self, kind: Kind, zygote: Zygote, said: str) -> Exception:
        """What to raise for a zygote that started no runner. One that never started any will not when it is tried once more either: that
        is for a person to mend, and no run goes on with it."""
        log = self.folder / f"{kind}.log"
        with contextlib.suppress(subprocess.TimeoutExpired):
            zygote.process.wait(1)
        words = " ".join(log.read_text(errors="replace").split())[-500:]
        if zygote.process.poll() is not None and self.zygotes.get(kind) is zygote:
            del self.zygotes[kind]
            self._end(zygote)
            self.failed[kind] = 0 if zygote.served else self.failed.get(kind, 0) + 1
        if self.failed.get(kind, 0) < MOST_FAILED_STARTS:
            return InfrastructureError(
                f"a runner could not be started by the process that holds torch ({kind}): {said}; {words}"
            )
        what = "torch.compile" if kind == "compile" else "torch"
        said = f"the judge's process that holds {what} ends as soon as it starts, its last words are there ({words[-200:]})"
        return UserError(f"{log}: {said}; mend that and run the same command again.")

    def _left(self, seconds: float) -> None:
        """Forget the runners that are gone, after waiting for all of them for so long."""
        deadline = time.monotonic() + seconds
        for process in list(self.watched):
            poll = select.poll()
            poll.register(process, select.POLLIN)
            if poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                self.watched.remove(process)
                os.close(process)

    @staticmethod
    def _end(zygote: Zygote) -> None:
        zygote.control.close()
        zygote.process.kill()
        zygote.process.wait()

    def close(self) -> None:
        """End all processes and wait until they are gone: a killed one that used a GPU holds gigabytes there for a second more."""
        with self.lock:
            for zygote in self.zygotes.values():
                self._end(zygote)
            self.zygotes.clear()
            self._left(GONE_SECONDS)
            for process in self.watched:
                os.close(process)
            self.watched.clear()
        self.starter.shutdown()
        os.close(self.empty)
