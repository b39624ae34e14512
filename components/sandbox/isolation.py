"""Isolation of untrusted processes: the bubblewrap command around them and their resource limits.

The user who starts a sandbox determines how it is made (`can_change_uid`):

- For root, no user namespace is made if the present one has the uids 65021 to 65534. Untrusted processes get
  one of these as their real uid, so that limits per user apply to them, and an interpreter that only root may
  read can be bound into the sandbox.
- For every other user, a user namespace is made. Inside, untrusted processes have the uid 65534; outside,
  they belong to that user. Since Linux 5.14 limits per user apply to each user namespace separately, so the
  user's other processes do not use up the limits of a sandbox.

Folders of the project and of Python's packages are bound at fixed paths (`PathMap`). So processes inside see
the same paths for every checkout, and these contain no blanks, which would break a compiler's command line.
"""

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from components.core.errors import IsolationUnavailable
from components.sandbox.seccomp_filter import seccomp_program

# The uid of runners.
NOBODY = 65534
# The uids of compilers, and those of agents' shells, which are given out in turn. They differ from the uid of
# runners and from each other, because the limit of processes applies per uid: a candidate's threads, or a
# shell's processes, would otherwise use up the limit of compilers or of other shells.
BUILDER = 65533
SHELLS = range(65021, BUILDER)
_shell_numbers = itertools.count(secrets.randbelow(len(SHELLS)))
# RLIMIT_SIGPENDING of every untrusted process.
PENDING_SIGNALS = 1024
# The environment of the bubblewrap process. It does not contain the judge's own variables, such as keys,
# because processes inside may be able to read it.
BUBBLEWRAP_ENVIRONMENT: Mapping[str, str] = MappingProxyType({"PATH": "/usr/bin:/bin"})
# Prefix of a command that makes the kernel end its process before the judge when memory runs out.
KILLED_FIRST = ("/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh")


@functools.cache
def can_change_uid() -> bool:
    """Return whether this process may start processes with the uids of `SHELLS` up to `NOBODY`.

    This requires that it is root and that its user namespace contains these uids.
    """
    if os.geteuid() != 0:
        return False
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= SHELLS.start and first + count > NOBODY for first, _, count in ranges)


def shell_uid() -> int:
    """Return the uid of the next agent's shell, which differs from those of the last 511 in this process."""
    return SHELLS[next(_shell_numbers) % len(SHELLS)]


@dataclass(frozen=True)
class PathMap:
    """Host folders that are visible read-only inside a sandbox, each with its path inside."""

    folders: Mapping[Path, str]

    def inside(self, path: Path | str) -> str:
        """Return the path inside the sandbox for a host path.

        A path that is in none of the folders, such as a path of the system, is returned unchanged.
        """
        # A path through a symbolic link, such as that of a linked .venv, names the same file.
        for host in (Path(path), Path(path).resolve()):
            for folder, target in sorted(self.folders.items(), key=lambda item: -len(item[0].parts)):
                if host.is_relative_to(folder):
                    return str(Path(target, host.relative_to(folder)))
        return str(path)

    def __or__(self, other: Mapping[Path, str]) -> "PathMap":
        return PathMap({**self.folders, **other})


# The map of a process without a sandbox, which leaves every path unchanged.
HOST_PATHS = PathMap({})


@functools.cache
def interpreter_paths() -> PathMap:
    """Return a map in which Python's own folder has the same path inside a sandbox as on the host.

    The path may be compiled into the interpreter. The map is empty if the folder is in /usr, which every
    sandbox has, or is the root folder.
    """
    base = Path(sys.base_prefix).resolve()
    return HOST_PATHS if base.is_relative_to("/usr") or base == Path("/") else PathMap({base: str(base)})


@functools.cache
def package_folders() -> tuple[Path, ...]:
    """Return the host folders of installed Python packages, beginning with the folder that contains torch."""
    torch = importlib.util.find_spec("torch")
    folders = [Path(torch.origin).parent.parent] if torch is not None and torch.origin else []
    folders += [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    return tuple(dict.fromkeys(path.resolve() for path in folders if path.is_dir()))


@functools.cache
def python_paths() -> PathMap:
    """Return the map from Python's folders on the host to their paths inside the sandbox.

    The interpreter's folder has the same path as outside, and the package folder i, counted from 0, is
    /packages/i.
    """
    return interpreter_paths() | {folder: f"/packages/{i}" for i, folder in enumerate(package_folders())}


def interpreter() -> list[str]:
    """Return a command inside a sandbox that starts Python without site packages.

    It names the base interpreter, to which that of a virtual environment links, because this has the same
    path inside.
    """
    return [os.path.realpath(getattr(sys, "_base_executable", sys.executable)), "-I", "-S"]


@functools.cache
def bubblewrap_supports(*options: str) -> bool:
    """Return whether bubblewrap can apply these options for this user, by running `true` with them.

    bubblewrap may be unable to in a container whose engine hides or protects parts of /proc.
    """
    user = () if can_change_uid() else ("--unshare-user",)
    program = shutil.which("bwrap") or "bwrap"
    command = [program, "--unshare-pid", *user, "--ro-bind", "/", "/", *options, "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def has_own_proc() -> bool:
    """Return whether a sandbox can mount its own /proc.

    An ordinary user cannot do so in a container whose engine hides parts of /proc.
    """
    return bubblewrap_supports("--proc", "/proc")


def bubblewrap(
    *,
    device: str,
    paths: PathMap,
    temporary_bytes: int,
    keep_capabilities: bool,
    writable: Mapping[str, Path] = MappingProxyType({}),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return a bwrap command with its options, without `--` and the command to run inside.

    With `device` "cuda", the device files of one GPU are visible inside. `paths` are visible read-only.
    `temporary_bytes` is the capacity of /tmp. `writable` are writable host folders by their path inside.
    `variables` are set in addition to `sandbox_environment`.

    `keep_capabilities` is for a zygote, the trusted process that forks other sandboxed processes
    (inside/zygote.py). A zygote needs capabilities to isolate its children from itself, and the children drop
    all capabilities before they run untrusted code. With this option, /workspace is another folder of
    `temporary_bytes`, and /tmp is read-only.
    """
    size = ("--size", str(temporary_bytes))
    command = [
        # oom_score_adj must be set outside if there is no /proc inside.
        *(() if has_own_proc() else KILLED_FIRST),
        shutil.which("bwrap") or "bwrap",
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--new-session", "--die-with-parent", "--clearenv"),
        *_privileges(keep_capabilities),
        *_system_folders(device),
        *("--dev", "/dev", "--perms", "1777", *size, "--tmpfs", "/tmp"),
    ]
    if device == "cuda":
        command += ["--ro-bind", "/sys", "/sys", *_same_path("--dev-bind", _gpu_devices())]
    for target, folder in writable.items():
        command += _bind("--bind", folder, target)
    for folder, target in paths.folders.items():  # after the writable folders, because they may lie in these
        command += _bind("--ro-bind", folder, target)
    for name, value in {**sandbox_environment(device), **variables}.items():
        command += ["--setenv", name, value]
    if keep_capabilities:
        # Every runner mounts a private /workspace over this one. No other folder except those in `writable`
        # is writable, so that a runner cannot leave files for other runners.
        command += [*size, "--tmpfs", "/workspace", "--remount-ro", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def _privileges(keep_capabilities: bool) -> list[str]:
    """Return bwrap's options for the user namespace and the capabilities.

    With `keep_capabilities` all capabilities are kept. Otherwise the sandbox of an ordinary account has none,
    and the sandbox of root has only those that `setpriv` needs to change the user and to drop them.
    """
    options = []
    if not can_change_uid():
        options += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        if not keep_capabilities:
            # Otherwise the process with PID 1 inside is bubblewrap, with this user's uid, and untrusted code
            # could change its memory.
            options += ["--as-pid-1"]
            # The option needs /proc/sys. Without it, only the system-call filter denies user namespaces.
            if bubblewrap_supports("--disable-userns"):
                options += ["--disable-userns"]
    if keep_capabilities:
        return [*options, "--cap-add", "ALL"]
    # setpriv needs these capabilities and drops them.
    kept = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP") if can_change_uid() else ()
    return [*options, "--cap-drop", "ALL", *(word for name in kept for word in ("--cap-add", name))]


def _system_folders(device: str) -> list[str]:
    """Return bwrap's options for /usr, the links to it, files of /etc that programs need, and /proc."""
    options = ["--ro-bind", "/usr", "/usr"]
    for path in ("/lib", "/lib32", "/lib64", "/bin", "/sbin"):
        if Path(path).is_symlink():
            options += ["--symlink", f"usr{path}", path]
        elif Path(path).exists():
            options += ["--ro-bind", path, path]
    configuration = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
    # Made explicitly, because uid 65534 may not enter parent folders that bwrap makes automatically.
    options += ["--perms", "0755", "--dir", "/etc"]
    options += _same_path("--ro-bind", [path for path in configuration if Path(path).exists()])
    if has_own_proc() or device == "cuda":  # CUDA's driver needs a complete /proc
        return [*options, "--proc", "/proc"]
    processor = _same_path("--ro-bind", ["/proc/cpuinfo", "/proc/meminfo"])  # torch chooses its kernels by it
    return [*options, "--perms", "0755", "--tmpfs", "/proc", *processor]


def _same_path(option: str, paths: list[str]) -> list[str]:
    """Return bwrap's options that bind each path at the same path inside the sandbox.

    `option` names the kind of bind, such as --ro-bind.
    """
    return [word for path in paths for word in (option, path, path)]


def _bind(option: str, source: Path, target: str) -> list[str]:
    """Return bwrap's options that bind `source` at `target`.

    They make the parent folders explicitly, because uid 65534 may not enter parents that bwrap makes itself.
    """
    options: list[str] = []
    for parent in reversed(Path(target).parents):
        if str(parent) not in ("/", "/usr", "/tmp", "/dev"):
            options += ["--perms", "0755", "--dir", str(parent)]
    return [*options, option, str(source), target]


def gpu_minor(root: Path = Path("/")) -> int:
    """Return the number N of the device file /dev/nvidiaN of the judge's GPU.

    The GPU is the first of CUDA_VISIBLE_DEVICES, which may name it by its number or its UUID, or the first of
    all if the variable is empty. CUDA numbers the GPUs whose device files exist by their PCI addresses, and
    the driver states the file of each address below /proc/driver. If a container hides that folder, the
    device files are taken in the order of their numbers. `root` is the folder that contains dev and proc. A
    number that no GPU has is returned unchanged. If no GPU is known to have the given UUID and there is only
    one, that one is taken. Raises IsolationUnavailable if none of several GPUs is known to have it, or if
    several UUIDs begin with it.
    """
    devices = {int(path.name[6:]) for path in (root / "dev").glob("nvidia[0-9]*")}
    gpus = []  # UUID and number of the device file, in the order of PCI addresses
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        values = dict(re.findall(r"^(.+?):\s*(.+?)\s*$", path.read_text(), re.MULTILINE))
        minor = values.get("Device Minor", "")
        if minor.isdecimal() and int(minor) in devices:
            gpus.append((values.get("GPU UUID", ""), int(minor)))
    gpus = gpus or [("", minor) for minor in sorted(devices)]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if wanted.isdecimal() or not wanted:
        number = int(wanted or 0)
        return gpus[number][1] if number < len(gpus) else number
    found = [minor for uuid, minor in gpus if uuid.startswith(wanted)] or [minor for _, minor in gpus]
    if len(found) != 1:
        raise IsolationUnavailable(
            f"CUDA_VISIBLE_DEVICES: the device file of {wanted} is not known here; give the GPU's number."
        )
    return found[0]


def _gpu_devices() -> list[str]:
    """Return the paths of those device files of the judge's GPU that exist.

    Raises IsolationUnavailable if it is not known which GPU is the judge's (`gpu_minor`).
    """
    names = (f"nvidia{gpu_minor()}", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    return [f"/dev/{name}" for name in names if Path("/dev", name).exists()]


def sandbox_environment(device: str) -> dict[str, str]:
    """Return all environment variables of processes inside a sandbox, by name.

    With `device` "cuda", they include LD_LIBRARY_PATH and CUDA_HOME of this process. The MALLOC_ variables
    make malloc keep freed pages, because page faults would slow down every call otherwise.
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
    """Return `value` or this process's hard limit, whichever is lower; only root may raise a hard limit.

    `limit` is one of the constants RLIMIT_… of the module resource.
    """
    hard = resource.getrlimit(limit)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def process_limit(value: int) -> int:
    """Return the largest number of processes that a sandbox may have: `value` or less.

    If this process cannot change uids, the result is at most a quarter of the account's own process limit,
    because the processes of sandboxes are included in that limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return value if can_change_uid() or limit == resource.RLIM_INFINITY else min(value, limit // 4)


@contextlib.contextmanager
def confined(
    command: list[str],
    *,
    device: str = "cpu",
    paths: PathMap,
    writable: Mapping[str, Path],
    variables: Mapping[str, str],
    temporary_bytes: int,
    memory_bytes: int,
    file_bytes: int,
    seconds: float,
    uid: int = BUILDER,
) -> Iterator[tuple[list[str], int]]:
    """Yield a command that runs `command` in a sandbox with limits, and the descriptor of its filter.

    The sandbox applies the system-call filter that it reads from the descriptor, so the process that is
    started must inherit the descriptor. With `device` "cuda", the device files of one GPU are visible inside.
    `variables` are set inside in addition to `sandbox_environment`.
    `paths` are visible read-only, and `writable` are host folders by their path inside. `temporary_bytes` is
    the capacity of /tmp in bytes, `memory_bytes` limits the address space of each process, `file_bytes` each
    written file, and `seconds` the CPU time of each process. `uid` is the user of the command if this process
    can change uids (`can_change_uid`). When memory runs out, the kernel ends `command` before the judge.
    """
    sandbox = bubblewrap(
        device=device,
        paths=paths,
        writable=writable,
        variables=variables,
        temporary_bytes=temporary_bytes,
        keep_capabilities=False,
    )
    drop = (
        *("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"),
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
        # At the hard limit the signal is SIGKILL, as that of a machine whose memory runs out.
        "cpu": ":".join(
            str(capped_by_hard_limit(resource.RLIMIT_CPU, int(seconds) + extra)) for extra in (1, 6)
        ),
    }
    options = [f"--{name}={value}" for name, value in limits.items()]
    with os.fdopen(os.memfd_create("seccomp"), "wb", buffering=0) as file:
        file.write(seccomp_program("command"))
        file.seek(0)
        filtered = [*sandbox, "--seccomp", str(file.fileno()), "--", *(drop if can_change_uid() else ())]
        yield [*filtered, "prlimit", *options, "--", *KILLED_FIRST, *command], file.fileno()
