"""How a stage becomes a Prefect task: cached by the digests of its inputs, checked against the files it left.

A task returns a small JSON record (paths relative to the home, digests, figures), never a model. Prefect keeps it under
the stage's key, so the same inputs give the same record at once. The record is only as good as its files: when they are
gone the task runs again; when they are damaged the run stops and says which file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import Task
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
from prefect.context import FlowRunContext
from prefect.states import Crashed, State, StateType

from components.core.errors import UserError
from components.core.files import digest_file, read_json, write_json
from components.core.progress import Progress
from components.judge.pool import JudgePool
from components.registry.tracking import MlflowRun
from flows.run_context import PipelineRun, verify_files

Record = dict[str, Any]
RECORD = "record.json"
"""In a stage's folder: its record, written when Prefect has it, so its presence means that both belong together."""

SAMPLING = ("device", "precision", "seed", "sandbox", "policy", "engine")
"""Sections of the parameters that everything depends on that samples a policy and judges what it wrote."""


class Context:
    """What the tasks of one night share. A plain class: Prefect looks into dataclasses among a task's arguments."""

    def __init__(
        self, night: PipelineRun, progress: Progress, pool: JudgePool, tracking: MlflowRun, dataset: Record
    ):
        self.night = night
        self.progress = progress
        self.pool = pool
        self.tracking = tracking
        self.dataset = dataset

    @property
    def dataset_folder(self) -> Path:
        return self.night.home / self.dataset["folder"]

    def step(
        self,
        work: Task[..., Any],
        stage: str,
        sections: tuple[str, ...],
        upstream: dict[str, str],
        call: Callable[[Path], Record],
        *,
        name: str = "",
        title: str = "",
    ) -> Record:
        """Run `call` in the stage's folder as Prefect task `work`, or take its record from the cache.

        Its result depends on these `sections` of the parameters, the `upstream` digests, the data set and the code.
        `name` goes into the key and names the folder; people see `title`.
        """
        name = name or stage
        title = title or name
        key = self.night.stage_key(stage, name, sections, upstream | {"dataset": self.dataset["version"]})
        folder = self.night.stage_folder(name, key)
        task = work.with_options(
            name=title, task_run_name=title, cache_key_fn=lambda *_: key, refresh_cache=not self._kept(folder)
        )
        state: Any = task(folder, call, return_state=True)
        record: Record = state.result()
        cached = state.name == "Cached"
        if cached:
            check(self.night.home, record)
            self.progress.update(title, 1, 1)
        else:
            write_json(folder / RECORD, record)
        self.tracking.stage(
            title,
            key,
            folder,
            {figure: value for figure, value in record.items() if figure != "figures"} | record["figures"],
        )
        return record | {"cached": cached, "key": key, "folder": f"stages/{folder.name}"}

    def _kept(self, folder: Path) -> bool:
        """Whether what the stage made last is there. Prefect's cache outlives the folder: after that was deleted, it knows a record
        of files that another night, killed on its way, has only begun to make."""
        if not (folder / RECORD).is_file():
            return False
        record: Record = read_json(folder / RECORD)
        return (self.night.home / record["checkpoint" if "checkpoint" in record else "results"]).exists()


def check(home: Path, record: Record) -> None:
    """See that the files of a cached record are what they were."""
    if "checkpoint" in record:
        found = verify_files(home / record["checkpoint"])
        if found != record["digest"]:
            raise UserError(
                f"{home / record['checkpoint']}: holds another checkpoint than the one this run made; delete the folder and run again."
            )
    elif digest_file(home / record["results"]) != record["digest"]:
        raise UserError(
            f"{home / record['results']}: is not what this run measured; delete its folder and run again."
        )


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
