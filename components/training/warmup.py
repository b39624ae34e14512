"""Stage 1: single-turn PPO, which teaches the policy to write kernels that build.

The critic starts as a copy of the actor. During the first `warmup.critic_warmup_steps` steps only the critic
is trained.
"""

from components.policy.checkpoint import load_model
from components.training.engine import DTYPES
from components.training.networks import critic_from_actor
from components.training.ppo import run_ppo
from components.training.rollouts import RunEpisodes, agent_loop
from components.training.stage import Stage, StageResult


def run(stage: Stage, episodes: RunEpisodes | None = None) -> StageResult:
    """Train the policy of the checkpoint `stage.actor`; tests replace the agent loop by `episodes`."""
    params = stage.params
    return run_ppo(
        stage,
        params.warmup,
        lambda: critic_from_actor(load_model(stage.actor, dtype=DTYPES[params.engine.dtype])),
        episodes or agent_loop(),
    )
