"""Zygotes inside bubblewrap, and runners forked from them on demand."""

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
from components.sandbox import isolation, seccomp_filter
from components.sandbox.runner_process import MESSAGE_BYTES, Runner, RunnerError, send
from components.sandbox.runner_protocol import Confinement, Role, RoleHeader, ZygoteKind

HEADER_BYTES = 180_000
"""Longest message to the zygote.

One packet of a local socket holds 208 KiB by default (net.core.wmem_default).
"""
START_SECONDS = 300
"""Longest wait for a new runner, which includes the zygote's import of torch."""
EXIT_SECONDS = 20
"""Longest wait for killed runners to be gone."""
MAX_FAILED_STARTS = 2
"""Zygotes of one kind that may end, one after another, without having started a runner."""
CACHE_SECONDS = 14 * 24 * 3600
"""Age at which unused builds and results of torch.compile are removed."""
TEMPORARY_BYTES = 1 << 29
"""Capacity of a runner's private /workspace."""
SANDBOX_FOLDER = Path(__file__).resolve().parent
WARM_KINDS: tuple[ZygoteKind, ...] = ("plain", "compile")


@dataclass
class Zygote:
    """A process that has torch loaded and forks runners; `control` takes their headers."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    has_served: bool = False
    """Whether it has started a runner."""

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


def torch_cache(parent: Path) -> Path:
    """Return this torch installation's folder below `parent`, and remove unused folders of others.

    Inside a sandbox every installation has the same path, so the folder's name must tell them apart.
    """
    installation = [str(path) for path in isolation.package_folders()]
    folder = parent / digest_json([importlib.metadata.version("torch"), sys.version, installation])[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    remove_stale(parent, CACHE_SECONDS)
    return folder


class RunnerFactory:
    """Starts one zygote of each kind (seconds) and forks runners from them (milliseconds).

    What torch.compile needs takes most of a minute to load and would make every fork slower, so its runners
    have a zygote of their own, and a candidate that is not compared with torch.compile never waits for it.
    """

    def __init__(self, sandbox: Sandbox, device: Device, folder: Path, result_channel: Path):
        self.sandbox = sandbox
        self.device = device
        self.result_channel = result_channel
        """Folder of the compiled module result_channel (build.build_result_channel)."""
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        self.zygotes: dict[ZygoteKind, Zygote] = {}
        # bubblewrap's --die-with-parent refers to the thread that started it: this one lives as long as the
        # factory.
        self.starter = ThreadPoolExecutor(1, thread_name_prefix="zygote")
        self.empty_library = os.memfd_create("empty")
        """Descriptor to send as the library of a role that has none."""
        self.failed_starts: dict[ZygoteKind, int] = {}
        self.pidfds: list[int] = []
        """Descriptors of the runners that may still live."""

    def prepare(self) -> None:
        """Start both zygotes without waiting for their imports."""
        with self.lock:
            for kind in WARM_KINDS:
                self._zygote(kind)

    def spawn(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Fork a runner for `header["role"]`, which has `seconds` of wall time for all that it does.

        Raises RunnerError for a header that is too long, InfrastructureError where the runner does not start,
        and UserError where no zygote of its kind can start.
        """
        message = {**header, **self._confinement(header["role"])}
        if len(json.dumps(message)) > HEADER_BYTES:
            raise RunnerError("error", f"sources and shapes are longer than {HEADER_BYTES} bytes")
        kind = header.get("zygote") or ("compile" if header["role"] == "compile" else "plain")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(ours)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES)
            with theirs, self.lock:
                zygote = self._zygote(kind)
                try:
                    send(zygote.control, message, (theirs.fileno(), *descriptors))
                except OSError as error:
                    raise self._start_error(kind, zygote, str(error)) from error
            pid = _receive_pid(ours)
            if pid is None:
                with self.lock:
                    raise self._start_error(kind, zygote, "it started no runner")
            zygote.has_served = True
            try:
                runner = Runner(ours, pid, os.pidfd_open(pid), time.monotonic() + seconds)
                on_failure.callback(runner.close)
                with self.lock:
                    self._forget_exited(0)
                    self.pidfds.append(os.dup(runner.pidfd))
                ours.send(b"G")  # last: without this message the runner ends before it loads untrusted code
            except OSError as error:
                raise InfrastructureError(f"a runner ended at once: {error}") from error
            on_failure.pop_all()
        return runner

    def close(self) -> None:
        """End all processes and wait until they are gone, which frees their GPU memory."""
        with self.lock:
            for zygote in self.zygotes.values():
                zygote.close()
            self.zygotes.clear()
            self._forget_exited(EXIT_SECONDS)
            for pidfd in self.pidfds:
                os.close(pidfd)
            self.pidfds.clear()
        self.starter.shutdown()
        os.close(self.empty_library)

    def _confinement(self, role: Role) -> Confinement:
        """Return the limits of a runner of this role."""
        candidate = role == "candidate"
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
        for name, value in limits.items():
            limits[name] = isolation.capped_by_hard_limit(getattr(resource, name), value)
        program = b""
        if self.sandbox.isolation == "bubblewrap":
            program = seccomp_filter.seccomp_program("candidate" if candidate else "baseline", self.device)
        return {
            "limits": limits,
            "temporary_bytes": TEMPORARY_BYTES,
            "seccomp": program.hex(),
            "folder": str(self.folder / f"runner-{os.urandom(8).hex()}"),
            "device": self.device,
        }

    def _zygote(self, kind: ZygoteKind) -> Zygote:
        """Return the zygote of this kind, started anew if it has ended; call it with the lock held."""
        zygote = self.zygotes.get(kind)
        if zygote is None or zygote.process.poll() is not None:
            zygote = self.zygotes[kind] = self.starter.submit(self._start, kind).result()
        return zygote

    def _start(self, kind: ZygoteKind) -> Zygote:
        self.folder.chmod(0o700)  # other users may not read or execute what a task's runners write below it
        caches: dict[str, Path] = {}
        if kind == "compile":
            # /warm holds Inductor's precompiled headers, one folder for all homes of a user. Only a zygote
            # writes there, before it forks a runner; Inductor names its files by content, and locks them
            # meanwhile.
            caches = {
                "/cache": torch_cache(self.folder / "inductor"),
                "/warm": torch_cache(user_cache("inductor")),
            }
            if (tasks := caches["/cache"] / "tasks").is_dir():
                remove_stale(tasks, CACHE_SECONDS)
        isolated = self.sandbox.isolation == "bubblewrap"
        environment = dict(isolation.BUBBLEWRAP_ENVIRONMENT)
        if isolated:
            paths = isolation.python_paths() | {SANDBOX_FOLDER: "/sandbox", self.result_channel: "/native"}
            interpreter = [isolation.interpreter_path(), "-I", "-S"]
            command = isolation.bubblewrap(
                device=self.device,
                paths=paths,
                temporary_bytes=TEMPORARY_BYTES,
                keep_capabilities=True,
                caches=caches,
            )
        else:
            paths, interpreter, command = isolation.HOST_PATHS, [sys.executable, "-I"], []
            home = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "PATH": os.environ["PATH"]}
            environment = isolation.sandbox_environment(self.device) | home
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command += [
            *interpreter,
            paths.inside(SANDBOX_FOLDER / "zygote.py"),
            str(theirs.fileno()),
            self.device,
            kind,
            "isolated" if isolated else "open",
            paths.inside(self.result_channel),
            os.pathsep.join(map(paths.inside, isolation.package_folders())) if isolated else "",
            *(caches if isolated else map(str, caches.values())),
        ]
        with theirs, (self.folder / f"{kind}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(theirs.fileno(),),
            )
        return Zygote(process, ours)

    def _start_error(self, kind: ZygoteKind, zygote: Zygote, reason: str) -> Exception:
        """Return what to raise for a zygote that started no runner; call it with the lock held.

        One that has never started any fails again when it is tried again: after MAX_FAILED_STARTS that is a
        UserError.
        """
        log = self.folder / f"{kind}.log"
        with contextlib.suppress(subprocess.TimeoutExpired):
            zygote.process.wait(1)
        output = " ".join(log.read_text(errors="replace").split())[-500:]
        if zygote.process.poll() is not None and self.zygotes.get(kind) is zygote:
            self.zygotes.pop(kind).close()
            self.failed_starts[kind] = 0 if zygote.has_served else self.failed_starts.get(kind, 0) + 1
        if self.failed_starts.get(kind, 0) < MAX_FAILED_STARTS:
            return InfrastructureError(
                f"a runner could not be started by the process that holds torch ({kind}): {reason}; {output}"
            )
        what = "torch.compile" if kind == "compile" else "torch"
        return UserError(
            f"{log}: the judge's process that holds {what} ends as soon as it starts, its last words are"
            f" there ({output[-200:]}); mend that and run the same command again."
        )

    def _forget_exited(self, seconds: float) -> None:
        """Wait up to `seconds` for runners to exit, and close the descriptors of those that have."""
        deadline = time.monotonic() + seconds
        for pidfd in list(self.pidfds):
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                self.pidfds.remove(pidfd)
                os.close(pidfd)


def _receive_pid(connection: socket.socket) -> int | None:
    """Return the PID of a new runner, or None if its zygote has failed.

    The kernel vouches for the PID (SCM_CREDENTIALS).
    """
    connection.settimeout(START_SECONDS)
    try:
        data, ancillary, _, _ = connection.recvmsg(16, socket.CMSG_SPACE(struct.calcsize("3i")))
    except OSError as error:
        raise InfrastructureError(f"a runner did not start: {error}") from error
    credentials = [payload for _, kind, payload in ancillary if kind == socket.SCM_CREDENTIALS]
    return struct.unpack("3i", credentials[0])[0] if data == b"H" and credentials else None
