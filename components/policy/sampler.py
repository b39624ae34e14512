"""The interface of every generation backend: token ids in, token ids and log-probabilities out. Importing it costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Completion:
    """Sampled ids (the end-of-turn token included when sampled), their log-probabilities (nats, temperature applied)."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    """stop (end-of-turn token) or length."""


class Sampler(Protocol):
    """A generation backend. `version` names the weights that it samples with."""

    version: str

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[Completion]:
        """One completion per prompt, in order; equal arguments and weights give equal results; temperature 0 is greedy."""
        ...
