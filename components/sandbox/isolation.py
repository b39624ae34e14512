"""Isolation of untrusted processes: bubblewrap around them, and the system-call filter inside it.

Who starts a sandbox decides how (`can_change_uid`):

- Root gets no user namespace. What is untrusted takes the real uid 65534 or 65533, so that limits per user hold and an
  interpreter that only root may read can be bound into the sandbox.
- An ordinary user gets a user namespace, in which it is uid 65534; outside, its processes still belong to that user. Limits per
  user are counted by user namespace (Linux 5.14), so those of a sandbox do not count what the user does elsewhere.

Folders of the project and of Python's packages are bound at fixed places (`PathMap`): what runs inside sees the same paths
whatever the checkout's own path is, which may hold blanks that a compiler's command line does not bear.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

NOBODY = 65534
BUILDER = 65533
"""Builds have a uid of their own: limits count by uid, and a candidate's thousand threads made every build fail ("Cannot fork")."""
CLONE_THREAD = 0x00010000
AF_UNIX = 1
WORD = 0xFFFFFFFF
"""The kernel looks at the lower half of what is an int; a filter that compares all of a register is passed with any upper half."""
FCNTL_REFUSED = (5, 6, 7, 36, 37, 38, 8, 10, 15)
"""F_GETLK, F_SETLK, F_SETLKW, the same for open file descriptions, F_SETOWN, F_SETSIG, F_SETOWN_EX: locks and signals."""
IOCTL_REFUSED = (0x5452, 0x8901, 0x8902)
"""FIOASYNC, FIOSETOWN, SIOCSPGRP: signals when a descriptor is ready."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PENDING_SIGNALS = 1024
FCNTL_OF_ACCOUNT = (1024, 1026, 1031)
"""F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ: leases keep others of the account from a file, watches and pipes are counted for all of it."""
SETUID_BITS = (0o4000, 0o2000)
CLONE_FILES = 0x00000400
SETTING_MODES = (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("creat", 1), ("mknod", 1), ("mknodat", 2))
"""System calls that set the mode of a file, and the place of that argument."""
OPENING = (("open", 1, 2), ("openat", 2, 3))
"""System calls that do so where they make a file, and the places of their flags and of the mode."""
MAKING_FLAGS = (0o100, 0o20000000)
"""O_CREAT, and the flag of O_TMPFILE."""
NEWER_CALLS = {"openat2": 437, "cachestat": 451, "fchmodat2": 452}
"""Numbers of system calls, the same on every architecture: libseccomp does not know the names of those that are newer than itself."""
NAMESPACE_FLAGS = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)


def _exists(path: str) -> bool:
    return Path(path).exists()


@functools.cache
def can_change_uid() -> bool:
    """Whether this process may give other uids to what it starts: it is root, and uids 65533 and 65534 exist in its user namespace."""
    if os.geteuid() != 0:
        return False
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return all(any(first <= uid < first + count for first, _, count in ranges) for uid in (BUILDER, NOBODY))


@dataclass(frozen=True)
class PathMap:
    """Host folders that are seen inside a sandbox, read-only, and the path of each there."""

    folders: Mapping[Path, str]

    def inside(self, path: Path | str) -> str:
        """The path inside of a host path; itself where it is in none of the folders, as are those of the system."""
        found = Path(path)
        for folder, place in sorted(self.folders.items(), key=lambda item: -len(item[0].parts)):
            if found.is_relative_to(folder):
                return str(Path(place, found.relative_to(folder)))
        return str(path)

    def __or__(self, other: Mapping[Path, str]) -> PathMap:
        return PathMap({**self.folders, **other})


HOST_PATHS = PathMap({})
"""No sandbox: every path is its own."""


@functools.cache
def interpreter_path() -> str:
    """The path of the base interpreter, which is the same inside: a virtual environment's own is a link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def interpreter_paths() -> PathMap:
    """The interpreter's folder at its own path, for it may be compiled into the interpreter; nothing where that is in /usr."""
    base = Path(sys.base_prefix).resolve()
    return HOST_PATHS if base.is_relative_to("/usr") or base == Path("/") else PathMap({base: str(base)})


@functools.cache
def package_folders() -> tuple[Path, ...]:
    """Host folders of installed packages, torch's first."""
    torch = importlib.util.find_spec("torch")
    found = [Path(torch.origin).parent.parent] if torch is not None and torch.origin else []
    found += [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    return tuple(dict.fromkeys(path.resolve() for path in found if path.is_dir()))


@functools.cache
def python_paths() -> PathMap:
    """The interpreter, and the folders of packages as /packages/0, /packages/1."""
    return interpreter_paths() | {
        folder: f"/packages/{number}" for number, folder in enumerate(package_folders())
    }


def _bind(option: str, source: Path, place: str) -> list[str]:
    """Bind one path, with parents that uid 65534 may pass: those that bwrap makes by itself are closed to it."""
    arguments: list[str] = []
    for parent in reversed(Path(place).parents):
        if str(parent) not in ("/", "/usr", "/tmp", "/dev"):
            arguments += ["--perms", "0755", "--dir", str(parent)]
    return [*arguments, option, str(source), place]


def gpu_devices() -> list[str]:
    """The device files of exactly one GPU: the first that CUDA_VISIBLE_DEVICES names, or the first there is."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    number = first if first.isdigit() else "0"
    return [
        d
        for d in (f"/dev/nvidia{number}", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
        if _exists(d)
    ]


@functools.cache
def allowed(*options: str) -> bool:
    """Whether bubblewrap can do what these options say, in the sandboxes of this user: a container's engine may hide or protect parts of /proc."""
    base = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-pid",
        *([] if can_change_uid() else ["--unshare-user"]),
        "--ro-bind",
        "/",
        "/",
    ]
    return subprocess.run([*base, *options, "true"], capture_output=True, check=False).returncode == 0


def has_own_proc() -> bool:
    """Whether a sandbox may have a /proc of its own: not an ordinary user's in a container whose engine masks parts of /proc."""
    return allowed("--proc", "/proc")


BUBBLEWRAP_ENVIRONMENT: Mapping[str, str] = MappingProxyType({"PATH": "/usr/bin:/bin"})
"""The environment of bubblewrap itself, which may be seen from inside: without the judge's own variables, such as keys."""
GOES_FIRST = ["/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh"]
"""The start of a command that is to end first when memory runs out, and never the judge."""


def bubblewrap(
    *,
    device: str,
    paths: PathMap,
    temporary_bytes: int,
    keep_capabilities: bool,
    writable: Mapping[str, Path] = MappingProxyType({}),
    caches: Mapping[str, Path] = MappingProxyType({}),
) -> list[str]:
    """The bwrap command up to and including `--`; what follows runs inside.

    `writable` and `caches` are host folders by their path inside. `keep_capabilities` is for our own zygote, which needs them to isolate its
    children from itself; it never runs untrusted code, and its children drop every one of them first.
    """
    root = can_change_uid()
    # Without a /proc inside oom_score_adj cannot be set there.
    command = [] if has_own_proc() else [*GOES_FIRST]
    command += [
        shutil.which("bwrap") or "bwrap",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    command += ["--new-session", "--die-with-parent", "--clearenv"]
    if not root:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        if not keep_capabilities:
            # Otherwise PID 1 inside is bubblewrap's own process with this user's uid, and untrusted code could read and rewrite its memory.
            command += ["--as-pid-1"]
        if not keep_capabilities and allowed(
            "--disable-userns"
        ):  # it writes to /proc/sys; the system-call filter refuses nested ones anyway
            command += ["--disable-userns"]
    if keep_capabilities:
        command += ["--cap-add", "ALL"]
    elif root:
        command += [
            "--cap-drop",
            "ALL",
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
            "--cap-add",
            "CAP_SETPCAP",
        ]
    else:
        command += ["--cap-drop", "ALL"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib32", "lib64", "bin", "sbin"):
        if _exists(f"/{name}"):
            command += (
                ["--symlink", f"usr/{name}", f"/{name}"]
                if Path(f"/{name}").is_symlink()
                else ["--ro-bind", f"/{name}", f"/{name}"]
            )
    command += [
        "--perms",
        "0755",
        "--dir",
        "/etc",
    ]  # a parent that bwrap makes by itself is closed to uid 65534
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"):
        if _exists(path):
            command += ["--ro-bind", path, path]
    if has_own_proc() or device == "cuda":  # CUDA's driver needs all of it
        command += ["--proc", "/proc"]
    else:  # torch chooses its kernels by the processor's description
        command += [
            "--perms",
            "0755",
            "--tmpfs",
            "/proc",
            "--ro-bind",
            "/proc/cpuinfo",
            "/proc/cpuinfo",
            "--ro-bind",
            "/proc/meminfo",
            "/proc/meminfo",
        ]
    command += ["--dev", "/dev", "--perms", "1777", "--size", str(temporary_bytes), "--tmpfs", "/tmp"]
    if device == "cuda":
        command += ["--ro-bind", "/sys", "/sys"]
        for path in gpu_devices():
            command += ["--dev-bind", path, path]
    for place, folder in writable.items():
        command += _bind("--bind", folder, place)
    for folder, place in paths.folders.items():  # also in writable ones
        command += _bind("--ro-bind", folder, place)
    for key, value in sandbox_environment(device).items():
        command += ["--setenv", key, value]
    if keep_capabilities:
        # Every runner mounts a private /workspace over this one; nothing else is writable, so that none can leave a thing behind.
        for place, folder in caches.items():
            command += ["--bind", str(folder), place]
        command += ["--size", str(temporary_bytes), "--tmpfs", "/workspace", "--remount-ro", "/tmp"]
    for path in ("/dev", "/"):
        command += ["--remount-ro", path]
    return [*command, "--chdir", "/", "--"]


def sandbox_environment(device: str) -> dict[str, str]:
    """The whole environment inside. malloc keeps freed pages, or every call of every arm would pay for page faults."""
    values = {
        "PATH": os.pathsep.join(
            p for p in os.environ.get("PATH", "").split(os.pathsep) if p.startswith(("/usr", "/bin"))
        )
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
    """`value`, or the hard limit of this process where that is less: only root may raise a hard limit."""
    hard = resource.getrlimit(limit)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def process_limit(value: int) -> int:
    """`value`, or a quarter of what the account may have where that is less: an ordinary user's sandboxes count towards the user's own limit."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return value if can_change_uid() or limit == resource.RLIM_INFINITY else min(value, limit // 4)


def with_limits(command: list[str], *, memory_bytes: int, file_bytes: int, seconds: float) -> list[str]:
    """`command` without capabilities and with limits, as root's with a uid of its own, for use inside `bubblewrap(keep_capabilities=False)`.

    When memory runs out it goes first and never the judge.
    """
    drop = [
        "setpriv",
        f"--reuid={BUILDER}",
        f"--regid={BUILDER}",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
        "--no-new-privs",
        "--",
    ]
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
    return [
        *(drop if can_change_uid() else []),
        "prlimit",
        *(f"--{name}={value}" for name, value in limits.items()),
        "--",
        *GOES_FIRST,
        *command,
    ]


@functools.cache
def seccomp_program(role: str, device: str = "cpu") -> bytes:
    """The system-call filter as BPF. `candidate`: no new process, no exec, no network socket; `baseline`: torch.compile may run g++.

    On cpu a candidate gets no memory that its address-space limit does not count (files in memory, System V segments).
    """
    import pyseccomp

    program = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refuse = pyseccomp.ERRNO(1)
    names = """unshare setns mount umount2 pivot_root chroot ptrace process_vm_readv process_vm_writev pidfd_open pidfd_getfd kcmp
        keyctl add_key request_key bpf perf_event_open userfaultfd open_by_handle_at name_to_handle_at init_module finit_module
        delete_module kexec_load kexec_file_load reboot swapon swapoff io_uring_setup io_uring_enter io_uring_register
        move_mount open_tree fsopen fsmount fsconfig fspick mount_setattr quotactl acct settimeofday clock_settime adjtimex
        clock_adjtime sethostname setdomainname iopl ioperm personality inotify_init inotify_init1 fanotify_init""".split()
    if role == "candidate":
        names += ["fork", "vfork", "execve", "execveat", "setrlimit"]
        # Locks, watches and times of a common file carry messages.
        names += ["flock", "utime", "utimes", "utimensat", "futimesat"]
        # A signal that comes by itself may be SIGCONT: it thaws a runner that the judge has stopped.
        names += ["timer_create", "setitimer", "alarm", "mq_open", "mq_notify"]
        names += ["semget", "msgget", "io_setup"]  # memory of the kernel's, or one count for the whole host
        # Which pages of a common file are in memory carries messages, too.
        names += ["memfd_create", "memfd_secret", "shmget", "mincore", "fadvise64"] if device == "cpu" else []
    for name in names:
        program.add_rule(refuse, name)
    # A program with the account's rights, left where others could start it, would outlive the sandbox.
    for bit in SETUID_BITS:
        for call, place in SETTING_MODES:
            program.add_rule(refuse, call, pyseccomp.Arg(place, pyseccomp.MASKED_EQ, bit, bit))
        for (call, flags, place), flag in itertools.product(OPENING, MAKING_FLAGS):
            program.add_rule(
                refuse,
                call,
                pyseccomp.Arg(flags, pyseccomp.MASKED_EQ, flag, flag),
                pyseccomp.Arg(place, pyseccomp.MASKED_EQ, bit, bit),
            )
    for number in NEWER_CALLS.values():
        program.add_rule(
            pyseccomp.ERRNO(38), number
        )  # as a kernel that has not got them: openat2 hides its arguments
    for command in FCNTL_OF_ACCOUNT:
        program.add_rule(refuse, "fcntl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, WORD, command))
    program.add_rule(
        refuse, "prctl", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, WORD, PR_SET_PDEATHSIG)
    )  # it must end when its parent ends
    # clone3 hides its flags from a filter: without it, glibc falls back to clone, whose flags are checked.
    program.add_rule(pyseccomp.ERRNO(38), "clone3")
    for flag in NAMESPACE_FLAGS:
        program.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    if role == "candidate":
        # The CUDA driver needs a local socket to start (error 304 without it, seen on an H200); no other family exists here.
        program.add_rule(refuse, "socket", pyseccomp.Arg(0, pyseccomp.NE, AF_UNIX))
        program.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_THREAD, 0))
        # Threads with descriptors of their own would have the limit of open files once each.
        program.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_FILES, 0))
        program.add_rule(refuse, "close_range", pyseccomp.Arg(2, pyseccomp.NE, 0))
        program.add_rule(refuse, "prlimit64", pyseccomp.Arg(2, pyseccomp.NE, 0))
        for call, place, refused in (
            ("fcntl", 1, FCNTL_REFUSED),
            ("ioctl", 1, IOCTL_REFUSED),
            ("prctl", 0, (PR_SET_DUMPABLE,)),
        ):
            for command in refused:
                program.add_rule(refuse, call, pyseccomp.Arg(place, pyseccomp.MASKED_EQ, WORD, command))
    with os.fdopen(os.memfd_create("bpf"), "w+b") as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()
