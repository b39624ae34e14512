"""A collapsing stage ends at good weights with the reason; a stopped one ends between two updates."""

import dataclasses
import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from training_fixtures import episode, params, stage

from components.agent.episode import RolloutRequest
from components.agent.trajectory import Trajectory
from components.core.errors import StageFailed, UserError
from components.core.files import digest_file, digest_json, read_json, write_json
from components.judge.verdict import Verdict
from components.training.metrics import collapse
from components.training.run_stage import run_stage
from components.training.training_loop import Terminated

GOOD = {"entropy": 0.5, "truncated": 0.0, "effective_share": 1.0, "explained_variance": 0.4}
AT_ONCE = ("warmup.critic_warmup_steps=0",)


def weights(checkpoint: Path) -> str:
    return digest_file(checkpoint / "model.safetensors")


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, ""),
        ({"entropy": 11.0}, "max_entropy"),
        ({"entropy": math.nan}, "entropy is not a number"),
        ({"entropy": 0.001}, "min_entropy"),
        ({"truncated": 0.9}, "max_truncated"),
        ({"effective_share": 0.1}, "min_effective_share"),
        ({"explained_variance": -3.0}, "min_explained_variance"),
        ({"explained_variance": math.nan}, ""),
    ],
)
def test_each_sign_of_collapse_is_told_by_its_limit(changed: dict[str, float], named: str) -> None:
    ppo = params("warmup.min_entropy=0.01", "warmup.min_explained_variance=-1").warmup
    earlier = [{"explained_variance": -2.0}, {"explained_variance": -1.5}]
    found = collapse(ppo, GOOD | changed, earlier)
    assert named in found and bool(found) == bool(named)


def test_a_critic_that_fails_now_and_then_has_not_collapsed() -> None:
    ppo = params("warmup.min_explained_variance=0").warmup
    assert (
        collapse(
            ppo,
            GOOD | {"explained_variance": -5.0},
            [{"explained_variance": -1.0}, {"explained_variance": 0.1}],
        )
        == ""
    )
    assert collapse(ppo, GOOD | {"explained_variance": -5.0}, [{"explained_variance": -1.0}]) == ""


def test_a_sampler_that_is_not_the_trainer_stops_the_stage(tmp_path: Path) -> None:
    async def other_policy(request: RolloutRequest, *rest: Any) -> Trajectory:
        trajectory = await episode(request, *rest)
        wrong = request.epoch.endswith("/1")
        return dataclasses.replace(
            trajectory,
            sampler_logprob=tuple(
                (5.0 * (place % 6) if own and wrong else 0.0) + p
                for place, (own, p) in enumerate(
                    zip(trajectory.action_mask, trajectory.sampler_logprob, strict=True)
                )
            ),
        )

    result = run_stage(stage(tmp_path, "warmup", *AT_ONCE, "warmup.steps=3"), other_policy)
    assert "min_effective_share" in result.stopped


@pytest.mark.parametrize(
    ("minibatches", "named"), [(4, "is not a number.* in update 1;"), (1, "is not a number.* in update 2;")]
)
def test_weights_that_are_not_numbers_give_way_to_the_last_good_ones(
    minibatches: int, named: str, tmp_path: Path
) -> None:
    # With a single minibatch nothing shows before the new weights are used.
    made = stage(
        tmp_path,
        "warmup",
        *AT_ONCE,
        "warmup.steps=3",
        "warmup.learning_rate=1e30",
        f"warmup.minibatches={minibatches}",
    )
    result = run_stage(made, episode)
    assert re.search(named, result.stopped), result.stopped
    assert weights(made.out / "checkpoint") == weights(tmp_path / "start")


def test_a_stage_without_good_weights_to_go_back_to_fails(tmp_path: Path) -> None:
    made = stage(
        tmp_path, "rejection", "rejection.learning_rate=1e30", "rejection.epochs=4", "rejection.batch=4"
    )
    with pytest.raises(StageFailed, match=r"rejection: .* not a number.* lower rejection\.learning_rate"):
        run_stage(made, episode)
    assert not (made.out / "stage.json").exists()


def test_batches_of_equal_rewards_teach_the_policy_nothing(tmp_path: Path) -> None:
    async def equal(request: RolloutRequest, *rest: Any) -> Trajectory:
        return dataclasses.replace(await episode(request, *rest), reward=1.0)

    made = stage(tmp_path, "warmup", *AT_ONCE, "warmup.steps=2", "warmup.learning_rate=0.01")
    for _ in range(2):
        with pytest.raises(
            StageFailed, match=r"all equal in 2 of 2 steps, .* give tasks of mixed difficulty"
        ) as failure:
            run_stage(made, equal)
        assert failure.value.exit_code == 1 and not (made.out / "stage.json").exists()
    assert all(
        record["equal_rewards"] == 1 and record["explained_variance"] is None and "policy_loss" not in record
        for record in lines(made.out)
    )
    assert not any(record["equal_rewards_after_drops"] for record in lines(made.out))
    lenient = stage(tmp_path, "warmup", *AT_ONCE, "warmup.steps=2", "warmup.min_updates=0")
    assert "all equal in 2 of 2 steps" in run_stage(lenient, equal).stopped
    assert weights(made.out / "checkpoint") == weights(tmp_path / "start")


def test_a_step_that_trains_the_critic_alone_is_no_update_of_the_policy(tmp_path: Path) -> None:
    async def equal_later(request: RolloutRequest, *rest: Any) -> Trajectory:
        sampled = await episode(request, *rest)
        return dataclasses.replace(sampled, reward=1.0) if request.epoch.endswith("/1") else sampled

    made = stage(tmp_path, "warmup", "warmup.critic_warmup_steps=1", "warmup.steps=2")
    with pytest.raises(StageFailed, match=r"all equal in 1 of 1 steps"):
        run_stage(made, equal_later)


def test_rewards_that_are_equal_after_the_judge_failed_on_some_are_told_apart(tmp_path: Path) -> None:
    async def losing(request: RolloutRequest, index: int, *rest: Any) -> Trajectory:
        sampled = await episode(request, index, *rest)
        if index or request.epoch.endswith("/1"):
            return dataclasses.replace(sampled, reward=1.0)
        lost = Verdict(status="infrastructure", reason="judge")
        return dataclasses.replace(sampled, verdicts=(lost,), reward=None)

    made = stage(tmp_path, "warmup", *AT_ONCE, "warmup.steps=2")
    with pytest.raises(
        StageFailed, match=r"in 2 of 2 steps.* in 1 of them only after .* dropped, 1 in all.* doctor"
    ):
        run_stage(made, losing)
    assert [(record["dropped"], record["equal_rewards_after_drops"]) for record in lines(made.out)] == [
        (1, 1),
        (0, 0),
    ]


class Asking:
    """Sends this process SIGTERM when the given update is reported."""

    def __init__(self, update: int):
        self.wanted = update

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        if (stage, step) == ("warmup", self.wanted) and "episodes" not in figures:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_stage_after_its_update_with_the_state_saved(tmp_path: Path) -> None:
    short = (*AT_ONCE, "warmup.steps=4", "warmup.learning_rate=0.003", "warmup.checkpoint_every=4")
    whole = run_stage(stage(tmp_path / "whole", "warmup", *short), episode)
    asked, before = stage(tmp_path / "asked", "warmup", *short), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated, match="after update 2 of 4"):
        run_stage(dataclasses.replace(asked, progress=Asking(2)), episode)
    assert signal.getsignal(signal.SIGTERM) == before
    assert [folder.name for folder in sorted((asked.out / "state").iterdir())] == [
        "step-0000-float32-zero1-world1",
        "step-0002-float32-zero1-world1",
    ]
    assert run_stage(asked, episode).digest == whole.digest


def test_a_critic_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    made = stage(tmp_path, "agentic")
    other = stage(tmp_path / "other", "critic").actor
    tokenizer = read_json(other / "tokenizer.json")
    tokenizer["added_tokens"] = []
    write_json(other / "tokenizer.json", tokenizer)
    manifest = read_json(other / "manifest.json")
    manifest["files"]["tokenizer.json"] = digest_file(other / "tokenizer.json")
    manifest["digest"] = digest_json(manifest["files"])
    write_json(other / "manifest.json", manifest)
    with pytest.raises(UserError, match="reads other tokens than the actor"):
        run_stage(dataclasses.replace(made, critic=other), episode)
