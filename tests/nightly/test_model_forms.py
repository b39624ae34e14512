"""Every family of models goes through all four stages, and plain transformers loads what they write."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_forms import FORMS, rollout_request, save_form, tiny_model, tiny_tokenizer
from safetensors.torch import load_file
from training_fixtures import episode, stage
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from components.agent.episode import RolloutRequest, run_episodes
from components.agent.trajectory import Trajectory
from components.policy.checkpoint import verify_checkpoint
from components.policy.sampler import Sampler, stop_ids
from components.policy.transformers_sampler import TransformersSampler
from components.training.run_stage import run_stage
from components.training.stage import StageName

SMALL = (
    "warmup.steps=2",
    "warmup.critic_warmup_steps=0",
    "warmup.learning_rate=0.001",
    "agentic.steps=1",
    "rejection.learning_rate=0.001",
    "critic.epochs=1",
    "critic.min_explained_variance=-10",
)
LOGITS_OF = torch.arange(3, 60)[None]


class Rollouts:
    """The episode of training_fixtures, where a quarter of the tokens is good, and their policy."""

    policy: Any = None

    async def __call__(self, request: RolloutRequest, index: int, sampler: Sampler, *rest: Any) -> Trajectory:
        assert isinstance(sampler, TransformersSampler)
        self.policy = sampler.model
        return await episode(request, index, sampler, *rest, is_good=lambda token: token % 4 == 3)


def stages(folder: Path, form: str, zero_stage: int) -> dict[StageName, Path]:
    """Run all stages from a new policy, compare what they trained with what they wrote, and return that."""
    save_form(form, folder / "start")
    found: dict[StageName, Path] = {}

    def run(name: StageName, actor: Path, **more: Any) -> Path:
        rollouts = Rollouts()
        made = stage(folder, name, *SMALL, f"engine.zero_stage={zero_stage}", actor=actor)
        result = run_stage(dataclasses.replace(made, **more), rollouts)
        assert result.stopped == ""
        found[name] = made.out / result.checkpoint
        assert verify_checkpoint(found[name]).digest == result.digest
        if name != "critic" and zero_stage < 3:  # Under ZeRO 3 the sampler has a copy of the last weights.
            trained = rollouts.policy.eval()
            loaded = AutoModelForCausalLM.from_pretrained(found[name])
            with torch.no_grad():
                logits = trained(LOGITS_OF).logits
                torch.testing.assert_close(loaded(LOGITS_OF).logits, logits, atol=1e-5, rtol=0)
        return found[name]

    warm = run("warmup", folder / "start")
    tuned = run("rejection", warm)
    sampled = (folder / "warmup/trajectories", folder / "rejection/trajectories")
    critic = run("critic", tuned, trajectories=sampled)
    run("agentic", tuned, critic=critic)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_all_stages_train_a_form_and_write_what_plain_transformers_loads(form: str, tmp_path: Path) -> None:
    checkpoints = stages(tmp_path, form, zero_stage=1)
    lines = (tmp_path / "warmup" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["sampler_difference"] for line in lines) < 1e-4
    own, start = tiny_tokenizer(form), AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    for name, folder in checkpoints.items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.get_vocab() == own.get_vocab() and tokenizer.chat_template == own.chat_template
        if name == "critic":
            continue
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        for file in ("config.json", "generation_config.json"):
            assert (folder / file).read_bytes() == (tmp_path / "start" / file).read_bytes()
        unchanged = [
            name
            for name, parameter in model.named_parameters()
            if torch.equal(parameter, start.get_parameter(name))
        ]
        assert unchanged == []


def test_sharded_experts_are_trained_like_whole_ones(tmp_path: Path) -> None:
    sharded, whole = (stages(tmp_path / str(zero), "qwen3-moe", zero) for zero in (3, 1))
    for name, folder in sharded.items():
        # Rounding chooses other tokens after some updates, so only the first stage must agree.
        if name == "warmup":
            one, other = (load_file(at / "model.safetensors") for at in (folder, whole[name]))
            assert one.keys() == other.keys()
            for key, tensor in one.items():
                torch.testing.assert_close(tensor, other[key], atol=1e-4, rtol=0)
        else:
            assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("form", FORMS)
def test_a_sampled_conversation_has_the_log_probabilities_of_its_own_ids(form: str) -> None:
    tokenizer, model = tiny_tokenizer(form), tiny_model(form)
    ends = tokenizer.convert_tokens_to_ids(list(FORMS[form].ends))
    # With many end tokens, because a random policy would seldom sample one of a few.
    ends += range(300, 380)
    model.generation_config = GenerationConfig(eos_token_id=ends)
    assert stop_ids(tokenizer, model.generation_config) == tuple(sorted(ends))
    sampler = TransformersSampler(model, tokenizer, batch=8, device="cpu", version="random")
    trajectories = run_episodes(rollout_request("compact", count=8, turns=2, tokens=50), sampler, tokenizer)
    for trajectory in trajectories:
        ids, mask = torch.tensor(list(trajectory.ids)), torch.tensor(list(trajectory.action_mask)).bool()
        is_end = torch.isin(ids, torch.tensor(ends)) & mask
        assert not (is_end[:-1] & mask[1:]).any(), "nothing is sampled after an end token"
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].double(), -1)
        expected = logprobs.gather(1, ids[1:, None])[:, 0]
        found = torch.tensor(list(trajectory.sampler_logprob)).double()
        torch.testing.assert_close(found[1:][mask[1:]], expected[mask[1:]], atol=1e-4, rtol=0)
    assert any(trajectory.ids[-1] in ends for trajectory in trajectories)
