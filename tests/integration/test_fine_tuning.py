"""Supervised fine-tuning: the cold start of a language model from demonstrations or trajectories."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
from cold_start_fixtures import params as params
from cold_start_fixtures import tasks as tasks
from training_fixtures import stage

from components.agent.chat_template import ChatTemplate
from components.agent.trajectory import ToolCall, Trajectory, Turn, save_trajectories
from components.bootstrap.cold_start import new_model
from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.operator_chain import BY_NAME
from components.bootstrap.tokenizer import encode_conversations, train_tokenizer
from components.core.config import resolve
from components.core.errors import UserError
from components.core.files import digest_tree, read_json
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.verdict import Verdict
from components.policy.checkpoint import save_checkpoint
from components.training import training_loop
from components.training.fine_tuning import demonstrated_tasks, plan_steps
from components.training.run_stage import run_stage
from components.training.stage import Stage

SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
)
SETS = (
    *("coldstart.demonstrations=60", "coldstart.steps=12", "coldstart.tokens_per_step=2048"),
    *("coldstart.learning_rate=0.01", "engine.tokens_per_microbatch=1024", "policy.context=4096"),
)


@pytest.fixture(scope="module")
def conversations(params: Params, tasks: list[KernelTask]) -> list[list[dict[str, str]]]:
    rng = random.Random(0)
    return [make_demonstration(task, rng, params.coldstart, "cpu") for task in tasks]


@pytest.fixture(scope="module")
def model(
    params: Params, conversations: list[list[dict[str, str]]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint of a random model whose chat template begins with a system message."""
    tokenizer = train_tokenizer(list(itertools.chain(*conversations)), 512, 1024)
    network = new_model(params, len(tokenizer), tokenizer)
    tokenizer.chat_template = SYSTEM + str(tokenizer.chat_template)
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    save_checkpoint(
        folder, network, tokenizer, stage="adopted", parent=None, dataset="", code="", params={}, figures={}
    )
    return folder


def cold_start(folder: Path, model: Path, *sets: str) -> Stage:
    return stage(folder, "coldstart", *SETS, *sets, actor=model)


def losses(made: Stage) -> list[float]:
    return [record["loss"] for record in training_loop.MetricsFile(made.out, start=99, writes=False).records]


def test_a_language_model_learns_its_demonstrations_and_continues_to_equal_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cold_start(tmp_path / "whole", model)
    result = run_stage(whole)
    curve = losses(whole)
    assert len(curve) == 12 and curve[-1] < 0.8 * curve[0]
    assert result.figures["conversations"] == 60 and result.figures["loss"] == curve[-1]
    manifest = read_json(whole.out / "checkpoint" / "manifest.json")
    assert manifest["stage"] == "coldstart"
    assert manifest["parent"] == read_json(model / "manifest.json")["digest"]

    cut = dataclasses.replace(cold_start(tmp_path / "cut", model), deadline=1e9)

    def now(metrics: Path = cut.out / "metrics.jsonl") -> float:
        return 2e9 if metrics.is_file() and len(metrics.read_text().splitlines()) >= 5 else 0.0

    with monkeypatch.context() as patch:
        patch.setattr(training_loop.time, "time", now)
        assert run_stage(cut).progress == (5, 12)
    run_stage(dataclasses.replace(cut, deadline=None))
    assert digest_tree(cut.out / "checkpoint") == digest_tree(whole.out / "checkpoint")


def test_a_conversation_has_the_ids_of_an_episode(
    params: Params, model: Path, conversations: list[list[dict[str, str]]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with_system = ChatTemplate(tokenizer, described=False)
    for conversation in conversations:
        ids, mask = with_system.conversation_ids(conversation)
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
        assert tokenizer.decode(ids) == text.removesuffix("\n")
        own = tokenizer.decode([token for token, said in zip(ids, mask, strict=True) if said])
        assert own == "".join(
            message["content"] + "<|im_end|>" for message in conversation if message["role"] == "assistant"
        )
    tokenizer.chat_template = str(tokenizer.chat_template).removeprefix(SYSTEM)
    plain = ChatTemplate(tokenizer, described=False)
    for conversation, expected in zip(
        conversations, encode_conversations(tokenizer, conversations), strict=True
    ):
        assert plain.conversation_ids(conversation) == expected


def trajectory(task: KernelTask, turns: tuple[Turn, ...], reward: float) -> Trajectory:
    return Trajectory(
        task_id=task.task_id,
        ids=[],
        action_mask=[],
        sampler_logprob=[],
        turns=turns,
        verdicts=(Verdict(status="correct" if reward > 0 else "wrong_output"),),
        reward=reward,
        finish_reason="stop",
        policy_version="other",
        task=task.code,
        settings={"device": "cpu", "in_turns": True, "context": 1024},
    )


def test_trajectories_of_another_policy_are_demonstrations(
    model: Path, tasks: list[KernelTask], tmp_path: Path
) -> None:
    write = Turn("I write.", (ToolCall("Write", {"content": "a"}, "Written a."),))
    good = trajectory(tasks[0], (write, Turn("Done.")), 2.0)
    bad = trajectory(tasks[1], (write,), -1.0)
    save_trajectories(tmp_path / "sampled" / "step-0000", [good, bad])
    made = cold_start(
        tmp_path, model, f"coldstart.demonstrations={tmp_path / 'sampled'}", "coldstart.steps=1"
    )
    assert run_stage(made).figures["conversations"] == 1
    save_trajectories(tmp_path / "wrong" / "step-0000", [bad])
    made = cold_start(tmp_path / "b", model, f"coldstart.demonstrations={tmp_path / 'wrong'}")
    with pytest.raises(UserError, match=r"coldstart\.demonstrations: .* \(1 low_reward judged\); give"):
        run_stage(made)


def test_conversations_longer_than_the_context_are_left_out(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.context: no demonstration fits into 16 tokens; raise it"):
        run_stage(cold_start(tmp_path, model, "policy.context=16"))


def test_one_demonstrated_chain_in_six_has_two_operators_over_whole_rows() -> None:
    made = list(itertools.islice(demonstrated_tasks(resolve("smollm2").params, 0), 300))
    rows = [sum(BY_NAME[name].kind in ("row", "reduction") for name in task.ops) for task in made]
    assert all(task.split == "train" for task in made)
    assert 30 < rows.count(2) < 75
    assert {0, 1, 2} == set(rows)


def test_steps_have_equal_tokens_and_pass_over_all_conversations() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(300, 1200) for _ in range(100)]
    steps = plan_steps(lengths, 20, 8192, seed=3)
    assert all(8192 <= sum(lengths[index] for index in step) < 8192 + 1200 for step in steps)
    order = list(itertools.chain(*steps))
    assert sorted(order[:100]) == list(range(100)) and sorted(order[100:200]) == list(range(100))
    assert steps == plan_steps(lengths, 20, 8192, seed=3) != plan_steps(lengths, 20, 8192, seed=4)
