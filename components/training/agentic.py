"""Stage 4: multi-turn PPO in the workspace, from the actor of stage 2 and the critic of stage 3."""

from __future__ import annotations

from components.core.errors import UserError
from components.policy.checkpoint import verify_checkpoint
from components.training.engine import DTYPES
from components.training.networks import load_critic
from components.training.ppo import run_ppo
from components.training.rollouts import RunEpisodes, agent_loop
from components.training.stage import Stage, StageResult

TOKENIZER = "tokenizer.json"


def run(stage: Stage, episodes: RunEpisodes | None = None) -> StageResult:
    """Train `stage.actor` with `stage.critic`; `episodes` takes the place of the agent loop in tests."""
    params, folder = stage.params, stage.critic
    if folder is None:
        raise UserError(f"{stage.name}: stage 4 needs the critic of stage 3; run the stages from critic on.")
    own, other = verify_checkpoint(stage.actor).files, verify_checkpoint(folder).files
    if own.get(TOKENIZER) != other.get(TOKENIZER):
        raise UserError(
            f"{folder / TOKENIZER}: the critic reads other tokens than the actor in {stage.actor}; give the critic that was made from this actor."
        )
    return run_ppo(
        stage,
        params.agentic,
        lambda: load_critic(folder, DTYPES[params.engine.dtype]),
        episodes or agent_loop(),
    )
