"""Tokenizer and sampler of a policy made from scratch."""

import asyncio
import random
import re
from pathlib import Path

import pytest
import torch
from cold_start_fixtures import params as params
from cold_start_fixtures import tasks as tasks
from training_fixtures import tiny_policy, tiny_tokenizer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from components.bootstrap import cold_start
from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.tokenizer import encode_conversations, train_tokenizer
from components.core.errors import UserError
from components.core.params import Params
from components.core.task import KernelTask
from components.policy.checkpoint import load_generation_config, load_model, load_tokenizer
from components.policy.sampler import Completion, complete_all, stop_ids
from components.policy.transformers_sampler import TransformersSampler, draw


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
    assert full == Completion((), (), "length", ())


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
