"""One function that runs a stage by name, for the command, the pipeline and every rank."""

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
from components.training.stage_checks import check_stages, policy_kind

if TYPE_CHECKING:
    from components.training.rejection import Row
    from components.training.rollouts import RunEpisodes

LOST = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer", re.IGNORECASE)
"""What torch says when a collective fails because another process is gone."""


class RankLost(StageFailed):
    """Another rank of the stage died; the message is one sentence."""


def run_stage(stage: Stage, episodes: RunEpisodes | None = None) -> StageResult:
    """Run the stage that `stage.name` names, on every rank alike.

    `episodes` replaces the agent loop in tests.

    A launcher that sets TORCHELASTIC_ERROR_FILE (torchrun, `launcher`) finds there what this rank raised.
    Whatever that is, the states and the trajectories in `stage.out` are complete, and the next call continues
    from them.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        check_stages(stage.params, (stage.name,))
        check_finished(stage)
        return _run(stage, episodes)
    except Exception as error:
        get_error_handler().record_exception(error)
        raise


def _run(stage: Stage, episodes: RunEpisodes | None) -> StageResult:
    # Imported here because they take seconds, and a pipeline run whose stages are all cached runs none.
    from components.training import agentic, critic, rejection, warmup
    from components.training.engine import NotFinite

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
    except NotFinite as error:
        raise StageFailed(
            f"{stage.name}: {error}; nothing of that update was kept: "
            f"lower {stage.name}.learning_rate and run again."
        ) from error
    except RuntimeError as error:
        if not LOST.search(str(error)):
            raise
        raise RankLost(
            f"{stage.name}: another rank died or was cut off; "
            "the last good state is kept, and the same command continues from it."
        ) from error


def training_sources(params: Params, seed: int) -> Iterator[KernelTask]:
    """Yield composed tasks without end, none of whose operator sequences is held out."""
    from components.synthesis.compose import compose_tasks, is_held_out

    tasks = compose_tasks(seed, params.data, params.device)
    return (task for task in tasks if not is_held_out(task.ops, params.data.seed))


def demonstrations(params: Params, policy: Path) -> Callable[[int], list[Row]] | None:
    """Return a function that makes that many cold-start demonstrations as rows, the same ones at every call.

    None for a policy that was never shown any.
    """
    if policy_kind(params) != "scratch":
        return None

    def rows(count: int) -> list[Row]:
        tokenizer, rng = load_tokenizer(policy), random.Random(params.coldstart.seed)
        # A shifted seed gives other tasks than those of the cold start.
        sources = islice(training_sources(params, params.coldstart.seed + 1), count)
        return [
            encode_messages(tokenizer, make_demonstration(source, rng, params.coldstart, params.device))
            for source in sources
        ]

    return rows
