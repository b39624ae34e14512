"""The interface of generation backends: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Completion:
    """Sampled ids and their log-probabilities (nats, after temperature).

    The ids include the end-of-turn token if it was sampled.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    """`stop` after an end-of-turn token, or `length`."""


class Sampler(Protocol):
    """A generation backend; `version` names the weights that it samples with."""

    version: str

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[Completion]:
        """Sample one completion for each prompt, in order.

        Temperature 0 always takes the most probable token. Equal arguments and weights give equal results,
        except on backends whose documentation says otherwise. A completion ends at the end of the context
        window; it is empty when the prompt fills the window.
        """
        ...
