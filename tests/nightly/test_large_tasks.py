"""Tasks that need much of the device's memory, with all of their data in host memory.

tests/nightly/test_placements.py judges in the other placements.
"""

import re
from pathlib import Path

import judge_fixtures as corpus
import pytest
import torch

from components.judge import correctness, input_mixing, memory_plan, task_layout, timed_output_check
from components.judge.input_mixing import InputMix
from components.judge.judge import Judge
from components.judge.source_runner import SourceRunner
from components.judge.task_layout import PLACEMENTS, Placement
from components.judge.timed_output_check import TimedOutputCheck
from components.sandbox.runner_process import has_ended

CASES = {
    ("honest", "simd"): ("correct", ""),
    ("honest", "double_softmin"): ("correct", ""),
    ("honest", "two_outputs"): ("correct", ""),
    ("exploits", "pointer_cache"): ("wrong_output", None),
    ("exploits", "stale_after_calls"): ("wrong_output", None),
    ("exploits", "changed_input"): ("wrong_output", "inputs_changed"),
    ("exploits", "narrow_range"): ("wrong_output", "max_error:wide"),
}


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> Placement:
    """Place all tasks like large ones on a GPU, with many parts of an output and one call a round."""
    monkeypatch.setattr(memory_plan, "PLACEMENTS", PLACEMENTS[-1:])
    monkeypatch.setattr(task_layout, "SHARING_ROUND_SHARE", 1e-9)
    monkeypatch.setattr(task_layout, "MAX_REFERENCE_BYTES", 1)
    monkeypatch.setattr(correctness, "PART_NUMEL", 4099)
    monkeypatch.setattr(timed_output_check, "PART_NUMEL", 4099)
    monkeypatch.setattr(input_mixing, "BLOCK_NUMEL", 5003)
    return PLACEMENTS[-1]


def test_verdicts_are_those_of_small_tasks(placement: Placement, cold_judge: Judge) -> None:
    for (group, name), (status, reason) in CASES.items():
        verdict = cold_judge.verdict(corpus.task(group, name), corpus.files(group, name))
        assert verdict.status == status, (name, verdict.reason, verdict.log)
        assert reason is None or verdict.reason == reason, name
    for bench in cold_judge.bench_cache.benches.values():
        layout = bench.reference.layout
        assert layout.placement == placement and layout.calls == 1 and layout.distributions == ["given"]
        runners = bench.baselines.runners.values()
        assert len({id(runner.memory) for runner in runners}) <= 1, "baselines share their memory"


def test_a_correct_candidate_is_compared_with_torch_compile(placement: Placement, cold_judge: Judge) -> None:
    verdict = cold_judge.verdict(corpus.TASK, corpus.files("honest", "simd"), compare_compile=True)
    assert verdict.status == "correct" and verdict.speedup.compile is not None, verdict.log


def test_a_task_is_admitted(placement: Placement, cold_judge: Judge) -> None:
    admission = cold_judge.admit(corpus.TASK.code, corpus.EAGER_SECONDS, headroom=True)
    assert admission.admitted, (admission.reason, admission.evidence)
    ignoring = corpus.TASK.code.replace("* self.scale", "* (0 * self.scale + 1)")
    assert cold_judge.admit(ignoring, corpus.EAGER_SECONDS).reason == "parameter_scale_does_not_matter"


def test_suspicious_calls_are_compared_after_the_candidate_has_ended(
    placement: Placement, cold_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call is suspicious here: the exact answer passes, and an answer that is wrong does not."""
    monkeypatch.setattr(
        timed_output_check, "round_departures", lambda reference, ours, eager, calls: [2.0] * calls
    )
    honest, compared = SourceRunner.float64_outputs, []

    def living() -> set[str]:
        pidfds = [pidfd for pidfd in list(cold_judge.runner_factory.pidfds) if not has_ended(pidfd, 0)]
        # By process, because the numbers of closed descriptors are used again.
        return {re.findall(r"Pid:\t(.*)", Path(f"/proc/self/fdinfo/{fd}").read_text())[0] for fd in pidfds}

    others = living()  # runners of other tests' tasks

    def outputs(self: SourceRunner) -> list[torch.Tensor]:
        (bench,) = cold_judge.bench_cache.benches.values()
        compared.append(len(bench.baselines.runners))
        assert bench.reference.processes.shared is None, "the memory that the baselines share is freed"
        is_running = bench.timed_output_check.source.runner is not None
        assert len(living() - others) == is_running, "no other runner has memory"
        return honest(self)

    monkeypatch.setattr(SourceRunner, "float64_outputs", outputs)
    simd = corpus.files("honest", "simd")
    assert cold_judge.verdict(corpus.TASK, simd).status == "correct"
    assert compared == [0, 0], "no baseline runs meanwhile"

    defer = TimedOutputCheck._defer

    def defer_wrong(
        self: TimedOutputCheck, figure: float, mix: InputMix, ours: torch.Tensor, eager: torch.Tensor
    ) -> None:
        defer(self, figure, mix, (ours.view(torch.float32) * 1.001).view(torch.uint8), eager)

    monkeypatch.setattr(TimedOutputCheck, "_defer", defer_wrong)
    verdict = cold_judge.verdict(corpus.TASK, simd)
    assert verdict.status == "wrong_output" and verdict.reason.startswith("max_error"), verdict.log


def test_of_many_suspicious_calls_the_worst_and_another_one_are_kept() -> None:
    runner = TimedOutputCheck.__new__(TimedOutputCheck)
    runner.deferred, runner.deferrable = [], 0
    mix, nothing = InputMix(0, 1, (0,), (0,), 0.5), torch.empty(0)
    for figure in (3.0, 9.0, 4.0, 2.0, 8.0):
        runner._defer(figure, mix, nothing, nothing)
    assert len(runner.deferred) == 2 and runner.deferred[0].departure == 9.0
