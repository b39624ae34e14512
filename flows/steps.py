"""The execution of a stage as a Prefect task, whose result is cached by the digests of its inputs.

A stage is a step of the pipeline with its own folder. A task returns a small JSON record (paths relative to
the home, the folder of all runs; digests; figures), never a model. Prefect stores the record under the
stage's key, so a stage with the same inputs returns the stored record without running. If the files of a
stored record are missing, the task runs again. If they are damaged, UserError names the file.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from prefect import get_run_logger, runtime, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, TaskRunFilter
from prefect.client.schemas.objects import State, StateType
from prefect.states import Crashed

from components.core.errors import refuse
from components.core.files import digest_file, verify_files, write_json
from components.core.records import FrozenModel, read_as
from components.judge.pool.local_pool import LocalPool
from components.registry.promotion import Promotion
from components.registry.tracking import MlflowRun
from flows.home_gc import note_use
from flows.run_context import PipelineRun
from flows.run_page import PageProgress
from flows.stage_keys import KEY_FILE, RECORD, KeyParts, changes_since_last, key_parts


class DatasetRecord(FrozenModel):
    """The record of a data set that a run built or reused.

    `version` is the digest of its tasks. `folder` is relative to the home (the folder of all runs), `figures`
    is the content of metrics.json, and `seconds` is how long it took to build or find it. `cached` is true if
    nothing was built.
    """

    version: str
    folder: str
    figures: dict[str, Any]
    cached: bool
    seconds: float


class StageRecord(FrozenModel):
    """The result of a stage, which is a step of the pipeline with its own folder.

    `digest` is that of the stage's output, and `figures` are numbers that are logged to MLflow. `progress`
    has the updates that are done and the updates in all if the time budget ended the stage, and is None if
    the stage is finished. `cached` says that the stage did not run, because its result was stored. `key` is
    the digest of everything on which the result depends, and `folder` the stage's folder, relative to the
    home (the folder of all runs). Prefect caches all fields except `cached`, `key` and `folder`, which
    `Context.stage` sets after each call.
    """

    digest: str
    figures: dict[str, Any]
    progress: tuple[int, int] | None = None
    cached: bool = False
    key: str = ""
    folder: str = ""

    def cacheable(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"cached", "key", "folder"})


class CheckpointRecord(StageRecord):
    """The record of a stage (a step of the pipeline) that makes a checkpoint.

    `checkpoint` is the checkpoint's folder, relative to the home (the folder of all runs). The rewards are
    the mean rewards before and after training, or None for a stage without them. `seconds` is how long the
    stage took. `stopped` is a remark on a stage that did not run as intended, such as why it ended early, and
    "" otherwise.
    """

    checkpoint: str
    reward_before: float | None
    reward_after: float | None
    seconds: float
    stopped: str

    def output(self, home: Path) -> Path:
        return home / self.checkpoint

    def verify(self, home: Path) -> None:
        """Raise UserError unless the files of the checkpoint match the recorded digest."""
        refuse(
            (
                verify_files(self.output(home)) != self.digest,
                f"{self.output(home)}: holds another checkpoint than the one this run made; "
                "delete the folder and run again.",
            )
        )


class EvaluationRecord(StageRecord):
    """The record of an evaluation of a checkpoint.

    `results` is the path of the file with its results, relative to the home (the folder of all runs), and
    `digest` is that file's SHA-256. `seconds` is how long the evaluation took.
    """

    results: str
    seconds: float

    def output(self, home: Path) -> Path:
        return home / self.results

    def verify(self, home: Path) -> None:
        """Raise UserError unless the results file matches the recorded digest."""
        refuse(
            (
                digest_file(self.output(home)) != self.digest,
                f"{self.output(home)}: is not what this run measured; delete its folder and run again.",
            )
        )


R = TypeVar("R", CheckpointRecord, EvaluationRecord)
T = TypeVar("T")
P = ParamSpec("P")
# The names of the task runs that this process has started. Prefect itself does not count them.
_started: list[str] = []


def counted(work: Callable[P, T]) -> Callable[P, T]:
    """Decorate the function of a Prefect task so that `count_task_runs` counts its runs."""

    @functools.wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        _started.append(work.__name__)
        return work(*args, **kwargs)

    return call


def count_task_runs() -> int:
    """Return the number of task runs that this process has started, including those that were cached."""
    return len(_started)


@task(persist_result=True, result_serializer="json")
def run_in_folder(folder: Path, upstream: dict[str, str], work: Callable[[Path], R]) -> dict[str, Any]:
    """Call `work` with a stage's folder, and return the record that `work` makes as JSON for Prefect's cache.

    A stage is a step of the pipeline. Each stage calls this task with a name and a cache key of its own.
    `upstream` maps the names of the stage's inputs to their digests, which are only logged.
    """
    log = get_run_logger()
    inputs = ", ".join(f"{name} {digest[:12]}" for name, digest in upstream.items())
    log.info(f"begins in stages/{folder.name}" + (f" with {inputs}" if inputs else ""))
    record = work(folder)
    log.info(f"made {record.digest[:12]} in stages/{folder.name}")
    return record.cacheable()


class Context:
    """The objects that all tasks of one run share, among them its judge pool, MLflow run and data set.

    `run` is the pipeline run, `pool` judges kernels, and `tracking` logs to MLflow. `params` are the
    parameters of the stages, in which `nightly_pipeline` replaces policy.source if it is "champion". This is
    not a dataclass, because Prefect would search the fields of a dataclass for futures at every task call.
    """

    def __init__(
        self,
        run: PipelineRun,
        progress: PageProgress,
        pool: LocalPool,
        tracking: MlflowRun,
        dataset: DatasetRecord,
    ):
        self.run = run
        self.params = run.params
        self.progress = progress
        self.pool = pool
        self.tracking = tracking
        self.dataset = dataset
        self.dataset_folder = run.home / dataset.folder
        self.promotion = Promotion(tracking.client, run.params.registry, run.home)

    def parts(self, stage: str, name: str, upstream: dict[str, str]) -> KeyParts:
        """Return everything that enters the key of a stage, a step of the pipeline with its own folder.

        `stage` is the step's name, one of run_context.STAGES, for which a request (`--from`) to run stages
        again is looked up. `name` is the form of the stage, a key of stage_keys.READS, which lists what it
        can read; the step `coldstart` has the forms `coldstart`, `adopted`, `fine_tuned` and `champion`.
        `upstream` maps the names of the stage's inputs to their digests. The data set is an input of every
        stage and need not be given.
        """
        return key_parts(
            self.params, name, upstream | {"dataset": self.dataset.version}, self.run.rerun_number(stage)
        )

    def stage(
        self,
        stage: str,
        upstream: dict[str, str],
        work: Callable[[Path], R],
        record_type: type[R],
        *,
        name: str = "",
        title: str = "",
    ) -> R:
        """Run `work` in the stage's folder as a Prefect task, or return the cached record of an earlier run.

        A stage is a step of the pipeline. `work` gets the folder and returns a record of the type
        `record_type`. `stage` is one of run_context.STAGES. The cache key is computed from `name`, the
        parameters and sources that this stage reads (stage_keys.READS), the `upstream` digests by input, the
        data set, and the request (`--from`) to run stages again. The record of a stage that the time budget
        ended is not used again. `name` also names the folder, and its default is `stage`. `title` is the name
        that is shown to people, and its default is `name`. Raises UserError if the files of a cached record
        are damaged.
        """
        name = name or stage
        title = title or name
        home = self.run.home
        parts = self.parts(stage, name, upstream)
        key, folder = parts.key, parts.folder(home)
        # A cached record may be older than the folder: if the folder was deleted and a later run was killed
        # in the stage, the folder is incomplete. So the cached record is used only if the output and RECORD,
        # the last file that a stage writes, exist.
        file = folder / RECORD
        is_kept = (
            file.is_file()
            and read_as(record_type, file, "delete it, and the step runs again").output(home).exists()
        )
        if not (folder / KEY_FILE).is_file():
            if changed := changes_since_last(parts, home):
                get_run_logger().info(f"{title} runs again, because these changed: {'; '.join(changed)}")
            write_json(folder / KEY_FILE, parts.model_dump(mode="json"))
        note_use(self.run.folder, folder)
        stage_task = run_in_folder.with_options(
            name=title, task_run_name=title, cache_key_fn=lambda *_: key, refresh_cache=not is_kept
        )

        def begin_and_work(folder: Path) -> R:
            self.progress.begin()
            return work(folder)

        with self.tracking.follow(title, key, folder):
            # A cached run does not call the function of its task, so it is counted here.
            _started.append(title)
            state: State[Any] = stage_task(folder, upstream, begin_and_work, return_state=True)
            record = record_type.model_validate(state.result())
        cached = state.name == "Cached"
        if cached:
            record.verify(home)
            self.progress.update(title, 1, 1)
            get_run_logger().info(f"{title} is cached: {record.digest[:12]} in stages/{folder.name}")
        elif record.progress is None:
            write_json(file, record.cacheable())
            self.progress.finish(title)
        self.tracking.stage(
            title,
            key,
            folder,
            record.model_dump(exclude={"figures", "cached", "key", "folder"}) | record.figures,
        )
        return record.model_copy(update={"cached": cached, "key": key, "folder": f"stages/{folder.name}"})


def mark_crashed_runs(tag: str) -> None:
    """Set unfinished flow runs of earlier processes, and their unfinished task runs, to the state Crashed.

    A flow or task run is unfinished if Prefect has it as RUNNING or PENDING. If `tag` is "", all flow runs of
    the server except the present one are meant, and otherwise those with this tag. The unfinished task runs
    of the present flow run are set to Crashed too: they are of an earlier attempt, because the caller has not
    started a task yet.
    """
    crashed: State[None] = Crashed(message="killed; continued by a later attempt")
    unfinished = {"state": {"type": {"any_": [StateType.RUNNING, StateType.PENDING]}}}
    tagged = {"tags": {"all_": [tag]}} if tag else {}
    present = UUID(runtime.flow_run.id)
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(unfinished | tagged))
        for number in {present, *(flow_run.id for flow_run in found)}:
            for task_run in client.read_task_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[number])),
                task_run_filter=TaskRunFilter.model_validate(unfinished),
            ):
                client.set_task_run_state(task_run.id, crashed, force=True)
            if number != present:
                client.set_flow_run_state(number, crashed, force=True)
