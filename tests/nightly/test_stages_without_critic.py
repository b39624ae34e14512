"""Stages 1 and 4 with advantages that need no critic."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from training_fixtures import episode, stage

from components.agent.episode import RolloutRequest
from components.agent.trajectory import Trajectory
from components.core.errors import StageFailed
from components.training.metrics import MetricsFile
from components.training.run_stage import run_stage
from components.training.stage import StageName


@pytest.mark.parametrize("name", ["warmup", "agentic"])
def test_a_policy_learns_without_a_critic(name: StageName, tmp_path: Path) -> None:
    made = stage(
        tmp_path,
        name,
        *(f"{name}.advantages=group", f"{name}.steps=14", f"{name}.learning_rate=0.01"),
        *(f"{name}.rollouts.samples=8", f"{name}.learning_rate_warmup_steps=0"),
    )
    result = run_stage(made, episode)
    assert result.reward_before is not None and result.reward_after is not None
    assert result.reward_after > result.reward_before + 1
    records = MetricsFile(made.out, start=14, writes=False).records
    # warmup.critic_warmup_steps, 1 here, does not count: the first step trains the actor.
    assert len(records) == 14 and "learning_rate" in records[0]
    assert not {"critic_gradient_norm", "value_loss", "seconds_critic"} & records[-1].keys()
    assert run_stage(made, episode) == result


def test_rewards_that_are_equal_within_every_task_change_nothing(tmp_path: Path) -> None:
    earned: set[float] = set()

    async def by_task(request: RolloutRequest, *rest: Any) -> Trajectory:
        sampled = await episode(request, *rest)
        rewarded = dataclasses.replace(sampled, reward=1.0 + int(sampled.task_id[0], 16) % 3)
        earned.add(rewarded.reward)
        return rewarded

    made = stage(tmp_path, "agentic", "agentic.advantages=group", "agentic.steps=2")
    with pytest.raises(StageFailed, match="did not change the policy"):
        run_stage(made, by_task)
    assert len(earned) > 1, "the tasks do not all earn the same"
