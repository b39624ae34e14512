"""The interface of the backends that sample token ids, with log-probabilities, after given token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Completion:
    """Sampled token ids and their log-probabilities, in nats under the distribution after temperature.

    The ids include the end-of-turn token if it was sampled. `finish_reason` is "stop" after an end-of-turn
    token, or "length" if a limit was reached. Within components/policy/vllm, it is also "abort" if a vLLM
    server ended the completion early. `versions` has the name of the weights that sampled each token.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[str, ...]


class Sampler(Protocol):
    """A backend that samples from a policy. `version` is the name of the weights with which it samples."""

    version: str

    def capacity(self) -> int:
        """Return how many sequences the backend can hold at once; it may change while sampling goes on."""
        ...

    async def complete(
        self, prompt: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int, session: str
    ) -> Completion:
        """Sample one completion of the token ids `prompt`, of at most `max_new_tokens` tokens.

        At temperature 0, each token is the most probable one. Equal arguments and weights give equal results,
        unless the documentation of the backend says otherwise. A completion ends after a token that ends a
        turn, and at the end of the context window at the latest. It is empty if the prompt fills the window.
        `session` is a name that all turns of one trajectory share. If the coroutine is cancelled, the backend
        stops sampling the sequence.
        """
        ...


def complete_all(
    sampler: Sampler, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float, seed: int
) -> list[Completion]:
    """Return one completion for each prompt (token ids), in the order of the prompts.

    Each completion has a seed of its own, which is derived from `seed` and the prompt's index. At most
    `sampler.capacity()` completions are sampled at the same time.
    """

    async def complete() -> list[Completion]:
        places = asyncio.Semaphore(sampler.capacity())

        async def one(index: int, prompt: Sequence[int]) -> Completion:
            async with places:
                return await sampler.complete(
                    prompt,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=(seed * 1_000_003 + index) % 2**63,
                    session=str(index),
                )

        return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))

    # In a thread of its own, because the caller may be called by an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, complete()).result()


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> tuple[int, ...]:
    """Return the ids of all tokens that end a turn, in ascending order.

    They are the tokenizer's end-of-sequence token and those of the model's generation config `generation`,
    which may have several, such as one for an answer and one for a tool call, or be None.
    """
    ids = generation.eos_token_id if generation is not None else None
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(sorted({int(tokenizer.eos_token_id), *map(int, listed)}))
