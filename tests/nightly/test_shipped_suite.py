"""The suite that is shipped: sound by the rubric of admission, and evaluated whole by the real judge."""

import copy
from pathlib import Path

import pytest

from components.agent.episode import RolloutRequest
from components.agent.trajectory import Trajectory, Turn
from components.core.config import resolve
from components.core.progress import Quiet
from components.evaluation.evaluate import evaluate
from components.evaluation.report import write_evaluation_report
from components.evaluation.suites import load_suite
from components.judge.judge import Judge
from components.judge.pool.local_pool import LocalPool, with_any_duration
from components.judge.verdict import Verdict
from components.registry.gate_runner import is_complete

GELU = {
    "model_new.py": """import torch
import torch.nn as nn
import cuda_extension

class ModelNew(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        cuda_extension.forward(x, out)
        return out
""",
    "kernels/forward.cpp": """#include <cmath>
#include "binding_registry.h"

KERNEL(forward) {
  for (int64_t i = 0; i < t[0].numel; ++i) {
    const float x = f32(t[0])[i];
    f32(t[1])[i] = 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
  }
}
""",
}


class KnowsGelu:
    """A policy that writes one kernel, whose verdict it does not await, and gives up on every other task."""

    name = version = digest = "knows-gelu"

    def __init__(self) -> None:
        params = resolve("ci", ("policy.batch=4",)).params
        evaluation = params.evaluation.model_copy(update={"attempts": 1})
        self.params = params.model_copy(update={"evaluation": evaluation})

    def sample(self, request: RolloutRequest) -> list[Trajectory]:
        found = []
        for task in request.tasks:
            is_known = task.name == "1_gelu"
            files = GELU if is_known else {}
            verdict = Verdict(status="correct" if is_known else "build_failed", reason="nothing")
            found.append(
                Trajectory(task.task_id, (), (), (), (Turn("said"),), (verdict,), -1.0, "stop", "v", files)
            )
        return found


@pytest.mark.timeout(600)
def test_the_shipped_suite_is_sound_and_evaluated_whole_by_the_real_judge(
    judge: Judge, tmp_path: Path
) -> None:
    params = with_any_duration(judge.params)
    tasks = load_suite(resolve("ci", ("evaluation.suite=shipped", "evaluation.numel=65536")).params, tmp_path)
    pool = LocalPool(params, tmp_path / "verdicts")
    pool._judge = copy.copy(judge)  # the one that all tests share, for tasks of any duration
    pool._judge.params = params
    try:
        found = evaluate(
            KnowsGelu(),
            tasks,
            pool,
            tmp_path / "out",
            epoch="shipped",
            progress=Quiet(),
            seed=0,
        )
        refused = {task.name: pool.admit(task.code).result().reason for task in tasks}
    finally:
        pool._judge = None
        pool.close()
    gelu = next(row for row in found.tasks if row.name == "1_gelu")
    assert gelu.status == "correct" and gelu.speedup.eager is not None and gelu.speedup.compile is not None, (
        gelu.status,
        gelu.reason,
    )
    assert (found.overall.tasks, found.overall.correct, found.errors, set(found.levels)) == (
        15,
        1,
        0,
        {"1", "2", "3"},
    )
    assert not any(refused.values()), (refused, "no cheat could pass on a task that we ship")
    assert is_complete(write_evaluation_report(tmp_path / "out", found))
