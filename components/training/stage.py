"""A training stage: its inputs, its result, and the folder from which a killed run continues.

The folder contains:

checkpoint/         the trained checkpoint: a Hugging Face folder with its manifest
trajectories/       folders step-NNNN with the trajectories that each step has trained on
sampling/           trajectories that no step has taken yet, while the stage runs
metrics.jsonl       one JSON object per step
state/              resumable states
stage.json          the StageResult; it is written last, so a stage with this file is finished
checkpoint-NNNN/    the weights after update NNNN, at which a time budget ended the stage
unfinished.json     the StageResult of such a stage; it continues from its states
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from components.core.errors import UserError
from components.core.files import MANIFEST, read_json
from components.core.param_kinds import KINDS
from components.core.param_types import TrainingStage
from components.core.params import Params
from components.core.progress import Progress
from components.core.records import FrozenModel
from components.core.stage_params import Rejection
from components.core.task import KernelTask, dataset_version, read_tasks
from components.judge.pool import JudgePool
from components.judge.verdict import require_standard_labels
from components.policy.checkpoint import Manifest, verify_checkpoint
from components.synthesis.headroom import repeat_by_headroom
from components.training.metrics_file import Figures

StageName = TrainingStage
STAGES: tuple[StageName, ...] = get_args(StageName)
RESULT = "stage.json"
UNFINISHED = "unfinished.json"
CHECKPOINT = "checkpoint"
TASKS = "tasks.parquet"


@dataclass(frozen=True)
class Stage:
    """Inputs of one training stage: parameters, folders, judge pool and limits."""

    name: StageName
    params: Params
    # Folder of the checkpoint that the stage starts from.
    actor: Path
    # Folder of the data set, which contains tasks.parquet.
    dataset: Path
    # Folder of the stage, to which it writes its state and its result.
    out: Path
    pool: JudgePool
    progress: Progress
    # Revision of this project's source.
    code: str
    # Folder of the checkpoint of stage 3; only stage 4 needs it, unless agentic.advantages needs no critic.
    critic: Path | None = None
    # Folders with the trajectories of earlier stages; only stage 3 needs them.
    trajectories: tuple[Path, ...] = ()
    # Folders of the finished stages before this one, whose states are deleted when this one has a state.
    earlier: tuple[Path, ...] = ()
    # The time.time() before which the stage has to end; None if there is no limit.
    deadline: float | None = None

    def tasks(self) -> list[KernelTask]:
        """Return the tasks of the training split.

        If data.weigh_by_headroom is set, tasks with much headroom (possible speedup) are repeated. Raises
        UserError if there is no training task.
        """
        path = self.dataset / TASKS
        tasks = [task for task in read_tasks(path) if task.split == "train"]
        if not tasks:
            raise UserError(f"{path}: no training task in it; build a data set with cuda-agent data build.")
        return repeat_by_headroom(tasks) if self.params.data.weigh_by_headroom else tasks


class StageResult(FrozenModel):
    """Result of a stage that is finished or that a time budget ended.

    The file stage.json contains its fields, or unfinished.json if a time budget ended the stage.
    """

    name: str
    # Path relative to the stage's folder.
    checkpoint: str
    digest: str
    # Mean reward before training or in its first steps; None for stage 3, which does not train a policy.
    reward_before: float | None
    # Mean reward after training or in its last steps; None for stage 3.
    reward_after: float | None
    seconds: float
    # Summary of the stage's metrics; figures that are NaN or infinite are left out.
    figures: Figures
    # Remark on a stage that did not run as intended, such as the reason of an early end; "" otherwise.
    stopped: str = ""
    # Updates that are done and updates in all, if a time budget ended the stage; None if it is finished.
    progress: tuple[int, int] | None = None


def load_unfinished(out: Path) -> StageResult | None:
    """Return the result in `out`/unfinished.json, after verifying its checkpoint; None if there is no file.

    A stage has this file if a time budget ended one of its runs. `out` is the stage's folder.
    """
    if not (out / UNFINISHED).is_file():
        return None
    result = StageResult.model_validate(read_json(out / UNFINISHED))
    verify_checkpoint(out / result.checkpoint)
    return result


def load_result(out: Path) -> StageResult | None:
    """Return the result of the stage with the folder `out`, after verifying its checkpoint.

    Returns None if the stage is not finished, or if its checkpoint was deleted. Raises UserError if
    stage.json is damaged.
    """
    if not (out / RESULT).is_file():
        return None
    try:
        result = StageResult.model_validate(read_json(out / RESULT))
    except ValueError as error:
        raise UserError(
            f"{out / RESULT}: not the result of a stage; delete the folder and run again."
        ) from error
    if not (out / result.checkpoint).exists():
        return None
    verify_checkpoint(out / result.checkpoint)
    return result


def finished_result(stage: Stage) -> StageResult | None:
    """Return the result in `stage.out`, or None if the stage is not finished.

    Raises UserError if it is the result of another stage or of other inputs. The comparison includes the
    stage's name, input checkpoint, data set, seed, device, and the parameters of the section with the stage's
    name, without throughput parameters.
    """
    if (result := load_result(stage.out)) is None:
        return None
    manifest = Manifest.model_validate(read_json(stage.out / result.checkpoint / MANIFEST))
    params = stage.params.model_dump(mode="json")
    pairs = {
        "stage": (manifest.stage, stage.name),
        "input": (manifest.parent, verify_checkpoint(stage.actor).digest),
        "data set": (manifest.dataset, dataset_version(stage.dataset / TASKS)),
        **{
            f"{stage.name}.{key}": (value, params[stage.name].get(key))
            for key, value in manifest.params.get(stage.name, {}).items()
            if KINDS.get(f"{stage.name}.{key}") != "throughput"
        },
        **{key: (manifest.params.get(key), params[key]) for key in ("seed", "device")},
    }
    different = [name for name, (finished, requested) in pairs.items() if finished != requested]
    if different:
        raise UserError(
            f"{stage.out}: holds the finished stage {manifest.stage} of another {', '.join(different)}; "
            "give another folder, or delete it first."
        )
    return result


def stages_of_run(params: Params) -> tuple[StageName, ...]:
    """Return the stages of a pipeline run, in order.

    They are night.stages, without value pretraining (`critic`) if agentic.advantages needs no critic.
    """
    return tuple(
        name for name in params.night.stages if name != "critic" or params.agentic.advantages == "critic"
    )


def check_critic_given(stage: Stage) -> None:
    """Raise UserError if agentic PPO lacks the critic that it needs, or was given one that it would ignore.

    Nothing is checked for other stages.
    """
    advantages = stage.params.agentic.advantages
    if stage.name != "agentic" or (advantages == "critic") == (stage.critic is not None):
        return
    if stage.critic is None:
        raise UserError(
            f"{stage.name}: stage 4 needs the critic of stage 3; run the stages from critic on, or set "
            "agentic.advantages to group or turns."
        )
    raise UserError(
        f"agentic.advantages: {advantages} uses no critic, but {stage.critic} was given; "
        "leave the critic out, or set it to critic."
    )


def replayed_rows(rejection: Rejection) -> int:
    """Return the number of cold-start demonstrations in a full batch of rejection fine-tuning."""
    return round(rejection.batch * rejection.replay_share)


def check_stages(params: Params, stages: Sequence[StageName] = ()) -> None:
    """Raise UserError, which names the parameter, if one of `stages` cannot run with `params`.

    If `stages` is empty, the stages of a pipeline run are checked. Parameters of sampling do not matter to a
    run of only value pretraining (`critic`), which samples nothing.
    """
    if not stages:
        _check_night(params)
    stages = stages or stages_of_run(params)
    _check_engine(params)
    require_standard_labels(params.sandbox, "training and promotion")
    if set(stages) != {"critic"} and params.policy.backend == "vllm-server" and not params.policy.servers:
        raise UserError(
            "policy.servers: is empty; give the addresses of vLLM servers, such as [http://127.0.0.1:8000]."
        )
    for name, ppo in (("warmup", params.warmup), ("agentic", params.agentic)):
        if name in stages and ppo.advantages != "critic" and ppo.rollouts.samples == 1:
            raise UserError(
                f"{name}.advantages: {ppo.advantages} compares the trajectories of a task, and "
                f"{name}.rollouts.samples is 1; raise it to 2 or more."
            )
        if name in stages and ppo.staleness and params.policy.sleep:
            raise UserError(
                f"{name}.staleness: {ppo.staleness} samples while the policy is trained, and policy.sleep "
                "takes the sampler's memory then; set one of them to 0 or false."
            )
        if name in stages and ppo.staleness and params.policy.backend == "vllm":
            raise UserError(
                f"{name}.staleness: {ppo.staleness} samples while the policy is trained, and vLLM in this "
                "process cannot change its weights then; set policy.backend to vllm-server, or the staleness "
                "to 0."
            )
    # Only a policy that the cold start made has demonstrations.
    made = ("scratch", "champion")
    if "rejection" in stages and params.policy.source not in made and replayed_rows(params.rejection):
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


def _check_night(params: Params) -> None:
    """Raise UserError, which names the parameter, if a pipeline run cannot have the stages night.stages."""
    chosen = params.night.stages
    needs_critic = params.agentic.advantages == "critic"
    faults = [
        (
            chosen != [name for name in STAGES if name in chosen],
            f"{chosen} is not in the order of the stages; give each at most once, in the order "
            f"{', '.join(STAGES)}",
        ),
        (
            not set(chosen) - {"critic"},
            "no stage trains the policy; add warmup, rejection or agentic",
        ),
        (
            needs_critic and "critic" in chosen and not {"warmup", "rejection"} & set(chosen),
            "critic learns from the trajectories of warmup or rejection; add one of them",
        ),
        (
            needs_critic and "agentic" in chosen and "critic" not in chosen,
            "agentic needs the critic of stage 3; add critic, or set agentic.advantages to group or turns",
        ),
    ]
    for is_found, why in faults:
        if is_found:
            raise UserError(f"night.stages: {why}.")


def _check_engine(params: Params) -> None:
    """Raise UserError, which names the parameter, if the training engine cannot run with `params`."""
    engine = params.engine
    if engine.zero_stage == 0 and engine.dtype == "bfloat16":
        raise UserError(
            "engine.zero_stage: 0 would accumulate gradients in bfloat16; "
            "set it to 1 or more, or engine.dtype to float32."
        )
    shared = engine.sequence_parallel
    if shared > 1 and engine.zero_stage == 0:
        raise UserError("engine.sequence_parallel: ZeRO 0 cannot use it; set engine.zero_stage to 1 or more.")
    if shared > 1 and engine.zero_stage < 3 and params.policy.backend == "transformers":
        # The sampler would share the trained model, whose attention expects a slice of each sequence.
        raise UserError(
            "engine.sequence_parallel: the backend transformers samples from the trained model itself; "
            "set engine.zero_stage to 3, or policy.backend to vllm-server."
        )
    trainers = params.pool.trainers
    if trainers % shared:
        raise UserError(
            f"pool.trainers: {trainers} ranks cannot be divided into groups of "
            f"engine.sequence_parallel {shared}; take a multiple of it."
        )
