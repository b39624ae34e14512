"""A training stage: its inputs, its result, and the folder from which a killed run continues.

The folder contains:

begun.json          the inputs with which the stage was begun; it continues with no others
checkpoint/         the trained checkpoint: a Hugging Face folder with its manifest
trajectories/       folders step-NNNN with the trajectories that each step has trained on
sampling/           trajectories that no step has taken yet, while the stage runs
task_checks.json    which tasks the judge can measure on this device, and their shapes
metrics.jsonl       one JSON object per step
state/              resumable states
stage.json          the StageResult; it is written last, so a stage with this file is finished
checkpoint-NNNN/    the weights after update NNNN, at which a time budget ended the stage
unfinished.json     the StageResult of such a stage; it continues from its states
corpus/             tokenised conversations of a cold start
published/          the newest weights, if they are sent to vLLM over the disk
logs/               outputs and errors of the ranks, if there are several
ray/                files of Ray Train, if the ranks run on a Ray cluster
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from components.core.config import KINDS
from components.core.errors import UserError
from components.core.files import MANIFEST, digest_json, read_json, write_json
from components.core.params import Params
from components.core.progress import Progress
from components.core.records import FrozenModel, TrainingStage, read_as
from components.core.task import KernelTask, dataset_version, read_tasks
from components.judge.pool.local_pool import JudgePool
from components.policy.checkpoint import Manifest, verify_checkpoint
from components.training.metrics import Figures

# Name of a stage: the cold start of a language model, or one of the four stages of a pipeline run.
StageName = Literal["coldstart", TrainingStage]
STAGES: tuple[TrainingStage, ...] = get_args(TrainingStage)
RESULT = "stage.json"
# Inputs with which the stage was begun.
BEGUN = "begun.json"
UNFINISHED = "unfinished.json"
CHECKPOINT = "checkpoint"
SAMPLING = "sampling"
TASK_CHECKS = "task_checks.json"
TASKS = "tasks.parquet"
# Largest number of times that a task occurs in one pass of training.
MAX_REPEATS = 4


@dataclass(frozen=True)
class Stage:
    """Inputs of one training stage: parameters, folders, judge pool and limits.

    `actor` is the checkpoint that the stage starts from, `dataset` is the folder of tasks.parquet, and the
    stage writes its state and its result to `out`. `pool` measures the kernels of the sampled trajectories,
    and `progress` is told which steps are done. `code` is the revision of this project's source. `critic` is
    the checkpoint of stage 3; only stage 4 needs it, unless agentic.advantages needs no critic.
    `trajectories` are the folders with the trajectories of earlier stages; only stage 3 needs them. `earlier`
    are the folders of the finished stages before this one, whose states are deleted when this one has a
    state. `deadline` is the time (seconds of Unix time) before which the stage has to end; None if there is
    no limit.
    """

    name: StageName
    params: Params
    actor: Path
    dataset: Path
    out: Path
    pool: JudgePool
    progress: Progress
    code: str
    critic: Path | None = None
    trajectories: tuple[Path, ...] = ()
    earlier: tuple[Path, ...] = ()
    deadline: float | None = None

    def tasks(self) -> list[KernelTask]:
        """Return the kernel tasks of the training split of the stage's data set.

        A task is a PyTorch module that the policy has to make faster. If data.weigh_by_headroom is set, a
        task occurs more often the larger its headroom, the possible speed-up, is (`repeat_by_headroom`).
        Raises UserError if there is no training task.
        """
        path = self.dataset / TASKS
        tasks = [task for task in read_tasks(path) if task.split == "train"]
        if not tasks:
            raise UserError(f"{path}: no training task in it; build a data set with cuda-agent data build.")
        return repeat_by_headroom(tasks) if self.params.data.weigh_by_headroom else tasks


def repeat_by_headroom(tasks: Iterable[KernelTask]) -> list[KernelTask]:
    """Return the tasks of one pass of training, with repetitions according to their headroom.

    Headroom is the speed-up that is possible for a task. A task occurs once, and once more for each whole
    doubling of its headroom above 1, but at most MAX_REPEATS times. A task with unknown headroom occurs once.
    The repetitions of a task follow each other.
    """
    return [
        task
        for task in tasks
        for _ in range(min(MAX_REPEATS, 1 + int(math.log2(max(task.evidence.get("headroom", 1.0), 1.0)))))
    ]


class StageResult(FrozenModel):
    """Result of a stage that is finished or that a time budget ended.

    The file stage.json contains its fields, or unfinished.json if a time budget ended the stage. `checkpoint`
    is a path relative to the stage's folder, and `digest` is that of the checkpoint. The rewards are means
    before training or in its first steps (`reward_before`), and after training or in its last steps
    (`reward_after`); they are None for stages that sample nothing. `seconds` is the time that the stage took
    in all. `figures` summarises the stage's metrics, without those that are NaN or infinite. `stopped` is a
    remark on a stage that did not run as intended, such as the reason of an early end, and "" otherwise.
    `progress` has the number of updates that are done and of updates in all if a time budget ended the stage,
    and is None if it is finished.
    """

    name: str
    checkpoint: str
    digest: str
    reward_before: float | None
    reward_after: float | None
    seconds: float
    figures: Figures
    stopped: str = ""
    progress: tuple[int, int] | None = None


def load_result(out: Path, file: str = RESULT) -> StageResult | None:
    """Return the result of the stage with the folder `out`, after verifying its checkpoint.

    `file` is RESULT, or UNFINISHED for the result of a stage that a time budget ended. Returns None if there
    is no such file, or if the checkpoint that it names was deleted. Raises UserError if the file or the
    checkpoint is damaged.
    """
    if not (out / file).is_file():
        return None
    result = read_as(StageResult, out / file, "delete the folder and run again")
    if not (out / result.checkpoint).exists():
        return None
    verify_checkpoint(out / result.checkpoint)
    return result


def finished_result(stage: Stage) -> StageResult | None:
    """Return the result in `stage.out`, or None if the stage is not finished.

    Raises UserError if the result is damaged, or if it is that of another stage or of other inputs. The
    comparison includes the stage's name, input checkpoint, data set, seed, device, reward, and the parameters
    of the section with the stage's name, without throughput parameters, which change results at most by
    rounding.
    """
    if (result := load_result(stage.out)) is None:
        return None
    manifest = Manifest.model_validate(read_json(stage.out / result.checkpoint / MANIFEST))
    _require_equal(
        stage,
        _inputs(stage.name, manifest.stage, manifest.parent, manifest.dataset, manifest.params),
        f"finished stage {manifest.stage}",
    )
    return result


def claim(stage: Stage) -> None:
    """Write the inputs of the stage to BEGUN in `stage.out`, or compare them with those of an earlier call.

    The folder of an interrupted stage continues only with equal inputs, which are those that
    `finished_result` compares. The parameters of the stage's section may differ, because a stage that failed
    asks for another learning rate, for instance. Raises UserError, which names the inputs that differ, or if
    the data set is missing.
    """
    file = stage.out / BEGUN
    if file.is_file():
        _require_equal(stage, read_json(file), f"interrupted stage {stage.name}")
    else:
        write_json(file, {name: value for name, value in _requested(stage).items() if "." not in name})


def _requested(stage: Stage) -> dict[str, Any]:
    return _inputs(
        stage.name,
        stage.name,
        verify_checkpoint(stage.actor, stage.params.device).digest,
        dataset_version(stage.dataset / TASKS),
        stage.params.model_dump(mode="json"),
    )


def _inputs(
    section: str, name: str, parent: str | None, dataset: str, params: dict[str, Any]
) -> dict[str, Any]:
    """Return what the results of a stage depend on, by names for people.

    `section` is the section of the stage's parameters in `params`, `name` is the stage's name, `parent` the
    digest of its input checkpoint, and `dataset` the version of its data set.
    """
    return {
        "stage": name,
        "input": parent,
        "data set": dataset,
        **{
            f"{section}.{key}": value
            for key, value in params.get(section, {}).items()
            if KINDS.get(f"{section}.{key}") != "throughput"
        },
        **{key: params.get(key) for key in ("seed", "device", "reward")},
    }


def _require_equal(stage: Stage, recorded: dict[str, Any], what: str) -> None:
    """Raise UserError if an input in `recorded` is not that of `stage`; `what` names the recorded stage."""
    requested = _requested(stage)
    different = [name for name, value in recorded.items() if value != requested.get(name)]
    if different:
        raise UserError(
            f"{stage.out}: holds the {what} of another {', '.join(different)}; "
            "give another folder, or delete it first."
        )


def derived_seed(*parts: object) -> int:
    """Return a seed below 2^60 that depends only on the texts of `parts` and their order.

    So a step that is repeated draws the same random numbers.
    """
    return int(digest_json([str(part) for part in parts])[:15], 16)
