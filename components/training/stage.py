"""A training stage: its inputs, its result, and the folder from which a killed run continues.

checkpoint/         the result: a Hugging Face folder with its manifest
trajectories/       step-NNNN, every trajectory that the stage sampled
metrics.jsonl       one JSON object a step
state/              resumable states
stage.json          the result's figures; written last, so its presence means that the stage is finished
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from components.core.config import Params
from components.core.errors import UserError
from components.core.files import MANIFEST, read_json
from components.core.progress import Progress
from components.core.task import KernelTask, dataset_version, read_tasks
from components.judge.pool import JudgePool
from components.policy.checkpoint import Manifest, verify_checkpoint
from components.synthesis.headroom import repeat_by_headroom
from components.training.metrics_file import Figures

StageName = Literal["warmup", "rejection", "critic", "agentic"]
STAGES: tuple[StageName, ...] = get_args(StageName)
RESULT = "stage.json"
CHECKPOINT = "checkpoint"
TASKS = "tasks.parquet"


@dataclass(frozen=True)
class Stage:
    """The inputs of one training stage."""

    name: StageName
    params: Params
    actor: Path
    """Checkpoint that the stage starts from."""
    dataset: Path
    """Folder with tasks.parquet."""
    out: Path
    """Folder of the stage."""
    pool: JudgePool
    progress: Progress
    code: str
    """Revision of this project's source."""
    critic: Path | None = None
    """Checkpoint of stage 3, for stage 4."""
    trajectories: tuple[Path, ...] = ()
    """Folders of earlier stages' trajectories, for stage 3."""

    def tasks(self) -> list[KernelTask]:
        """Return the tasks of the training split.

        With data.weigh_by_headroom, tasks with much headroom appear several times.
        """
        path = self.dataset / TASKS
        tasks = [task for task in read_tasks(path) if task.split == "train"]
        if not tasks:
            raise UserError(f"{path}: no training task in it; build a data set with cuda-agent data build.")
        return repeat_by_headroom(tasks) if self.params.data.weigh_by_headroom else tasks


class StageResult(BaseModel):
    """The result of a finished stage, as stage.json holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    checkpoint: str
    """Path relative to the stage's folder."""
    digest: str
    reward_before: float | None
    """Mean reward of the first steps; None for stage 3, which changes no policy."""
    reward_after: float | None
    seconds: float
    figures: Figures
    """Summary of the metrics; one that has no value is absent."""
    stopped: str = ""
    """Why the stage ended early; empty when it did not."""


def load_result(out: Path) -> StageResult | None:
    """Return the result of a finished stage after verifying its checkpoint.

    None when the stage is not finished, or when its checkpoint was deleted since.
    """
    if not (out / RESULT).is_file():
        return None
    try:
        result = StageResult.model_validate(read_json(out / RESULT))
    except (ValueError, ValidationError) as error:
        raise UserError(
            f"{out / RESULT}: not the result of a stage; delete the folder and run again."
        ) from error
    if not (out / result.checkpoint).exists():
        return None
    verify_checkpoint(out / result.checkpoint)
    return result


def check_finished(stage: Stage) -> None:
    """Raise UserError when `stage.out` holds the result of another stage or of other inputs.

    Compared are the stage's name, input checkpoint, data set, section of the parameters, seed and device.
    """
    if (result := load_result(stage.out)) is None:
        return
    manifest = Manifest.model_validate(read_json(stage.out / result.checkpoint / MANIFEST))
    params = stage.params.model_dump(mode="json")
    pairs = {
        "stage": (manifest.stage, stage.name),
        "input": (manifest.parent, verify_checkpoint(stage.actor).digest),
        "data set": (manifest.dataset, dataset_version(stage.dataset / TASKS)),
    }
    pairs |= {
        f"{stage.name}.{key}": (value, params[stage.name].get(key))
        for key, value in manifest.params.get(stage.name, {}).items()
    }
    pairs |= {key: (manifest.params.get(key), params[key]) for key in ("seed", "device")}
    different = [name for name, (finished, requested) in pairs.items() if finished != requested]
    if different:
        raise UserError(
            f"{stage.out}: holds the finished stage {manifest.stage} of another {', '.join(different)}; "
            "give another folder, or delete it first."
        )
