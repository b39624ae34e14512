"""The four stages on a tiny policy: they learn, they can be killed, and their outputs are complete."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_fixtures import NoPool, episode, stage

from components.agent.episode import RolloutRequest
from components.agent.trajectory import Trajectory, load_trajectories
from components.core.errors import StageFailed, UserError
from components.core.files import digest_file
from components.judge.verdict import Verdict
from components.policy.checkpoint import load_model, verify_checkpoint
from components.training import critic, rejection
from components.training.networks import check_critic, load_critic
from components.training.run_stage import run_stage
from components.training.stage import claim, load_result


class Killed(BaseException):
    """What SIGKILL is to a stage: nothing runs after it."""


def killed_at(step: int) -> Any:
    """Episodes that die when the given step samples."""

    async def run(request: RolloutRequest, *rest: Any) -> Trajectory:
        if request.epoch.endswith(f"/{step}"):
            raise Killed
        return await episode(request, *rest)

    return run


def weights(checkpoint: Path) -> str:
    return digest_file(checkpoint / "model.safetensors")


FAST = (
    "warmup.steps=10",
    "warmup.learning_rate=0.01",
    "warmup.critic_learning_rate=0.01",
    "warmup.minibatches=4",
    "warmup.critic_warmup_steps=1",
)


def test_a_data_set_that_is_missing_is_named_before_training(tmp_path: Path) -> None:
    made = dataclasses.replace(stage(tmp_path, "warmup", *FAST), dataset=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"nowhere/tasks\.parquet: .*there is no such file"):
        run_stage(made, killed_at(0))
    assert not made.out.exists()


def test_warmup_raises_the_reward_of_a_rule_it_has_not_seen(tmp_path: Path) -> None:
    result = run_stage(stage(tmp_path, "warmup", *FAST), episode)
    assert result.stopped == ""
    assert result.reward_before is not None and result.reward_after is not None
    assert result.reward_after > result.reward_before + 1
    assert (
        verify_checkpoint(tmp_path / "warmup" / result.checkpoint).parent
        == verify_checkpoint(tmp_path / "start").digest
    )
    records = [json.loads(line) for line in (tmp_path / "warmup" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(10))
    logged = {
        "reward",
        "m_-1",
        "m_1",
        "m_2",
        "m_3",
        "entropy",
        "kl_start",
        "clip_fraction",
        "clip_fraction_low",
        "clip_fraction_high",
    }
    logged |= {"explained_variance", "gradient_norm", "truncated", "sampler_difference", "seconds"}
    logged |= {f"tokens_per_second_{phase}" for phase in ("rollout", "score", "critic", "actor")}
    assert logged <= set(records[1])
    assert max(record["sampler_difference"] for record in records) < 1e-4
    assert records[0]["kl_start"] == pytest.approx(0, abs=1e-6) and records[-1]["kl_start"] > 0
    assert "policy_loss" not in records[0], "the first step trains the critic alone"
    assert len(load_trajectories(tmp_path / "warmup" / "trajectories" / "step-0000")) == 32


def test_a_killed_stage_resumes_to_equal_weights_and_samples_no_step_twice(tmp_path: Path) -> None:
    short = (
        "warmup.steps=4",
        "warmup.learning_rate=0.003",
        "warmup.checkpoint_every=2",
    )
    whole = run_stage(stage(tmp_path / "whole", "warmup", *short), episode)
    killed = stage(tmp_path / "killed", "warmup", *short)
    with pytest.raises(Killed):
        run_stage(killed, killed_at(3))
    assert load_result(killed.out) is None
    sampled: list[str] = []

    async def counting(request: RolloutRequest, *rest: Any) -> Trajectory:
        sampled.append(request.epoch)
        return await episode(request, *rest)

    resumed = run_stage(killed, counting)
    assert sampled == ["warmup/3"] * 32, (
        "steps 0 to 2 are on disk; step 2 is trained again from there, since the state is older"
    )
    assert weights(killed.out / "checkpoint") == weights(tmp_path / "whole" / "warmup" / "checkpoint")
    assert resumed.digest == whole.digest and resumed.figures == whole.figures
    lines = (killed.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
    assert run_stage(killed, killed_at(0)) == resumed, "a finished stage is not run again"


def test_a_collapsed_policy_stops_the_stage_at_the_last_good_weights(tmp_path: Path) -> None:
    async def truncating(request: RolloutRequest, *rest: Any) -> Trajectory:
        bad = request.epoch.endswith("/2")
        return dataclasses.replace(await episode(request, *rest), finish_reason="length" if bad else "stop")

    collapsing = run_stage(
        stage(tmp_path / "a", "warmup", "warmup.steps=4", "warmup.critic_warmup_steps=0"), truncating
    )
    assert "max_truncated" in collapsing.stopped
    one_update = run_stage(
        stage(tmp_path / "b", "warmup", "warmup.steps=1", "warmup.critic_warmup_steps=0"), episode
    )
    assert one_update.stopped == ""
    assert weights(tmp_path / "a/warmup/checkpoint") == weights(tmp_path / "b/warmup/checkpoint")


def test_a_policy_that_collapses_before_its_first_state_goes_back_to_its_start(tmp_path: Path) -> None:
    async def truncating(request: RolloutRequest, *rest: Any) -> Trajectory:
        finish = "stop" if request.epoch.endswith("/0") else "length"
        return dataclasses.replace(await episode(request, *rest), finish_reason=finish)

    made = stage(
        tmp_path, "warmup", "warmup.steps=3", "warmup.critic_warmup_steps=0", "warmup.checkpoint_every=3"
    )
    assert "max_truncated" in run_stage(made, truncating).stopped
    assert weights(made.out / "checkpoint") == weights(tmp_path / "start")


def test_sharded_weights_sample_and_save_like_whole_ones(tmp_path: Path) -> None:
    digests = set()
    for zero_stage in (1, 3):
        made = stage(
            tmp_path / str(zero_stage),
            "warmup",
            "warmup.steps=2",
            "warmup.critic_warmup_steps=0",
            f"engine.zero_stage={zero_stage}",
        )
        result = run_stage(made, episode)
        model = load_model(made.out / "checkpoint")
        digests.add(
            round(sum(float(parameter.detach().double().abs().sum()) for parameter in model.parameters()), 2)
        )
        assert result.reward_after is not None
    assert len(digests) == 1


def test_a_step_on_which_the_judge_failed_altogether_is_not_stored(tmp_path: Path) -> None:
    async def failing(request: RolloutRequest, *rest: Any) -> Trajectory:
        broken = (Verdict(status="infrastructure", reason="no bubblewrap"),)
        return dataclasses.replace(await episode(request, *rest), verdicts=broken)

    made = stage(tmp_path, "warmup", "warmup.steps=1")
    with pytest.raises(UserError, match="no bubblewrap"):
        run_stage(made, failing)
    assert run_stage(made, episode).stopped == ""


def test_tasks_that_the_judge_cannot_measure_are_not_sampled_and_the_result_says_so(tmp_path: Path) -> None:
    made = stage(tmp_path, "warmup", "warmup.steps=1")
    refused = {task.code: ("too_large", "it takes 9.0 GB") for task in made.tasks()[:6]}
    sampled: set[str] = set()

    async def noting(request: RolloutRequest, index: int, *rest: Any) -> Trajectory:
        sampled.add(request.tasks[index].code)
        return await episode(request, index, *rest)

    result = run_stage(dataclasses.replace(made, pool=NoPool(refused)), noting)
    assert sampled == {task.code for task in made.tasks()[6:]}
    assert "6 of 12 tasks are left out" in result.stopped and "it takes 9.0 GB" in result.stopped
    few = stage(tmp_path / "few", "rejection", "sandbox.measurable_share=0.6")
    with pytest.raises(UserError, match=r"tasks\.parquet: 6 of 12 tasks .*sandbox\.device_bytes"):
        run_stage(dataclasses.replace(few, pool=NoPool(refused)), noting)
    assert not (few.out / "trajectories").exists() and not (few.out / "sampling").exists()


def test_a_stage_of_which_no_trajectory_passes_the_filters_fails(tmp_path: Path) -> None:
    made = stage(tmp_path, "rejection", "rejection.min_reward=3")
    with pytest.raises(StageFailed, match=r"too few trajectories passed .* \(32 low_reward, 0 kept\)"):
        run_stage(made, episode)
    assert not (made.out / "stage.json").exists()
    lenient = stage(tmp_path, "rejection", "rejection.min_reward=3", "rejection.min_kept=0")
    assert "too few trajectories" in run_stage(lenient, episode).stopped


def test_a_kl_penalty_keeps_the_policy_near_its_start(tmp_path: Path) -> None:
    fast = (
        "warmup.steps=4",
        "warmup.learning_rate=0.01",
        "warmup.critic_warmup_steps=0",
        "warmup.epochs=2",
    )
    free = run_stage(stage(tmp_path / "free", "warmup", *fast), episode)
    held = run_stage(stage(tmp_path / "held", "warmup", *fast, "warmup.kl_coefficient=5"), episode)
    assert held.figures["kl_start"] < 0.5 * free.figures["kl_start"]


def test_adapters_train_in_place_of_the_weights_through_all_stages(tmp_path: Path) -> None:
    small = (
        "policy.adapter.rank=4",
        "policy.adapter.alpha=8",
        "warmup.steps=3",
        "warmup.critic_warmup_steps=0",
        "warmup.learning_rate=0.01",
        "agentic.steps=1",
        "critic.epochs=1",
        "critic.min_explained_variance=-10",
        "rejection.learning_rate=0.003",
    )
    run_stage(stage(tmp_path, "warmup", *small), episode)
    records = [json.loads(line) for line in (tmp_path / "warmup" / "metrics.jsonl").read_text().splitlines()]
    # The reference is the same network without its adapter, and the sampler has the adapter.
    assert records[0]["kl_start"] == 0 and records[2]["kl_start"] > 1e-6
    assert max(record["sampler_difference"] for record in records) < 1e-4
    merged = load_model(tmp_path / "warmup/checkpoint").state_dict()
    for name, before in load_model(tmp_path / "start").state_dict().items():
        assert torch.equal(merged[name], before) == ("proj" not in name), name
    adapter = load_file(tmp_path / "warmup/checkpoint/adapter/adapter_model.safetensors")
    assert all(4 in tensor.shape for tensor in adapter.values())
    rejection.run(stage(tmp_path, "rejection", *small, actor=tmp_path / "warmup/checkpoint"), episode)
    actor = tmp_path / "rejection/checkpoint"
    critic.run(
        dataclasses.replace(
            stage(tmp_path, "critic", *small, actor=actor), trajectories=(tmp_path / "warmup/trajectories",)
        )
    )
    last = stage(tmp_path, "agentic", *small, actor=actor)
    result = run_stage(dataclasses.replace(last, critic=tmp_path / "critic/checkpoint"), episode)
    assert verify_checkpoint(last.out / "checkpoint").digest == result.digest


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_the_first_policy_is_kept_only_for_a_loss_or_a_metric(zero_stage: int, tmp_path: Path) -> None:
    changes = ("warmup.steps=2", "warmup.critic_warmup_steps=0", f"engine.zero_stage={zero_stage}")
    made = {}
    for name, more in {
        "kept": ("engine.reference_offload=true",),
        "left-out": ("warmup.measure_kl=false",),
    }.items():
        made[name] = stage(tmp_path / name, "warmup", *changes, *more)
        run_stage(made[name], episode)
    kept, left_out = (
        [json.loads(line) for line in (one.out / "metrics.jsonl").read_text().splitlines()]
        for one in made.values()
    )
    assert kept[0]["kl_start"] == pytest.approx(0, abs=1e-6) and kept[1]["kl_start"] > 0
    assert "kl_start" not in left_out[1] and left_out[1]["policy_loss"] == kept[1]["policy_loss"]


def test_the_whole_chain_hands_checkpoints_on(tmp_path: Path) -> None:
    small = (
        "warmup.steps=2",
        "warmup.critic_warmup_steps=1",
        "warmup.learning_rate_warmup_steps=2",
        "agentic.steps=2",
        "critic.epochs=2",
        "rejection.learning_rate=0.003",
        "critic.min_explained_variance=-10",
    )
    run_stage(stage(tmp_path, "warmup", *small), episode)
    tuned = rejection.run(stage(tmp_path, "rejection", *small, actor=tmp_path / "warmup/checkpoint"), episode)
    assert tuned.figures["trajectories_kept"] > 0
    assert (
        tuned.reward_after is not None
        and tuned.reward_before is not None
        and tuned.reward_after > tuned.reward_before
    )
    folders = (tmp_path / "warmup/trajectories", tmp_path / "rejection/trajectories")
    valued = critic.run(
        dataclasses.replace(
            stage(tmp_path, "critic", *small, actor=tmp_path / "rejection/checkpoint"), trajectories=folders
        )
    )
    assert valued.figures["trajectories"] + valued.figures["held_out"] == 32 + 32 + 32 + 8
    assert -10 < valued.figures["explained_variance_held_out"] <= 1
    last = dataclasses.replace(
        stage(tmp_path, "agentic", *small, actor=tmp_path / "rejection/checkpoint"),
        critic=tmp_path / "critic/checkpoint",
    )
    result = run_stage(last, episode)
    assert result.name == "agentic" and verify_checkpoint(last.out / "checkpoint").digest == result.digest
    trajectory = load_trajectories(last.out / "trajectories/step-0001")[0]
    assert 0 in trajectory.action_mask[trajectory.action_mask.index(1) :], (
        "an observation lies between two turns"
    )
    load_model(last.out / "checkpoint")


def test_a_critic_is_what_its_checkpoint_says(tmp_path: Path) -> None:
    small = (
        "warmup.steps=1",
        "critic.epochs=3",
        "critic.learning_rate=0.01",
        "critic.min_explained_variance=-10",
    )
    run_stage(stage(tmp_path, "warmup", *small, "warmup.rollouts.samples=8"), episode)
    made = dataclasses.replace(
        stage(tmp_path, "critic", *small), trajectories=(tmp_path / "warmup/trajectories",)
    )
    result = critic.run(made)
    assert result.figures["explained_variance"] > 0.05, "it explains some of what it was taught"
    loaded = load_critic(made.out / "checkpoint", made.params)
    tensors = load_file(made.out / "checkpoint/value_head.safetensors")
    assert torch.equal(loaded.value_head.weight, tensors["weight"]) and float(loaded.baseline) == float(
        tensors["baseline"]
    )
    with pytest.raises(UserError, match=r"value_head\.safetensors is missing"):
        check_critic(tmp_path / "start")


def test_a_policy_for_another_device_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    made = stage(tmp_path, "warmup")
    made = dataclasses.replace(made, params=made.params.model_copy(update={"device": "cuda"}))
    with pytest.raises(
        UserError,
        match=r"start: it was trained to write kernels for cpu; give --set device=cpu or another policy",
    ):
        run_stage(made, episode)
    assert not made.out.exists()


def test_a_checkpoint_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    made = stage(tmp_path, "warmup", "warmup.steps=2")
    first = run_stage(made, episode)
    shutil.rmtree(made.out / "checkpoint")
    assert run_stage(made, episode).digest == first.digest


def test_a_critic_that_explains_too_little_fails_its_stage(tmp_path: Path) -> None:
    run_stage(stage(tmp_path, "warmup", "warmup.steps=1"), episode)
    made = stage(tmp_path, "critic", "critic.epochs=1", "critic.min_explained_variance=0.99")
    with pytest.raises(StageFailed, match="min_explained_variance"):
        critic.run(dataclasses.replace(made, trajectories=(tmp_path / "warmup/trajectories",)))


def test_a_trajectory_whose_mask_does_not_fit_is_named(tmp_path: Path) -> None:
    run_stage(stage(tmp_path, "warmup", "warmup.steps=1"), episode)
    folder = tmp_path / "warmup/trajectories/step-0000/0000-00003"
    tensors = load_file(folder / "tokens.safetensors")
    tensors["action_mask"][0] = 1
    save_file(tensors, folder / "tokens.safetensors")
    made = dataclasses.replace(stage(tmp_path, "critic"), trajectories=(tmp_path / "warmup/trajectories",))
    with pytest.raises(UserError, match=r"step-0000/0000-00003: action_mask .* of trajectory 0 does not"):
        critic.run(made)
    assert not made.out.exists()


def test_equal_rewards_leave_the_explained_variance_undefined_and_pass(tmp_path: Path) -> None:
    async def equal(request: RolloutRequest, *rest: Any) -> Trajectory:
        return dataclasses.replace(await episode(request, *rest), reward=1.0)

    with pytest.raises(StageFailed, match="all equal"):
        run_stage(stage(tmp_path, "warmup", "warmup.steps=1"), equal)
    made = stage(tmp_path, "critic", "critic.epochs=1", "critic.min_explained_variance=0.99")
    result = critic.run(dataclasses.replace(made, trajectories=(tmp_path / "warmup/trajectories",)))
    assert "undefined" in result.stopped and "explained_variance_held_out" not in result.figures


def test_an_interrupted_stage_continues_with_equal_inputs_only(tmp_path: Path) -> None:
    begun = stage(tmp_path, "critic")
    claim(begun)
    claim(stage(tmp_path, "critic", "engine.tokens_per_microbatch=64"))
    claim(stage(tmp_path, "critic", "critic.learning_rate=1e-5"))
    with pytest.raises(UserError, match=r"holds the interrupted stage critic of another seed; give another"):
        claim(stage(tmp_path, "critic", "seed=9"))
    (tmp_path / "data" / "tasks.parquet").unlink()
    with pytest.raises(UserError, match=r"tasks\.parquet"):
        claim(begun)
