"""The system-call filter of untrusted processes, as a BPF program for seccomp(2).

Filters compare arguments by their lower 32 bits where the kernel reads an int: a filter that compares the
whole register could be passed by setting the upper half.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import os
import socket
from typing import Literal

WORD = 0xFFFFFFFF
"""Mask of the lower 32 bits of an argument."""

DENIED = """
    unshare setns mount umount2 pivot_root chroot ptrace process_vm_readv process_vm_writev pidfd_open
    pidfd_getfd kcmp keyctl add_key request_key bpf perf_event_open userfaultfd open_by_handle_at
    name_to_handle_at init_module finit_module delete_module kexec_load kexec_file_load reboot swapon
    swapoff io_uring_setup io_uring_enter io_uring_register move_mount open_tree fsopen fsmount fsconfig
    fspick mount_setattr quotactl acct settimeofday clock_settime adjtimex clock_adjtime sethostname
    setdomainname iopl ioperm personality inotify_init inotify_init1 fanotify_init""".split()
DENIED_TO_CANDIDATES = [
    *("fork", "vfork", "execve", "execveat", "setrlimit"),
    *(
        "flock",
        "utime",
        "utimes",
        "utimensat",
        "futimesat",
    ),  # locks and times of a shared file carry messages
    # A signal that a process sends itself later may be SIGCONT, which resumes a runner that the judge has
    # paused.
    *("timer_create", "setitimer", "alarm", "mq_open", "mq_notify"),
    *("semget", "msgget", "io_setup"),  # kernel memory, or a count for the whole host
]
DENIED_TO_CPU_CANDIDATES = [
    *("memfd_create", "memfd_secret", "shmget"),  # memory that RLIMIT_AS does not count
    *("mincore", "fadvise64"),  # which pages of a shared file are in memory carries messages
]
NOT_IMPLEMENTED = ("openat2", 437), ("cachestat", 451), ("fchmodat2", 452)
"""Calls answered by ENOSYS, with their numbers, which libseccomp may be too old to know.

openat2 hides its arguments.
"""

SETUID_BITS = (0o4000, 0o2000)
MODE_CALLS = (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("creat", 1), ("mknod", 1), ("mknodat", 2))
"""Calls that set the mode of a file, and the position of that argument."""
OPEN_CALLS = (("open", 1, 2), ("openat", 2, 3))
"""Calls that set a mode if they create a file, and the positions of their flags and of the mode."""
CREATE_FLAGS = (os.O_CREAT, 0o20000000)
"""Flags by which a call creates a file: O_CREAT, and that bit of O_TMPFILE which is its own."""

ACCOUNT_FCNTL = (fcntl.F_SETLEASE, fcntl.F_NOTIFY, fcntl.F_SETPIPE_SZ)
"""Leases keep other processes of the account from a file.

Watches and pipe sizes are counted for the whole account.
"""
F_SETSIG, F_SETOWN_EX = 10, 15
CANDIDATE_FCNTL = (
    *(fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW),
    *(fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW),
    *(fcntl.F_SETOWN, F_SETSIG, F_SETOWN_EX),
)
"""File locks, and signals when a descriptor is ready."""
CANDIDATE_IOCTL = (0x5452, 0x8901, 0x8902)
"""FIOASYNC, FIOSETOWN and SIOCSPGRP: signals when a descriptor is ready."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
CLONE_FILES, CLONE_THREAD = 0x00000400, 0x00010000
NAMESPACE_FLAGS = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""


@functools.cache
def seccomp_program(role: Literal["candidate", "baseline"], device: str = "cpu") -> bytes:
    """Compile the filter to BPF.

    A candidate may start threads only: no process, no program, no network socket. A `baseline`, which
    includes compilers and the agent's shell, may start programs. On cpu a candidate gets no memory that its
    address-space limit does not count.
    """
    import pyseccomp

    program = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    candidate = role == "candidate"

    def deny(call: str, *conditions: tuple[int, int, int]) -> None:
        """Answer EPERM where each condition's argument, masked, has the value: (position, mask, value)."""
        arguments = (
            pyseccomp.Arg(position, pyseccomp.MASKED_EQ, mask, value) for position, mask, value in conditions
        )
        program.add_rule(pyseccomp.ERRNO(errno.EPERM), call, *arguments)

    names = DENIED + (DENIED_TO_CANDIDATES if candidate else [])
    for name in names + (DENIED_TO_CPU_CANDIDATES if candidate and device == "cpu" else []):
        deny(name)
    # A setuid program, left where others could start it, would outlive the sandbox with the account's rights.
    for bit in SETUID_BITS:
        for call, mode in MODE_CALLS:
            deny(call, (mode, bit, bit))
        for (call, flags, mode), flag in itertools.product(OPEN_CALLS, CREATE_FLAGS):
            deny(call, (flags, flag, flag), (mode, bit, bit))
    for _, number in NOT_IMPLEMENTED:
        program.add_rule(pyseccomp.ERRNO(errno.ENOSYS), number)
    for command in ACCOUNT_FCNTL:
        deny("fcntl", (1, WORD, command))
    deny("prctl", (0, WORD, PR_SET_PDEATHSIG))  # a process must end with its parent
    # clone3 hides its flags from a filter: without it, glibc falls back to clone, whose flags are checked.
    program.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    for flag in NAMESPACE_FLAGS:
        deny("clone", (0, flag, flag))
    if candidate:
        # The CUDA driver does not start without a local socket (error 304).
        nonzero = pyseccomp.Arg(2, pyseccomp.NE, 0)
        program.add_rule(
            pyseccomp.ERRNO(errno.EPERM), "socket", pyseccomp.Arg(0, pyseccomp.NE, socket.AF_UNIX)
        )
        deny("clone", (0, CLONE_THREAD, 0))
        deny("clone", (0, CLONE_FILES, 0))  # threads with descriptor tables of their own have a limit each
        program.add_rule(pyseccomp.ERRNO(errno.EPERM), "close_range", nonzero)
        program.add_rule(pyseccomp.ERRNO(errno.EPERM), "prlimit64", nonzero)
        for call, position, commands in (
            ("fcntl", 1, CANDIDATE_FCNTL),
            ("ioctl", 1, CANDIDATE_IOCTL),
            ("prctl", 0, (PR_SET_DUMPABLE,)),
        ):
            for command in commands:
                deny(call, (position, WORD, command))
    with os.fdopen(os.memfd_create("bpf"), "w+b") as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()
