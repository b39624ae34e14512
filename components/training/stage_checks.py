"""Checks of the parameters of each stage, made before anything is sampled.

This module does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from components.core.errors import UserError
from components.core.params import Params, Rejection
from components.training.stage import STAGES, StageName

# Kind of policy: made by the cold start ("scratch"), or an unchanged Hugging Face model.
PolicyKind = Literal["scratch", "huggingface"]


def policy_kind(params: Params) -> PolicyKind:
    return "scratch" if params.policy.source == "scratch" else "huggingface"


def replayed_rows(rejection: Rejection) -> int:
    """Return the number of cold-start demonstrations in a full batch of stage 2, rejection fine-tuning."""
    return round(rejection.batch * rejection.replay_share)


def check_ppo(params: Params, kind: PolicyKind) -> None:
    """Raise UserError if policy.backend is vllm-server and policy.server, its address, is empty."""
    if params.policy.backend == "vllm-server" and not params.policy.server:
        raise UserError(
            "policy.server: is empty; give the address of a vLLM server, such as http://127.0.0.1:8000."
        )


def check_rejection(params: Params, kind: PolicyKind) -> None:
    """Raise UserError if `check_ppo` does, or if demonstrations are to be mixed in but cannot be made.

    Only a policy that the cold start made has demonstrations.
    """
    check_ppo(params, kind)
    if kind != "scratch" and replayed_rows(params.rejection):
        raise UserError(
            "rejection.replay_share: this policy has no cold-start demonstrations to mix in; set it to 0."
        )


def check_critic(params: Params, kind: PolicyKind) -> None:
    """Accept all parameters: value pretraining can fail at its start only for unusable trajectories."""


CHECKS: Mapping[StageName, Callable[[Params, PolicyKind], None]] = {
    "warmup": check_ppo,
    "rejection": check_rejection,
    "critic": check_critic,
    "agentic": check_ppo,
}


def check_stages(params: Params, stages: Sequence[StageName] = STAGES) -> None:
    """Raise UserError for the first setting that one of `stages` refuses for the policy of `params`."""
    for stage in stages:
        CHECKS[stage](params, policy_kind(params))
    tasks = (params.warmup.steps * params.warmup.rollouts.tasks, params.rejection.rollouts.tasks)
    if set(stages) == set(STAGES) and max(tasks) < 2 and not params.warmup.solve_rate_share:
        # Both stages then sample the same task, so stage 3 would get trajectories of only one task.
        raise UserError(
            "warmup.rollouts.tasks: stages 1 and 2 sample a single task, and stage 3 cannot hold one out; "
            "raise it to 2 or more."
        )
