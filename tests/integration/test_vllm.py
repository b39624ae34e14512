"""Sampling through a vLLM server: the same tokens as in process, and new weights after every push.

A check notices a push that was lost.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from training_fixtures import episode, params, stage, tiny_policy, tiny_tokenizer
from vllm_double import Engine, serving

from components.agent.policies import open_sampler
from components.agent.trajectory import load_trajectories
from components.core.errors import UserError
from components.core.params import Params
from components.policy.checkpoint import save_checkpoint
from components.policy.sampler import complete_all
from components.policy.transformers_sampler import TransformersSampler
from components.policy.vllm.fleet import Fleet
from components.policy.vllm.sampler import VllmSampler
from components.policy.vllm.worker import MODULUS, fingerprint
from components.policy.weight_stream import weight_buckets
from components.training.run_stage import run_stage

# Bytes, of which the weights of the tiny policy need several times as many.
BUCKET = 10_000
UPDATE = "/update_weights"
PROMPTS = [[1, 5, 6], [1, 5, 6], [1, 9, 10, 11, 12]]


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny_policy(seed=3), tiny_tokenizer(), context=128)


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


def settings(url: str, *sets: str) -> Params:
    return params("policy.backend=vllm-server", f"policy.servers={url}", "policy.context=128", *sets)


def sampler(url: str, *sets: str) -> VllmSampler:
    return VllmSampler(
        Fleet([url], context=128, version="v0"), (2,), settings(url, *sets).policy, version="v0"
    )


def test_tokens_go_in_and_out_with_their_log_probabilities(url: str, engine: Engine) -> None:
    found = complete_all(sampler(url), PROMPTS, max_new_tokens=12, temperature=1.0, seed=4)
    assert found[0].ids != found[1].ids, "equal prompts have seeds of their own"
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([[*prompt, *completion.ids]])
        with torch.no_grad():
            logprobs = torch.log_softmax(engine.model(ids).logits[0].double(), -1)
        expected = [
            float(logprobs[len(prompt) - 1 + place, token]) for place, token in enumerate(completion.ids)
        ]
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        assert completion.finish_reason == ("stop" if completion.ids[-1] == 2 else "length") and (
            len(completion.ids) == 12 or completion.ids[-1] == 2
        )
    assert complete_all(sampler(url), PROMPTS, max_new_tokens=12, temperature=1.0, seed=4) == found


def test_greedy_equals_the_transformers_backend(url: str, engine: Engine) -> None:
    own = TransformersSampler(engine.model, tiny_tokenizer(), batch=8, device="cpu", version="")
    there, here = (
        complete_all(one, PROMPTS, max_new_tokens=9, temperature=0.0, seed=0) for one in (sampler(url), own)
    )
    assert [completion.ids for completion in there] == [completion.ids for completion in here]


def test_the_context_window_cuts_a_turn_and_a_prompt_that_fills_it_gets_nothing(url: str) -> None:
    found = complete_all(sampler(url), [[1] * 126, [1] * 128], max_new_tokens=50, temperature=1.0, seed=0)
    assert 1 <= len(found[0].ids) <= 2 and found[1].ids == () and found[1].finish_reason == "length"


@pytest.mark.parametrize("transfer", ["ipc", "disk"])
def test_a_push_replaces_every_weight(transfer: str, url: str, engine: Engine, tmp_path: Path) -> None:
    trained = tiny_policy(seed=8)
    trained.save_pretrained(tmp_path / "new")
    one = sampler(url, f"policy.weight_transfer={transfer}")
    one.push(weight_buckets(trained, BUCKET), version="v1", folder=tmp_path / "new")
    assert one.version == "v1"
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, dict(trained.named_parameters())[name]), name
    assert engine.calls.index("/reset_prefix_cache") > engine.calls.index("/collective_rpc")
    if transfer == "ipc":
        updates = [call for call in engine.calls if "weight_update" in call or call == UPDATE]
        start, *parts, end = updates
        assert (start, end) == ("/start_weight_update", "/finish_weight_update")
        assert len(parts) > 3 and set(parts) == {UPDATE}


def test_a_push_that_did_not_arrive_is_noticed(url: str, engine: Engine) -> None:
    engine.workers[0].model.loses_updates = True
    with pytest.raises(UserError, match="does not hold the weights"):
        sampler(url).push(weight_buckets(tiny_policy(seed=8), BUCKET), version="v1")


def test_two_commands_that_push_to_one_server_wait_for_each_other(url: str, engine: Engine) -> None:
    trained = tiny_policy(seed=8)
    second = threading.Thread(target=lambda: sampler(url).push(weight_buckets(trained, BUCKET), version="v1"))

    def buckets() -> Iterator[Mapping[str, torch.Tensor]]:
        for number, bucket in enumerate(weight_buckets(trained, BUCKET)):
            yield bucket
            if number == 1:
                second.start()
                second.join(1.0)  # long enough for the other push to begin

    sampler(url).push(buckets(), version="v1")
    second.join()
    assert torch.equal(engine.model.lm_head.weight, trained.lm_head.weight)
    updates = [call for call in engine.calls if "weight_update" in call]
    assert updates == ["/start_weight_update", "/finish_weight_update"] * 2


def test_an_update_that_a_killed_trainer_left_open_is_closed_first_and_a_sleeping_server_woken(
    url: str, engine: Engine
) -> None:
    engine.updating = True
    engine.asleep = engine.workers[0].asleep = True
    trained = tiny_policy(seed=8)
    sampler(url).push(weight_buckets(trained, BUCKET), version="v1")
    assert torch.equal(engine.model.lm_head.weight, trained.lm_head.weight) and not engine.updating


def test_the_fingerprint_sees_one_changed_element_and_not_how_matrices_are_joined_or_padded() -> None:
    a, b = torch.randn(4, 6), torch.randn(2, 6)
    joined = torch.cat([b, a, torch.zeros(3, 6)])

    def total(*tensors: torch.Tensor) -> int:
        return sum(fingerprint(tensor, torch.float32) for tensor in tensors) % MODULUS

    assert total(a, b) == total(joined) == fingerprint(joined, torch.float32)
    changed = a.clone()
    changed[1, 1] = torch.nextafter(changed[1, 1], torch.tensor(9.0))
    assert total(changed, b) != total(a, b)
    assert fingerprint(a.bfloat16(), torch.bfloat16) == fingerprint(a, torch.bfloat16)


def test_a_server_sleeps_between_rollouts_and_wakes_for_the_next_weights(url: str, engine: Engine) -> None:
    one = sampler(url, "policy.sleep=true")
    one.sleep()
    assert engine.asleep
    one.push(weight_buckets(tiny_policy(seed=8), BUCKET), version="v1")
    assert not engine.asleep and complete_all(one, PROMPTS, max_new_tokens=2, temperature=1.0, seed=0)


@pytest.mark.parametrize("transfer", ["ipc", "disk"])
def test_a_stage_trains_with_a_server_that_follows_every_update(
    transfer: str, url: str, engine: Engine, tmp_path: Path
) -> None:
    chosen = (
        "policy.backend=vllm-server",
        f"policy.servers={url}",
        "policy.context=128",
        f"policy.weight_transfer={transfer}",
        "policy.sleep=true",
    )
    made = stage(
        tmp_path,
        "warmup",
        *chosen,
        "warmup.steps=3",
        "warmup.learning_rate=0.01",
        "warmup.critic_warmup_steps=0",
    )
    result = run_stage(made, episode)
    assert result.stopped == "" and engine.asleep
    records = [json.loads(line) for line in (made.out / "metrics.jsonl").read_text().splitlines()]
    # Only a sampler with the newest weights agrees with the trainer to rounding: the learning rate moves
    # them by more.
    assert max(record["sampler_difference"] for record in records) < 1e-4
    assert all(record["seconds_publish"] > 0 for record in records)
    versions = [
        load_trajectories(made.out / "trajectories" / f"step-{step:04d}")[0].policy_version
        for step in range(3)
    ]
    assert [version.rpartition("+")[2] for version in versions] == ["0", "1", "2"]


@pytest.mark.parametrize("transfer", ["ipc", "disk"])
def test_an_evaluation_gives_the_server_the_checkpoint_that_it_evaluates(
    transfer: str, url: str, engine: Engine, tmp_path: Path
) -> None:
    policy, tokenizer = tiny_policy(seed=8), tiny_tokenizer()
    save_checkpoint(
        tmp_path / "policy",
        policy,
        tokenizer,
        stage="agentic",
        parent=None,
        dataset="",
        code="",
        params={},
        figures={},
    )
    one = open_sampler(
        settings(url, f"policy.weight_transfer={transfer}"), tmp_path / "policy", tokenizer, version="digest"
    )
    own = TransformersSampler(policy, tokenizer, batch=8, device="cpu", version="")
    there, here = (
        complete_all(each, PROMPTS, max_new_tokens=6, temperature=0.0, seed=0) for each in (one, own)
    )
    assert [completion.ids for completion in there] == [
        completion.ids for completion in here
    ] and one.version == "digest"


def test_a_server_that_is_not_there_or_cannot_be_trained_with_is_one_sentence(engine: Engine) -> None:
    with pytest.raises(UserError, match="no vLLM server answers"):
        sampler("http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"policy\.servers: localhost:9 is no address"):
        sampler("localhost:9")
    with serving(engine, development=False) as url, pytest.raises(UserError, match="VLLM_SERVER_DEV_MODE=1"):
        sampler(url)


def test_a_prompt_that_the_server_refuses_is_told_with_its_reason(engine: Engine) -> None:
    engine.context = 20
    with serving(engine) as url, pytest.raises(UserError, match="maximum context length is 20"):
        complete_all(sampler(url), [[1] * 19], max_new_tokens=9, temperature=1.0, seed=0)
