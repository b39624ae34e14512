"""The nightly pipeline: data, cold start, four stages, evaluation, registration, gate.

Read `nightly_pipeline` from top to bottom. Each step is a Prefect task, cached by the digests of its inputs:
a second run does only what changed, and a killed one continues where it was.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow, tags

from components.core.files import MANIFEST, digest_file, digest_json, write_json
from components.core.progress import Progress
from components.core.task import read_tasks
from components.evaluation.compare import SETTINGS
from components.judge.pool import open_pool, with_any_duration
from components.registry.gates import Decision
from components.registry.tracking import MlflowRun, connect
from components.storage import open_store, put_checkpoint
from components.training.stage_checks import check_stages
from flows.data import dataset
from flows.evaluation import evaluate_checkpoint, load, table
from flows.progress import DiskGuard, MetricsProgress
from flows.promotion import decide, evaluate_champion, promote, register
from flows.run_context import RUN_FILE, PipelineRun, source_digests
from flows.steps import CheckpointRecord, Context, DatasetRecord, EvaluationRecord, mark_crashed_runs
from flows.training import cold_start, stage_four, stage_one, stage_three, stage_two

RunRecord = dict[str, Any]
"""The content of run.json, which `cuda-agent run --json` prints."""


def run_pipeline(run: PipelineRun, progress: Progress) -> RunRecord:
    """Run the pipeline as a Prefect flow in this process, in a locked home with a prepared environment."""

    @flow(name="nightly", flow_run_name="{profile}-{run_id}", persist_result=False)
    def nightly(run_id: str, profile: str, device: str, home: str) -> RunRecord:
        """Run every stage. The parameters are for Prefect's page; `run` has them all."""
        return nightly_pipeline(run, progress)

    with tags(run.run_id):
        return nightly(run.run_id, run.profile or "base", run.params.device, str(run.home))


def nightly_pipeline(run: PipelineRun, progress: Progress) -> RunRecord:
    """Run every stage inside a running flow."""
    started = time.monotonic()
    check_stages(run.params)
    progress = MetricsProgress(DiskGuard(progress, run.home), run.home)
    mark_crashed_runs(run.run_id)
    data = dataset(run, progress)
    context = open_context(run, progress, data)
    try:
        start = cold_start(context)
        before = evaluate_checkpoint(context, "cold start", start.checkpoint, start.digest)
        first = stage_one(context, start)
        second = stage_two(context, first)
        critic = stage_three(context, second, sampled=[first, second])
        policy = stage_four(context, second, critic)
        after = evaluate_checkpoint(context, "evaluation", policy.checkpoint, policy.digest)

        stages = {
            "coldstart": start,
            "warmup": first,
            "rejection": second,
            "critic": critic,
            "agentic": policy,
        }
        version = register(context, policy, after)
        champion = evaluate_champion(context, version)
        decision = decide(context, version, stages, before, after, champion)
        promote(context, version, decision, champion)
    except BaseException:
        context.tracking.fail()
        raise
    finally:
        context.pool.close()

    record = run_record(context, stages, before, after, version, decision)
    record["seconds"] = round(time.monotonic() - started, 3)
    publish(context, record, stages, {"cold_start": before, "evaluation": after})
    return record


def open_context(run: PipelineRun, progress: Progress, data: DatasetRecord) -> Context:
    """Open what all stages share: the tracked MLflow run and the judges."""
    if not (run.folder / "started.json").is_file():
        created = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(run.folder / "started.json", {"created": created})
    # `cuda-agent runs compare` reads the full parameters and the digest of every source.
    settings = {"params": run.params.model_dump(mode="json", exclude={"home"}), "sources": source_digests()}
    write_json(run.folder / SETTINGS, settings)
    registry = run.params.registry
    name = f"{run.profile or 'base'}-{run.run_id}"
    tracking = MlflowRun(connect(registry, run.home), registry, run.home, run.key, name)
    identity = {
        "run_id": run.run_id,
        "profile": run.profile,
        "code.revision": run.code,
        "home": str(run.home),
    }
    tracking.describe(run.params.model_dump(mode="json"), identity)
    tracking.dataset(data.version, run.home / data.folder, data.figures)
    tracking.watch()
    pool = open_pool(with_any_duration(run.params), run.home / "verdicts")
    return Context(run, progress, pool, tracking, data)


def run_record(
    context: Context,
    stages: dict[str, CheckpointRecord],
    before: EvaluationRecord,
    after: EvaluationRecord,
    version: str,
    decision: Decision,
) -> RunRecord:
    """Return the run's record, without its seconds and the address of its stored files."""
    run, data = context.run, context.dataset
    splits = [kernel.split for kernel in read_tasks(context.dataset_folder / "tasks.parquet")]
    figures = {"digest", "reward_before", "reward_after", "seconds", "cached", "stopped"}
    return {
        "run_id": run.run_id,
        "profile": run.profile,
        "device": run.params.device,
        "dataset": {
            "version": data.version,
            "tasks": splits.count("train"),
            "held_out": splits.count("held_out"),
            "cached": data.cached,
            "seconds": data.seconds,
        },
        "stages": [
            {"name": name, "checkpoint": str(stage.output(run.home))} | stage.model_dump(include=figures)
            for name, stage in stages.items()
        ],
        "cold_start": before.figures,
        "evaluation": after.figures | {"results": after.results},
        "model": {"name": run.params.registry.model, "version": version},
        "gate": decision.model_dump(mode="json"),
        "report": str(run.folder / "report.html"),
    }


def publish(
    context: Context,
    record: RunRecord,
    stages: dict[str, CheckpointRecord],
    evaluations: dict[str, EvaluationRecord],
) -> None:
    """Log the record, store what must outlive this machine, and finish the run: run.json is written last."""
    run, tracking = context.run, context.tracking
    tracking.figures({key: value for key, value in record.items() if key != "gate"})
    manifest = {"dataset": context.dataset.version, "decision": digest_json(record["gate"])}
    manifest |= {f"checkpoint.{name}": stage.digest for name, stage in stages.items()}
    for name, evaluation in evaluations.items():
        results = load(context, evaluation)
        tracking.table(name, table(results.tasks))
        manifest[name] = digest_json(results.model_dump(mode="json", exclude={"policy"}))
    for name in ("report.html", "report.json"):
        tracking.artifact(run.folder / name)
    write_json(run.folder / MANIFEST, manifest)

    record["artifacts"] = store_artifacts(run, list(stages.values())[-1], context.dataset_folder)
    tracking.tags(
        {
            "gate.verdict": record["gate"]["verdict"],
            "model.version": record["model"]["version"],
            "artifacts": record["artifacts"],
        }
    )
    tracking.finish()
    write_json(run.folder / RUN_FILE, record)


def store_artifacts(run: PipelineRun, policy: CheckpointRecord, dataset_folder: Path) -> str:
    """Put what must outlive this machine into the store; return the address of the run's folder there.

    Objects are immutable. A checkpoint is stored under its digest; the run's files under a digest of their
    content, so a run that was continued after a repair leaves a second folder beside its first.
    """
    store = open_store(run.params.store, run.home)
    put_checkpoint(store, policy.digest, policy.output(run.home))
    files = [
        run.folder / MANIFEST,
        run.folder / "report.html",
        run.folder / "report.json",
        dataset_folder / "dvc.lock",
        dataset_folder / "metrics.json",
    ]
    name = digest_json([digest_file(path) for path in files])[:12]
    addresses = [store.put(f"runs/{run.run_id}/{name}/{path.name}", path) for path in files]
    return addresses[0].rpartition("/")[0]
