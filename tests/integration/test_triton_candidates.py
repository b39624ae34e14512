"""Candidates whose kernels Triton compiles: what their two processes may do, and what the judge keeps.

Triton has no kernels for a processor, so the candidates here write to its cache themselves.
"""

import contextlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import replace

import judge_fixtures as corpus
import pytest

from components.core.params import Params
from components.core.task import KernelTask
from components.judge.candidate import BuiltCandidate
from components.judge.candidate_runner import start_candidate, with_compiled_kernels
from components.judge.judge import Judge
from components.judge.task_bench import TaskBench
from components.judge.verdict import Rejected
from components.sandbox.runner_process import RunnerError

# A candidate that needs a file in Triton's cache, which it makes with a program if it does not exist.
MODEL_NEW = """
import subprocess
from pathlib import Path

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        kernel = Path("triton/KEY/kernel")
        if not kernel.exists():
            kernel.parent.mkdir(parents=True)
            kernel.write_bytes(subprocess.run(["echo", "compiled"], capture_output=True, check=True).stdout)
        assert kernel.read_text() == "compiled\\n"
        return nn.functional.leaky_relu(torch.sigmoid(x) * self.scale - 0.3, 0.1)
"""


@pytest.fixture
def judge_of_any(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> Judge:
    sandbox = judge.params.sandbox.model_copy(update={"rules": "any"})
    params: Params = judge.params.model_copy(update={"sandbox": sandbox})
    monkeypatch.setattr(judge, "params", params)
    return judge


@contextlib.contextmanager
def bench_and_candidate(judge: Judge, code: str) -> Iterator[tuple[TaskBench, BuiltCandidate]]:
    built = judge._build(corpus.TASK, {"model_new.py": code})
    with judge.bench(corpus.TASK) as bench:
        yield bench, replace(built, uses_triton=True)


def test_what_is_compiled_in_one_process_is_loaded_in_the_timed_one(judge_of_any: Judge) -> None:
    with bench_and_candidate(judge_of_any, MODEL_NEW) as (bench, built):
        compiled = with_compiled_kernels(judge_of_any.params, bench.reference, built)
        with zipfile.ZipFile(io.BytesIO(compiled.triton_archive)) as archive:
            assert [name for name in archive.namelist() if "KEY/" in name] == ["triton/KEY/kernel"]
        with contextlib.closing(start_candidate(judge_of_any.params, bench.reference, compiled)) as runner:
            assert runner.verify("check") is None
        with (
            contextlib.closing(start_candidate(judge_of_any.params, bench.reference, built)) as runner,
            pytest.raises(RunnerError, match="PermissionError"),
        ):
            runner.verify("check")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("raise ValueError('no kernel')", ("crashed", "exception", "no kernel")),
        (
            "raise type('E', (Exception,), {'__module__': 'triton.compiler.errors'})('at 3:4')",
            ("build_failed", "compiler", "at 3:4"),
        ),
        ("import time; time.sleep(1e6)", ("timed_out", "run_limit", "")),
        (
            "Path('triton').mkdir(); Path('triton/a').write_bytes(bytes(1 << 28))",
            ("load_failed", "too_large", ""),
        ),
        # The task's own implementation is not where the candidate's kernels are compiled.
        ("import model", ("crashed", "exception", "No module named 'model'")),
    ],
)
def test_a_failure_of_the_first_call_is_a_verdict(
    line: str, expected: tuple[str, str, str], judge_of_any: Judge
) -> None:
    code = MODEL_NEW.replace("        if not kernel", f"        {line}\n        if not kernel")
    with bench_and_candidate(judge_of_any, code) as (bench, built):
        params = judge_of_any.params
        params = params.model_copy(
            update={"sandbox": params.sandbox.model_copy(update={"build_seconds": 10.0})}
        )
        with pytest.raises(Rejected) as rejected:
            with_compiled_kernels(params, bench.reference, built)
    status, reason, text = expected
    assert (rejected.value.status, rejected.value.reason) == (status, reason), rejected.value.log
    assert text in rejected.value.log


def test_the_first_call_gets_inputs_with_the_strides_of_timed_calls(judge_of_any: Judge) -> None:
    """Triton compiles another kernel for an argument that is 1, as a stride of a transposed input is."""
    task = KernelTask(code=corpus.CODE.replace("torch.randn(256, 1024)", "torch.randn(1024, 256).t()"))
    code = MODEL_NEW.replace(
        "        kernel = Path", "        assert x.is_contiguous()\n        kernel = Path"
    )
    built = replace(judge_of_any._build(task, {"model_new.py": code}), uses_triton=True)
    with judge_of_any.bench(task) as bench:
        assert with_compiled_kernels(judge_of_any.params, bench.reference, built).triton_archive


def test_a_candidate_without_triton_is_not_called_before_its_measurement(judge: Judge) -> None:
    built = judge._build(corpus.TASK, corpus.files("honest", "simd"))
    with judge.bench(corpus.TASK) as bench:
        assert with_compiled_kernels(judge.params, bench.reference, built) is built
