"""What runs inside the sandbox: a zygote that has torch loaded, and the runners that it forks.

    python runner.py FD DEVICE plain|compile walled|open NATIVE [CACHE WARM]

Importing torch takes seconds; a fork takes milliseconds. So a trusted zygote imports it once and forks a runner for
every piece of untrusted code. The runner walls itself off from the zygote (new PID, mount, IPC, network namespaces,
private /workspace and /proc), drops every capability and privilege, takes the system-call filter, says who it is (the kernel
vouches for its PID) and only then loads code. It is thrown away afterwards. The zygote runs no untrusted code.

Trusted side -> runner: JSON with descriptors. Runner -> trusted side: one letter, then text or numbers that the judge
checks for length and never believes: what counts is the shared memory, and the clock that the judge holds.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, sys.argv[5])  # the folder of handover.cpp, compiled
sys.path.insert(0, str(Path(__file__).resolve().parent))

import arms
import refusal
import shared
import torch

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x08000000, 0x04000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 0x1000, 0x4000, 1 << 18
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 4, 24, 38, 22
NOBODY = 65534
MESSAGE_BYTES = 1 << 20
INODES = 1 << 16
"""Files that a runner may make: each takes a kilobyte of the kernel's memory, which no other limit counts."""
INDUCTOR = "/workspace/inductor"
"""Where torch.compile keeps what it compiled: a folder that the runners of one task share over time, and no others."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, call: str) -> None:
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


def wall_off(header: dict, keep: set[int]) -> None:
    """Become harmless: everything a runner must lose before it may load untrusted code."""
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out, a runner goes first and never the judge
    size = f"size={header['temporary_bytes']},nr_inodes={INODES},mode=0777".encode()
    check(libc.mount(b"tmpfs", b"/workspace", b"tmpfs", MS_NOSUID | MS_NODEV, size), "mount /workspace")
    # All runners of a zygote would share its pseudo-terminals: one could compute for another through them.
    check(libc.mount(b"tmpfs", b"/dev/pts", b"tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, b"size=4096"), "mount /dev/pts")
    if header.get("cache"):
        own = f"/cache/tasks/{header['cache']}"
        os.makedirs(own, exist_ok=True)
        os.utime(own)  # in use: not to be swept
        os.makedirs(INDUCTOR)
        os.chmod(own, 0o777)
        check(libc.mount(own.encode(), INDUCTOR.encode(), None, MS_BIND, None), "mount inductor")
        for place in (b"/cache", b"/warm"):
            check(libc.mount(b"none", place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None), f"remount {place.decode()}")
    if libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV, None) != 0:
        # In a user namespace the kernel may refuse a second /proc: an empty folder hides the neighbours as well.
        check(libc.mount(b"tmpfs", b"/proc", b"tmpfs", MS_NOSUID | MS_NODEV, b"size=4096"), "mount /proc")
    for descriptor in map(int, os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else range(256)):
        if descriptor not in keep and descriptor > 2:
            try:
                os.close(descriptor)
            except OSError:
                continue
    os.chdir("/workspace")
    for name, value in header["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if os.getuid() == 0:
        os.setgroups([])
        for capability in range(64):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    no_capabilities = struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)
    check(libc.capset(struct.pack("Ii", 0x20080522, 0), no_capabilities), "capset")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl DUMPABLE")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")
    if header["seccomp"]:
        code = bytes.fromhex(header["seccomp"])
        memory = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(memory))
        check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(program, len(program)), 0, 0), "prctl SECCOMP")


def silence() -> None:
    """Nothing that untrusted code prints is kept: a log file is a place where one candidate leaves answers for the next."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)


def runner(connection: socket.socket, header: dict, descriptors: list[int], walled: bool) -> None:
    """The life of one runner; never returns."""
    code = 1
    try:
        if walled:
            wall_off(header, {connection.fileno(), *descriptors})
            silence()
        else:
            os.makedirs(header["folder"], exist_ok=True)
            os.chdir(header["folder"])
        connection.send(b"H")  # with SCM_CREDENTIALS on the other side: the kernel says which PID this is
        connection.recv(1)  # nothing foreign runs, or ends, before the judge has a handle on this process
        torch.set_num_threads(1)
        if header.get("cache"):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = INDUCTOR if walled else f"{CACHE_FOLDER}/tasks/{header['cache']}"
        arms.serve(connection, header, descriptors, receive)
        code = 0
    except MemoryError:
        connection.send(b"Mout of memory")
    except (SystemExit, KeyboardInterrupt) as error:
        connection.send(b"Eexit " + repr(error).encode()[:200])
    except BaseException as error:  # the boundary: whatever untrusted code raises becomes a message
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        text = "".join(traceback.format_exception(error, limit=-6))[-6000:]
        try:
            connection.send((b"M" if out_of_memory else b"E") + text.encode(errors="replace"))
        except OSError:
            code = 2
    os._exit(code)


def warm_up_inductor() -> None:
    """Compile one function of ours, so that every later torch.compile finds Inductor's checks and headers done.

    The first compilation of a process took 12 s, later ones about 1 s: nearly all of it is precompiling headers (kept on
    disk in WARM_FOLDER) and probing the instruction set (kept in memory, inherited by fork).
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{WARM_FOLDER}/kernels"
    tempfile.tempdir = WARM_FOLDER  # where Inductor keeps precompiled headers, whatever its cache folder is
    torch.compile(lambda x: torch.sigmoid(x).sum(-1))(torch.ones(64, 64))
    torch._dynamo.reset()
    tempfile.tempdir = None


LATE = (
    "torch._dynamo.backends.inductor",
    "torch._export.passes.collect_tracepoints_pass",
    "torch._inductor.choices",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.halide",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.quantization",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "sympy.tensor.tensor",
    "triton.backends.nvidia.compiler",
    "triton.compiler.code_generator",
)
"""What the first compilation of a process imports besides, as seen with torch 2.11 on a GPU; a name that another version lacks is passed over."""


def import_inductor() -> None:
    """What compiling for a GPU imports, seconds of CPU time of every runner otherwise; CUDA must not be initialised before a fork.

    Of all of it one module asks whether there is a GPU when it is imported (`_inductor.runtime.benchmarking`), which initialises CUDA.
    """
    asked, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        for name in ("torch._inductor.compile_fx", *LATE):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        torch.cuda.is_available = asked


def warm_up_torch() -> None:
    """What every runner would otherwise do for itself, done once before they are forked."""
    for key in ("CPU", "CUDA"):
        refusal.compute_operators(key)
    shared.quiet(torch.nn.Linear(1, 1), "cpu").load_state_dict(torch.nn.Linear(1, 1).state_dict())


def zygote(control: socket.socket, walled: bool) -> None:
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
    while True:
        header, descriptors = receive(control)
        if not header:
            os._exit(0)
        if walled:  # for the next child only: it is the first process of a PID namespace, and all that it starts ends with it
            check(libc.unshare(CLONE_NEWPID), "unshare PID")
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                control.close()
                connection = socket.socket(fileno=descriptors[0])
                if walled:
                    # The network too: two candidates that meet at a local socket's name would share one's uncounted time.
                    check(libc.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET), "unshare")
                runner(connection, header, descriptors[1:], walled)
            except BaseException:
                traceback.print_exc()
                os._exit(3)
        if walled:
            check(libc.setns(own_namespace, CLONE_NEWPID), "setns PID")
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    descriptor, device, kind, walls, _, *folders = sys.argv[1:]
    CACHE_FOLDER, WARM_FOLDER = folders or ("", "")
    torch.set_num_threads(1)
    warm_up_torch()
    if kind == "compile" and device == "cpu":
        warm_up_inductor()
    elif kind == "compile":
        import_inductor()
    zygote(socket.socket(fileno=int(descriptor)), walled=walls == "walled")
