"""The first check of every command that judges: one runner is started, isolated and read as the judge does it, in a fraction of a second.

What fails is told in one sentence with the mend for that very case (`explain`), and exit code 3.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from components.core.config import PROJECT, Device, Sandbox
from components.core.errors import InfrastructureError, IsolationUnavailable
from components.sandbox import isolation
from components.sandbox.isolation import NOBODY
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import RunnerError

LEAST_BUBBLEWRAP = (0, 7)
"""The first version with --size."""
PROBE_SECONDS = 30.0
PROBE_BYTES = 4096
"""As zygote.py has it."""
GUIDE = "docs/operations.md, Where the judge runs"
NONE = "or judge without isolation by --set sandbox.isolation=none where every candidate is your own"


@dataclass(frozen=True)
class System:
    """What the system says of itself; `root` is where its files are looked for."""

    root: Path = Path("/")

    def setting(self, name: str) -> str:
        """A kernel setting by its path below /proc/sys; empty where this kernel has none of that name."""
        return self._text(f"proc/sys/{name}").strip()

    def filtered(self) -> bool:
        """Whether a system-call filter was put on this process before it started, as container engines do."""
        return re.search(r"^Seccomp:\s*2$", self._text("proc/self/status"), re.MULTILINE) is not None

    def _text(self, name: str) -> str:
        try:
            return (self.root / name).read_text()
        except OSError:
            return ""


Case = tuple[Callable[[System, str, bool], bool], str]
"""Whether it is this case, by what the system says, what the tools said, and whether root asked; and the mend."""
CASES: tuple[Case, ...] = (
    (
        lambda system, said, root: system.setting("user/max_user_namespaces") == "0" and not root,
        "user namespaces are switched off (user.max_user_namespaces is 0); run sudo sysctl -w user.max_user_namespaces=15000",
    ),
    (
        lambda system, said, root: system.setting("kernel/unprivileged_userns_clone") == "0" and not root,
        "user namespaces are for root only (kernel.unprivileged_userns_clone is 0); run sudo sysctl -w kernel.unprivileged_userns_clone=1",
    ),
    (
        lambda system, said, root: (
            "reading a runner's memory" in said and system.setting("kernel/yama/ptrace_scope") == "3"
        ),
        "no process may read another's memory (kernel.yama.ptrace_scope is 3, which lasts until the next boot);"
        " set it to 2 or less in /etc/sysctl.d and boot anew",
    ),
    (
        lambda system, said, root: "mount proc" in said,
        "the container's engine hides parts of /proc, and CUDA needs all of it; start it with --security-opt systempaths=unconfined (Docker), or with"
        f" hostUsers: false and procMount: Unmasked as infra/prefect/kubernetes.json (Kubernetes), see {GUIDE}",
    ),
    (
        lambda system, said, root: system.filtered(),
        "the container's system-call filter refuses what isolation needs; start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        f" (Docker, Podman) or with the security context of infra/prefect/kubernetes.json (Kubernetes), see {GUIDE}",
    ),
    (
        lambda system, said, root: (
            system.setting("kernel/apparmor_restrict_unprivileged_userns") == "1" and not root
        ),
        "AppArmor restricts user namespaces (Ubuntu 24.04 and later); run sudo cp infra/apparmor/bwrap /etc/apparmor.d/bwrap && sudo systemctl reload apparmor",
    ),
    (
        lambda system, said, root: root and "Operation not permitted" in said,
        "root of this container lacks rights; start it as another user, or add the capabilities SYS_ADMIN and SYS_PTRACE"
        f" (docker run --cap-add SYS_ADMIN --cap-add SYS_PTRACE), see {GUIDE}",
    ),
)


def explain(said: str, *, root: bool, system: System | None = None) -> str:
    """The sentence for a sandbox that could not be made: the first case that the system's state tells, or what the tools said."""
    found = next((mend for applies, mend in CASES if applies(system or System(), said, root)), None)
    words = " ".join(said.split())[-300:]
    return f"sandbox.isolation: no sandbox can be made here: {found or f'see {GUIDE}'}, {NONE} (the system says: {words})."


def _too_old() -> str:
    """bubblewrap's version where that lacks options which are needed; empty where it has them, or does not tell."""
    found = re.search(
        r"(\d+)\.(\d+)",
        subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False).stdout,
    )
    return found[0] if found is not None and tuple(map(int, found.groups())) < LEAST_BUBBLEWRAP else ""


def _unreadable() -> Path | None:
    """What a candidate of root's, which has another uid, needs and may not read; None if there is nothing, or for an ordinary user."""
    if not isolation.can_change_uid():
        return None
    torch = next(
        (folder / "torch" for folder in isolation.package_folders() if (folder / "torch").is_dir()), None
    )
    needed = [
        PROJECT / "agent_workdir" / "utils",
        PROJECT / "agent_workdir" / "vec.h",
        *([torch, torch / "__init__.py"] if torch else []),
    ]
    return next(
        (
            path
            for path in needed
            if path.stat().st_mode & (0o005 if path.is_dir() else 0o004)
            != (0o005 if path.is_dir() else 0o004)
        ),
        None,
    )


def check_installed() -> None:
    """Raise IsolationUnavailable unless the programs and libraries of isolation are here."""
    if shutil.which("bwrap") is None:
        raise IsolationUnavailable(
            f"sandbox.isolation: bubblewrap is not installed; run sudo apt-get install -y bubblewrap, {NONE}."
        )
    if version := _too_old():
        mend = "install a newer one (Debian 12 and Ubuntu 24.04 have it)"
        raise IsolationUnavailable(
            f"sandbox.isolation: bubblewrap {version} is too old, 0.7 is needed; {mend}, {NONE}."
        )
    try:
        isolation.seccomp_program("candidate")
    except (ImportError, OSError, RuntimeError) as error:
        raise IsolationUnavailable(
            f"sandbox.isolation: libseccomp cannot be loaded ({error}); run sudo apt-get install -y libseccomp2."
        ) from error
    if (path := _unreadable()) is not None:
        raise IsolationUnavailable(
            f"{path}: candidates of root's judge run as uid {NOBODY} and may not read it; run chmod -R a+rX {PROJECT}, or work as an ordinary user."
        )


def check_isolation(sandbox: Sandbox, device: Device) -> None:
    """Raise IsolationUnavailable, with the mend, unless a runner can be started, isolated, stopped and read, and a compiler confined.

    It is looked at once in a process, and not where a person has switched isolation off.
    """
    global _passed
    if _passed or sandbox.isolation != "bubblewrap":
        return
    check_installed()
    root = isolation.can_change_uid()
    command = isolation.bubblewrap(
        device="cpu", paths=isolation.HOST_PATHS, temporary_bytes=1 << 20, keep_capabilities=False
    )
    probe = [
        *command,
        *isolation.with_limits(["/usr/bin/true"], memory_bytes=1 << 30, file_bytes=1 << 20, seconds=5),
    ]
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise IsolationUnavailable(explain(result.stderr, root=root))
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        runner_factory = RunnerFactory(sandbox, device, Path(folder), Path(folder))
        try:
            problem = _probe(runner_factory)
        except (InfrastructureError, RunnerError, OSError) as error:
            log = Path(folder, "probe.log")
            problem = f"{error} {log.read_text(errors='replace') if log.exists() else ''}"
        finally:
            runner_factory.close()
    if problem:
        raise IsolationUnavailable(explain(problem, root=root))
    _passed = True


_passed = False
"""Whether `check_isolation` has passed in this process."""


def _probe(runner_factory: RunnerFactory) -> str:
    """What is wrong with a runner that was started as a candidate's is; empty if nothing."""
    runner = runner_factory.spawn({"role": "candidate", "zygote": "probe"}, seconds=PROBE_SECONDS)
    try:
        addresses = runner.receive_addresses(1)
        memory = bytearray(PROBE_BYTES)
        try:
            runner.read_memory(addresses, [_address(memory)], [PROBE_BYTES])
            runner.is_private_memory(addresses[0], PROBE_BYTES)
        except (InfrastructureError, RunnerError) as error:
            return f"reading a runner's memory: {error}"
        runner.pause()
        runner.resume()
        runner.cpu_seconds()
        runner.acknowledge()
        found = json.loads(runner.receive())
    finally:
        runner.close()
    expected = {
        "digest": hashlib.sha256(memory).hexdigest(),
        "written": True,
        "uid": NOBODY,
        "pid": 1,
        "capabilities": False,
        "no_new_privileges": 1,
        "seccomp": 2,
    }
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    return (
        f"a runner is not isolated: {', '.join(f'{name} is {found.get(name)!r}' for name in wrong)}"
        if wrong
        else ""
    )


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
