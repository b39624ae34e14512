"""The judge's side of the runners: zygotes inside bubblewrap, and runners forked from them on demand."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from components.core.config import Device, Sandbox
from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_json, remove_stale, user_cache
from components.sandbox import isolation
from components.sandbox.runner_process import MESSAGE_BYTES, Runner, RunnerError, send
from components.sandbox.runner_protocol import RoleHeader, ZygoteKind

HEADER_BYTES = 180_000
"""Longest message to the zygote: one packet of a local socket holds 208 KiB by default (net.core.wmem_default)."""
START_SECONDS = 300
GONE_SECONDS = 20
MOST_FAILED_STARTS = 2
KEPT_SECONDS = 14 * 24 * 3600
"""How long a cached build that nobody asks for is kept, and what torch.compile made of a task: a night leaves tens of megabytes of each."""
TEMPORARY_BYTES = 1 << 29
SANDBOX_FOLDER = Path(__file__).resolve().parent


@dataclass
class Zygote:
    """A process that has torch loaded and forks runners; `control` takes their headers."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    served: bool = False
    """Whether it has started a runner."""


WARM_KINDS: tuple[ZygoteKind, ...] = ("plain", "compile")


def torch_cache(parent: Path) -> Path:
    """The folder below `parent` for what this installation of torch compiled; those of others that are not in use any more are removed.

    Inside a sandbox torch has the same path whichever it is, so what names it must be part of the folder's name.
    """
    stamp = digest_json(
        [
            importlib.metadata.version("torch"),
            sys.version,
            [str(path) for path in isolation.package_folders()],
        ]
    )[:16]
    folder = parent / stamp
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    remove_stale(parent, KEPT_SECONDS)
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
        self.empty_library = os.memfd_create("empty")  # stands for "no library"
        self.failed: dict[ZygoteKind, int] = {}
        """How many zygotes of a kind have ended, one after another, without having started a runner."""
        self.pidfds: list[int] = []
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
            remove_stale(tasks, KEPT_SECONDS)
        start, view, environment = (
            [sys.executable, "-I"],
            isolation.HOST_PATHS,
            dict(isolation.BUBBLEWRAP_ENVIRONMENT),
        )
        if walled:
            view = isolation.python_paths() | {SANDBOX_FOLDER: "/sandbox", self.native: "/native"}
            start = isolation.bubblewrap(
                device=self.device,
                paths=view,
                temporary_bytes=TEMPORARY_BYTES,
                keep_capabilities=True,
                caches=caches,
            )
            start += [isolation.interpreter_path(), "-I", "-S"]
        else:
            environment = isolation.sandbox_environment(self.device) | {
                "HOME": str(self.folder),
                "TMPDIR": str(self.folder),
                "PATH": os.environ["PATH"],
            }
        command = [
            *start,
            view.inside(SANDBOX_FOLDER / "zygote.py"),
            str(theirs.fileno()),
            self.device,
            kind,
            "isolated" if walled else "open",
            view.inside(self.native),
            os.pathsep.join(view.inside(path) for path in isolation.package_folders()) if walled else "",
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

    def spawn(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Fork a runner that plays `header['role']`; it has `seconds` of wall time for all that it does."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES)
        candidate = header["role"] == "candidate"
        limits = {
            "RLIMIT_FSIZE": TEMPORARY_BYTES,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_NPROC": isolation.process_limit(2048 if candidate else 4096),
            "RLIMIT_CPU": int(self.sandbox.run_seconds * 4) + 10,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": isolation.PENDING_SIGNALS,
        }
        if self.device == "cpu":
            limits["RLIMIT_AS"] = self.sandbox.memory_bytes
        walls = {
            "limits": {
                name: isolation.capped_by_hard_limit(getattr(resource, name), value)
                for name, value in limits.items()
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
        kind: ZygoteKind = header.get("zygote") or ("compile" if header["role"] == "compile" else "plain")
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
                self.pidfds.append(os.dup(process))
            ours.send(b"G")  # last: from here on it works, and without this word it ends
        except OSError as error:
            runner.close()
            raise InfrastructureError(f"a runner ended at once: {error}") from error
        return runner

    def _gone(self, kind: ZygoteKind, zygote: Zygote, said: str) -> Exception:
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
        for process in list(self.pidfds):
            poll = select.poll()
            poll.register(process, select.POLLIN)
            if poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                self.pidfds.remove(process)
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
            for process in self.pidfds:
                os.close(process)
            self.pidfds.clear()
        self.starter.shutdown()
        os.close(self.empty_library)
