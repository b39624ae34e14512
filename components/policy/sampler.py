"""The interface of the backends that sample token ids and their log-probabilities for given token ids."""

from dataclasses import dataclass
from typing import Protocol


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
