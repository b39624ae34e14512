"""Stages 1 and 4 with advantages that need no critic."""

from pathlib import Path

import pytest
from training_fixtures import episodes, stage

from components.training.metrics_file import MetricsFile
from components.training.run_stage import run_stage
from components.training.stage import StageName


@pytest.mark.parametrize(("name", "mode"), [("warmup", "group"), ("agentic", "group"), ("agentic", "turns")])
def test_a_policy_learns_without_a_critic(name: StageName, mode: str, tmp_path: Path) -> None:
    made = stage(
        tmp_path,
        name,
        *(f"{name}.advantages={mode}", f"{name}.steps=14", f"{name}.learning_rate=0.01"),
        *(f"{name}.rollouts.samples=8", f"{name}.learning_rate_warmup_steps=0"),
    )
    result = run_stage(made, episodes)
    assert result.reward_before is not None and result.reward_after is not None
    assert result.reward_after > result.reward_before + 1
    records = MetricsFile(made.out, start=14, writes=False).records
    assert len(records) == 14
    assert not {"critic_gradient_norm", "value_loss", "seconds_critic"} & records[-1].keys()
    assert run_stage(made, episodes) == result
