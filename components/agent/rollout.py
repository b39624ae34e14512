"""The arguments of one rollout, the same for a sampler of tokens and for a chat server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.core.config import Params
from components.core.task import KernelTask
from components.judge.pool import JudgePool


def _ignore_progress(done: int, total: int) -> None:
    return


@dataclass(frozen=True)
class RolloutRequest:
    """Which trajectories to sample, and within which limits.

    A task is sampled once for each time that it is listed. `epoch` names the policy update to the judge:
    within one epoch, equal candidates for a task share one measurement.
    """

    tasks: Sequence[KernelTask]
    params: Params
    pool: JudgePool
    epoch: str
    seed: int
    max_turns: int
    """With 1, the first answer is final."""
    max_new_tokens: int
    """Limit of one turn, in tokens."""
    temperature: float
    deadline: float | None = None
    """Time of `time.monotonic` after which no turn begins; None is no limit."""
    shorten_history: bool = False
    """Whether a token rollout shortens old observations when the context window is full.

    Off in training, where a trajectory must be one sequence. A chat rollout always does so.
    """
    on_progress: Callable[[int, int], None] = _ignore_progress
    """Called with the number of finished trajectories and of all."""

    @property
    def multi_turn(self) -> bool:
        return self.max_turns > 1

    def is_out_of_time(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline
