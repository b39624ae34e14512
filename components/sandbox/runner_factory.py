"""The factory of runners: it starts zygotes and lets them fork runners on demand.

A runner is a process that executes code of a candidate (an implementation of a PyTorch module, to be judged)
or a task (the PyTorch module that is to be made faster). A zygote is a process that has loaded torch
(inside/zygote.py). Zygotes run inside bubblewrap unless sandbox.isolation is "none".
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_json, remove_stale, user_cache
from components.core.params import Sandbox
from components.core.records import Device
from components.sandbox import isolation, seccomp_filter
from components.sandbox.inside.runner_protocol import Confinement, Role, RoleHeader, ZygoteKind
from components.sandbox.runner_process import (
    EXIT_SECONDS,
    MESSAGE_BYTES,
    Runner,
    RunnerError,
    has_ended,
    send,
)
from components.sandbox.unsuspended_time import unsuspended_seconds

# Maximum length of the first message to a runner. By default a packet on a local socket can have at most
# 208 KiB (net.core.wmem_default).
HEADER_BYTES = 180_000
# Maximum time to wait for a new runner, which includes the zygote's import of torch.
START_SECONDS = 300
# Number of successive zygotes of one kind that fail to start any runner before UserError is raised.
MAX_FAILED_STARTS = 2
# Time without use after which builds and results of torch.compile are removed.
CACHE_SECONDS = 14 * 24 * 3600
# Capacity of a runner's private /workspace.
TEMPORARY_BYTES = 1 << 29
# The same for a runner that compiles for a GPU, where max-autotune compiles hundreds of kernels to time them.
AUTOTUNE_BYTES = 1 << 32
INSIDE_FOLDER = Path(__file__).resolve().parent / "inside"
# Seals after which nobody can change a file's content or size, or its seals.
ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
WARM_KINDS: tuple[ZygoteKind, ...] = ("plain", "compile")


@dataclass
class Zygote:
    """A running zygote, which is a process that has loaded torch, and the judge's socket `control` to it.

    The zygote forks one runner (a sandboxed process) for each message that it receives on this socket: a
    RoleHeader with a Confinement (inside/runner_protocol.py).
    """

    process: subprocess.Popen[bytes]
    control: socket.socket
    # Whether it has started at least one runner.
    has_served: bool = False

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


def torch_cache(parent: Path) -> Path:
    """Return the cache folder of this torch installation below `parent`, and remove unused cache folders.

    Unused are those that were not modified for CACHE_SECONDS. The folder's name is a digest of the
    installation, because inside a sandbox every installation has the same path and cached results could not
    be distinguished otherwise.
    """
    installation = [str(path) for path in isolation.package_folders()]
    folder = parent / digest_json([importlib.metadata.version("torch"), sys.version, installation])[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    remove_stale(parent, CACHE_SECONDS)
    return folder


def sealed_file(content: bytes) -> int:
    """Return the descriptor of a file in memory that has `content` and that nobody can change.

    The file is sealed, because a read-only descriptor would not suffice: a process can open the file of a
    descriptor again, and for writing if its own account owns the file.
    """
    descriptor = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, ALL_SEALS)
    return descriptor


class RunnerFactory:
    """Factory that starts one zygote of each kind (seconds) and forks runners from them (milliseconds).

    A zygote is a process that has loaded torch, and a runner is a sandboxed process that executes code of a
    candidate (an implementation of a PyTorch module, to be judged) or a task (the PyTorch module that is to
    be made faster). `folder` has logs of the zygotes, and files of runners that are not isolated.
    `result_channel` is the folder of the compiled module of this name. Runners of torch.compile are forked
    from a separate zygote, because the modules of torch.compile take most of a minute to load and would make
    every fork slower. So a candidate that is not compared with torch.compile never waits for these modules.
    """

    def __init__(self, sandbox: Sandbox, device: Device, folder: Path, result_channel: Path):
        self.sandbox = sandbox
        self.device = device
        # Folder of the compiled module result_channel, made by build.build_result_channel.
        self.result_channel = result_channel
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        self.zygotes: dict[ZygoteKind, Zygote] = {}
        # With --die-with-parent, bubblewrap ends when the thread that started it ends. This thread exists as
        # long as the factory.
        self.starter = ThreadPoolExecutor(1, thread_name_prefix="zygote")
        # Descriptor of an empty file, sent in place of the library if a role has no library.
        self.empty_library = sealed_file(b"")
        self.failed_starts: dict[ZygoteKind, int] = {}
        # Number of zygotes that ended by themselves and were replaced.
        self.replaced = 0
        # Process descriptors of the runners that may not have ended yet.
        self.pidfds: list[int] = []

    def prepare(self) -> None:
        """Start the zygotes of the kinds `plain` and `compile` without waiting for their imports.

        A zygote is a process that has loaded torch and that sandboxed processes are forked from. One of the
        kind `compile` loads torch.compile too.
        """
        with self.lock:
            for kind in WARM_KINDS:
                self._zygote(kind)

    def spawn(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Fork a runner for the role `header["role"]`, with `seconds` of wall time, pauses not counted.

        A runner is a sandboxed process, and a role is what it executes. `descriptors` are sent to the runner
        with the header, in the order that RoleHeader states. Raises RunnerError if the header is too long,
        InfrastructureError if the runner does not start, and UserError if MAX_FAILED_STARTS successive
        zygotes of the kind that the role needs have ended without starting any runner. A zygote is a process
        that runners are forked from.
        """
        kind = header.get("zygote") or (
            "compile" if header["role"] in ("compile", "compile_only") else "plain"
        )
        header = {**header, "device": self.device}
        if len(json.dumps(header)) > HEADER_BYTES:
            raise RunnerError("error", f"sources and shapes are longer than {HEADER_BYTES} bytes")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(ours)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES)
            with theirs, self.lock:
                zygote = self._zygote(kind)
                try:
                    send(zygote.control, self._confinement(header["role"], kind), (theirs.fileno(),))
                except OSError as error:
                    raise self._start_error(kind, zygote, str(error)) from error
            pid, pagemap = _receive_start(ours)
            if pagemap is not None:
                on_failure.callback(os.close, pagemap)
            if pid is None:
                with self.lock:
                    raise self._start_error(kind, zygote, "it started no runner")
            zygote.has_served = True
            try:
                pidfd = os.pidfd_open(pid)
                runner = Runner(ours, pid, pidfd, unsuspended_seconds() + seconds, pagemap)
                on_failure.pop_all()
                on_failure.callback(runner.close)
                with self.lock:
                    self._forget_exited(0)
                    self.pidfds.append(os.dup(runner.pidfd))
                # Sent last, because the runner loads untrusted code only after this message, and not to the
                # zygote, because later runners inherit its memory.
                send(ours, header, descriptors)
            except OSError as error:
                raise InfrastructureError(f"a runner ended at once: {error}") from error
            on_failure.pop_all()
        return runner

    def ended_zygotes(self) -> int:
        """Return how many zygotes have ended by themselves until now, for instance because they were killed.

        A zygote is a process that has loaded torch. The sandboxed processes that were forked from it end too.
        """
        with self.lock:
            return self.replaced + sum(one.process.poll() is not None for one in self.zygotes.values())

    def close(self) -> None:
        """End all zygotes and runners and wait until they have ended, so that their GPU memory is free.

        Runners are sandboxed processes, and zygotes the processes that they are forked from. The wait for the
        runners ends after EXIT_SECONDS.
        """
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

    def _confinement(self, role: Role, kind: ZygoteKind) -> Confinement:
        """Return the resource limits and system-call filter of a runner (a sandboxed process).

        They depend on the runner's role (what it executes), and on the kind of the zygote (the process that
        it is forked from).
        """
        candidate = role in ("candidate", "record", "construct")
        autotunes = (kind == "compile" or role == "compile_triton") and self.device == "cuda"
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
        program = b""
        if self.sandbox.isolation == "bubblewrap":
            program = seccomp_filter.seccomp_program("candidate" if candidate else "task", self.device)
        return {
            "limits": {
                name: isolation.capped_by_hard_limit(getattr(resource, name), value)
                for name, value in limits.items()
            },
            "temporary_bytes": AUTOTUNE_BYTES if autotunes else TEMPORARY_BYTES,
            "seccomp": program.hex(),
            "folder": str(self.folder / f"runner-{os.urandom(8).hex()}"),
            # On cuda no other runner works while a candidate exists.
            "own_limits": self.sandbox.isolation == "bubblewrap" and self.device == "cpu",
        }

    def _zygote(self, kind: ZygoteKind) -> Zygote:
        """Return the zygote of this kind, after starting it if none is running; the caller holds the lock.

        A zygote is a process that runners are forked from.
        """
        zygote = self.zygotes.get(kind)
        if zygote is not None and zygote.process.poll() is not None:
            self._remove(kind)
            zygote = None
        if zygote is None:
            zygote = self.zygotes[kind] = self.starter.submit(self._start, kind).result()
        return zygote

    def _remove(self, kind: ZygoteKind) -> None:
        """Forget the zygote of this kind, which has ended by itself; the caller holds the lock."""
        self.zygotes.pop(kind).close()
        self.replaced += 1

    def _start(self, kind: ZygoteKind) -> Zygote:
        self.folder.chmod(0o700)  # other users must not read or run files that runners write below it
        caches: dict[str, Path] = {}
        if kind == "compile":
            # /warm contains Inductor's precompiled headers, which all homes of a user share. Only zygotes
            # write there, before they fork runners. Several zygotes may do so at the same time, because
            # Inductor names these files by their content and locks them while it writes.
            caches = {"/warm": torch_cache(user_cache("inductor"))}
        isolated = self.sandbox.isolation == "bubblewrap"
        environment = dict(isolation.BUBBLEWRAP_ENVIRONMENT)
        if isolated:
            paths = isolation.python_paths() | {INSIDE_FOLDER: "/sandbox", self.result_channel: "/native"}
            interpreter = isolation.interpreter()
            command = isolation.bubblewrap(
                device=self.device,
                paths=paths,
                temporary_bytes=TEMPORARY_BYTES,
                keep_capabilities=True,
                writable=caches,
            )
        else:
            paths, interpreter, command = isolation.HOST_PATHS, [sys.executable, "-I"], []
            home = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "PATH": os.environ["PATH"]}
            environment = isolation.sandbox_environment(self.device) | home
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command += [
            *(["--"] if isolated else []),
            *interpreter,
            paths.inside(INSIDE_FOLDER / "zygote.py"),
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
                # A signal to this process's group, such as torchrun's SIGTERM to a rank, is not for runners.
                start_new_session=True,
            )
        return Zygote(process, ours)

    def _start_error(self, kind: ZygoteKind, zygote: Zygote, reason: str) -> Exception:
        """Return the exception to raise for a zygote that did not start a runner; the caller holds the lock.

        A zygote is a process that runners (sandboxed processes) are forked from, and `reason` says what
        happened. The exception is InfrastructureError, after which the caller may try again, or UserError if
        MAX_FAILED_STARTS successive zygotes of this kind have ended without starting any runner.
        """
        log = self.folder / f"{kind}.log"
        with contextlib.suppress(subprocess.TimeoutExpired):
            zygote.process.wait(1)
        output = " ".join(log.read_text(errors="replace").split())[-500:]
        if zygote.process.poll() is not None and self.zygotes.get(kind) is zygote:
            self._remove(kind)
            self.failed_starts[kind] = 0 if zygote.has_served else self.failed_starts.get(kind, 0) + 1
        if self.failed_starts.get(kind, 0) < MAX_FAILED_STARTS:
            return InfrastructureError(
                f"a runner could not be started by the process that holds torch ({kind}): {reason}; {output}"
            )
        what = "torch.compile" if kind == "compile" else "torch"
        return UserError(
            f"{log}: the judge's process that holds {what} ends as soon as it starts, with the output"
            f" {output[-200:]}; fix that and run the same command again."
        )

    def _forget_exited(self, seconds: float) -> None:
        """Wait up to `seconds` until all runners (sandboxed processes) have ended, and forget the ended ones.

        The process descriptors of ended runners are closed and removed from `pidfds`.
        """
        deadline = time.monotonic() + seconds
        for pidfd in list(self.pidfds):
            if has_ended(pidfd, deadline - time.monotonic()):
                self.pidfds.remove(pidfd)
                os.close(pidfd)


def _receive_start(connection: socket.socket) -> tuple[int | None, int | None]:
    """Return the PID of a new runner, and the descriptor of its page table (/proc/PID/pagemap).

    A runner is a sandboxed process. Its PID is reliable, because the kernel adds it to the runner's message
    (SCM_CREDENTIALS). It is None if the runner's zygote (the process that forks it) has failed, and the
    descriptor is None if there is no such file. Raises InfrastructureError if no message comes in
    START_SECONDS.
    """
    connection.settimeout(START_SECONDS)
    space = socket.CMSG_SPACE(struct.calcsize("3i")) + socket.CMSG_SPACE(struct.calcsize("i"))
    try:
        data, ancillary, _, _ = connection.recvmsg(16, space)
    except OSError as error:
        raise InfrastructureError(f"a runner did not start: {error}") from error
    found = {kind: payload for _, kind, payload in ancillary}
    credentials, rights = found.get(socket.SCM_CREDENTIALS), found.get(socket.SCM_RIGHTS)
    pid = struct.unpack("3i", credentials)[0] if data == b"H" and credentials else None
    return pid, struct.unpack("i", rights)[0] if rights else None
