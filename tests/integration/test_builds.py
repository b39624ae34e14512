"""Builds of candidates, and what the cache keeps of them."""

import os
import subprocess
from pathlib import Path

import judge_fixtures as corpus
import pytest

from components.core.errors import InfrastructureError
from components.judge.judge import Judge
from components.sandbox.build import COMPILER_FAILED, Builder, is_compiler_error

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
    assert sorted(path.suffix for path in cache.iterdir()) == [".so", ".symbols"] and built.library.is_file()
    aged()
    again = builder()
    assert list(cache.iterdir()) == []
    assert again.build(used).library == built.library and built.library.is_file()


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
