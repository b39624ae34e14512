"""Checks of the parameters of each stage, made before anything is sampled.

This module does not import torch.
"""

from collections.abc import Sequence

from components.core.errors import UserError
from components.core.params import Params, Rejection
from components.training.stage import STAGES, StageName


def replayed_rows(rejection: Rejection) -> int:
    """Return the number of cold-start demonstrations in a full batch of stage 2, rejection fine-tuning."""
    return round(rejection.batch * rejection.replay_share)


def check_stages(params: Params, stages: Sequence[StageName] = STAGES) -> None:
    """Raise UserError, which names the parameter, if one of `stages` cannot run with `params`.

    A run of only stage 3 (value pretraining) is never refused here, because it samples nothing.
    """
    if set(stages) != {"critic"} and params.policy.backend == "vllm-server" and not params.policy.server:
        raise UserError(
            "policy.server: is empty; give the address of a vLLM server, such as http://127.0.0.1:8000."
        )
    # Only a policy that the cold start made has demonstrations.
    if "rejection" in stages and params.policy.source != "scratch" and replayed_rows(params.rejection):
        raise UserError(
            "rejection.replay_share: this policy has no cold-start demonstrations to mix in; set it to 0."
        )
    tasks = (params.warmup.steps * params.warmup.rollouts.tasks, params.rejection.rollouts.tasks)
    if set(stages) == set(STAGES) and max(tasks) < 2 and not params.warmup.solve_rate_share:
        # Both stages then sample the same task, so stage 3 would get trajectories of only one task.
        raise UserError(
            "warmup.rollouts.tasks: stages 1 and 2 sample a single task, and stage 3 cannot hold one out; "
            "raise it to 2 or more."
        )
