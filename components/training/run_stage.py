"""The stages by name: one function that the command, the orchestrator's tasks and every rank of a launcher call."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.tokenizer import encode_messages
from components.core.config import Params
from components.core.errors import StageFailed
from components.core.task import KernelTask
from components.policy.checkpoint import load_tokenizer
from components.training.stage import Stage, StageResult, check_finished

if TYPE_CHECKING:
    from components.training.rejection import Row
    from components.training.rollouts import RunEpisodes

STAGES = ("warmup", "rejection", "critic", "agentic")
LOST = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer", re.IGNORECASE)
"""What torch says when a collective fails because another process is gone."""


class RankLost(StageFailed):
    """Another rank of the stage died."""


def run_stage(stage: Stage, episodes: RunEpisodes | None = None) -> StageResult:
    """Run the stage that `stage.name` names, on every rank alike; `episodes` takes the place of the agent loop in tests.

    Whatever is raised, the states and the trajectories in `stage.out` are whole, and the next call goes on from there.
    """
    from components.training import (  # takes seconds, and a night that is cached runs none
        agentic,
        critic,
        rejection,
        warmup,
    )
    from components.training.engine import NotFinite

    check_finished(stage)
    try:
        match stage.name:
            case "warmup":
                return warmup.run(stage, episodes)
            case "rejection":
                return rejection.run(stage, episodes, demonstrations(stage.params, stage.actor))
            case "critic":
                return critic.run(stage)
            case "agentic":
                return agentic.run(stage, episodes)
            case _:
                raise ValueError(f"{stage.name}: no such stage; there are {', '.join(STAGES)}")
    except NotFinite as error:
        raise StageFailed(
            f"{stage.name}: {error}; nothing of that update was kept: lower {stage.name}.learning_rate and run again."
        ) from error
    except RuntimeError as error:
        if not LOST.search(str(error)):
            raise
        raise RankLost(
            f"{stage.name}: another rank died or was cut off; the last good state is kept, and the same command continues from it."
        ) from error


def training_sources(params: Params, seed: int) -> Iterator[KernelTask]:
    """Composed tasks without end, none of whose operator sequences is held out."""
    from components.synthesis.compose import compose_tasks, is_held_out

    return (
        found
        for found in compose_tasks(seed, params.data, params.device)
        if not is_held_out(found.ops, params.data.seed)
    )


def demonstrations(params: Params, policy: Path) -> Callable[[int], list[Row]] | None:
    """Cold-start demonstrations as rows of ids and mask, the same ones whenever it is asked; None for a policy that was never shown any."""
    if params.policy.source != "scratch":
        return None

    def rows(count: int) -> list[Row]:
        tokenizer, rng = load_tokenizer(policy), random.Random(params.coldstart.seed)
        # Other tasks than the cold start's own: a shifted seed, held-out sequences left out all the same.
        sources = islice(training_sources(params, params.coldstart.seed + 1), count)
        return [
            encode_messages(tokenizer, make_demonstration(source, rng, params.coldstart, params.device))
            for source in sources
        ]

    return rows
