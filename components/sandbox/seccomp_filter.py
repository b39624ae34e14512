"""The system-call filter of untrusted processes, as a BPF program for seccomp(2).

If the kernel reads an argument as an int, the filter compares only its lower 32 bits. A filter that compares
all 64 bits could be evaded by setting upper bits, which the kernel ignores.
"""

import errno
import fcntl
import functools
import itertools
import os
import socket
from typing import Literal

# Mask of the lower 32 bits of an argument.
WORD = 0xFFFFFFFF

# System calls that all untrusted processes are denied.
DENIED = """
    unshare setns mount umount2 pivot_root chroot ptrace process_vm_readv process_vm_writev pidfd_open
    pidfd_getfd kcmp keyctl add_key request_key bpf perf_event_open userfaultfd open_by_handle_at
    name_to_handle_at init_module finit_module delete_module kexec_load kexec_file_load reboot swapon
    swapoff io_uring_setup io_uring_enter io_uring_register move_mount open_tree fsopen fsmount fsconfig
    fspick mount_setattr quotactl acct settimeofday clock_settime adjtimex clock_adjtime sethostname
    setdomainname iopl ioperm personality inotify_init inotify_init1 fanotify_init""".split()
# Further system calls that all runners are denied. With them a process could send itself a later SIGCONT,
# which resumes a runner that the judge has stopped.
DENIED_TO_RUNNERS = ["timer_create", "setitimer", "alarm", "mq_open", "mq_notify"]
# Further system calls that candidates are denied.
DENIED_TO_CANDIDATES = [
    *("fork", "vfork", "execve", "execveat", "setrlimit"),
    # Locks and times of a shared file could be used to send messages to another runner.
    *("flock", "utime", "utimes", "utimensat", "futimesat"),
    *("semget", "msgget", "io_setup"),  # they use kernel memory, or a number limited for the whole host
]
# Further system calls that candidates on cpu are denied.
DENIED_TO_CPU_CANDIDATES = [
    *("memfd_create", "memfd_secret", "shmget"),  # they make memory that RLIMIT_AS does not include
    # Whether pages of a shared file are in memory could be used to send messages to another runner.
    *("mincore", "fadvise64"),
    "mremap",  # it could put memory that was prepared earlier at the address of an output
]
# Calls that fail with ENOSYS, and their numbers, because an old libseccomp may not know the names. openat2
# takes its flags and mode in a structure, which a filter cannot read.
NOT_IMPLEMENTED = ("openat2", 437), ("cachestat", 451), ("fchmodat2", 452)

# Flag of preadv2 with which it fails unless the data is in memory. With it a candidate could read which pages
# of a shared file other runners have read, as mincore tells.
RWF_NOWAIT = 8
# Operations of futex that tell how many threads wait at an address: FUTEX_WAKE, REQUEUE, CMP_REQUEUE,
# WAKE_OP, WAKE_BITSET and CMP_REQUEUE_PI. Unless they have the flag FUTEX_PRIVATE_FLAG, the threads may be
# those of another runner that has mapped the same file, so candidates on cpu are denied them. A thread that
# waits for the end of another is woken by the kernel itself.
FUTEX_WAKES = (1, 3, 4, 5, 10, 12)
FUTEX_WAIT, FUTEX_CLOCK_REALTIME = 0, 256
# Calls that could take the place of these operations: futex_waitv, futex_wake, futex_wait and futex_requeue.
FUTEX_CALLS = (449, 454, 455, 456)

SETUID_BITS = (0o4000, 0o2000)
# Calls that set the mode of a file, and the position of the mode among their arguments.
MODE_CALLS = (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("creat", 1), ("mknod", 1), ("mknodat", 2))
# Calls that set a file's mode if they create it, and the positions of their flags and of the mode.
OPEN_CALLS = (("open", 1, 2), ("openat", 2, 3))
# Flags with which a call creates a file: O_CREAT, and the bit that only O_TMPFILE has.
CREATE_FLAGS = (os.O_CREAT, 0o20000000)

# Commands of fcntl that affect other processes of the account, so that all runners are denied them. A lease
# delays other processes that open the file. The numbers of watches and of pipe pages are limited for the
# whole account.
ACCOUNT_FCNTL = (fcntl.F_SETLEASE, fcntl.F_NOTIFY, fcntl.F_SETPIPE_SZ)
F_SETSIG, F_SETOWN_EX = 10, 15
# Commands of fcntl that candidates are denied: file locks.
CANDIDATE_FCNTL = (
    *(fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW),
    *(fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW),
)
# Commands that runners are denied, because they make the kernel send a signal when a descriptor is ready:
# those of fcntl, and of ioctl FIOASYNC, FIOSETOWN and SIOCSPGRP.
RUNNER_FCNTL = (fcntl.F_SETOWN, F_SETSIG, F_SETOWN_EX)
RUNNER_IOCTL = (0x5452, 0x8901, 0x8902)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
CLONE_FILES, CLONE_THREAD = 0x00000400, 0x00010000
# The flags of clone that make namespaces. They are CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID
# and NEWNET.
NAMESPACE_FLAGS = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)


@functools.cache
def seccomp_program(role: Literal["candidate", "task", "command"], device: str = "cpu") -> bytes:
    """Return the system-call filter for one kind of untrusted process, which `role` names, as a BPF program.

    The role `candidate` is for a process with the code of a candidate, an implementation of a PyTorch module,
    to be judged. It may start threads, but no processes and no programs, and it may open only local sockets.
    If `device` is cpu, it also cannot make memory that its address-space limit does not include, or wake
    threads that wait at an address of a file. The role
    `task` is for a process with the original module, which may start programs, as torch.compile does. A
    process of these two roles may not make the kernel send a signal to it later. The role `command` is for a
    compiler or an agent's shell, which may.
    """
    import pyseccomp

    program = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    candidate = role == "candidate"

    def deny(call: str, *conditions: tuple[int, int, int]) -> None:
        """Make a call fail with EPERM if all conditions hold.

        A condition (position, mask, value) holds if the argument at that position, after applying the mask,
        equals the value.
        """
        arguments = (
            pyseccomp.Arg(position, pyseccomp.MASKED_EQ, mask, value) for position, mask, value in conditions
        )
        program.add_rule(pyseccomp.ERRNO(errno.EPERM), call, *arguments)

    names = DENIED + (DENIED_TO_CANDIDATES if candidate else [])
    names += DENIED_TO_RUNNERS if role != "command" else []
    for name in names + (DENIED_TO_CPU_CANDIDATES if candidate and device == "cpu" else []):
        deny(name)
    # A setuid program that remains after the sandbox has ended would give others the account's rights.
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
    # A filter cannot read the flags of clone3. Without clone3, glibc uses clone, whose flags are checked.
    program.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    for flag in NAMESPACE_FLAGS:
        deny("clone", (0, flag, flag))
    if role != "command":
        for command in RUNNER_FCNTL:
            deny("fcntl", (1, WORD, command))
        for command in RUNNER_IOCTL:
            deny("ioctl", (1, WORD, command))
    if candidate:
        # Local sockets stay allowed, because the CUDA driver does not start without one (error 304).
        nonzero = pyseccomp.Arg(2, pyseccomp.NE, 0)
        program.add_rule(
            pyseccomp.ERRNO(errno.EPERM), "socket", pyseccomp.Arg(0, pyseccomp.NE, socket.AF_UNIX)
        )
        deny("clone", (0, CLONE_THREAD, 0))
        # Threads with separate descriptor tables would each have a separate limit of descriptors.
        deny("clone", (0, CLONE_FILES, 0))
        program.add_rule(pyseccomp.ERRNO(errno.EPERM), "close_range", nonzero)
        program.add_rule(pyseccomp.ERRNO(errno.EPERM), "prlimit64", nonzero)
        deny("prctl", (0, WORD, PR_SET_DUMPABLE))
        for command in CANDIDATE_FCNTL:
            deny("fcntl", (1, WORD, command))
        deny("preadv2", (5, RWF_NOWAIT, RWF_NOWAIT))
    if candidate and device == "cpu":
        # The comparison includes FUTEX_PRIVATE_FLAG, which must not be set, and leaves out the flag that
        # selects a clock.
        operation = WORD & ~FUTEX_CLOCK_REALTIME
        for wake in FUTEX_WAKES:
            deny("futex", (1, operation, wake))
        # Futures and the initialisation of static variables of libstdc++ wake by the denied operation. They
        # wait in a loop by this one, which glibc does not use to join threads, so they end, but do not sleep.
        waits = pyseccomp.Arg(1, pyseccomp.MASKED_EQ, operation, FUTEX_WAIT)
        program.add_rule(pyseccomp.ERRNO(errno.EAGAIN), "futex", waits)
        for number in FUTEX_CALLS:
            program.add_rule(pyseccomp.ERRNO(errno.ENOSYS), number)
    with os.fdopen(os.memfd_create("bpf"), "w+b") as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()
