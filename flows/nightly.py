"""The night: data, cold start, four stages, evaluation, registration, gate.

Read `story` from top to bottom. Each step is a Prefect task, cached by the digests of its inputs: a second run does only
what changed, a killed one goes on where it was.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from prefect import flow, tags

from components.core.config import PROJECT
from components.core.files import MANIFEST, digest_file, digest_json, write_json
from components.core.progress import Progress
from components.core.task import read_tasks
from components.evaluation.compare import SETTINGS
from components.evaluation.evaluate import for_admission
from components.judge.pool import open_pool
from components.registry.tracking import MlflowRun, connect
from components.storage import open_store, put_checkpoint
from components.training.stage_checks import check_stages
from flows import run_context
from flows.data import dataset
from flows.evaluation import evaluate_checkpoint, load, table
from flows.progress import DiskGuard, MetricsProgress
from flows.promotion import decide, evaluate_champion, promote, register
from flows.run_context import PipelineRun
from flows.steps import Context, Record, mark_crashed_runs
from flows.training import cold_start, stage_four, stage_one, stage_three, stage_two


def nightly_pipeline(night: PipelineRun, progress: Progress) -> Record:
    """The whole night inside a running flow; returns the record that run.json holds."""
    started = time.monotonic()
    check_stages(night.params)
    progress = MetricsProgress(DiskGuard(progress, night.home), night.home)
    mark_crashed_runs(night.run_id)
    data = dataset(night, progress)
    context = open_context(night, progress, data)
    try:
        start = cold_start(context)
        before = evaluate_checkpoint(context, "cold start", start)
        first = stage_one(context, start)
        second = stage_two(context, first)
        values = stage_three(context, second, sampled=[first, second])
        policy = stage_four(context, second, values)
        after = evaluate_checkpoint(context, "evaluation", policy)

        version = register(context, policy, after)
        stages = {
            "coldstart": start,
            "warmup": first,
            "rejection": second,
            "critic": values,
            "agentic": policy,
        }
        champion = evaluate_champion(context, version)
        decision = decide(
            context,
            version,
            policy,
            after,
            champion,
            {name: night.home / stage["folder"] for name, stage in stages.items()},
            before,
        )
        promote(context, version, decision, champion)
    except BaseException:
        context.tracking.fail()
        raise
    finally:
        context.pool.close()

    record = {
        "run_id": night.run_id,
        "profile": night.profile,
        "device": night.params.device,
        "dataset": {
            "version": data["version"],
            **task_counts(context.dataset_folder),
            "cached": data["cached"],
            "seconds": data["seconds"],
        },
        "stages": [
            {"name": name, "checkpoint": str(night.home / stage["checkpoint"])}
            | {key: stage[key] for key in STAGE_KEYS}
            for name, stage in stages.items()
        ],
        "cold_start": before["figures"],
        "evaluation": after["figures"] | {"results": after["results"]},
        "model": {"name": night.params.registry.model, "version": version},
        "gate": {
            "verdict": decision.verdict,
            "reasons": list(decision.reasons),
            "gates": [gate.model_dump() for gate in decision.gates],
        },
        "report": str(night.folder / "report.html"),
        "seconds": round(time.monotonic() - started, 3),
    }
    publish(
        context,
        record,
        {name: stage["digest"] for name, stage in stages.items()},
        {"cold_start": before, "evaluation": after},
    )
    return record


STAGE_KEYS = ("digest", "reward_before", "reward_after", "seconds", "cached", "stopped")


def open_context(night: PipelineRun, progress: Progress, data: Record) -> Context:
    """The judges and the tracked run that all stages share."""
    if not (night.folder / "started.json").is_file():
        write_json(
            night.folder / "started.json", {"created": datetime.now(UTC).isoformat(timespec="seconds")}
        )
    # What `cuda-agent runs compare` reads: the full parameters, and every source by its digest.
    sources = {
        f"{room}/{name}": digest
        for room in run_context.SOURCES
        for name, digest in run_context.digest_sources(PROJECT / room).items()
    }
    write_json(
        night.folder / SETTINGS,
        {"params": night.params.model_dump(mode="json", exclude={"home"}), "sources": sources},
    )
    registry = night.params.registry
    tracking = MlflowRun(
        connect(registry, night.home),
        registry,
        night.home,
        night.key,
        f"{night.profile or 'base'}-{night.run_id}",
    )
    identity = {
        "run_id": night.run_id,
        "profile": night.profile,
        "code.revision": night.code,
        "home": str(night.home),
    }
    tracking.describe(night.params.model_dump(mode="json"), identity)
    tracking.dataset(data["version"], night.home / data["folder"], data["figures"])
    tracking.watch()
    return Context(
        night, progress, open_pool(for_admission(night.params), night.home / "verdicts"), tracking, data
    )


def task_counts(folder: Path) -> dict[str, int]:
    splits = [kernel.split for kernel in read_tasks(folder / "tasks.parquet")]
    return {"tasks": splits.count("train"), "held_out": splits.count("held_out")}


def publish(
    context: Context, record: Record, checkpoints: dict[str, str], evaluations: dict[str, Record]
) -> None:
    """Log the record, store what has to outlive this machine, and close the night: run.json comes last."""
    night, tracking = context.night, context.tracking
    tracking.figures({key: value for key, value in record.items() if key != "gate"})
    for name, evaluation in evaluations.items():
        tracking.table(name, table(load(context, evaluation).tasks))
    for name in ("report.html", "report.json"):
        tracking.artifact(night.folder / name)

    manifest = {"dataset": record["dataset"]["version"]} | {
        f"checkpoint.{name}": digest for name, digest in checkpoints.items()
    }
    manifest |= {
        name: digest_json(load(context, evaluation).model_dump(mode="json", exclude={"policy"}))
        for name, evaluation in evaluations.items()
    }
    manifest["decision"] = digest_json(record["gate"])
    write_json(night.folder / MANIFEST, manifest)

    record["artifacts"] = store_artifacts(night, record["stages"][-1], context.dataset_folder)
    tracking.tags(
        {
            "gate.verdict": record["gate"]["verdict"],
            "model.version": record["model"]["version"],
            "artifacts": record["artifacts"],
        }
    )
    tracking.finish()
    write_json(night.folder / run_context.RUN_FILE, record)


def store_artifacts(night: PipelineRun, policy: Record, dataset_folder: Path) -> str:
    """Put what has to outlive this machine into the store; the address of the run's own folder there.

    Objects are immutable: a checkpoint goes by its digest, and a run that was mended leaves a second folder beside its first.
    """
    store = open_store(night.params.store, night.home)
    put_checkpoint(store, policy["digest"], Path(policy["checkpoint"]))
    files = [
        night.folder / MANIFEST,
        night.folder / "report.html",
        night.folder / "report.json",
        dataset_folder / "dvc.lock",
        dataset_folder / "metrics.json",
    ]
    name = digest_json([digest_file(path) for path in files])[:12]
    addresses = [store.put(f"runs/{night.run_id}/{name}/{path.name}", path) for path in files]
    return addresses[0].rpartition("/")[0]


def run_pipeline(night: PipelineRun, progress: Progress) -> Record:
    """Run the pipeline as a Prefect flow in this process. The caller has locked the home and prepared the environment."""

    @flow(name="nightly", flow_run_name="{profile}-{run_id}", persist_result=False)
    def nightly(run_id: str, profile: str, device: str, home: str) -> Record:
        """Run every stage; the parameters are what Prefect's page shows of the run."""
        return nightly_pipeline(night, progress)

    with tags(night.run_id):
        return nightly(night.run_id, night.profile or "base", night.params.device, str(night.home))
