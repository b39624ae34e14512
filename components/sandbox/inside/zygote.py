"""The zygote: the process that loads torch once and forks a runner for every piece of untrusted code.

    python zygote.py FD DEVICE plain|compile|triton|probe isolated|open MODULES PACKAGES [WARM]

FD is the descriptor of the socket on which the judge requests runners, which are sandboxed processes. MODULES
is the folder of the compiled result_channel.cpp, and PACKAGES are folders of Python packages, separated by
colons. WARM is the folder for the precompiled headers of torch.compile.

Importing torch takes seconds, a fork only milliseconds. The zygote is trusted and runs no untrusted code.
Each runner isolates itself from the zygote and from the other runners (new PID, mount, IPC, UTS and network
namespaces, private /workspace and /proc), drops all capabilities and privileges, and applies the system-call
filter. Then it sends the judge a message to which the kernel attaches the runner's PID (SCM_CREDENTIALS).
Only after the judge's answer it loads untrusted code. A runner serves one candidate (an implementation of a
PyTorch module, to be judged) or the source of one task (the PyTorch module that is to be made faster), in one
role after another, and then ends. A role is what it executes. With `open`, runners are not isolated.

The judge sends a runner JSON messages with descriptors (runner_protocol.py). Each message of a runner is one
character that names its type, followed by text or numbers. The judge checks their length and does not trust
their content: it relies only on the outputs that it reads from memory and on its own clock.

A zygote of the kind `compile` also loads what torch.compile needs, and one of the kind `triton` loads Triton.
A zygote of the kind `probe` does not load torch. Its single runner is isolated in the same way and reports
its uid and PID (preflight.py).
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 0x1000, 0x4000, 1 << 18
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
CAPABILITIES, CAPABILITY_VERSION = 64, 0x20080522
NOBODY = 65534
# Maximum length of a message of the judge, and maximum number of descriptors that come with it.
MESSAGE_BYTES, MAX_DESCRIPTORS = 1 << 20, 64
# Maximum number of files in a runner's /workspace. Each file takes about a kilobyte of kernel memory, which
# no other limit includes.
INODES = 1 << 16
# Largest number of descriptors of a zygote, and so of those that a runner without a complete /proc tries to
# close. The limit that it inherits from the judge can be a thousand million.
DESCRIPTORS = 1024
# Folder of torch.compile's precompiled headers, which the sandbox of a zygote of the kind `compile` has.
WARM_FOLDER = "/warm"
# Size of the memory that the judge reads from the runner of a `probe` zygote.
PROBE_BYTES = 4096

libc = ctypes.CDLL(None, use_errno=True)
Message = dict[str, Any]
# Type of the function that a runner calls after isolating itself. Its arguments are the connection, the first
# message and the descriptors.
RunnerMain = Callable[[socket.socket, Message, list[int]], None]


def check(result: int, call: str) -> None:
    """Raise OSError with the name `call` and the C library's errno unless `result` is 0."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount the file system `source` of the type `kind` at the folder `target`, or change the mount there.

    The arguments are those of mount(2), with `options` as the last one. Raises OSError if the call fails.
    """
    words = (None if word is None else word.encode() for word in (source, target, kind))
    check(libc.mount(*words, flags, None if options is None else options.encode()), f"mount {target}")


def hide(folder: str) -> None:
    """Hide the content of `folder` by mounting an empty read-only file system over it.

    Raises OSError if the kernel refuses this.
    """
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, "size=4096")


def receive(connection: socket.socket) -> tuple[Message, list[int]]:
    """Return one JSON message of the judge and the descriptors that came with it.

    Returns ({}, []) if the judge has closed the connection.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_DESCRIPTORS)
    return (json.loads(data) if data else {}), descriptors


def close_descriptors_except(keep: set[int]) -> None:
    """Close every descriptor above 2 that is not in `keep`."""
    try:
        descriptors = {int(name) for name in os.listdir("/proc/self/fd")}
    except FileNotFoundError:  # the sandbox has no complete /proc
        descriptors = set(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    for descriptor in descriptors - {0, 1, 2, *keep}:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def enter_sandbox(message: Message, keep: set[int], lock_folders: list[str]) -> None:
    """Isolate this process from all other runners (sandboxed processes) and drop its privileges.

    The process gets mount, IPC, UTS and network namespaces of its own, and an empty private /workspace as its
    working folder. `message` has the limits of the runner (runner_protocol.Confinement). All descriptors
    except 0 to 2 and those in `keep` are closed. The content of `lock_folders`, where torch.compile locks
    files, is hidden. Raises OSError if the kernel refuses a step.
    """
    # A network namespace is needed too: two candidates that communicate over a local socket could share
    # computing time that the judge does not measure.
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET), "unshare")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    close_descriptors_except(keep)
    options = f"size={message['temporary_bytes']},nr_inodes={INODES},mode=0777"
    mount("tmpfs", "/workspace", "tmpfs", MS_NOSUID | MS_NODEV, options)
    hide("/dev/pts")  # all runners of a zygote share its pseudo-terminals and could communicate over them
    if os.path.isdir(WARM_FOLDER):
        mount("none", WARM_FOLDER, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    for lock_folder in lock_folders:  # a runner that locked a file there would block every starting zygote
        hide(lock_folder)
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    # In a user namespace the kernel may refuse to mount another /proc. An empty folder hides the other
    # runners too.
    except OSError:
        hide("/proc")
    os.chdir("/workspace")
    drop_privileges(message)


def drop_privileges(message: Message) -> None:
    """Set the resource limits, drop all capabilities and root's uid, and apply the system-call filter.

    `message` has the limits and the filter (runner_protocol.Confinement); an empty filter is not applied. A
    process of root gets the uid 65534 instead. With `own_limits`, the numbers of threads and of pending
    signals of other runners do not count towards the limits. Raises OSError or ValueError if the kernel
    refuses a step.
    """
    drop_bounding_set()
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if message["own_limits"]:
        # Limits per user apply in each user namespace separately. In this one no uid is mapped, so every uid
        # reads as 65534. Where the kernel refuses it, all runners share the limits.
        libc.unshare(CLONE_NEWUSER)
        drop_bounding_set()  # it is complete again
    for name, value in message["limits"].items():  # later, as the limits of now apply to all such namespaces
        resource.setrlimit(getattr(resource, name), (value, value))
    check(libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)), "capset")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl DUMPABLE")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")
    if message["seccomp"]:
        code = bytes.fromhex(message["seccomp"])
        memory = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(memory))  # struct sock_fprog
        mode = 2  # SECCOMP_MODE_FILTER
        check(
            libc.prctl(PR_SET_SECCOMP, mode, ctypes.create_string_buffer(program, len(program)), 0, 0),
            "seccomp",
        )


def drop_bounding_set() -> None:
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails if the kernel does not know the capability


def redirect_stdio() -> None:
    """Connect stdin, stdout and stderr to /dev/null.

    Otherwise the untrusted code of this process could store data for later processes in the log file of the
    zygote, the process that all of them are forked from.
    """
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)


def open_pagemap() -> list[int]:
    """Return the descriptor of this process's page table, or an empty list if there is none.

    The judge reads it (Runner.is_written). As an ordinary user it could not open the file of a process that
    has dropped its privileges.
    """
    with contextlib.suppress(OSError):
        return [os.open("/proc/self/pagemap", os.O_RDONLY)]
    return []


def start_runner(
    confinement: Message,
    connection: socket.socket,
    isolated: bool,
    runner_main: RunnerMain,
    lock_folders: list[str],
) -> None:
    """Turn a forked child of the zygote into a runner, and call `runner_main` in it; never returns.

    A runner is a sandboxed process. `confinement` has its limits (runner_protocol.Confinement), and
    `connection` is its socket to the judge, on which its role follows. Without `isolated`, the runner only
    changes to the folder `confinement["folder"]`. Otherwise it isolates itself and hides the content of
    `lock_folders`, where torch.compile locks files.

    The runner must be the first process of a PID namespace, so that all processes that it starts end with it.
    unshare(CLONE_NEWPID) only affects children that are forked later, and the zygote could not return to its
    own namespace without CAP_SYS_ADMIN over that namespace. So the child calls unshare, forks again and ends,
    and the grandchild is the runner. The kernel ends the runner when bubblewrap is killed, because its PID
    namespace lies inside the sandbox's PID namespace.
    """
    if isolated:
        score = Path("/proc/self/oom_score_adj")
        if score.exists():
            # When memory runs out, the kernel then ends runners before the judge.
            score.write_text("1000")
        check(libc.unshare(CLONE_NEWPID), "unshare PID")
        if os.fork() != 0:
            os._exit(0)
        pages = open_pagemap()
        enter_sandbox(confinement, {connection.fileno(), *pages}, lock_folders)
        redirect_stdio()
    else:
        pages = open_pagemap()
        os.makedirs(confinement["folder"], exist_ok=True)
        os.chdir(confinement["folder"])
    # The judge receives this message with SCM_CREDENTIALS, in which the kernel states this process's PID.
    socket.send_fds(connection, [b"H"], pages)
    for descriptor in pages:
        os.close(descriptor)
    # The judge answers with the role when it has opened a descriptor with which it can end this process. A
    # role has the sources of a candidate or a task, so the zygote, whose memory later runners inherit, must
    # not receive it.
    message, buffers = receive(connection)
    if not message:
        os._exit(0)
    runner_main(connection, message, buffers)


def serve(control: socket.socket, isolated: bool, runner_main: RunnerMain, lock_folders: list[str]) -> None:
    """Fork a runner for each message on `control`, until the judge closes the socket; never returns.

    A message has the limits of a runner, which is a sandboxed process, and comes with the runner's socket to
    the judge. The runner calls `runner_main` when it is ready. With `isolated`, it first
    isolates itself from the other runners, and the content of `lock_folders` is hidden from it.
    """
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ended children do not remain as zombies
    while True:
        message, descriptors = receive(control)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                control.close()
                connection = socket.socket(fileno=descriptors[0])
                start_runner(message, connection, isolated, runner_main, lock_folders)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(3)
        for descriptor in descriptors:
            os.close(descriptor)


def report_identity(connection: socket.socket, message: Message, descriptors: list[int]) -> None:
    """Send the judge a report on this process, which is isolated like a runner, then end the process.

    The first message has the address of PROBE_BYTES of random memory, which the judge reads from outside.
    After the judge's answer, the report has the uid, the PID, whether a file could be written in /workspace,
    and the SHA-256 of that memory. `message` and `descriptors` are not used.
    """
    memory = ctypes.create_string_buffer(os.urandom(PROBE_BYTES), PROBE_BYTES)
    thread = threading.Thread(target=Path("/workspace/probe").write_bytes, args=(bytes(memory),))
    thread.start()
    thread.join()
    connection.send(struct.pack("cQ", b"O", ctypes.addressof(memory)))
    connection.recv(1)
    report = {
        "digest": hashlib.sha256(bytes(memory)).hexdigest(),
        "written": Path("/workspace/probe").read_bytes() == bytes(memory),
        "uid": os.getuid(),
        "pid": os.getpid(),
    }
    connection.send(b"R" + json.dumps(report).encode())
    connection.recv(1)
    os._exit(0)


def main() -> None:
    descriptor, device, kind, isolation, modules, packages, *warm = sys.argv[1:]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, DESCRIPTORS), hard))
    os.umask(0o022)  # if the judge is root, runners have another uid and must be able to read shared files
    sys.path += [path for path in packages.split(os.pathsep) if path]
    runner_main: RunnerMain = report_identity
    if kind != "probe":
        sys.path.insert(0, modules)  # the folder of the compiled result_channel.cpp
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        import runner

        runner.warm_up(kind, device, *warm)
        runner_main = functools.partial(runner.main, receive)
    walked = os.walk(warm[0]) if warm else ()
    lock_folders = [path for path, _, _ in walked if os.path.basename(path) == "locks"]
    serve(socket.socket(fileno=int(descriptor)), isolation == "isolated", runner_main, lock_folders)


if __name__ == "__main__":
    main()
