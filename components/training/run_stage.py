"""This module runs a training stage by its name, for the command line, the pipeline and every rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from components.core.errors import StageFailed
from components.training.demonstration_replay import demonstrations
from components.training.disk_space import check_disk_space
from components.training.stage import Stage, StageResult, check_critic_given, check_stages, finished_result

if TYPE_CHECKING:
    from components.training.rollouts import RunEpisode

# Pattern of torch's error messages when a collective fails because another process has ended.
LOST = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer", re.IGNORECASE)


class RankLost(StageFailed):
    """Error of a rank that lost the connection to another rank; the message is one sentence."""


def run_stage(stage: Stage, episode: RunEpisode | None = None) -> StageResult:
    """Run the stage that `stage.name` names, and return its result; every rank calls this function.

    If the stage is finished already, its stored result is returned. `episode` replaces the agent loop in
    tests. If this rank raises an error, the error is also written to the file that the environment variable
    TORCHELASTIC_ERROR_FILE names; torchrun and `launcher` set this variable. The states and trajectories in
    `stage.out` are complete even after an error, and the next call continues from them.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        check_stages(stage.params, (stage.name,))
        check_critic_given(stage)
        if result := finished_result(stage):
            return result
        check_disk_space(stage)
        return _run(stage, episode)
    except Exception as error:
        get_error_handler().record_exception(error)
        raise


def _run(stage: Stage, episode: RunEpisode | None) -> StageResult:
    # Imported here because the imports take seconds, and a pipeline run does not need them if all of its
    # stages are cached.
    from components.agent.token_rollout import run_episode
    from components.training import critic, ppo, rejection
    from components.training.engine import NotFinite

    episode = episode or run_episode
    try:
        match stage.name:
            case "warmup":
                return ppo.warmup(stage, episode)
            case "rejection":
                return rejection.run(stage, episode, demonstrations(stage.params, stage.actor))
            case "critic":
                return critic.run(stage)
            case "agentic":
                return ppo.agentic(stage, episode)
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
