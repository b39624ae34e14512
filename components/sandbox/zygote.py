"""The first process inside a sandbox: it loads torch once and forks a runner for every piece of untrusted code.

    python zygote.py FD DEVICE plain|compile|probe isolated|open NATIVE PACKAGES [CACHE WARM]

Importing torch takes seconds, a fork milliseconds. The zygote is trusted and runs no untrusted code. Each runner isolates itself
from the zygote and from its neighbours (new PID, mount, IPC, UTS and network namespaces, private /workspace and /proc), drops every
capability and privilege, takes the system-call filter, says who it is (the kernel vouches for its PID) and only then
loads code. It is thrown away afterwards.

Trusted side -> runner: JSON with descriptors. Runner -> trusted side: one letter, then text or numbers that the judge
checks for length and never believes: what counts is the shared memory, and the clock that the judge holds.

A zygote of the kind `probe` loads no torch. Its one runner goes the same way and reports what it is (see preflight.py).
"""

from __future__ import annotations

import array
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

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x04000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 0x1000, 0x4000, 1 << 18
(
    PR_SET_DUMPABLE,
    PR_GET_SECCOMP,
    PR_SET_SECCOMP,
    PR_CAPBSET_READ,
    PR_CAPBSET_DROP,
    PR_SET_NO_NEW_PRIVS,
    PR_GET_NO_NEW_PRIVS,
) = 4, 21, 22, 23, 24, 38, 39
CAPABILITIES = 64
CAPABILITY_VERSION = 0x20080522
NOBODY = 65534
MESSAGE_BYTES = 1 << 20
INODES = 1 << 16
"""Files that a runner may make: each takes a kilobyte of the kernel's memory, which no other limit counts."""
INDUCTOR = "/workspace/inductor"
"""Where torch.compile keeps what it compiled: a folder that the runners of one task share over time, and no others."""
PROBE_BYTES = 4096

libc = ctypes.CDLL(None, use_errno=True)
Play = Callable[[socket.socket, dict, list[int], bool], None]


def check(result: int, call: str) -> None:
    """Raise OSError naming `call` unless `result` is 0."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """One JSON message of the judge and the descriptors that came with it; ({}, []) at the end."""
    data, ancillary, _, _ = connection.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(64 * 4))
    descriptors = array.array("i")
    for _, kind, payload in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return (json.loads(data) if data else {}), list(descriptors)


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor above 2 that is not in `keep`. Call it while /proc is there."""
    for descriptor in map(
        int,
        os.listdir("/proc/self/fd")
        if Path("/proc/self/fd").is_dir()
        else range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ):
        if descriptor > 2 and descriptor not in keep:
            try:
                os.close(descriptor)
            except OSError:
                continue


def isolate(header: dict, keep: set[int]) -> None:
    """Lose everything that a runner must not have when it loads untrusted code, but the descriptors in `keep`."""
    # The network too: two candidates that meet at a local socket's name would share one's uncounted time.
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET), "unshare")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    close_all_but(keep)
    size = f"size={header['temporary_bytes']},nr_inodes={INODES},mode=0777".encode()
    check(libc.mount(b"tmpfs", b"/workspace", b"tmpfs", MS_NOSUID | MS_NODEV, size), "mount /workspace")
    # All runners of a zygote would share its pseudo-terminals: one could compute for another through them.
    check(
        libc.mount(b"tmpfs", b"/dev/pts", b"tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, b"size=4096"),
        "mount /dev/pts",
    )
    if header.get("cache"):
        own = f"/cache/tasks/{header['cache']}"
        os.makedirs(own, exist_ok=True)
        os.utime(own)  # in use: not to be swept
        os.makedirs(INDUCTOR)
        os.chmod(own, 0o777 if os.getuid() == 0 else 0o700)
        check(libc.mount(own.encode(), INDUCTOR.encode(), None, MS_BIND, None), "mount inductor")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = INDUCTOR
        for place in (b"/cache", b"/warm"):
            check(
                libc.mount(
                    b"none", place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None
                ),
                f"remount {place.decode()}",
            )
        for folder in header["locks"]:  # who holds a lock there holds up every zygote that starts
            check(
                libc.mount(
                    b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, b"size=4096"
                ),
                f"mount {folder}",
            )
    if libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV, None) != 0:
        # In a user namespace the kernel may refuse a second /proc: an empty folder hides the neighbours as well.
        check(
            libc.mount(b"tmpfs", b"/proc", b"tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, b"size=4096"),
            "mount /proc",
        )
    os.chdir("/workspace")
    for name, value in header["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # of those that this kernel does not know it says so
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    check(libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)), "capset")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl DUMPABLE")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")
    if header["seccomp"]:
        code = bytes.fromhex(header["seccomp"])
        memory = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(memory))
        check(
            libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(program, len(program)), 0, 0),
            "prctl SECCOMP",
        )


def discard_output() -> None:
    """Send what is printed from here on to /dev/null: a log file is a place where one candidate leaves answers for the next."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)


def start_runner(header: dict, descriptors: list[int], isolated: bool, play: Play) -> None:
    """Become a runner, in a forked child of the zygote; never returns.

    unshare(CLONE_NEWPID) moves only children that are forked later. Going back to the former namespace needs CAP_SYS_ADMIN over it, which
    a sandbox in an ordinary user's nested user namespace does not have. So the child unshares, forks once more and
    ends; the grandchild is the first process of the new namespace, and all that it starts ends with it. The first process of
    the sandbox inherits it: when bubblewrap is killed, the kernel ends every process of that namespace and of those inside it.
    """
    connection, rest = socket.socket(fileno=descriptors[0]), descriptors[1:]
    if isolated:
        score = Path("/proc/self/oom_score_adj")
        if score.exists():
            score.write_text("1000")  # when memory runs out, a runner goes first and never the judge
        check(libc.unshare(CLONE_NEWPID), "unshare PID")
        if os.fork() != 0:
            os._exit(0)
        isolate(header, {connection.fileno(), *rest})
        discard_output()
    else:
        os.makedirs(header["folder"], exist_ok=True)
        os.chdir(header["folder"])
    connection.send(b"H")  # with SCM_CREDENTIALS on the other side: the kernel says which PID this is
    if (
        connection.recv(1) != b"G"
    ):  # nothing foreign runs, or ends, before the judge has a handle on this process
        os._exit(0)
    play(connection, header, rest, isolated)


def serve(control: socket.socket, isolated: bool, play: Play, locks: list[str]) -> None:
    """Fork a runner for each header that comes over `control`, until the judge closes it. `locks` are folders that no runner may see into."""
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        header, descriptors = receive(control)
        if not header:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                control.close()
                start_runner(header | {"locks": locks}, descriptors, isolated, play)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(3)
        for descriptor in descriptors:
            os.close(descriptor)


def report(connection: socket.socket, header: dict, descriptors: list[int], isolated: bool) -> None:
    """Say what this runner is allowed, and the digest of memory that the judge is to read from outside."""
    memory = ctypes.create_string_buffer(os.urandom(PROBE_BYTES), PROBE_BYTES)
    thread = threading.Thread(target=Path("/workspace/probe").write_bytes, args=(bytes(memory),))
    thread.start()
    thread.join()
    held = ctypes.create_string_buffer(24)
    check(libc.capget(struct.pack("Ii", CAPABILITY_VERSION, 0), held), "capget")
    bounding = [number for number in range(CAPABILITIES) if libc.prctl(PR_CAPBSET_READ, number, 0, 0, 0) == 1]
    connection.send(struct.pack("cQ", b"O", ctypes.addressof(memory)))
    connection.recv(1)
    found = {
        "digest": hashlib.sha256(bytes(memory)).hexdigest(),
        "written": Path("/workspace/probe").read_bytes() == bytes(memory),
        "uid": os.getuid(),
        "pid": os.getpid(),
        "capabilities": any(bytes(held)) or bool(bounding),
        "no_new_privileges": libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
        "seccomp": libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0),
    }
    connection.send(b"R" + json.dumps(found).encode())
    connection.recv(1)
    os._exit(0)


def main() -> None:
    descriptor, device, kind, isolation, native, packages, *folders = sys.argv[1:]
    os.umask(0o022)  # a runner of root's has another uid, and reads what is kept for all runners
    sys.path += [path for path in packages.split(os.pathsep) if path]
    play: Play = report
    if kind != "probe":
        sys.path.insert(0, native)  # the folder of result_channel.cpp, compiled
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        import runner

        runner.warm_up(kind, device, *folders)
        play = functools.partial(runner.play, receive)
    locks = (
        [path for path, _, _ in os.walk(folders[1]) if os.path.basename(path) == "locks"] if folders else []
    )
    serve(socket.socket(fileno=int(descriptor)), isolation == "isolated", play, locks)


if __name__ == "__main__":
    main()
