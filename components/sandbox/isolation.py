"""Isolation of untrusted processes: the bubblewrap command around them and their resource limits.

Who starts a sandbox decides how (`can_change_uid`):

- Root gets no user namespace. What is untrusted takes the real uid 65534 or 65533, so that limits per user
  hold and an interpreter that only root may read can be bound into the sandbox.
- An ordinary user gets a user namespace, in which it is uid 65534; outside, its processes still belong to
  that user. Limits per user are counted by user namespace (Linux 5.14), so those of a sandbox do not count
  what the user does elsewhere.

Folders of the project and of Python's packages are bound at fixed paths (`PathMap`): what runs inside sees
the same paths wherever the checkout lies, and a checkout's path may hold blanks, which a compiler's command
line does not bear.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from components.sandbox.seccomp_filter import seccomp_program

NOBODY = 65534
"""The uid of a runner."""
BUILDER = 65533
"""The uid of compilers and of the agent's shell.

Limits count by uid, so a candidate's threads must not use up theirs.
"""
PENDING_SIGNALS = 1024
"""RLIMIT_SIGPENDING of every untrusted process."""
BUBBLEWRAP_ENVIRONMENT: Mapping[str, str] = MappingProxyType({"PATH": "/usr/bin:/bin"})
"""The environment of bubblewrap itself, which may be visible inside.

Without the judge's own variables, such as keys.
"""
KILLED_FIRST = ("/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh")
"""Prefix of a command that the kernel ends first when memory runs out, before the judge."""
NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")


@functools.cache
def can_change_uid() -> bool:
    """Return whether this process may start others under uids 65533 and 65534.

    That needs root, and a user namespace that has these uids.
    """
    if os.geteuid() != 0:
        return False
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return all(any(first <= uid < first + count for first, _, count in ranges) for uid in (BUILDER, NOBODY))


@dataclass(frozen=True)
class PathMap:
    """Host folders that are visible inside a sandbox, read-only, each with its path there."""

    folders: Mapping[Path, str]

    def inside(self, path: Path | str) -> str:
        """Return the path inside the sandbox.

        The path itself where no folder holds it, such as those of the system.
        """
        host = Path(path)
        for folder, target in sorted(self.folders.items(), key=lambda item: -len(item[0].parts)):
            if host.is_relative_to(folder):
                return str(Path(target, host.relative_to(folder)))
        return str(path)

    def __or__(self, other: Mapping[Path, str]) -> PathMap:
        return PathMap({**self.folders, **other})


HOST_PATHS = PathMap({})
"""The map of a process without a sandbox: every path stays as it is."""


@functools.cache
def interpreter_path() -> str:
    """Return the path of the base interpreter, the same inside and outside.

    That of a virtual environment is a link to it.
    """
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def interpreter_paths() -> PathMap:
    """Map the interpreter's folder to its own path, which may be compiled into the interpreter.

    Empty where it is in /usr.
    """
    base = Path(sys.base_prefix).resolve()
    return HOST_PATHS if base.is_relative_to("/usr") or base == Path("/") else PathMap({base: str(base)})


@functools.cache
def package_folders() -> tuple[Path, ...]:
    """Return the host folders of installed packages, torch's first."""
    torch = importlib.util.find_spec("torch")
    folders = [Path(torch.origin).parent.parent] if torch is not None and torch.origin else []
    folders += [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    return tuple(dict.fromkeys(path.resolve() for path in folders if path.is_dir()))


@functools.cache
def python_paths() -> PathMap:
    """Map the interpreter to its own path, and the folders of packages to /packages/0, /packages/1."""
    return interpreter_paths() | {folder: f"/packages/{i}" for i, folder in enumerate(package_folders())}


@functools.cache
def bubblewrap_supports(*options: str) -> bool:
    """Return whether bubblewrap can apply these options for this user.

    A container engine may hide or protect parts of /proc.
    """
    user = [] if can_change_uid() else ["--unshare-user"]
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-pid",
        *user,
        "--ro-bind",
        "/",
        "/",
        *options,
        "true",
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def has_own_proc() -> bool:
    """Return whether a sandbox can mount a /proc.

    An ordinary user cannot in a container whose engine masks parts of it.
    """
    return bubblewrap_supports("--proc", "/proc")


def bubblewrap(
    *,
    device: str,
    paths: PathMap,
    temporary_bytes: int,
    keep_capabilities: bool,
    writable: Mapping[str, Path] = MappingProxyType({}),
    caches: Mapping[str, Path] = MappingProxyType({}),
) -> list[str]:
    """Return the bwrap command up to and including `--`; what follows runs inside.

    `writable` and `caches` are host folders by their path inside. `keep_capabilities` is for the zygote,
    which needs them to isolate its children from itself; it runs no untrusted code, and its children drop
    every capability first.
    """
    command = [] if has_own_proc() else [*KILLED_FIRST]  # oom_score_adj cannot be set without a /proc inside
    command += [
        shutil.which("bwrap") or "bwrap",
        *NAMESPACES,
        "--new-session",
        "--die-with-parent",
        "--clearenv",
    ]
    command += [*_privileges(keep_capabilities), *_system_folders(device)]
    command += ["--dev", "/dev", "--perms", "1777", "--size", str(temporary_bytes), "--tmpfs", "/tmp"]
    if device == "cuda":
        command += ["--ro-bind", "/sys", "/sys"]
        for path in _gpu_devices():
            command += ["--dev-bind", path, path]
    for target, folder in writable.items():
        command += _bind("--bind", folder, target)
    for folder, target in paths.folders.items():  # after the writable ones, which they may lie in
        command += _bind("--ro-bind", folder, target)
    for key, value in sandbox_environment(device).items():
        command += ["--setenv", key, value]
    if keep_capabilities:
        # Every runner mounts a private /workspace over this one; nothing else is writable, so that none can
        # leave a file.
        for target, folder in caches.items():
            command += ["--bind", str(folder), target]
        command += ["--size", str(temporary_bytes), "--tmpfs", "/workspace", "--remount-ro", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--"]


def _privileges(keep_capabilities: bool) -> list[str]:
    """Return bwrap's options for the user namespace and the capabilities."""
    options = []
    if not can_change_uid():
        options += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        if not keep_capabilities:
            # Otherwise PID 1 inside is bubblewrap's own process with this user's uid, whose memory untrusted
            # code could rewrite.
            options += ["--as-pid-1"]
            if bubblewrap_supports(
                "--disable-userns"
            ):  # it needs /proc/sys; the system-call filter denies them anyway
                options += ["--disable-userns"]
    if keep_capabilities:
        return [*options, "--cap-add", "ALL"]
    kept = (
        ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP") if can_change_uid() else ()
    )  # for setpriv, which drops them
    return [*options, "--cap-drop", "ALL", *(word for name in kept for word in ("--cap-add", name))]


def _system_folders(device: str) -> list[str]:
    """Return bwrap's options for /usr, the linker's configuration and /proc."""
    options = ["--ro-bind", "/usr", "/usr"]
    for path in ("/lib", "/lib32", "/lib64", "/bin", "/sbin"):
        if Path(path).is_symlink():
            options += ["--symlink", f"usr{path}", path]
        elif Path(path).exists():
            options += ["--ro-bind", path, path]
    options += [
        "--perms",
        "0755",
        "--dir",
        "/etc",
    ]  # a parent that bwrap makes by itself is closed to uid 65534
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"):
        if Path(path).exists():
            options += ["--ro-bind", path, path]
    if has_own_proc() or device == "cuda":  # CUDA's driver needs all of it
        return [*options, "--proc", "/proc"]
    options += ["--perms", "0755", "--tmpfs", "/proc"]
    for path in (
        "/proc/cpuinfo",
        "/proc/meminfo",
    ):  # torch chooses its kernels by the processor's description
        options += ["--ro-bind", path, path]
    return options


def _bind(option: str, source: Path, target: str) -> list[str]:
    """Return options that bind one path, with parents that uid 65534 may pass.

    bwrap closes those that it makes by itself.
    """
    options: list[str] = []
    for parent in reversed(Path(target).parents):
        if str(parent) not in ("/", "/usr", "/tmp", "/dev"):
            options += ["--perms", "0755", "--dir", str(parent)]
    return [*options, option, str(source), target]


def _gpu_devices() -> list[str]:
    """Return the device files of exactly one GPU.

    The first that CUDA_VISIBLE_DEVICES names, or the first there is.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    names = (f"nvidia{first if first.isdigit() else 0}", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    return [f"/dev/{name}" for name in names if Path("/dev", name).exists()]


def sandbox_environment(device: str) -> dict[str, str]:
    """Return the whole environment inside.

    malloc keeps freed pages: every call would pay for page faults otherwise.
    """
    folders = os.environ.get("PATH", "").split(os.pathsep)
    values = {
        "PATH": os.pathsep.join(path for path in folders if path.startswith(("/usr", "/bin")))
        or "/usr/bin:/bin",
        "HOME": "/workspace",
        "TMPDIR": "/workspace",
        "LANG": "C.UTF-8",
        "USER": "nobody",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    if device == "cuda":
        values |= {key: os.environ[key] for key in ("LD_LIBRARY_PATH", "CUDA_HOME") if key in os.environ}
    return values


def capped_by_hard_limit(limit: int, value: int) -> int:
    """Return `value`, or this process's hard limit where that is lower: only root may raise a hard limit."""
    hard = resource.getrlimit(limit)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def process_limit(value: int) -> int:
    """Return `value`, or a quarter of an ordinary account's process limit where that is lower.

    Sandboxes count towards the account's limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return value if can_change_uid() or limit == resource.RLIM_INFINITY else min(value, limit // 4)


def with_limits(command: list[str], *, memory_bytes: int, file_bytes: int, seconds: float) -> list[str]:
    """Return `command` without capabilities and with resource limits.

    For use inside `bubblewrap(keep_capabilities=False)`. Where the judge is root it runs under uid 65533.
    When memory runs out the kernel ends it first.
    """
    drop = (
        *("setpriv", f"--reuid={BUILDER}", f"--regid={BUILDER}", "--clear-groups"),
        *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"),
    )
    limits = {
        "msgqueue": 0,
        "sigpending": capped_by_hard_limit(resource.RLIMIT_SIGPENDING, PENDING_SIGNALS),
        "as": capped_by_hard_limit(resource.RLIMIT_AS, memory_bytes),
        "fsize": capped_by_hard_limit(resource.RLIMIT_FSIZE, file_bytes),
        "core": 0,
        "nofile": capped_by_hard_limit(resource.RLIMIT_NOFILE, 256),
        "nproc": process_limit(capped_by_hard_limit(resource.RLIMIT_NPROC, 512)),
        "cpu": capped_by_hard_limit(resource.RLIMIT_CPU, int(seconds) + 1),
    }
    options = [f"--{name}={value}" for name, value in limits.items()]
    return [*(drop if can_change_uid() else ()), "prlimit", *options, "--", *KILLED_FIRST, *command]


@contextlib.contextmanager
def confined(
    command: list[str],
    *,
    paths: PathMap,
    writable: Mapping[str, Path],
    variables: Mapping[str, str],
    temporary_bytes: int,
    memory_bytes: int,
    file_bytes: int,
    seconds: float,
) -> Iterator[tuple[list[str], int]]:
    """Yield `command` confined by a sandbox, limits and the system-call filter, and the filter's descriptor.

    The process must inherit the descriptor. `variables` are set inside besides `sandbox_environment`;
    `seconds` limits the CPU time.
    """
    sandbox = bubblewrap(
        device="cpu", paths=paths, writable=writable, temporary_bytes=temporary_bytes, keep_capabilities=False
    )
    limited = with_limits(command, memory_bytes=memory_bytes, file_bytes=file_bytes, seconds=seconds)
    settings = [word for key, value in variables.items() for word in ("--setenv", key, value)]
    with os.fdopen(os.memfd_create("seccomp"), "wb", buffering=0) as file:
        file.write(seccomp_program("baseline"))
        file.seek(0)
        yield [*sandbox[:-1], *settings, "--seccomp", str(file.fileno()), "--", *limited], file.fileno()
