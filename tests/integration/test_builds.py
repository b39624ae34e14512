"""Builds of candidates, and what the cache keeps of them."""

import contextlib
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import judge_fixtures as corpus
import psutil
import pytest

from components.core.errors import InfrastructureError
from components.judge.judge import Judge
from components.sandbox.build import Builder
from components.sandbox.compilers import COMPILER_FAILED, is_compiler_error

SIMD = corpus.files("honest", "simd")
KERNEL = "kernels/forward.cpp"


def test_build_failure_quotes_the_compiler(judge: Judge) -> None:
    verdict = judge.verdict(corpus.TASK, SIMD | {KERNEL: SIMD[KERNEL].replace("vsigmoid(", "vsigmoit(")})
    assert "vsigmoit" in verdict.log and f"{KERNEL}:" in verdict.log


def test_builds_that_nobody_asks_for_are_forgotten_and_those_in_use_are_kept(
    judge: Judge, tmp_path: Path
) -> None:
    cache = tmp_path / "builds"

    def builder() -> Builder:
        return Builder(judge.params.sandbox, judge.params.device, cache)

    def aged() -> None:
        for path in cache.iterdir():
            os.utime(path, (0, 0))

    used, unused = corpus.files("honest", "simd"), {"kernels/forward.cpp": "no C++"}
    first = builder()
    built = first.build(used)
    assert built.library is not None and first.build(unused).library is None
    (cache / "build-of-a-killed-judge").mkdir()
    aged()
    assert first.build(used).library == built.library
    builder()
    assert sorted(path.suffix for path in cache.iterdir()) == [".so", ".symbols"]
    aged()
    again = builder()
    assert list(cache.iterdir()) == []
    assert again.build(used).library == built.library
    (library,) = cache.glob("*.so")
    library.write_bytes(b"changed by another process")
    assert again.build(used).library == built.library, "a damaged build is made again"


def test_a_build_that_the_machine_ends_is_not_cached(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder, files = (
        Builder(judge.params.sandbox, judge.params.device, tmp_path),
        corpus.files("honest", "simd"),
    )
    killed = subprocess.CompletedProcess(
        [], COMPILER_FAILED, "", "g++: fatal error: Killed signal terminated program cc1plus"
    )
    with monkeypatch.context() as patched:
        patched.setattr(builder, "_compile", lambda folder, command: (killed, ()))
        with pytest.raises(InfrastructureError, match="Killed signal"):
            builder.build(files)
    assert builder.build(files).library is not None


def compilers() -> set[int]:
    """Return the PIDs of the compilers proper that this process has started."""
    return {
        process.pid for process in psutil.Process().children(recursive=True) if process.name() == "cc1plus"
    }


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_compiler_that_is_ended_once_from_outside_is_started_again(
    judge: Judge, tmp_path: Path, number: signal.Signals
) -> None:
    builder = Builder(judge.params.sandbox, judge.params.device, tmp_path)
    files = SIMD | {"kernels/slow.cpp": "#include <functional>\n#include <map>\n#include <random>\n"}
    with ThreadPoolExecutor(1) as executor:
        building = executor.submit(builder.build, files)
        while not (found := compilers()) and not building.done():
            time.sleep(0.01)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, number)
        assert building.result().library is not None, building.result().log


def test_a_compiler_that_is_always_ended_is_not_cached_as_the_candidates_failure(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder, line = Builder(judge.params.sandbox, judge.params.device, tmp_path), "Segmentation fault signal"
    crashed = subprocess.CompletedProcess(
        [], COMPILER_FAILED, "", f"g++: internal compiler error: {line} terminated program cc1plus"
    )
    with monkeypatch.context() as patched:
        patched.setattr(builder, "_compile", lambda folder, command: (crashed, ()))
        assert line in builder.build(SIMD).log
    assert builder.build(SIMD).library is not None


def test_a_build_that_waits_for_the_machine_is_tried_again_and_one_that_computes_on_is_not(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder, tries = Builder(judge.params.sandbox, judge.params.device, tmp_path), list[str]()

    def waits(*_: object) -> None:
        tries.append("waits")
        raise subprocess.TimeoutExpired("g++", 1)

    def computes(*_: object) -> tuple[subprocess.CompletedProcess[str], tuple[str, ...]]:
        tries.append("computes")
        line = "g++: fatal error: CPU time limit exceeded signal terminated program cc1plus"
        return subprocess.CompletedProcess([], COMPILER_FAILED, "", line), ()

    for compile in (waits, computes):
        monkeypatch.setattr(builder, "_compile", compile)
        built = builder.build(SIMD)
        assert built.timed_out and built.library is None
    assert tries == ["waits", "waits", "computes"]


@pytest.mark.parametrize(
    ("code", "is_compiled"),
    [(1, True), (255, True), (126, False), (137, False)],  # 255 is nvcc's code after an error of ptxas
)
def test_what_ends_a_compiler_determines_whose_fault_it_is(
    judge: Judge, tmp_path: Path, code: int, is_compiled: bool
) -> None:
    builder = Builder(judge.params.sandbox, judge.params.device, tmp_path)
    fails = ["/bin/sh", "-c", f"echo 'ptxas error   : too much shared data' >&2; exit {code}"]
    with builder._build_folder() as folder:
        result, _ = builder._compile(folder, fails)
    assert is_compiler_error(result) == is_compiled and "too much shared data" in result.stderr


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("true", "the compiler wrote no library"),
        ('ln -s /etc/hostname "$1"', "the compiler wrote no library"),
        ('echo text > "$1"', "nm cannot read the library"),
        ('g++ -shared -nostdlib -x c++ /dev/null -o "$1"', "the library imports no symbols"),
    ],
)
def test_a_library_that_is_missing_or_unusable_is_the_candidates_fault(
    judge: Judge, tmp_path: Path, script: str, words: str
) -> None:
    builder = Builder(judge.params.sandbox, judge.params.device, tmp_path)
    with builder._build_folder() as folder:
        result, _ = builder._compile(folder, ["/bin/sh", "-c", script])
    assert is_compiler_error(result) and words in result.stderr, (result.returncode, result.stderr)


def test_a_kernel_that_defines_every_symbol_of_its_library_is_refused(judge: Judge, tmp_path: Path) -> None:
    builder = Builder(judge.params.sandbox, judge.params.device, tmp_path)
    imported = builder.build(SIMD).symbols
    names = [name.partition("@")[0] for name in imported]
    defined = "".join(f'".globl {name}\\n.hidden {name}\\n{name}:\\n"\n' for name in names)
    source = f'{SIMD[KERNEL]}\nasm(".pushsection .text\\n"\n{defined}"ret\\n.popsection\\n");\n'
    built = builder.build(SIMD | {KERNEL: source})
    assert built.library is None and "the library imports no symbols" in built.log, built.log
