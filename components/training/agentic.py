"""Stage 4: multi-turn PPO in the workspace, from the actor of stage 2 and the critic of stage 3."""

from components.core.errors import UserError
from components.policy.checkpoint import verify_checkpoint
from components.training.engine import DTYPES
from components.training.networks import load_critic
from components.training.ppo import run_ppo
from components.training.rollouts import RunEpisodes, agent_loop
from components.training.stage import Stage, StageResult

TOKENIZER = "tokenizer.json"


def run(stage: Stage, episodes: RunEpisodes | None = None) -> StageResult:
    """Train the policy of the checkpoint `stage.actor`, starting with the critic of `stage.critic`.

    Tests replace the agent loop by `episodes`. Raises UserError if there is no critic, or if its tokenizer
    differs from the actor's.
    """
    params, critic = stage.params, stage.critic
    if critic is None:
        raise UserError(f"{stage.name}: stage 4 needs the critic of stage 3; run the stages from critic on.")
    tokenizers = [verify_checkpoint(folder).files.get(TOKENIZER) for folder in (stage.actor, critic)]
    if tokenizers[0] != tokenizers[1]:
        raise UserError(
            f"{critic / TOKENIZER}: the critic reads other tokens than the actor in {stage.actor}; "
            "give the critic that was made from this actor."
        )
    return run_ppo(
        stage,
        params.agentic,
        lambda: load_critic(critic, DTYPES[params.engine.dtype]),
        episodes or agent_loop(),
    )
