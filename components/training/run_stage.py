"""Run a training stage by its name, and refuse parameters with which a stage cannot run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.agent.rewards import load_reward
from components.core.errors import StageFailed, refuse
from components.core.params import Params
from components.core.records import TrainingStage
from components.judge.verdict import require_standard_labels
from components.policy.vllm.own_servers import check_own_servers
from components.training.stage import STAGES, Stage, StageName, StageResult, claim, finished_result

if TYPE_CHECKING:
    from components.training.rollouts import RunEpisode

# Pattern of torch's error messages when a collective fails because another process has ended.
LOST = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer", re.IGNORECASE)


class RankLost(StageFailed):
    """Error of a rank that lost the connection to another rank; the message is one sentence.

    `launcher.raise_first_error` ignores this error, because it only follows from the end of the other rank.
    """


def run_stage(stage: Stage, episode: RunEpisode | None = None) -> StageResult:
    """Run the stage that `stage.name` names, and return its result; every rank calls this function.

    If the stage is finished already, its stored result is returned. `episode` is the function that samples
    one trajectory; None is the agent loop (`run_episode`), and tests give another one. If this rank raises an
    error, the error is also written to the file that the environment variable TORCHELASTIC_ERROR_FILE names,
    which torchrun, `launcher` and `ray_launcher` set. Raises UserError for inputs with which the stage cannot
    run, and StageFailed if training fails. The states and trajectories in `stage.out` are complete even after
    an error, and the next call continues from them.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        check_stages(stage.params, (stage.name,))
        check_critic_given(stage)
        if result := finished_result(stage):
            return result
        claim(stage)
        return _run(stage, episode)
    except Exception as error:
        get_error_handler().record_exception(error)
        raise


def _run(stage: Stage, episode: RunEpisode | None) -> StageResult:
    # Imported here because the imports take seconds, and a pipeline run does not need them if all of its
    # stages are cached.
    from components.agent.episode import run_episode
    from components.training import critic, fine_tuning, ppo, rejection
    from components.training.engine import NotFinite

    episode = episode or run_episode
    try:
        stages: dict[StageName, Callable[[], StageResult]] = {
            "coldstart": lambda: fine_tuning.run(stage),
            "warmup": lambda: ppo.run_ppo(stage, stage.params.warmup, stage.actor, episode),
            "rejection": lambda: rejection.run(stage, episode),
            "critic": lambda: critic.run(stage),
            "agentic": lambda: ppo.agentic(stage, episode),
        }
        return stages[stage.name]()
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


def stages_of_run(params: Params) -> tuple[TrainingStage, ...]:
    """Return the names of the training stages of a pipeline run, in order.

    They are those that the parameter night.stages lists, without value pretraining (`critic`) if
    agentic.advantages needs no critic.
    """
    return tuple(
        name for name in params.night.stages if name != "critic" or params.agentic.advantages == "critic"
    )


def check_critic_given(stage: Stage) -> None:
    """Raise UserError if agentic PPO lacks the critic that it needs, or was given one that it would ignore.

    It needs `stage.critic` if and only if the parameter agentic.advantages is `critic`. Nothing is checked
    for other stages.
    """
    advantages = stage.params.agentic.advantages
    if stage.name == "agentic":
        refuse(
            (
                advantages == "critic" and stage.critic is None,
                "agentic: stage 4 needs the critic of stage 3; run the stages from critic on, or set "
                "agentic.advantages to group.",
            ),
            (
                advantages != "critic" and stage.critic is not None,
                f"agentic.advantages: {advantages} uses no critic, but {stage.critic} was given; "
                "leave the critic out, or set it to critic.",
            ),
        )


def check_stages(params: Params, stages: Sequence[StageName] = ()) -> None:
    """Raise UserError, which names the parameter, if one of `stages` cannot run with `params`.

    If `stages` is empty, the stages of a pipeline run are checked. Whether vLLM servers can be started is not
    checked for the cold start and value pretraining (`critic`), which sample nothing.
    """
    if not stages:
        _check_night(params)
    stages = stages or stages_of_run(params)
    require_standard_labels(params.sandbox, "training and promotion")
    load_reward(params.reward)
    policy, demonstrations = params.policy, params.coldstart.demonstrations
    ppos = [
        (name, ppo)
        for name, ppo in (("warmup", params.warmup), ("agentic", params.agentic))
        if name in stages
    ]
    tasks = (params.warmup.steps * params.warmup.rollouts.tasks, params.rejection.rollouts.tasks)
    if set(stages) - {"coldstart", "critic"}:
        check_own_servers(params)
    refuse(
        *_engine_faults(params),
        *(
            (
                ppo.advantages != "critic" and ppo.rollouts.samples == 1,
                f"{name}.advantages: {ppo.advantages} compares the trajectories of a task, and "
                f"{name}.rollouts.samples is 1; raise it to 2 or more.",
            )
            for name, ppo in ppos
        ),
        *(
            (
                ppo.staleness and policy.sleep,
                f"{name}.staleness: {ppo.staleness} samples while the policy is trained, and policy.sleep "
                "takes the sampler's memory then; set one of them to 0 or false.",
            )
            for name, ppo in ppos
        ),
        (
            # Only a policy that a cold start made has demonstrations.
            "rejection" in stages
            and policy.source not in ("scratch", "champion")
            and params.rejection.replayed
            and not params.coldstart.language_model,
            "rejection.replay_share: this policy has no cold-start demonstrations to mix in; set it to 0, or "
            "coldstart.language_model to true.",
        ),
        (
            isinstance(demonstrations, str) and not any(Path(demonstrations).rglob("trajectories.jsonl")),
            f"coldstart.demonstrations: {demonstrations} holds no trajectories.jsonl; give the folder of a "
            "stage that sampled, or a number.",
        ),
        (
            # Both stages then sample the same task, so stage 3 would get trajectories of only one task.
            set(stages) == set(STAGES) and max(tasks) < 2,
            "warmup.rollouts.tasks: stages 1 and 2 sample a single task, and stage 3 cannot hold one out; "
            "raise it to 2 or more.",
        ),
    )


def _check_night(params: Params) -> None:
    """Raise UserError unless a pipeline run can train the stages that the parameter night.stages lists.

    They must be in the order of `STAGES` and one of them must train the policy. A stage must not need what
    neither a listed stage nor the first policy, with which the run starts, provides, such as a critic. The
    error names the parameter to change.
    """
    chosen, policy = params.night.stages, params.policy
    first, demonstrations = (
        policy.base if policy.source == "champion" else policy.source,
        params.coldstart.demonstrations,
    )
    needs_critic = params.agentic.advantages == "critic"
    refuse(
        (
            first == "scratch" and isinstance(demonstrations, str),
            "coldstart.demonstrations: a policy from scratch learns from demonstrations; give their number.",
        ),
        (
            chosen != [name for name in STAGES if name in chosen],
            f"night.stages: {chosen} is not in the order of the stages; give each at most once, in the "
            f"order {', '.join(STAGES)}.",
        ),
        (
            not set(chosen) - {"critic"},
            "night.stages: no stage trains the policy; add warmup, rejection or agentic.",
        ),
        (
            needs_critic and "critic" in chosen and not {"warmup", "rejection"} & set(chosen),
            "night.stages: critic learns from the trajectories of warmup or rejection; add one of them.",
        ),
        (
            needs_critic and "agentic" in chosen and "critic" not in chosen,
            "night.stages: agentic needs the critic of stage 3; add critic, or set agentic.advantages to "
            "group.",
        ),
    )


def _engine_faults(params: Params) -> list[tuple[object, str]]:
    """Return the possible faults of the parameters of the training engine.

    Each is a pair of whether the fault is found in `params` and the error message, as `refuse` takes them.
    """
    engine, trainers = params.engine, params.pool.trainers
    shared = engine.sequence_parallel
    return [
        (
            engine.zero_stage == 0 and engine.dtype == "bfloat16",
            "engine.zero_stage: 0 would accumulate gradients in bfloat16; "
            "set it to 1 or more, or engine.dtype to float32.",
        ),
        (
            shared > 1 and engine.zero_stage == 0,
            "engine.sequence_parallel: ZeRO 0 cannot use it; set engine.zero_stage to 1 or more.",
        ),
        (
            # The sampler would share the trained model, whose attention expects a slice of each sequence.
            shared > 1 and engine.zero_stage < 3 and params.policy.backend == "transformers",
            "engine.sequence_parallel: the backend transformers samples from the trained model itself; "
            "set engine.zero_stage to 3, or policy.backend to vllm-server.",
        ),
        (
            engine.compile
            and (
                shared > 1 or engine.zero_stage == 3 or engine.activation_checkpointing or engine.mlp_tokens
            ),
            "engine.compile: it needs sequence_parallel 1, zero_stage below 3, activation_checkpointing "
            "false and mlp_tokens 0; set these, or compile to false.",
        ),
        (
            engine.compile and (params.device == "cpu" or engine.dtype == "float32"),
            "engine.compile: it needs device cuda and engine.dtype bfloat16; set these, or compile to false.",
        ),
        (
            trainers % shared,
            f"pool.trainers: {trainers} ranks cannot be divided into groups of "
            f"engine.sequence_parallel {shared}; take a multiple of it.",
        ),
    ]
