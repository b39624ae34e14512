"""Tokens per second of TransformersSampler against transformers' own generate.

    python tests/bench/bench_sampling.py [CHECKPOINT] [--batch 96] [--sequences 96] [--limit 40]

With a checkpoint of the smoke profile, prompts are composed tasks and turns end by themselves, at different
lengths; a fresh policy never ends a turn, so that all ways do the same work. One line for each way: tokens
per CPU second (one thread; wall time on a shared machine says little), and how many times as fast the
sampler is.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.bootstrap.cold_start import new_model
from components.bootstrap.tokenizer import encode_conversations, train_tokenizer
from components.core.config import resolve
from components.core.params import Params
from components.policy.checkpoint import load_model, load_tokenizer
from components.policy.sampler import complete_all
from components.policy.transformers_sampler import TransformersSampler
from components.synthesis.core_composer import compose_tasks


def with_generate(
    model: Any,
    prompts: list[list[int]],
    limit: int,
    batch: int,
    tokenizer: PreTrainedTokenizerBase,
    endless: bool,
) -> int:
    """Sample with `model.generate` in batches, padded on the left; the number of sampled tokens."""
    padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    count = 0
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        width = max(map(len, some))
        ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in some])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in some])
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=limit,
            min_new_tokens=limit if endless else 0,
        )
        count += sum(row.index(end) + 1 if end in row else len(row) for row in out[:, width:].tolist())
    return count


def policy(
    checkpoint: Path | None, params: Params, sequences: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[list[int]]]:
    """The policy to sample from and its prompts."""
    if checkpoint is None:
        tokenizer: PreTrainedTokenizerBase = train_tokenizer(
            [{"role": "user", "content": "x"}], 300, params.policy.context
        )
        rng = random.Random(0)
        prompts = [[rng.randrange(3, 200) for _ in range(rng.randint(15, 30))] for _ in range(sequences)]
        return new_model(params, params.policy.vocabulary, tokenizer).eval(), tokenizer, prompts
    tokenizer = load_tokenizer(checkpoint)
    messages = [
        [{"role": "user", "content": task.code}]
        for task in itertools.islice(compose_tasks(1, params.data), sequences)
    ]
    heading = tokenizer.encode("\n<|im_start|>assistant\n", add_special_tokens=False)
    return (
        load_model(checkpoint),
        tokenizer,
        [next(encode_conversations(tokenizer, [message]))[0] + heading for message in messages],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--sequences", type=int, default=96)
    parser.add_argument("--limit", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer, prompts = policy(options.checkpoint, resolve("smoke").params, options.sequences)
    endless = options.checkpoint is None
    sampler = TransformersSampler(model, tokenizer, batch=options.batch, device="cpu", version="bench")

    def ours() -> int:
        return sum(
            len(c.ids)
            for c in complete_all(sampler, prompts, max_new_tokens=options.limit, temperature=1.0, seed=0)
        )

    ways: dict[str, Callable[[], int]] = {
        "generate, one prompt at a time": lambda: with_generate(
            model, prompts[::8], options.limit, 1, tokenizer, endless
        ),
        f"generate, batches of {options.batch}": lambda: with_generate(
            model, prompts, options.limit, options.batch, tokenizer, endless
        ),
        "TransformersSampler": ours,
    }
    rates = {}
    for name, way in ways.items():
        way()
        start = time.process_time()
        count = way()
        rates[name] = count / (time.process_time() - start)
    for name, rate in rates.items():
        print(
            f"{name:32} {rate:8.0f} tokens/s   sampler is {rates['TransformersSampler'] / rate:5.1f} times as"
            " fast"
        )


if __name__ == "__main__":
    main()
