"""A stage: a function from digests to digests, in a folder of its own that a killed run continues from.

checkpoint/         the result: a Hugging Face folder with its manifest
trajectories/       step-NNNN, everything that was sampled
metrics.jsonl       one object a step
state/              resumable states
stage.json          the result's figures; written last, so its presence means done
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from components.core.config import Params
from components.core.errors import UserError
from components.core.files import MANIFEST, atomic_write, read_json, write_json
from components.core.progress import Progress
from components.core.task import KernelTask, dataset_version, read_tasks
from components.judge.pool import JudgePool
from components.policy.checkpoint import Manifest, save_checkpoint, verify_checkpoint
from components.synthesis.headroom import repeat_by_headroom

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from components.training.engine import World

Figures = dict[str, float]
RESULT = "stage.json"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Stage:
    """Everything that a stage is made from."""

    name: str
    params: Params
    actor: Path
    """Checkpoint that the stage starts from."""
    dataset: Path
    """Folder with tasks.parquet."""
    out: Path
    pool: JudgePool
    progress: Progress
    code: str
    """Revision of this project's source."""
    critic: Path | None = None
    """Checkpoint of stage 3, for stage 4."""
    trajectories: tuple[Path, ...] = ()
    """Folders of earlier stages' trajectories, for stage 3."""

    def tasks(self) -> list[KernelTask]:
        """The training tasks, those with headroom more often where data.weigh_by_headroom says so; held-out ones are never seen."""
        tasks = [task for task in read_tasks(self.dataset / "tasks.parquet") if task.split == "train"]
        if not tasks:
            raise UserError(
                f"{self.dataset / 'tasks.parquet'}: no training task in it; build a data set with cuda-agent data build."
            )
        return repeat_by_headroom(tasks) if self.params.data.weigh_by_headroom else tasks


class StageResult(BaseModel):
    """What a stage made. Rewards are None for a stage that changes no policy; figures that have no value are absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    checkpoint: str
    """Relative to the stage's folder."""
    digest: str
    reward_before: float | None
    reward_after: float | None
    seconds: float
    figures: Figures
    stopped: str = ""
    """Why the stage ended early; empty when it did not."""


def load_result(out: Path) -> StageResult | None:
    """The result of a finished stage, its checkpoint verified; None when the stage is not finished, or its checkpoint was deleted since."""
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
    """UserError when `stage.out` holds the result of another stage, or of this one from another input, data set or parameters of its own."""
    if not (stage.out / RESULT).is_file() or (result := load_result(stage.out)) is None:
        return
    made = Manifest.model_validate(read_json(stage.out / result.checkpoint / MANIFEST))  # verified above
    asked = stage.params.model_dump(mode="json")
    own = {"stage": (made.stage, stage.name), "input": (made.parent, verify_checkpoint(stage.actor).digest)}
    own |= {"data set": (made.dataset, dataset_version(stage.dataset / "tasks.parquet"))}
    own |= {
        f"{stage.name}.{key}": (value, asked[stage.name].get(key))
        for key, value in made.params.get(stage.name, {}).items()
    }
    own |= {key: (made.params.get(key), asked[key]) for key in ("seed", "device")}
    different = [name for name, (there, wanted) in own.items() if there != wanted]
    if different:
        raise UserError(
            f"{stage.out}: holds the finished stage {made.stage} of another {', '.join(different)}; give another folder, or delete it first."
        )


def finish(
    stage: Stage,
    world: World,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rewards: tuple[float | None, float | None],
    figures: Figures,
    seconds: float,
    stopped: str = "",
    extra: dict[str, dict[str, torch.Tensor]] | None = None,
) -> StageResult:
    """Write the checkpoint, then stage.json, on rank 0; every rank returns the result.

    Figures must be the same after a resume (no times), since the manifest is part of what names the checkpoint.
    """
    figures = {name: value for name, value in figures.items() if math.isfinite(value)}
    if world.rank == 0:
        manifest = save_checkpoint(
            stage.out / CHECKPOINT,
            model,
            tokenizer,
            stage=stage.name,
            parent=verify_checkpoint(stage.actor).digest,
            dataset=dataset_version(stage.dataset / "tasks.parquet"),
            code=stage.code,
            params=stage.params.model_dump(mode="json", exclude={"home"}),
            figures=figures,
            extra=extra or {},
        )
        result = StageResult(
            name=stage.name,
            checkpoint=CHECKPOINT,
            digest=manifest.digest,
            reward_before=rewards[0],
            reward_after=rewards[1],
            seconds=seconds,
            figures=figures,
            stopped=stopped,
        )
        write_json(stage.out / RESULT, result.model_dump())
    world.barrier()
    return StageResult.model_validate(read_json(stage.out / RESULT))


class Metrics:
    """`metrics.jsonl`: one object a step. A resumed stage drops what lies after its state and writes it again."""

    def __init__(self, out: Path, world: World, *, start: int):
        self.path = out / "metrics.jsonl"
        self.writes = world.rank == 0
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        self.records: list[dict[str, float | None]] = [
            record for record in map(json.loads, lines) if record["step"] < start
        ]

    def write(self, step: int, figures: Figures) -> None:
        """Append a step; a figure without a value (NaN) is null."""
        self.records.append(
            {"step": step}
            | {name: float(value) if math.isfinite(value) else None for name, value in figures.items()}
        )
        if self.writes:
            atomic_write(self.path, "".join(json.dumps(record) + "\n" for record in self.records))

    def mean(self, name: str, records: slice) -> float:
        """Mean of a figure over some steps; NaN when none has it."""
        values = [value for record in self.records[records] if (value := record.get(name)) is not None]
        return math.fsum(values) / len(values) if values else math.nan
