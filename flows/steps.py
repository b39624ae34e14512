"""A stage as a Prefect task: cached by the digests of its inputs, checked against the files that it left.

A task returns a small JSON record (paths relative to the home, digests, figures), never a model. Prefect
keeps it under the stage's key, so the same inputs give the same record at once. When the files of a record
are gone the task runs again; when they are damaged the run stops and names the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prefect import task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.states import Crashed

from components.core.errors import UserError
from components.core.files import digest_file, read_json, verify_files, write_json
from components.core.progress import Progress
from components.core.records import FrozenModel
from components.judge.pool import JudgePool
from components.registry.tracking import MlflowRun
from flows.run_context import PipelineRun

RECORD = "record.json"
"""A stage's record in its folder. Written after Prefect has cached the record, so both exist when it does."""

SAMPLING = ("device", "precision", "seed", "sandbox", "policy", "engine")
"""Sections of the parameters that every stage depends on which samples a policy and has its kernels judged.
"""


class DatasetRecord(FrozenModel):
    """A version of the data set; `folder` is relative to the home."""

    version: str
    folder: str
    figures: dict[str, Any]
    cached: bool
    seconds: float


class StageRecord(FrozenModel):
    """What a stage hands on. `Context.stage` fills in the last three; the others are cached."""

    digest: str
    figures: dict[str, Any]
    cached: bool = False
    key: str = ""
    """Digest of everything that the result depends on."""
    folder: str = ""
    """The stage's folder, relative to the home."""

    def cacheable(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"cached", "key", "folder"})


class CheckpointRecord(StageRecord):
    """A checkpoint, as a path relative to the home, and what training it gained."""

    checkpoint: str
    reward_before: float | None
    reward_after: float | None
    seconds: float
    stopped: str
    """Why the stage ended before its last step; empty when it did not."""

    def output(self, home: Path) -> Path:
        return home / self.checkpoint

    def verify(self, home: Path) -> None:
        """Raise UserError unless the checkpoint is the one that the stage made."""
        if verify_files(self.output(home)) != self.digest:
            raise UserError(
                f"{self.output(home)}: holds another checkpoint than the one this run made; "
                "delete the folder and run again."
            )


class EvaluationRecord(StageRecord):
    """The results file of an evaluation, as a path relative to the home; `digest` is that of the file."""

    results: str

    def output(self, home: Path) -> Path:
        return home / self.results

    def verify(self, home: Path) -> None:
        """Raise UserError unless the results are those that the stage measured."""
        if digest_file(self.output(home)) != self.digest:
            raise UserError(
                f"{self.output(home)}: is not what this run measured; delete its folder and run again."
            )


R = TypeVar("R", CheckpointRecord, EvaluationRecord)


@task(persist_result=True, result_serializer="json")
def run_in_folder(folder: Path, work: Callable[[Path], R]) -> dict[str, Any]:
    """Run one stage in its folder. Every stage runs this task under its own name and cache key."""
    return work(folder).cacheable()


class Context:
    """What the tasks of one run share.

    Not a dataclass: Prefect would search it for futures at every task call.
    """

    def __init__(
        self,
        run: PipelineRun,
        progress: Progress,
        pool: JudgePool,
        tracking: MlflowRun,
        dataset: DatasetRecord,
    ):
        self.run = run
        self.progress = progress
        self.pool = pool
        self.tracking = tracking
        self.dataset = dataset

    @property
    def dataset_folder(self) -> Path:
        return self.run.home / self.dataset.folder

    def stage(
        self,
        stage: str,
        sections: tuple[str, ...],
        upstream: dict[str, str],
        work: Callable[[Path], R],
        record_type: type[R],
        *,
        name: str = "",
        title: str = "",
    ) -> R:
        """Run `work` in the stage's folder as a Prefect task, or return its cached record.

        The result depends on these `sections` of the parameters, the `upstream` digests, the data set and the
        code. `name` goes into the key and names the folder; people see `title`. Both default to the stage's
        name.
        """
        name = name or stage
        title = title or name
        home = self.run.home
        key = self.run.stage_key(stage, name, sections, upstream | {"dataset": self.dataset.version})
        folder = self.run.stage_folder(name, key)
        # Prefect's cache outlives the folder. After the folder was deleted, the cached record would name
        # files that
        # another run, killed on its way, has only begun to make: so the last file that a stage makes must
        # exist.
        file = folder / RECORD
        is_kept = file.is_file() and record_type.model_validate(read_json(file)).output(home).exists()
        stage_task = run_in_folder.with_options(
            name=title, task_run_name=title, cache_key_fn=lambda *_: key, refresh_cache=not is_kept
        )
        state: State[Any] = stage_task(folder, work, return_state=True)
        record = record_type.model_validate(state.result())
        cached = state.name == "Cached"
        if cached:
            record.verify(home)
            self.progress.update(title, 1, 1)
        else:
            write_json(file, record.cacheable())
        figures = record.model_dump(exclude={"figures", "cached", "key", "folder"}) | record.figures
        self.tracking.stage(title, key, folder, figures)
        return record.model_copy(update={"cached": cached, "key": key, "folder": f"stages/{folder.name}"})


def mark_crashed_runs(tag: str) -> None:
    """Mark other flow runs with this tag that are RUNNING or PENDING, and their tasks, as Crashed.

    They are earlier attempts whose process was killed: no process is left to report their end.
    """
    context = FlowRunContext.get()
    current = context.flow_run.id if context is not None and context.flow_run is not None else None
    crashed: State[None] = Crashed(message="killed; continued by a later attempt")
    unfinished = [StateType.RUNNING, StateType.PENDING]
    with get_client(sync_client=True) as client:
        for flow_run in client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                tags=FlowRunFilterTags(all_=[tag]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=unfinished)),
            )
        ):
            if flow_run.id == current:
                continue
            for task_run in client.read_task_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])),
                task_run_filter=TaskRunFilter(
                    state=TaskRunFilterState(type=TaskRunFilterStateType(any_=unfinished))
                ),
            ):
                client.set_task_run_state(task_run.id, crashed, force=True)
            client.set_flow_run_state(flow_run.id, crashed, force=True)
