"""Faults of the machine are not charged to candidates, and a judge finds its own GPU."""

import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from components.core.errors import InfrastructureError, IsolationUnavailable
from components.judge.pool.ray_pool import RayBackend
from components.sandbox import isolation
from components.sandbox.compilers import (
    COMPILER_FAILED,
    MAX_OUTPUT_BYTES,
    extension_flags,
    is_compiler_error,
    refused_flag,
)
from components.sandbox.inside.inline_extension import Extension
from components.sandbox.runner_factory import INSIDE_FOLDER


@pytest.mark.parametrize(
    ("code", "errors"),
    [
        (1, "bwrap: Can't mount proc on /newroot/proc: Operation not permitted\n"),
        (1, "bwrap: Creating new namespace failed: error: Resource temporarily unavailable\n"),
        (2, "sh: 0: Cannot fork\n"),
        (126, "sh: 1: g++: Permission denied\n"),
        (137, ""),
        (COMPILER_FAILED, "sh: Cannot fork\n"),
        (
            COMPILER_FAILED,
            "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n",
        ),
        (COMPILER_FAILED, "collect2: fatal error: ld terminated with signal 9 [Killed]\n"),
        (COMPILER_FAILED, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n"),
        (
            COMPILER_FAILED,
            "g++: fatal error: cannot execute '/usr/lib/gcc/x86_64-linux-gnu/12/cc1plus': "
            "vfork: Resource temporarily unavailable\ncompilation terminated.\n",
        ),
        (COMPILER_FAILED, ""),
    ],
)
def test_a_fault_of_the_machine_is_no_error_of_the_compiler(code: int, errors: str) -> None:
    assert not is_compiler_error(CompletedProcess([], code, "", errors))


@pytest.mark.parametrize(
    "errors",
    [
        "kernels/a.cpp:1:10: error: expected primary-expression before 'return'\n",
        "kernels/a.cpp:1:10: fatal error: missing.h: No such file or directory\ncompilation terminated.\n",
        'kernels/a.cu(3): error: identifier "y" is undefined\n',
        "ptxas error   : Entry function 'f' uses too much shared data\n",
        "a.o: in function `f': a.cpp:(.text+0x5): undefined reference to `g'\n",
        "cc1plus: out of memory allocating 65536 bytes after a total of 8589934592 bytes\n",
        # A source that imitates a fault of the machine has an error of its own beside it.
        "g++: fatal error: Killed signal terminated program cc1plus\nfoo:1:2: error: #error x\n",
        "g++: fatal error: Killed signal terminated program cc1plus:1:2: error: #error x\n",
        # The name of a file to include, after a #line that gives the source the name of a program.
        "collect2: fatal error: ld terminated with signal 9 [Killed]: No such file or directory\n",
        "a.cpp:1:10: fatal error: ld terminated with signal 9 [Killed]\u2028x: No such file or directory\n",
        "a.cpp:1:48: sorry, unimplemented: capture of variably-modified type 'int [n][n]'\n",
        "a.cpp:1:48: words of another compiler\n",
    ],
)
def test_diagnostics_of_a_compiler_are_the_candidates_fault(errors: str) -> None:
    assert is_compiler_error(CompletedProcess([], COMPILER_FAILED, "", errors))


def test_a_compiler_that_its_source_floods_or_crashes_is_the_candidates_fault() -> None:
    notes = "a.cpp:1:9: note: '#pragma message: 0123456789'\n" * (MAX_OUTPUT_BYTES // 40)
    assert is_compiler_error(CompletedProcess([], COMPILER_FAILED, "", notes[:MAX_OUTPUT_BYTES]))
    for number in (signal.SIGXFSZ, signal.SIGXCPU, signal.SIGSEGV):
        assert is_compiler_error(CompletedProcess([], 128 + number, "", ""))


@pytest.mark.parametrize(
    "flag",
    [
        *("-fsyntax-only", "-fpreprocessed", "-fdirectives-only", "-fmodule-only", "-fmodules-ts", "-fhelp"),
        *("-fplugin=x", "-fuse-ld=gold", "-fprofile-use", "-fdump-passes", "-fsanitize=address", "-fversion"),
        *("-fstack-usage", "-fcallgraph-info", "-fwpa", "-fself-test=x", "-fmax-errors=1", "-fno-working"),
        *("-E", "-S", "-c", "-M", "-x", "-wrapper", "-o", "-Wl,-s", "@file"),
    ],
)
def test_a_flag_that_changes_what_a_compiler_reads_writes_or_prints_is_refused(flag: str) -> None:
    assert refused_flag(["-O3", flag]) == flag


def test_flags_of_published_kernels_are_accepted_and_those_of_messages_are_left_out() -> None:
    flags = [
        *("-O3", "-Ofast", "-ffast-math", "-fopenmp", "-fopenmp-simd", "-funroll-loops", "-fPIC", "-flto"),
        *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-ftree-vectorize", "-fno-plt"),
        *("-fomit-frame-pointer", "-fno-strict-aliasing", "-fvisibility=hidden", "-fno-exceptions"),
        *("-finline-functions", "-falign-loops=32", "-fassociative-math", "-ffinite-math-only"),
        *("-fprefetch-loop-arrays", "-fvect-cost-model=unlimited", "-fno-semantic-interposition"),
        *("-mavx2", "-mfma", "-mavx512f", "-mprefer-vector-width=512", "-DNDEBUG"),
    ]
    ignored = [
        "-march=native",
        "-std=c++17",
        "-Wall",
        "-fdiagnostics-color=always",
        "-fdiagnostics-format=json",
    ]
    assert refused_flag(flags + ignored) is None
    extension: Extension = {
        "name": "x",
        "sources": {},
        "cflags": flags + ignored,
        "cuda_cflags": [],
        "ldflags": [],
    }
    assert extension_flags(extension, "cpu") == flags


def machine(root: Path, devices: list[int], gpus: dict[str, tuple[str, int]]) -> Path:
    (root / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in devices)):
        (root / "dev" / name).touch()
    for address, (uuid, minor) in gpus.items():
        folder = root / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H20\nIRQ:   \t\t 184\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        )
    return root


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        ("", [0, 1, 3], 3),  # the first PCI address has the device file nvidia3
        ("1", [0, 1, 3], 0),
        ("2,0", [0, 1, 3], 1),
        ("GPU-bbbb", [0, 1, 3], 0),
        ("GPU-cccc2222-0000,GPU-bbbb", [0, 1, 3], 1),
        ("0", [1], 1),  # a container that was given one GPU
        ("", [1], 1),
    ],
)
def test_the_judges_gpu_has_the_device_file_that_the_driver_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, devices: list[int], expected: int
) -> None:
    gpus = {
        "0000:1a:00.0": ("GPU-aaaa1111-0000", 3),
        "0000:3b:00.0": ("GPU-bbbb1111-0000", 0),
        "0000:d8:00.0": ("GPU-cccc2222-0000", 1),
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert isolation.gpu_minor(machine(tmp_path, devices, gpus)) == expected


def test_the_gpu_of_a_container_that_hides_the_drivers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, [3], {})
    for visible in ("", "0", "GPU-aaaa1111-0000"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert isolation.gpu_minor(root) == 3
    (root / "dev" / "nvidia5").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert isolation.gpu_minor(root) == 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa1111-0000")
    with pytest.raises(IsolationUnavailable, match=r"GPU-aaaa1111-0000.*give the GPU's number"):
        isolation.gpu_minor(root)


def test_shells_and_compilers_do_not_share_a_limit_of_processes() -> None:
    shells = {isolation.shell_uid() for _ in isolation.SHELLS}
    assert len(shells) == 512 and not shells & {isolation.NOBODY, isolation.BUILDER}


def test_an_actor_that_failed_is_avoided_until_the_next_success() -> None:
    judges = RayBackend.__new__(RayBackend)
    judges.workers, judges.lock = 1, threading.Lock()

    class Locked(dict[str, int]):
        def __setitem__(self, key: str, index: int) -> None:
            assert judges.lock.locked(), "other threads choose actors by it"
            super().__setitem__(key, index)

        def pop(self, *key: Any) -> Any:
            assert judges.lock.locked(), "other threads choose actors by it"
            return super().pop(*key)

    judges.actors, judges.loads, judges.failed = ["a", "b"], [0, 0], Locked()
    with judges._actor("task") as first:
        pass
    with pytest.raises(InfrastructureError), judges._actor("task"):
        raise InfrastructureError("the judge's Ray actor died")
    with judges._actor("task") as second:
        assert second != first
    with judges._actor("task") as third:
        assert third == first, "it has the task's baselines, and may have been restarted"
    assert judges.failed == {}


def test_an_admission_that_failed_does_not_keep_its_source() -> None:
    def remote(*_: object) -> object:
        raise InfrastructureError("the judge's Ray actor died")

    judges = RayBackend.__new__(RayBackend)
    judges.actors = [SimpleNamespace(admit=SimpleNamespace(remote=remote))]
    judges.loads, judges.failed, judges.workers, judges.lock = [0], {}, 1, threading.Lock()
    with pytest.raises(InfrastructureError):
        judges.admit("x = 1\n" * 10_000, (0.0, 1.0))
    assert all(len(key) == 64 for key in judges.failed) and judges.failed


def test_a_path_through_a_link_has_the_place_of_the_folder_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "packages" / "torch").mkdir(parents=True)
    (tmp_path / ".venv").symlink_to(tmp_path / "packages")
    paths = isolation.PathMap({tmp_path / "packages": "/packages/0"})
    assert paths.inside(tmp_path / ".venv" / "torch") == "/packages/0/torch"
    assert paths.inside("/usr/include") == "/usr/include"


def test_a_zygote_has_few_descriptors_to_close_whatever_limit_it_inherits() -> None:
    """Without a complete /proc a runner tries to close each of them, which took 7 s for a million."""
    code = (
        "import resource, sys, zygote\n"
        "zygote.serve = lambda *_: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "zygote.main()"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", code, str(theirs.fileno()), "cpu", "probe", "isolated", "", ""],
            cwd=INSIDE_FOLDER,
            pass_fds=(theirs.fileno(),),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard)),
            capture_output=True,
            text=True,
            check=True,
        )
    assert int(done.stdout) == min(hard, 1024)
