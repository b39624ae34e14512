"""The walls: bubblewrap around everything untrusted, and the system-call filter inside it.

Two recipes, because bubblewrap differs by who starts it (knowledge of Debian 12, bubblewrap 0.8):
a normal user gets a user namespace with nested ones disabled; root gets none, so that the real uid becomes 65534 (only
then do per-user limits bind, and only then can an interpreter that root alone may read be bound into the sandbox).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from components.config import BadInput

NOBODY = 65534
BUILDER = 65533
"""Builds have a uid of their own: limits count by uid, and a candidate's thousand threads made every build fail ("Cannot fork")."""
HERE = Path(__file__).resolve().parent
CLONE_THREAD = 0x00010000
AF_UNIX = 1
WORD = 0xFFFFFFFF
"""The kernel looks at the lower half of what is an int; a filter that compares all of a register is passed with any upper half."""
FCNTL_REFUSED = (5, 6, 7, 36, 37, 38, 1024, 1026, 8, 10, 15)
"""F_GETLK, F_SETLK, F_SETLKW, the same for open file descriptions, F_SETLEASE, F_NOTIFY, F_SETOWN, F_SETSIG, F_SETOWN_EX: locks, watches, signals."""
IOCTL_REFUSED = (0x5452, 0x8901, 0x8902)
"""FIOASYNC, FIOSETOWN, SIOCSPGRP: signals when a descriptor is ready."""
PR_SET_DUMPABLE = 4
NAMESPACE_FLAGS = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)


class IsolationUnavailable(BadInput):
    """No sandbox can be made here; exit code 3."""


def _exists(path: str) -> bool:
    return Path(path).exists()


@functools.cache
def python_paths() -> tuple[str, ...]:
    """Folders that the interpreter and torch need, outermost first; never the folder of a script, which may be anything."""
    torch = importlib.util.find_spec("torch")
    site = [str(Path(torch.origin).parent.parent)] if torch is not None and torch.origin else []
    paths = sysconfig.get_paths()
    candidates = {sys.base_prefix, sys.prefix, paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site}
    folders = sorted({str(Path(p).resolve()) for p in candidates if Path(p).is_dir()})
    kept: list[str] = []
    for folder in folders:
        inside = any(folder == k or folder.startswith(k + "/") for k in kept)
        if not inside and not folder.startswith("/usr/") and folder not in ("/", "/usr"):
            kept.append(folder)
    return tuple(kept)


def _bind(path: str, option: str = "--ro-bind") -> list[str]:
    """Bind one path at its own place, with parents that uid 65534 may pass (a private home is 0700)."""
    arguments: list[str] = []
    for parent in reversed(Path(path).parents):
        if str(parent) not in ("/", "/usr", "/tmp", "/dev"):
            arguments += ["--perms", "0755", "--dir", str(parent)]
    return [*arguments, option, path, path]


def gpu_devices() -> list[str]:
    """The device files of exactly one GPU: the first that CUDA_VISIBLE_DEVICES names, or the first there is."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    number = first if first.isdigit() else "0"
    return [d for d in (f"/dev/nvidia{number}", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools") if _exists(d)]


def bubblewrap(
    *, device: str, read_only: list[str], writable: list[str], temporary_bytes: int, keep_capabilities: bool, caches: Mapping[str, Path] = MappingProxyType({})
) -> list[str]:
    """The bwrap command up to and including `--`; what follows runs inside.

    `keep_capabilities` is for our own zygote, which needs them to wall its children off from itself; it never runs
    untrusted code, and its children drop every one of them first.
    """
    root = os.getuid() == 0
    command = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--new-session", "--die-with-parent", "--clearenv"]
    if not root:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        if not keep_capabilities:
            command += ["--disable-userns"]
    if keep_capabilities:
        command += ["--cap-add", "ALL"]
    elif root:
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    else:
        command += ["--cap-drop", "ALL"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib32", "lib64", "bin", "sbin"):
        if _exists(f"/{name}"):
            command += ["--symlink", f"usr/{name}", f"/{name}"] if Path(f"/{name}").is_symlink() else ["--ro-bind", f"/{name}", f"/{name}"]
    command += ["--perms", "0755", "--dir", "/etc"]  # a parent that bwrap makes by itself is closed to uid 65534
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"):
        if _exists(path):
            command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(temporary_bytes), "--tmpfs", "/tmp"]
    if device == "cuda":
        command += ["--ro-bind", "/sys", "/sys"]
        for path in gpu_devices():
            command += ["--dev-bind", path, path]
    for path in read_only:
        command += _bind(path)
    for path in writable:
        command += _bind(path, "--bind")
    for key, value in environment(device).items():
        command += ["--setenv", key, value]
    if keep_capabilities:
        # Every runner mounts a private /workspace over this one; nothing else is writable, so that none can leave a thing behind.
        for place, folder in caches.items():
            command += ["--bind", str(folder), place]
        command += ["--size", str(temporary_bytes), "--tmpfs", "/workspace"]
        for path in ("/tmp", "/dev", "/"):
            command += ["--remount-ro", path]
    return [*command, "--chdir", "/", "--"]


def environment(device: str) -> dict[str, str]:
    """The whole environment inside. malloc keeps freed pages, or every call of every arm would pay for page faults."""
    values = {
        "PATH": os.pathsep.join(p for p in os.environ.get("PATH", "").split(os.pathsep) if p.startswith(("/usr", "/bin"))) or "/usr/bin:/bin",
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


def confined(command: list[str], *, memory_bytes: int, file_bytes: int, seconds: float) -> list[str]:
    """`command` as a uid of its own without capabilities and with limits, for use inside `bubblewrap(keep_capabilities=False)`."""
    drop = ["setpriv", f"--reuid={BUILDER}", f"--regid={BUILDER}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]
    limits = ["prlimit", f"--as={memory_bytes}", f"--fsize={file_bytes}", "--core=0", "--nofile=256", "--nproc=512", f"--cpu={int(seconds) + 1}", "--"]
    return [*(drop if os.getuid() == 0 else []), *limits, *command]


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
        clock_adjtime sethostname setdomainname iopl ioperm personality""".split()
    if role == "candidate":
        names += ["fork", "vfork", "execve", "execveat", "setrlimit"]
        # Locks, watches and times of a common file carry messages.
        names += ["flock", "inotify_init", "inotify_init1", "fanotify_init", "utime", "utimes", "utimensat", "futimesat"]
        # A signal that comes by itself may be SIGCONT: it thaws a runner that the judge has stopped.
        names += ["timer_create", "setitimer", "alarm", "mq_open", "mq_notify"]
        names += ["semget", "msgget", "io_setup"]  # memory of the kernel's, or one count for the whole host
        names += ["memfd_create", "memfd_secret", "shmget"] if device == "cpu" else []
    for name in names:
        program.add_rule(refuse, name)
    # clone3 hides its flags from a filter: without it, glibc falls back to clone, whose flags are checked.
    program.add_rule(pyseccomp.ERRNO(38), "clone3")
    for flag in NAMESPACE_FLAGS:
        program.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    if role == "candidate":
        # The CUDA driver needs a local socket to start (error 304 without it, seen on an H200); no other family exists here.
        program.add_rule(refuse, "socket", pyseccomp.Arg(0, pyseccomp.NE, AF_UNIX))
        program.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_THREAD, 0))
        program.add_rule(refuse, "prlimit64", pyseccomp.Arg(2, pyseccomp.NE, 0))
        for call, place, refused in (("fcntl", 1, FCNTL_REFUSED), ("ioctl", 1, IOCTL_REFUSED), ("prctl", 0, (PR_SET_DUMPABLE,))):
            for command in refused:
                program.add_rule(refuse, call, pyseccomp.Arg(place, pyseccomp.MASKED_EQ, WORD, command))
    with os.fdopen(os.memfd_create("bpf"), "w+b") as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()


@functools.cache
def check_available() -> None:
    """Raise IsolationUnavailable, with the mend, unless bubblewrap and libseccomp work here."""
    if shutil.which("bwrap") is None:
        raise IsolationUnavailable(
            "sandbox.isolation: bubblewrap is not installed; run apt-get install -y bubblewrap, or write --set sandbox.isolation=none to judge without walls."
        )
    try:
        seccomp_program("candidate")
    except (ImportError, OSError, RuntimeError) as error:
        raise IsolationUnavailable(f"sandbox.isolation: libseccomp cannot be loaded ({error}); run apt-get install -y libseccomp2.") from error
    command = bubblewrap(device="cpu", read_only=[], writable=[], temporary_bytes=1 << 20, keep_capabilities=False)
    probe = [*command, *confined(["/usr/bin/true"], memory_bytes=1 << 30, file_bytes=1 << 20, seconds=5)]
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = " ".join(result.stderr.split())[:200]
        raise IsolationUnavailable(
            f"sandbox.isolation: bubblewrap does not work here ({reason}); allow user namespaces (sysctl kernel.unprivileged_userns_clone=1) or run as root."
        )
