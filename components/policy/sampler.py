"""The interface of the backends that sample token ids and their log-probabilities for given token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Completion:
    """Sampled token ids and their log-probabilities, in nats under the distribution after temperature.

    The ids include the end-of-turn token if it was sampled.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    # Reason of the end: `stop` after an end-of-turn token, or `length` if a limit was reached.
    finish_reason: str


class Sampler(Protocol):
    """A backend that samples from a policy. `version` is the name of the weights that it samples with."""

    version: str

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[Completion]:
        """Sample one completion for each prompt, in the order of the prompts.

        At temperature 0, each token is the most probable one. Equal arguments and weights give equal results,
        unless the documentation of the backend says otherwise. A completion ends at the end of the context
        window at the latest. It is empty if the prompt fills the window.
        """
        ...


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> tuple[int, ...]:
    """Return the ids of all tokens that end a turn, in ascending order.

    They are the tokenizer's end-of-sequence token and those of the model's generation config, which may have
    several, such as one for an answer and one for a tool call.
    """
    ids = generation.eos_token_id if generation is not None else None
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(sorted({int(tokenizer.eos_token_id), *map(int, listed)}))
