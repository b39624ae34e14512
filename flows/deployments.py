"""The flows that a worker starts (prefect.yaml): the night, its data set, the champion measured anew, and the approval.

Each does what a command does, in the home that its deployment names. Flows that write in the home take turns: a slot
with a short lease, so that a killed run gives it back within a minute (slots of tag limits leak for minutes), and
below it the home's own lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger, tags
from prefect.artifacts import create_table_artifact
from prefect.concurrency.sync import concurrency
from prefect.runtime import flow_run
from rich.console import Console

from components.agent.policies import checkpoint_policy
from components.core.config import Resolved, resolve
from components.core.errors import UserError
from components.core.progress import Progress
from components.evaluation.evaluate import evaluate
from components.evaluation.suites import load_suite
from components.judge.pool import open_pool
from components.registry import models
from components.registry.tracking import connect, flatten
from flows import process_reaper, run_context
from flows.approval import approval, ask
from flows.data import dataset
from flows.evaluation import figures
from flows.nightly import nightly_pipeline
from flows.progress import DiskGuard
from flows.retry_policy import retry_by_kind
from flows.run_context import PipelineRun
from flows.steps import Record
from flows.training_events import EventProgress

LEASE_SECONDS = 60.0
LAST_ATTEMPT = 4
"""A run that crashed so often (killed for memory, say) would crash for ever: it fails, and a person looks."""


def settings(profile: str, sets: list[str] | None, home: str, *more: str) -> Resolved:
    return resolve(profile, (*more, *(sets or ()), *((f"home={json.dumps(home)}",) if home else ())))


def at_work(night: PipelineRun, work: Callable[[Progress], Record]) -> Record:
    """Do `work` as the only flow in the home, again after faults that pass."""
    from components.core.progress_view import ProgressView

    attempt, logger = flow_run.run_count or 1, get_run_logger()
    if attempt > LAST_ATTEMPT:
        raise UserError(
            f"{night.folder}: this flow run crashed {LAST_ATTEMPT} times; see why, then start the deployment again: it goes on where it was."
        )
    run_context.check_environment(night)
    # Killed, this process takes DVC, the judge and what they started with it: they would hold locks against its next attempt.
    process_reaper.start_reaper()

    with ProgressView(Console(stderr=True)) as view:
        progress = EventProgress(view, night.params, night.home, str(flow_run.id))

        def once() -> Record:
            with (
                concurrency(run_context.HOME_SLOT, occupy=1, lease_duration=LEASE_SECONDS),
                run_context.home_lock(night.home),
                tags(night.run_id),
            ):
                return work(progress)

        return retry_by_kind(once, logger.warning)


@flow(name="nightly", persist_result=False)
def nightly(
    profile: str = "h20-pool",
    sets: list[str] | None = None,
    home: str = "",
    dated: bool = True,
    redo_from: str = "",
) -> dict[str, Any]:
    """What `cuda-agent run` does. `dated` makes the day it was scheduled for the seed: a retry of a night is the same run."""
    day = [f"seed={flow_run.scheduled_start_time or datetime.now(UTC):%Y%m%d}"] if dated else []
    night = run_context.open_run(settings(profile, sets, home, *day), redo_from)

    chosen = [*(sets or ()), *([f"home={json.dumps(home)}"] if home else ())]

    def work(progress: Progress) -> Record:
        record = nightly_pipeline(night, progress)
        version = record["model"]["version"]
        if record["gate"]["verdict"] == "waiting" and not ask(version, profile, chosen):
            get_run_logger().warning(
                f"cuda-agent models approve {version}, or refuse, decides: the approval flow is not deployed."
            )
        return record

    return run_context.finished(night) or at_work(night, work)


@flow(name="data", persist_result=False)
def data(profile: str = "h20-pool", sets: list[str] | None = None, home: str = "") -> dict[str, Any]:
    """The data set that the next night will ask for; with nothing changed it is there at once."""
    night = PipelineRun(settings(profile, sets, home))
    return at_work(night, lambda progress: dataset(night, DiskGuard(progress, night.home)))


@flow(name="evaluation", persist_result=False)
def evaluation(
    profile: str = "h20-pool", sets: list[str] | None = None, home: str = "", version: str = "champion"
) -> dict[str, Any]:
    """Measure a model version anew on the run's suite; its figures stand beside those it was registered with."""
    night = PipelineRun(settings(profile, sets, home))

    def work(progress: Progress) -> Record:
        client, model = connect(night.params.registry, night.home), night.params.registry.model
        found = models.describe(client, model, version)
        day = f"{flow_run.scheduled_start_time or datetime.now(UTC):%Y%m%d}"
        folder = night.home / "evaluations" / f"{model}-{found['version']}-{day}"
        checkpoint = models.checkpoint(client, model, found["version"], folder / "checkpoint")
        newest = max(
            (night.home / "datasets").glob("*/tasks.parquet"),
            key=lambda path: path.stat().st_mtime,
            default=night.home / "datasets",
        )
        suite, pool = (
            load_suite(night.params, newest.parent),
            open_pool(night.params, night.home / "verdicts"),
        )
        try:
            policy = checkpoint_policy(checkpoint, night.params)
            measured = evaluate(
                policy,
                suite,
                pool,
                folder / "results",
                epoch=folder.name,
                progress=progress,
                seed=night.params.seed,
            )
        finally:
            pool.close()
        now = figures(measured.overall)
        before = {
            key.removeprefix("figure."): value
            for key, value in found["tags"].items()
            if key.startswith("figure.")
        }
        rows = [
            {"figure": name, "registered": before.get(name, ""), "now": value}
            for name, value in sorted(flatten(now).items())
        ]
        create_table_artifact(
            rows, key="evaluation", description=f"{model} version {found['version']}, {day}"
        )
        return {
            "model": model,
            "version": found["version"],
            "figures": now,
            "results": str(folder / "results"),
        }

    return at_work(night, work)


@flow(name="promotion", persist_result=False)
def promotion(profile: str = "h20-pool", sets: list[str] | None = None, home: str = "") -> dict[str, Any]:
    """Ask a person about the version that still waits, and settle it as told: a reminder, should the night's own question be lost."""
    night = PipelineRun(settings(profile, sets, home))
    client, model = connect(night.params.registry, night.home), night.params.registry.model
    version = models.aliases(client, model).get(models.CANDIDATE)
    if version is None or models.describe(client, model, version)["decision"] != "waiting":
        return {"model": model, "version": version, "verdict": "nothing waits"}
    entry: dict[str, Any] = approval.fn(version, profile, sets, home)
    return entry
