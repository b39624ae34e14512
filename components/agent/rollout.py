"""This module defines the arguments of a rollout, the same ones for token samplers and for chat servers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.core.params import Params
from components.core.task import KernelTask
from components.judge.pool import JudgePool


def _ignore_progress(done: int, total: int) -> None:
    return


@dataclass(frozen=True)
class RolloutRequest:
    """Tasks, judge pool and limits of one rollout.

    One trajectory is sampled for each entry of `tasks`, which may list a task several times. `epoch` is part
    of the key under which the judge keeps its verdicts, so equal candidates for a task share one measurement
    only within one epoch.
    """

    tasks: Sequence[KernelTask]
    params: Params
    pool: JudgePool
    epoch: str
    seed: int
    # Largest number of turns of one trajectory. If it is 1, the first answer is final.
    max_turns: int
    # Largest number of tokens that are sampled in one turn.
    max_new_tokens: int
    temperature: float
    # Value of `time.monotonic()` after which no further turn begins. None means that there is no limit.
    deadline: float | None = None
    # Whether a token rollout shortens old observations when the context window is full. It is off in
    # training, because a trajectory that is trained on must be one sequence of tokens. A chat rollout always
    # shortens old observations.
    shorten_history: bool = False
    # Function that is called with the number of finished trajectories and the number of all trajectories.
    on_progress: Callable[[int, int], None] = _ignore_progress

    @property
    def multi_turn(self) -> bool:
        return self.max_turns > 1

    def is_out_of_time(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline
