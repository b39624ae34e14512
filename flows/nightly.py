"""Run the nightly pipeline: data set, cold start, training stages, evaluation, registration, promotion.

The cold start makes the first policy, and promotion depends on gates, which are conditions that a model
version must meet. Start with `nightly_pipeline`. The cold start, the training stages and the evaluations are
Prefect tasks that are cached by the digests of their inputs. So a second run repeats only the stages whose
inputs changed, and a run that was killed continues with the stage in which it was killed.
"""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.exceptions import TerminationSignal

from components.core.errors import StageFailed, error_chain
from components.core.files import MANIFEST, digest_file, digest_json, read_json, write_json
from components.core.progress import Progress
from components.core.signals import sigterm_outside_of_locks
from components.core.signing import Signer
from components.core.sources import project_digests
from components.core.task import read_tasks
from components.evaluation.compare import SETTINGS
from components.judge.pool.local_pool import with_any_duration
from components.judge.pool.open_pool import open_pool
from components.policy.vllm.own_servers import OWN_SERVERS
from components.registry.gates import Decision
from components.registry.tracking import MlflowRun, connect
from components.storage import open_store, put_checkpoint
from components.training.run_stage import check_stages, stages_of_run
from flows import run_page
from flows.data import dataset
from flows.night import (
    lineage_tags,
    may_begin,
    night_lineage,
    night_params,
    open_night,
    training_deadline,
)
from flows.processes import Server
from flows.progress import DiskGuard, MetricsProgress
from flows.promotion import decide, evaluate_champion, promote, register
from flows.run_context import (
    RUN_FILE,
    PipelineRun,
    check_training,
    keep_request,
    source_commit,
    undecidable_gates,
)
from flows.run_page import PageProgress, verdict
from flows.stage_keys import reward_digests
from flows.stages import evaluate_checkpoint, load, start_policy, table, train
from flows.steps import (
    CheckpointRecord,
    Context,
    DatasetRecord,
    EvaluationRecord,
    count_task_runs,
    mark_crashed_runs,
)

# The content of run.json, which `cuda-agent run --json` prints.
RunRecord = dict[str, Any]


def run_pipeline(run: PipelineRun, progress: Progress, server: Server | None = None) -> RunRecord:
    """Run the pipeline as a Prefect flow in this process, and return the run's record (its run.json).

    The caller holds the lock of the run's home, the folder of all runs, and has called `prepare_environment`
    (run_context.py). `progress` receives the progress reports. `server` is the run's own Prefect server,
    whose attribute `task_runs` is set at the end; it is None if the run uses a server that was already there.
    Raises what `nightly_pipeline` raises, or KeyboardInterrupt if that was caused by SIGINT.
    """

    @flow(name="nightly", flow_run_name="{profile}-{run_id}", persist_result=False)
    def nightly(
        run_id: str, profile: str, sets: list[str], seed: int, start_policy: str, device: str, home: str
    ) -> RunRecord:
        """Run every stage of the pipeline, and return the run's record.

        The arguments are only shown on Prefect's page of the flow run.
        """
        try:
            return nightly_pipeline(run, progress, owns_server=server is not None)
        finally:
            if server is not None:
                server.task_runs = count_task_runs()

    run_page.keep_logs_off_the_console()
    run_page.show_logs()
    try:
        record: RunRecord = nightly(**run_page.parameters(run))
    except Exception as error:
        raise_interruption(error)
        raise
    return record


def raise_interruption(error: Exception) -> None:
    """Raise KeyboardInterrupt or send SIGTERM to this process again if a signal is the cause of `error`.

    Nothing is done if no signal is among the causes. The handlers of SIGINT and SIGTERM raise an exception
    wherever the main thread is. If the thread is in a serializer of pydantic, which Prefect calls for its
    settings and requests, pydantic wraps that exception in a PydanticSerializationError, and Prefect does not
    recognise the signal.
    """
    for cause in error_chain(error):
        if isinstance(cause, KeyboardInterrupt):
            raise cause
        if isinstance(cause, TerminationSignal):
            os.kill(os.getpid(), cause.signal)


@sigterm_outside_of_locks()
def nightly_pipeline(run: PipelineRun, progress: Progress, *, owns_server: bool = False) -> RunRecord:
    """Run every stage inside the current Prefect flow, and return the run's record, the content of run.json.

    `progress` receives the progress reports. `owns_server` says whether all runs on Prefect's server are of
    this home (folder of all runs). If so, all other unfinished flow runs on the server are marked as crashed,
    and otherwise only unfinished attempts of this pipeline run. If an error is raised after `open_context`,
    the MLflow run ends as failed. Raises StageFailed if training fails, or if the run began with the champion
    (the promoted version) and its time budget ended before the first update, and UserError for bad parameters
    or a full disk.
    """
    started = time.monotonic()
    check_stages(run.params)
    check_training(run.params)
    page = PageProgress(MetricsProgress(DiskGuard(progress, run.home), run.home))
    mark_crashed_runs("" if owns_server else run.run_id)
    run_page.show_run(run)
    for line in undecidable_gates(run.params):
        get_run_logger().warning(line)
    keep_request(run)
    begun = note_start(run)
    context = open_context(run, page, dataset(run, page))
    try:
        night = open_night(run, context.tracking.client, begun)
        context.params = night_params(run.params, night.champion)
        check_stages(context.params)
        stages = {"coldstart": start_policy(context, night.champion)}
        start = stages["coldstart"]
        begins = "start policy" if start.folder.startswith("stages/champion-") else "cold start"
        before = evaluate_checkpoint(context, f"evaluation ({begins})", start.checkpoint, start.digest)
        unfinished = train_stages(context, stages, training_deadline(run, night, before))
        policy = [record for name, record in stages.items() if name != "critic"][-1]
        if night.champion is not None and not has_updates(stages):
            raise StageFailed(
                f"night.hours: {run.params.night.hours:g} h ended before the first update, because what "
                "follows training needs the rest; raise it, and the same command continues."
            )
        trained = time.monotonic()
        after = evaluate_checkpoint(context, "evaluation", policy.checkpoint, policy.digest)

        lineage = night_lineage(context, night, unfinished)
        version = register(context, policy, before, after, lineage_tags(lineage))
        champion = evaluate_champion(context, version)
        decision = decide(context, version, stages, policy, before, after, champion)
        promote(context, version, decision, champion)
        record = run_record(context, stages, before, after, version, decision) | {
            "night": lineage,
            "seconds": round(time.monotonic() - started, 3),
            "tail_seconds": round(time.monotonic() - trained, 3),
        }
        publish(context, record, stages, policy, {"cold_start": before, "evaluation": after})
    except BaseException:
        context.tracking.end("FAILED")
        raise
    finally:
        OWN_SERVERS.close()
        context.pool.close()
    run_page.show_result(record)
    return record


def has_updates(stages: dict[str, CheckpointRecord]) -> bool:
    """Return whether one of the stages that train the policy has made at least one update of the weights.

    `stages` maps names of stages to their records. The cold start, which makes the first policy, and the
    critic do not count.
    """
    trained = [record for name, record in stages.items() if name not in ("coldstart", "critic")]
    return any(record.progress is None or record.progress[0] > 0 for record in trained)


def train_stages(
    context: Context, stages: dict[str, CheckpointRecord], deadline: float | None
) -> dict[str, Any] | None:
    """Run the training stages of the pipeline in their order, and add their records to `stages`.

    `stages` maps names of stages to their records and has that of the first policy, `coldstart`. `deadline`
    is the time (seconds of Unix time) at which training ends, or None without a time budget. Returns None if
    all stages are finished. Otherwise the result describes the stage at which the deadline ended training, by
    the keys `run_id`, `seed`, `stage` (its name) and `progress` (updates that are done and updates in all, or
    None if the stage was not begun).
    """
    run = context.run
    for name in stages_of_run(context.params):
        record = train(
            context,
            name,
            [earlier for other, earlier in stages.items() if other != "critic"][-1],
            critic=stages.get("critic") if name == "agentic" else None,
            sampled=[stages[other] for other in ("warmup", "rejection") if other in stages]
            if name == "critic"
            else None,
            earlier=list(stages.values()),
            deadline=deadline,
            may_begin=may_begin(run, name, deadline),
        )
        if record is not None:
            stages[name] = record
        progress = record.progress if record is not None else None
        if record is None or progress is not None:
            return {"run_id": run.run_id, "seed": run.params.seed, "stage": name, "progress": progress}
    return None


def note_start(run: PipelineRun) -> float:
    """Return when the first attempt of this run began, in seconds of Unix time.

    At the first call, the present time is stored in started.json in the run's folder; later calls read it
    there.
    """
    file = run.folder / "started.json"
    if not file.is_file():
        write_json(file, {"created": datetime.now(UTC).isoformat(timespec="seconds")})
    return datetime.fromisoformat(read_json(file)["created"]).timestamp()


def open_context(run: PipelineRun, progress: PageProgress, data: DatasetRecord) -> Context:
    """Create the objects that all stages of a run share, and begin or continue its MLflow run.

    The objects are returned as a `Context`; among them is an open pool of judges, which the caller closes.
    `data` is the record of the data set. Writes the parameters and the digests of the sources to
    settings.json in the run's folder.
    """
    # `cuda-agent runs compare` reads the full parameters and the digest of every source.
    write_json(
        run.folder / SETTINGS,
        {
            "params": run.params.model_dump(mode="json", exclude={"home"}),
            "sources": project_digests() | reward_digests(run.params.reward),
        },
    )
    registry = run.params.registry
    tracking = MlflowRun(
        connect(registry, run.home), registry, run.home, run.key, f"{run.profile or 'base'}-{run.run_id}"
    )
    try:
        tracking.describe(
            run.params.model_dump(mode="json"),
            {
                "run_id": run.run_id,
                "profile": run.profile,
                "code.revision": run.code,
                "home": str(run.home),
                "mlflow.source.name": f"cuda-agent run --profile {run.profile or 'base'}",
                "mlflow.source.type": "PROJECT",
                "mlflow.source.git.commit": source_commit(),
            },
        )
        tracking.dataset(data.version, run.home / data.folder, data.figures)
        tracking.watch()
        pool = open_pool(
            with_any_duration(run.params), run.home / "verdicts", trains=not run.params.pool.trainers
        )
    except BaseException:
        tracking.end("FAILED")
        raise
    return Context(run, progress, pool, tracking, data)


def run_record(
    context: Context,
    stages: dict[str, CheckpointRecord],
    before: EvaluationRecord,
    after: EvaluationRecord,
    version: str,
    decision: Decision,
) -> RunRecord:
    """Return the run's record, a dictionary for JSON: data set, stages, evaluations, model version and gates.

    `stages` has the records of the stages by their names. `before` and `after` are the evaluations of the
    first and the last policy, and `decision` is that of the gates (conditions of promotion) on `version`, a
    number. The functions `nightly_pipeline` and `publish` add the rest: the night's descent, the durations,
    the address of the stored files, and the signature.
    """
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
        "experiment": context.tracking.experiment_id,
    }


def publish(
    context: Context,
    record: RunRecord,
    stages: dict[str, CheckpointRecord],
    policy: CheckpointRecord,
    evaluations: dict[str, EvaluationRecord],
) -> None:
    """Log the run's record to MLflow, upload the results to the artefact store, and write run.json.

    `stages` has the records of the stages by their names, `policy` is the record of the last trained policy,
    and `evaluations` has the evaluations by the names of their MLflow tables. The address of the uploaded
    files and a signature are added to `record`. The file run.json is written last, because its presence means
    that the run is finished.
    """
    run, tracking = context.run, context.tracking
    tracking.figures({key: value for key, value in record.items() if key != "gate"})
    manifest = {"dataset": context.dataset.version, "decision": digest_json(record["gate"])}
    manifest |= {f"checkpoint.{name}": stage.digest for name, stage in stages.items()}
    for name, evaluation in evaluations.items():
        results = load(context, evaluation)
        tracking.table(name, table(results.tasks))
        manifest[name] = digest_json(results.model_dump(mode="json", exclude={"policy"}))
    for name in ("report.html", "report.json"):
        tracking.client.log_artifact(tracking.run_id, str(run.folder / name))
    write_json(run.folder / MANIFEST, manifest)

    record["artifacts"] = store_artifacts(run, policy, context.dataset_folder)
    tracking.tags(
        lineage_tags(record["night"])
        | {
            "gate.verdict": record["gate"]["verdict"],
            "model.version": record["model"]["version"],
            "artifacts": record["artifacts"],
            "mlflow.note.content": verdict(record),
        }
    )
    tracking.end("FINISHED")
    record["signature"] = Signer(run.params.registry).sign(record)
    write_json(run.folder / RUN_FILE, record)


def store_artifacts(run: PipelineRun, policy: CheckpointRecord, dataset_folder: Path) -> str:
    """Upload a run's final checkpoint, report and manifests to the artefact store; return their address.

    The address is that of the folder with the report and the manifests. `policy` is the record of the final
    checkpoint. Objects in the store are never overwritten. The checkpoint is stored under its digest, and the
    files of the run are stored in a folder that is named by a digest of their content. So if a run is
    continued and its files differ, they are stored in a second folder.
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
