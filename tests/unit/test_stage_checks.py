"""Settings that a stage would refuse are refused before anything is sampled."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training_fixtures import NoPool, tiny_tokenizer

from components.core.config import check_policy_source, resolve
from components.core.errors import UserError
from components.core.params import Params
from components.core.progress import Quiet
from components.planning import ray_cluster
from components.training.run_stage import check_critic_given, check_stages, stages_of_run
from components.training.stage import Stage
from flows import nightly
from flows.run_context import check_training

OWN_SERVERS = ("rejection.replay_share=0", "policy.backend=vllm-server", "policy.servers=''")


def params(folder: Path, *sets: str) -> Params:
    return resolve("ci", (f"policy.source={folder}", *sets)).params


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (("engine.zero_stage=0", "engine.dtype=bfloat16"), r"engine\.zero_stage: .* set it to 1"),
        (("engine.sequence_parallel=2", "engine.zero_stage=0"), r"sequence_parallel: .* 1 or more"),
        (("engine.sequence_parallel=2", "engine.zero_stage=2"), r"sequence_parallel: .*\.zero_stage to 3"),
        (("engine.compile=true",), r"engine\.compile: it needs device cuda"),
        (("engine.compile=true", "engine.mlp_tokens=64"), r"engine\.compile: .* mlp_tokens 0"),
        (("engine.compile=true", "engine.zero_stage=3"), r"engine\.compile: .* zero_stage below 3"),
        (
            ("engine.sequence_parallel=2", "engine.zero_stage=3", "pool.trainers=3"),
            r"pool\.trainers: 3 ranks .* multiple",
        ),
        (
            ("rejection.replay_share=0.5",),
            r"rejection\.replay_share: .* set it to 0, or coldstart\.language_model to true",
        ),
        (
            (*OWN_SERVERS, "pool.trainers=1"),
            r"policy\.servers: is empty; give the addresses",
        ),
        (
            (*OWN_SERVERS, "policy.vllm=/nowhere/vllm"),
            r"policy\.vllm: there is no executable /nowhere/vllm; give",
        ),
        (
            (
                *("rejection.replay_share=0", "rejection.rollouts.tasks=1"),
                *("warmup.steps=1", "warmup.critic_warmup_steps=0", "warmup.rollouts.tasks=1"),
            ),
            r"warmup\.rollouts\.tasks: .* raise it to 2",
        ),
        (
            ("policy.source=scratch", "coldstart.demonstrations=folder", "rejection.replay_share=0"),
            r"coldstart\.demonstrations: a policy from scratch .*; give their number",
        ),
        (
            ("rejection.replay_share=0", "coldstart.demonstrations=no/such/folder"),
            r"coldstart\.demonstrations: no/such/folder holds no trajectories\.jsonl; give",
        ),
        (
            ("reward=no_such_module.reward",),
            r"params\.yaml: reward: no_such_module\.reward cannot be imp",
        ),
        (
            ("reward=components.agent.rewards.mileston",),
            r"reward: .*mileston cannot be .*; give module\.function, such as components\.agent\.re",
        ),
        (("reward=components.agent.rewards.math",), r"reward: .* is no function; give one that takes a tr"),
        (("sandbox.rules=any",), r"sandbox\.rules: any is not for training.*sandbox\.rules=kernel-only"),
        *(
            (
                ("rejection.replay_share=0", f"{stage}.advantages={mode}", f"{stage}.rollouts.samples=1"),
                rf"{stage}\.advantages: {mode} compares .*{stage}\.rollouts\.samples is 1; raise it to 2",
            )
            for stage, mode in (("warmup", "group"), ("agentic", "group"))
        ),
    ],
)
def test_a_setting_that_a_later_stage_refuses_is_refused_at_once(
    sets: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = params(tmp_path, *sets)
    with pytest.raises(UserError, match=sentence):
        check_stages(wrong)

    def dataset(*_: Any) -> None:
        raise AssertionError("the pipeline began to make its data set")

    monkeypatch.setattr(nightly, "dataset", dataset)
    night: Any = SimpleNamespace(params=wrong)
    with pytest.raises(UserError, match=sentence):
        nightly.nightly_pipeline(night, Quiet())


def test_every_profile_passes_and_only_the_stages_to_run_are_checked(tmp_path: Path) -> None:
    for profile in ("ci", "smoke"):
        check_stages(resolve(profile).params)
    check_stages(params(tmp_path, "rejection.replay_share=0"))
    check_stages(params(tmp_path, "rejection.replay_share=0.01"), ("rejection",))
    check_stages(params(tmp_path, "rejection.replay_share=0.5"), ("warmup", "critic", "agentic"))
    alone = params(tmp_path, "rejection.replay_share=0", "agentic.rollouts.samples=1")
    check_stages(alone)
    alone = params(tmp_path, "agentic.advantages=group", "agentic.rollouts.samples=1")
    check_stages(alone, ("warmup", "critic"))


def test_without_a_critic_a_run_has_three_stages_and_needs_no_held_out_task(tmp_path: Path) -> None:
    for mode, stages in (
        ("critic", ("warmup", "rejection", "critic", "agentic")),
        ("group", ("warmup", "rejection", "agentic")),
    ):
        single_task = params(
            tmp_path,
            *("rejection.replay_share=0", "rejection.rollouts.tasks=1", "warmup.rollouts.tasks=1"),
            *("warmup.steps=1", "warmup.critic_warmup_steps=0", f"agentic.advantages={mode}"),
        )
        assert stages_of_run(single_task) == stages
        if mode != "critic":
            check_stages(single_task)


@pytest.mark.parametrize(
    ("mode", "given", "sentence"),
    [
        ("critic", False, r"needs the critic of stage 3; .* or set agentic\.advantages to group\."),
        ("group", True, r"agentic\.advantages: group uses no critic, but .*values was given; leave"),
        ("critic", True, ""),
        ("group", False, ""),
    ],
)
def test_stage_4_takes_a_critic_if_and_only_if_it_uses_one(
    mode: str, given: bool, sentence: str, tmp_path: Path
) -> None:
    stage = Stage(
        name="agentic",
        params=params(tmp_path, f"agentic.advantages={mode}"),
        actor=tmp_path,
        dataset=tmp_path,
        out=tmp_path,
        pool=NoPool(),
        progress=Quiet(),
        code="",
        critic=tmp_path / "values" if given else None,
    )
    if not sentence:
        check_critic_given(stage)
        return
    with pytest.raises(UserError, match=sentence):
        check_critic_given(stage)
    check_critic_given(dataclasses.replace(stage, name="warmup"))


def test_a_folder_without_a_model_is_refused_where_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = params(tmp_path, "rejection.replay_share=0")
    with pytest.raises(UserError, match=r"policy\.source: .* has no config\.json; .*--set policy\.source="):
        check_policy_source(wrong)

    def dataset(*_: Any) -> None:
        raise AssertionError("the pipeline began to make its data set")

    monkeypatch.setattr(nightly, "dataset", dataset)
    night: Any = SimpleNamespace(params=wrong)
    with pytest.raises(UserError, match=r"policy\.source"):
        nightly.nightly_pipeline(night, Quiet())
    (tmp_path / "config.json").write_text("{}")
    tiny_tokenizer().save_pretrained(tmp_path)
    check_training(wrong)
    check_training(resolve("smoke").params)


@pytest.mark.parametrize(
    ("sets", "there", "sentence"),
    [
        (
            ("pool.trainers=2",),
            {"CPU": 1.0},
            r"2 trainers and 0 judges need 2 CPU, .* cluster has 1; add nodes",
        ),
        (("pool.trainers=2", "pool.judges=3"), {"CPU": 4.0}, r"2 trainers and 3 judges need 5 CPU"),
        (("pool.judges=1", "pool.resource=H20"), {"CPU": 4.0}, r"need 1 H20, and the Ray cluster has 0"),
    ],
)
def test_a_pool_that_the_cluster_does_not_hold_is_refused_before_anything_is_made(
    sets: tuple[str, ...], there: dict[str, float], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "connect", lambda: None)
    monkeypatch.setattr(ray_cluster.ray, "cluster_resources", lambda: there)
    with pytest.raises(UserError, match=sentence):
        check_training(resolve("ci", sets).params)


@pytest.mark.parametrize(
    "sets", [("policy.backend=transformers",), ("policy.weight_transfer=ipc",), ("policy.sleep=true",)]
)
def test_samplers_on_gpus_of_their_own_cannot_share_the_trainers(sets: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"pool\.samplers gives samplers GPUs of their own, .*; set it to 0"):
        resolve("hf", sets)
    resolve("hf", (*sets, "pool.samplers=0"))


def test_a_broadcast_needs_samplers_that_do_not_share_the_trainers_gpu() -> None:
    nccl = ("policy.weight_transfer=nccl", "policy.servers=[]")
    with pytest.raises(UserError, match=r"weight_transfer nccl needs samplers on GPUs of their own, .*; set"):
        resolve("hf-adapter", nccl)
    for other in (("policy.servers=http://127.0.0.1:8000",), ("pool.samplers=1", "policy.sleep=false")):
        resolve("hf-adapter", (*nccl, *other))
