"""Tokenizer, sampler and cold start of a policy made from scratch."""

import asyncio
import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from training_fixtures import tiny_policy, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from components.bootstrap import cold_start
from components.bootstrap.corpus import plan_batches
from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.muon import Muon
from components.bootstrap.tokenizer import encode_conversations, train_tokenizer
from components.core.config import resolve
from components.core.errors import UserError
from components.core.params import Params
from components.core.progress import Quiet
from components.core.task import KernelTask
from components.policy.checkpoint import (
    load_generation_config,
    load_model,
    load_tokenizer,
    verify_checkpoint,
)
from components.policy.sampler import Completion, complete_all, stop_ids
from components.policy.transformers_sampler import TransformersSampler, draw
from components.synthesis.compose import compose_tasks

TINY = (
    "coldstart.steps=8",
    "coldstart.tokens_per_step=1024",
    "coldstart.demonstrations=60",
    "policy.hidden=32",
    "policy.layers=1",
    "policy.heads=2",
)
TINY += ("policy.kv_heads=1", "policy.head_dim=16", "policy.feed_forward=64", "policy.vocabulary=512")


@pytest.fixture(scope="module")
def params() -> Params:
    return resolve("ci", TINY).params


@pytest.fixture(scope="module")
def tasks(params: Params) -> list[KernelTask]:
    return list(
        itertools.islice((task for task in compose_tasks(3, params.data) if task.split == "train"), 60)
    )


@pytest.fixture(scope="module")
def conversations(params: Params, tasks: list[KernelTask]) -> list[list[dict[str, str]]]:
    rng = random.Random(0)
    return [
        make_demonstration(task, rng, params.coldstart.model_copy(update={"multi_turn_share": 0.5}), "cpu")
        for task in tasks
        for _ in range(3)
    ]


@pytest.fixture(scope="module")
def tokenizer(conversations: list[list[dict[str, str]]]) -> PreTrainedTokenizerBase:
    return train_tokenizer([message for conversation in conversations for message in conversation], 1024, 512)


@pytest.fixture(scope="module")
def model(params: Params, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    model = cold_start.new_model(params, len(tokenizer), tokenizer).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)  # far from uniform, so that a wrong position or mask shows
    return model


def sampler(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int = 8
) -> TransformersSampler:
    return TransformersSampler(model, tokenizer, batch=batch, device="cpu", version="test")


def prompts(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict[str, str]]], count: int
) -> list[list[int]]:
    return [
        next(encode_conversations(tokenizer, [conversation[:1]]))[0]
        for conversation in conversations[: 3 * count : 3]
    ]


# --- tokenizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "a\r\n\tb\n\n\n",
        "é 漢 🙂",
        "x = -0.75 * 1e-5 + 1024.5\n",
        " ",
        "<tool_call>\n<tool_call>",
        "",
        "0.1.2.3 10000000 v2.0",
    ],
)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_constant_is_one_token_the_same_in_task_and_kernel(
    tokenizer: PreTrainedTokenizerBase, tasks: list[KernelTask]
) -> None:
    constants = {constant for task in tasks for constant in re.findall(r"\d\.\d+", task.code)}
    assert len(constants) > 5
    for constant in constants:
        assert constant in tokenizer.tokenize(f"        x = torch.clamp(x, -{constant}, 9)\n")
        assert constant in tokenizer.tokenize(f"    v = v < 0 ? v * {constant}f : v;\n")


def test_a_line_common_to_all_kernels_is_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer.tokenize("  const float* x = f32(t[0]);\n")) == 1


def test_conversation_is_the_chat_template_and_the_mask_what_the_assistant_says(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict[str, str]]]
) -> None:
    for conversation in conversations:
        ids, mask = next(encode_conversations(tokenizer, [conversation]))
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
            conversation, tokenize=False
        ).removesuffix("\n")
        own = tokenizer.decode([token for token, said in zip(ids, mask, strict=True) if said])
        assert own == "".join(
            message["content"] + "<|im_end|>" for message in conversation if message["role"] == "assistant"
        )


def test_prompt_turn_and_suffix_tokenised_apart_give_the_conversation(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict[str, str]]]
) -> None:
    conversation = next(c for c in conversations if len(c) > 2)
    user, turn, tool = (message["content"] for message in conversation[:3])
    pieces = [f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n", f"{turn}<|im_end|>"]
    pieces.append(f"\n<|im_start|>tool\n{tool}<|im_end|>\n<|im_start|>assistant\n")
    grown = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    assert next(encode_conversations(tokenizer, [conversation]))[0][: len(grown)] == grown
    assert list(encode_conversations(tokenizer, [])) == []


def test_tokenizer_is_the_same_after_saving(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert next(encode_conversations(loaded, [conversations[0]])) == next(
        encode_conversations(tokenizer, [conversations[0]])
    )
    assert loaded.chat_template == tokenizer.chat_template and loaded.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "{", "cannot be loaded"),
        ("config.json", "[1]", "cannot be loaded"),
        ("config.json", '{"model_type": "nosuch"}', "its model cannot be loaded"),
        ("model.safetensors", "damaged", "its model cannot be loaded"),
        ("model.safetensors", None, "its model cannot be loaded"),
        ("tokenizer.json", "", "its tokenizer cannot be loaded"),
        ("tokenizer.json", None, "tokenizer"),
        ("chat_template.jinja", "{% if %}", "its chat template cannot be loaded"),
        ("chat_template.jinja", None, "has no chat template"),
    ],
)
def test_a_damaged_model_folder_is_one_sentence(
    params: Params,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    name: str,
    content: str | None,
    said: str,
) -> None:
    folder = tmp_path / "policy"
    cold_start.new_model(params, len(tokenizer), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    load_tokenizer(folder), load_model(folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=rf"policy: .*{said}"):
        load_tokenizer(folder), load_model(folder)


# --- sampler --------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_completions_and_others_differ(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: list
) -> None:
    given = prompts(tokenizer, conversations, 6)
    first, again, other = (
        complete_all(sampler(model, tokenizer), given, max_new_tokens=12, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again and first != other


def test_a_sequence_does_not_depend_on_its_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: list
) -> None:
    given = prompts(tokenizer, conversations, 12)
    together, apart = (
        complete_all(sampler(model, tokenizer, batch), given, max_new_tokens=80, temperature=1.0, seed=5)
        for batch in (12, 1)
    )
    assert [c.ids for c in together] == [c.ids for c in apart]


def test_no_bit_of_a_completion_depends_on_the_sequences_beside_it_or_on_its_moment(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: list
) -> None:
    given = prompts(tokenizer, conversations, 20)

    async def completions(batch: int, places: int, order: list[int]) -> dict[int, Completion]:
        one, found, free = sampler(model, tokenizer, batch), {}, asyncio.Semaphore(places)

        async def complete(index: int) -> None:
            async with free:
                found[index] = await one.complete(
                    given[index],
                    max_new_tokens=20 + 3 * index,
                    temperature=1.0,
                    seed=index,
                    session=str(index),
                )

        await asyncio.gather(*map(complete, order))
        return found

    alone = asyncio.run(completions(8, 1, list(range(20))))
    assert len({len(completion.ids) for completion in alone.values()}) > 10, "rows end one after the other"
    for batch, places in ((8, 8), (2, 2), (12, 12), (16, 5), (64, 20)):
        order = random.Random(batch).sample(range(20), 20)
        assert asyncio.run(completions(batch, places, order)) == alone


def test_a_cancelled_completion_frees_its_row_and_one_that_fails_raises_its_error(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    one = sampler(model, tokenizer, batch=1)

    async def complete(prompt: list[int], limit: int) -> Completion:
        return await one.complete(prompt, max_new_tokens=limit, temperature=1.0, seed=1, session="a")

    async def run() -> None:
        waited = asyncio.create_task(complete([5, 6], 10**6))
        await asyncio.sleep(0.05)
        waited.cancel()
        assert len((await complete([5, 6], 3)).ids) <= 3
        with pytest.raises(IndexError):
            await complete([5, 10**6], 3)
        assert (await complete([5, 6], 3)).ids

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_the_whole_sequence_at_once(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: list, temperature: float
) -> None:
    given = prompts(tokenizer, conversations, 12)
    completions = complete_all(
        sampler(model, tokenizer), given, max_new_tokens=80, temperature=temperature, seed=5
    )
    for prompt, completion in zip(given, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.ids]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(
            1, torch.tensor(completion.ids)[:, None]
        )[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-4, rtol=0)
        if temperature == 0:
            assert completion.ids == tuple(logits.argmax(-1).tolist())


def test_a_turn_ends_with_its_end_token_or_at_the_limit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: list
) -> None:
    for completion in complete_all(
        sampler(model, tokenizer),
        prompts(tokenizer, conversations, 20) * 4,
        max_new_tokens=200,
        temperature=2.0,
        seed=0,
    ):
        stopped = completion.finish_reason == "stop"
        assert completion.ids.count(tokenizer.eos_token_id) == (1 if stopped else 0)
        assert completion.ids[-1] == tokenizer.eos_token_id if stopped else len(completion.ids) == 200
        assert len(completion.logprobs) == len(completion.ids)


def test_a_turn_ends_with_any_end_token_of_the_generation_config(tmp_path: Path) -> None:
    several = tiny_policy()
    several.generation_config.eos_token_id = [9, 5]
    several.save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    assert stop_ids(tokenizer, load_generation_config(tmp_path)) == (2, 5, 9)
    (tmp_path / "generation_config.json").unlink()
    assert stop_ids(tokenizer, load_generation_config(tmp_path)) == (2,)
    ends = set()
    for completion in complete_all(
        sampler(several, tokenizer), [[1, 7]] * 60, max_new_tokens=100, temperature=1.0, seed=0
    ):
        assert completion.finish_reason == "stop"
        assert [token for token in completion.ids if token in (2, 5, 9)] == [completion.ids[-1]]
        ends.add(completion.ids[-1])
    assert ends == {2, 5, 9}


def test_the_context_window_cuts_a_turn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    context = model.config.max_position_embeddings
    almost, full = complete_all(
        sampler(model, tokenizer),
        [[5] * (context - 2), [5] * context],
        max_new_tokens=9,
        temperature=0.0,
        seed=0,
    )
    assert len(almost.ids) <= 2
    assert full == Completion((), (), "length", "test")


def test_tokens_are_drawn_in_proportion_to_their_probability() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0])
    uniforms = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    for temperature in (1.0, 0.5):
        tokens, _ = draw(logits.expand(20000, 4), uniforms, torch.full((20000,), temperature))
        shares = torch.bincount(tokens, minlength=4) / 20000
        torch.testing.assert_close(shares, torch.softmax(logits / temperature, 0), atol=1e-4, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert draw(logits, torch.tensor([uniform], dtype=torch.float64), torch.ones(1))[0].item() == 1


# --- cold start -----------------------------------------------------------------------------------


class Watch:
    """Keeps the losses, and dies at a step if told to."""

    def __init__(self, die_at: int = -1):
        self.losses: dict[int, float] = {}
        self.die_at = die_at

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        if "loss" in figures:
            self.losses[step] = figures["loss"]
        if step == self.die_at:
            raise KeyboardInterrupt


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def run(
    params: Params, tasks: list[KernelTask], out: Path, progress: Watch | Quiet
) -> dict[str, torch.Tensor]:
    manifest = cold_start.coldstart(params, iter(tasks), out, dataset="d", code="c", progress=progress)
    assert verify_checkpoint(out) == manifest and not (out.parent / "state").exists()
    return weights(out)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(cold_start, "SAVE_SECONDS", 0.0)


@pytest.mark.usefixtures("one_core")
def test_a_killed_cold_start_continues_to_the_same_weights(
    params: Params, tasks: list[KernelTask], tmp_path: Path
) -> None:
    whole = run(params, tasks, tmp_path / "a/checkpoint", watch := Watch())
    assert watch.losses[8] < watch.losses[1]
    with pytest.raises(KeyboardInterrupt):
        cold_start.coldstart(
            params, iter(tasks), tmp_path / "b/checkpoint", dataset="d", code="c", progress=Watch(die_at=5)
        )
    assert not (tmp_path / "b/checkpoint").exists()
    rest = run(params, [], tmp_path / "b/checkpoint", again := Watch())
    assert min(again.losses) == 5, "step 5 died after its update and before its state was kept"
    assert all(torch.equal(whole[name], rest[name]) for name in whole)


@pytest.mark.usefixtures("one_core")
def test_state_of_other_parameters_is_not_continued(
    params: Params, tasks: list[KernelTask], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        cold_start.coldstart(
            params, iter(tasks), tmp_path / "checkpoint", dataset="d", code="c", progress=Watch(die_at=5)
        )
    changed = params.model_copy(
        update={"coldstart": params.coldstart.model_copy(update={"learning_rate": 0.001})}
    )
    run(changed, tasks, tmp_path / "checkpoint", watch := Watch())
    assert min(watch.losses) == 1


@pytest.mark.usefixtures("one_core")
def test_too_few_tasks_are_a_mistake_of_the_caller(
    params: Params, tasks: list[KernelTask], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"coldstart\.demonstrations"):
        cold_start.coldstart(
            params, iter(tasks[:5]), tmp_path / "checkpoint", dataset="d", code="c", progress=Quiet()
        )


def test_held_out_tasks_are_never_demonstrated(
    params: Params, tasks: list[KernelTask], tmp_path: Path
) -> None:
    held_out = [task.model_copy(update={"split": "held_out"}) for task in tasks]
    with pytest.raises(UserError):
        cold_start.make_corpus(params, iter(held_out), tmp_path / "corpus", Quiet())


def test_the_plan_uses_every_conversation_once_an_epoch_and_fills_its_micro_batches() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(20, 200) for _ in range(1000)]
    batches = plan_batches(lengths, steps=1000, tokens_per_step=4000, microbatches=4, seed=1)
    assert batches == plan_batches(lengths, steps=1000, tokens_per_step=4000, microbatches=4, seed=1)
    flat = [batch for step in batches for batch in step]
    assert all(len(batch) * max(lengths[i] for i in batch) <= 1000 for batch in flat)
    seen = [index for batch in flat for index in batch]
    assert sorted(seen[:1000]) == list(range(1000)) and seen[:1000] != seen[1000:2000]
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in flat)
    assert sum(lengths[i] for i in seen) > 0.95 * padded


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_muon_steps_as_torchs_own_does_in_lower_precision(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [Muon([ours], lr=0.1), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0)]
    for _ in range(3):
        gradient = torch.randn(shape)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert (ours - theirs).norm() < 0.02 * (theirs - start).norm()
