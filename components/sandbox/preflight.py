"""Check whether runners can be isolated, as the first step of a command that judges candidates.

A runner is a sandboxed process with code of a candidate, which is an implementation of a PyTorch module, to
be judged. The check confines a command as a compiler is confined. Then it starts one runner as a candidate's
runner is started, pauses it and reads its memory. This takes a fraction of a second. If it fails,
IsolationUnavailable (exit code 3) is raised, with one sentence that includes the fix for the cause that was
found (`explain`).
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from components.core.config import PROJECT
from components.core.errors import InfrastructureError, IsolationUnavailable
from components.core.params import Sandbox
from components.core.records import Device
from components.sandbox import isolation, seccomp_filter
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.isolation import NOBODY
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import Runner, RunnerError

# The first version of bubblewrap with the option --size.
MIN_BUBBLEWRAP = (0, 7)
# Maximum wall time of the runner that is started to test isolation.
PROBE_SECONDS = 30.0
# Size of the memory that is read from the test's runner; zygote.py must have the same value.
PROBE_BYTES = 4096
READ_FAILED = "reading a runner's memory"
GUIDE = "docs/operations.md, Where the judge runs"
NO_ISOLATION = "or judge without isolation by --set sandbox.isolation=none where every candidate is your own"


@dataclass(frozen=True)
class System:
    """The kernel's settings and this process's status, read from the /proc below the folder `root`."""

    root: Path = Path("/")

    def setting(self, name: str) -> str:
        """Return the kernel setting at a path below /proc/sys, or "" if this kernel does not have it."""
        return self._text(f"proc/sys/{name}").strip()

    def is_filtered(self) -> bool:
        """Return whether a system-call filter applies to this process, as in most containers."""
        return re.search(r"^Seccomp:\s*2$", self._text("proc/self/status"), re.MULTILINE) is not None

    def _text(self, name: str) -> str:
        try:
            return (self.root / name).read_text()
        except OSError:
            return ""


# Possible causes why no sandbox can be made. Each has a function that returns whether it is the cause, from
# the system, the failure's message and whether root ran it, and a text with the cause and its fix.
CASES: tuple[tuple[Callable[[System, str, bool], bool], str], ...] = (
    (
        lambda system, message, root: system.setting("user/max_user_namespaces") == "0" and not root,
        "user namespaces are switched off (user.max_user_namespaces is 0); run"
        " sudo sysctl -w user.max_user_namespaces=15000",
    ),
    (
        lambda system, message, root: system.setting("kernel/unprivileged_userns_clone") == "0" and not root,
        "user namespaces are for root only (kernel.unprivileged_userns_clone is 0); run"
        " sudo sysctl -w kernel.unprivileged_userns_clone=1",
    ),
    (
        lambda system, message, root: (
            READ_FAILED in message and system.setting("kernel/yama/ptrace_scope") == "3"
        ),
        "no process may read another's memory (kernel.yama.ptrace_scope is 3, which lasts until the next"
        " boot); set it to 2 or less in /etc/sysctl.d and boot anew",
    ),
    (
        lambda system, message, root: "mount proc" in message,
        "the container's engine hides parts of /proc, and CUDA needs all of it; start it with"
        " --security-opt systempaths=unconfined (Docker), or with hostUsers: false and procMount: Unmasked as"
        f" infra/prefect/kubernetes.json (Kubernetes), see {GUIDE}",
    ),
    (
        lambda system, message, root: system.is_filtered(),
        "the container's system-call filter refuses what isolation needs; start it with --security-opt"
        " seccomp=unconfined --security-opt apparmor=unconfined (Docker, Podman) or with the security context"
        f" of infra/prefect/kubernetes.json (Kubernetes), see {GUIDE}",
    ),
    (
        lambda system, message, root: (
            system.setting("kernel/apparmor_restrict_unprivileged_userns") == "1" and not root
        ),
        "AppArmor restricts user namespaces (Ubuntu 24.04 and later); run"
        " sudo cp infra/apparmor/bwrap /etc/apparmor.d/bwrap && sudo systemctl reload apparmor",
    ),
    (
        lambda system, message, root: root and "Operation not permitted" in message,
        "root of this container lacks rights; start it as another user, or add the capabilities SYS_ADMIN and"
        f" SYS_PTRACE (docker run --cap-add SYS_ADMIN --cap-add SYS_PTRACE), see {GUIDE}",
    ),
)


def explain(message: str, *, root: bool, system: System | None = None) -> str:
    """Return the error message for a failure to make a sandbox, with the fix of the cause if it is known.

    The cause is the first of `CASES` that applies. `message` is what the failed program printed, and `root`
    tells whether root started it. `system` has the kernel's settings, by default those of this machine.
    """
    remedy = next(
        (remedy for applies, remedy in CASES if applies(system or System(), message, root)), f"see {GUIDE}"
    )
    detail = " ".join(message.split())[-300:]
    return (
        f"sandbox.isolation: no sandbox can be made here: {remedy}, {NO_ISOLATION} "
        f"(the system says: {detail})."
    )


def check_installed() -> None:
    """Raise IsolationUnavailable unless the programs and libraries for isolation are installed.

    The same error is raised if bubblewrap is too old, or if runners (sandboxed processes) may not read files
    that they need.
    """
    if shutil.which("bwrap") is None:
        raise IsolationUnavailable(
            "sandbox.isolation: bubblewrap is not installed; run sudo apt-get install -y bubblewrap,"
            f" {NO_ISOLATION}."
        )
    printed = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"(\d+)\.(\d+)", printed.stdout)
    if version is not None and tuple(map(int, version.groups())) < MIN_BUBBLEWRAP:
        raise IsolationUnavailable(
            f"sandbox.isolation: bubblewrap {version[0]} is too old, 0.7 is needed; install a newer one"
            f" (Debian 12 and Ubuntu 24.04 have it), {NO_ISOLATION}."
        )
    try:
        seccomp_filter.seccomp_program("candidate")
    except (ImportError, OSError, RuntimeError) as error:
        raise IsolationUnavailable(
            f"sandbox.isolation: libseccomp cannot be loaded ({error});"
            " run sudo apt-get install -y libseccomp2."
        ) from error
    if (path := _unreadable_path()) is not None:
        raise IsolationUnavailable(
            f"{path}: candidates of root's judge run as uid {NOBODY} and may not read it; run"
            f" chmod -R a+rX {PROJECT}, or work as an ordinary user."
        )


def _unreadable_path() -> Path | None:
    """Return a path that candidates need but may not read, or None if there is none.

    A candidate is an implementation of a PyTorch module, to be judged. There is no such path unless the judge
    is root and can change uids, because only then its candidates run with another uid.
    """
    if not isolation.can_change_uid():
        return None
    project, torch = PROJECT / "agent_workdir", isolation.package_folders()[0] / "torch"
    needed = [project / "utils", project / "vec.h", torch, torch / "__init__.py"]
    bits = {path: 0o005 if path.is_dir() else 0o004 for path in needed}
    return next((path for path in needed if path.stat().st_mode & bits[path] != bits[path]), None)


@functools.cache
def check_isolation(sandbox: Sandbox, device: Device) -> None:
    """Raise IsolationUnavailable unless runners can be isolated, paused and read, and compilers confined.

    A runner is a sandboxed process. A check that has passed is not repeated in this process for equal
    arguments. Nothing is checked if sandbox.isolation is "none".
    """
    if sandbox.isolation == "none":
        return
    check_installed()
    if problem := _confine_failure() or _runner_failure(sandbox, device):
        raise IsolationUnavailable(explain(problem, root=isolation.can_change_uid()))


def _confine_failure() -> str:
    """Run a test command confined as a compiler is; return its error message, or "" if it succeeds."""
    with isolation.confined(
        ["/usr/bin/true"],
        paths=isolation.HOST_PATHS,
        writable={},
        variables={},
        temporary_bytes=1 << 20,
        memory_bytes=1 << 30,
        file_bytes=1 << 20,
        seconds=5,
    ) as (command, filter_fd):
        result = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=(filter_fd,))
    return "" if result.returncode == 0 else result.stderr or f"exit code {result.returncode}"


def _runner_failure(sandbox: Sandbox, device: Device) -> str:
    """Return the problem with a test process that is isolated as a candidate is, or "" if there is none.

    A candidate is an implementation of a PyTorch module, to be judged.
    """
    header: RoleHeader = {"role": "candidate", "zygote": "probe"}
    with (
        tempfile.TemporaryDirectory(prefix="probe-") as folder,
        contextlib.closing(RunnerFactory(sandbox, device, Path(folder), Path(folder))) as factory,
    ):
        try:
            with contextlib.closing(factory.spawn(header, seconds=PROBE_SECONDS)) as runner:
                return _probe(runner)
        except (InfrastructureError, RunnerError, OSError) as error:
            log = Path(folder, "probe.log")
            return f"{error} {log.read_text(errors='replace') if log.exists() else ''}"


def _probe(runner: Runner) -> str:
    addresses = runner.receive_addresses(1)
    memory = ctypes.create_string_buffer(PROBE_BYTES)
    try:
        runner.read_memory(addresses, [ctypes.addressof(memory)], [PROBE_BYTES])
        runner.is_private_memory(addresses[0], PROBE_BYTES)
    except (InfrastructureError, RunnerError) as error:
        return f"{READ_FAILED}: {error}"
    runner.stop()
    runner.resume()
    runner.cpu_seconds()
    status = Path(f"/proc/{runner.pid}/status").read_text()
    found = dict(
        re.findall(r"^(Cap(?:Prm|Eff|Inh|Bnd|Amb)|NoNewPrivs|Seccomp):\s*(\w+)$", status, re.MULTILINE)
    )
    runner.acknowledge()
    found |= json.loads(runner.receive())
    expected = {
        "digest": hashlib.sha256(memory.raw).hexdigest(),
        "written": True,
        "uid": NOBODY,
        "pid": 1,
        "NoNewPrivs": "1",
        "Seccomp": "2",
    } | dict.fromkeys(("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb"), f"{0:016x}")
    wrong = [f"{name} is {found.get(name)!r}" for name in expected if found.get(name) != expected[name]]
    return f"a runner is not isolated: {', '.join(wrong)}" if wrong else ""
