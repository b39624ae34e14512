"""Admission of tasks: which are refused, for which reason, and within which time."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import judge_fixtures as corpus
import pytest
from judge_fixtures import EAGER_SECONDS
from judge_fixtures import changed_code as source

from components.core.params import Params
from components.core.records import TaskDtype
from components.core.task import KernelTask, in_dtype
from components.judge.judge import Judge
from components.judge.pool.local_pool import Candidate, Job, LocalPool
from components.judge.verdict import Admission


def test_ordinary_task_is_admitted(judge: Judge) -> None:
    admission = judge.admit(corpus.CODE, EAGER_SECONDS)
    assert admission.admitted, admission
    assert admission.evidence["inputs"] == [{"shape": [256, 1024], "dtype": "float32"}]
    assert admission.evidence["outputs"] == [{"shape": [256, 1024], "dtype": "float32"}]
    assert admission.evidence["parameters"] == ["scale"]
    assert 0.0002 <= admission.evidence["eager_seconds"] <= 0.05


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_task_in_half_precision_is_admitted_unless_float8_would_pass(
    dtype: TaskDtype, judge: Judge
) -> None:
    admission = judge.admit(in_dtype(corpus.CODE, dtype), EAGER_SECONDS)
    assert admission.admitted, admission
    assert admission.evidence["outputs"] == [{"shape": [256, 1024], "dtype": dtype}]
    # Of each factor: a product can be 0 in half precision, and nothing else in float64.
    signs = in_dtype(source("torch.sign(x) * torch.sign(self.scale)"), dtype)
    assert judge.admit(signs, (0.0, 1.0)).reason == "float8_passes"
    both = source("torch.sign(x * self.scale), torch.sigmoid(x * self.scale).bfloat16()")
    assert judge.admit(both, (0.0, 1.0)).reason == "half_precision_passes"
    checked = corpus.CODE.replace(
        "def forward(self, x):", "def forward(self, x):\n        assert x.dtype != torch.float64"
    )
    refused = judge.admit(in_dtype(checked, dtype), EAGER_SECONDS)
    assert refused.reason == "does_not_run" and "must run in float64 too" in refused.evidence["detail"]
    unused = source(
        "torch.sigmoid(x) * self.scale + torch.tanh(y) * 0",
        "[torch.randn(256, 1024), torch.randn(256, 1024)]",
        "x, y",
    )
    assert judge.admit(in_dtype(unused, dtype), EAGER_SECONDS).reason == "input_1_does_not_matter"


def test_a_check_of_the_memory_alone_agrees_with_the_verdicts(
    ci_params: Params, judge: Judge, tmp_path: Path
) -> None:
    found = judge.admit(corpus.CODE, EAGER_SECONDS, memory_only=True)
    whole = judge.admit(corpus.CODE, EAGER_SECONDS).evidence
    shapes = {name: whole[name] for name in ("inputs", "outputs", "parameters")}
    assert found == Admission(True, "", shapes)
    failing = judge.admit(source("undefined * self.scale"), EAGER_SECONDS, memory_only=True)
    assert failing.reason == "does_not_run" and "undefined" in failing.evidence["detail"]
    sandbox = ci_params.sandbox.model_copy(update={"device_bytes": 10_000_000})
    pool = LocalPool(ci_params.model_copy(update={"sandbox": sandbox}), tmp_path / "verdicts")
    with contextlib.closing(pool):
        refusal = pool.check(corpus.CODE).result()
        verdict = pool.submit(Job(corpus.TASK, Candidate.of(corpus.files("honest", "naive")), "0")).result()
    assert (refusal.admitted, refusal.reason, verdict.reason) == (False, "too_large", "too_large")
    assert "judging it takes" in refusal.evidence["detail"] and "GB can be used" in verdict.log


def test_a_task_whose_candidates_need_more_memory_than_its_admission_is_not_admitted(
    ci_params: Params, tmp_path: Path
) -> None:
    """A data set holds no task that the judge it was built with cannot judge.

    A judge with more memory, such as one whose GPU is shared no longer, is asked again.
    """
    sandbox = ci_params.sandbox.model_copy(update={"device_bytes": 3_000_000_000})
    pool = LocalPool(ci_params.model_copy(update={"sandbox": sandbox}), tmp_path / "verdicts")
    with contextlib.closing(pool):
        refusal = pool.admit(corpus.CODE).result()
    assert (refusal.admitted, refusal.reason) == (False, "too_large"), refusal
    assert "judging it takes" in refusal.evidence["detail"]
    assert not [*(tmp_path / "verdicts").rglob("*.json")]


def test_spread_is_that_of_the_parameters_with_which_the_output_varies_least(judge: Judge) -> None:
    code = source("torch.sigmoid(x) * (self.scale - 1) + torch.tanh(x * 1e-6) + 1")
    admission = judge.admit(code, EAGER_SECONDS)
    assert admission.admitted, admission
    # With the initial scale of 1 the large term is 0, so the spread is that of the small one.
    assert admission.evidence["spread"] == pytest.approx(1e-6, rel=0.5)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            source("torch.relu(x * self.scale - 100 * x.abs().max()) * torch.sigmoid(x).tanh()"),
            "zeros_pass",
        ),
        (
            source("torch.sigmoid(x * 1e-9) * self.scale.sum().sigmoid() + torch.tanh(x * 1e-9)"),
            "mean_passes|seeds_agree",
        ),
        (
            source(
                "torch.sigmoid(x) * self.scale + (torch.tanh(y) * 0)",
                "[torch.randn(256, 1024), torch.randn(256, 1024)]",
                "x, y",
            ),
            "input_1_does_not_matter",
        ),
        (
            source("torch.tanh(torch.sigmoid(x)) * (self.scale * 0 + 2)"),
            "parameter_scale_does_not_matter",
        ),
        (
            source("F.dropout(torch.sigmoid(x) * self.scale, 0.5, True)"),
            "does_not_run|not_deterministic",
        ),
        (
            source("(torch.sigmoid(x) * self.scale).exp().tanh().sum() > 0"),
            "no_float_output|eager_time",
        ),
        (source(inputs="1 / 0"), "does_not_run"),
        (source(inputs="[torch.zeros(1 << 38)]"), "does_not_run"),
        (source(forward="self.missing(x)"), "does_not_run"),
        ("import torch\n", "does_not_run"),
        ("x = " + "-" * 50000 + "1\n", "does_not_run"),
        (corpus.CODE + "#" * 300_000, "does_not_run"),
        (source(inputs="__import__('os')._exit(0)"), "does_not_run"),
    ],
)
def test_task_on_which_a_cheat_would_pass_is_refused(code: str, reason: str, judge: Judge) -> None:
    admission = judge.admit(code, EAGER_SECONDS)
    assert not admission.admitted
    assert admission.reason in reason.split("|"), admission


@pytest.mark.parametrize("cast", ["", ".bfloat16()"])
def test_an_output_without_elements_decides_nothing(cast: str, judge: Judge) -> None:
    scaled = "(torch.sigmoid(x) * self.scale)"
    admission = judge.admit(source(f"{scaled}[:256], {scaled}[256:]{cast}"), EAGER_SECONDS)
    assert admission.admitted, admission
    assert admission.evidence["spread"] > 0


def test_a_task_that_takes_less_than_the_permitted_time_is_refused(judge: Judge) -> None:
    admission = judge.admit(corpus.CODE, (0.02, 0.05))
    assert (admission.admitted, admission.reason) == (False, "eager_time")
    assert admission.evidence["eager_seconds"] < 0.02


def test_a_task_that_changes_a_float64_input_is_right_about_itself(judge: Judge) -> None:
    """The float64 call of a source gets copies of its inputs, those that are float64 already included."""
    code = source("torch.sigmoid(x.add_(1.0)) * self.scale", "[torch.randn(256, 1024, dtype=torch.float64)]")
    admission = judge.admit(code, EAGER_SECONDS)
    assert admission.reason != "does_not_run", admission


def test_task_that_never_returns_is_refused_in_time(with_limits: Callable[[float, float], Judge]) -> None:
    code = source(inputs="[torch.randn(256, 1024) for _ in iter(int, 1)]")
    admission = with_limits(3, 30).admit(code, EAGER_SECONDS)
    assert (admission.admitted, admission.reason) == (False, "does_not_run")
    assert "timed_out" in admission.evidence["detail"] or "out_of_memory" in admission.evidence["detail"]


def test_an_inexact_task_is_refused_in_one_sentence(judge: Judge) -> None:
    code = source("(x * 1e5 + torch.sigmoid(x) * self.scale) - x * 1e5")
    admission = judge.admit(code, EAGER_SECONDS)
    assert not admission.admitted
    verdict = judge.verdict(KernelTask(code=code), corpus.files("honest", "simd"))
    assert (verdict.status, verdict.reason) == ("infrastructure", "task")
    for text in (admission.evidence["detail"], verdict.log):
        assert "differs from its float64 result by" in text and "sandbox.absolute_tolerance" in text
