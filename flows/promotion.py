"""Prefect tasks that register a model version for each run, apply the gates and move the aliases.

The gates are conditions of promotion, and an alias such as `champion` names a version of the model registry.
Each task can be repeated after the run was killed: a registered version is found by the run's key, a decision
is written again with the same content, and a version that is already the champion stays the champion.
"""

import logging

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from components.core.files import (
    MANIFEST,
    digest_file,
    digest_json,
    read_json,
    write_json,
)
from components.evaluation.results import load_evaluation
from components.registry import gate_runner, models
from components.registry.gates import REFUSALS, Compared, Decision
from components.registry.tracking import numbers
from flows.night import descent, keep_checkpoint
from flows.stages import evaluate_checkpoint, load
from flows.steps import CheckpointRecord, Context, EvaluationRecord, counted


@task(name="register", task_run_name="register", persist_result=False, cache_policy=NO_CACHE)
@counted
def register(
    context: Context,
    policy: CheckpointRecord,
    before: EvaluationRecord,
    evaluation: EvaluationRecord,
    lineage: dict[str, str],
) -> str:
    """Register a checkpoint and its evidence as a model version, and return the version's number.

    The evidence has the paths and digests of the files that decisions on the version rest on; it becomes an
    entry of the audit chain, the log of decisions. `policy` is the record of the checkpoint, `before` and
    `evaluation` are the evaluations of the run's first policy and of the checkpoint, and `lineage` has the
    tags that say what the version was trained from. The version gets the alias `candidate`. If an earlier
    attempt of the run has registered the checkpoint, that version is used, and no alias changes.
    """
    run, tracking = context.run, context.tracking
    evidence = {
        "dataset.version": context.dataset.version,
        "code.revision": run.code,
        "checkpoint.digest": policy.digest,
        "manifest.digest": digest_file(policy.output(run.home) / MANIFEST),
        "evaluation": evaluation.results,
        "evaluation.digest": evaluation.digest,
        "start.evaluation": before.results,
        "start.digest": before.digest,
        "report": str((run.folder / "report.html").relative_to(run.home)),
        "profile": run.profile,
        "device": run.params.device,
    }
    version = models.register(
        tracking.client,
        model=run.params.registry.model,
        run_key=run.key,
        run_id=tracking.run_id,
        experiment_id=tracking.experiment_id,
        checkpoint=policy.output(run.home),
        tags=evidence | {"suite.digest": load(context, evaluation).suite_digest} | lineage,
        figures=numbers(evaluation.figures),
    )
    context.promotion.register(version, evidence)
    get_run_logger().info(f"{run.params.registry.model} version {version}, checkpoint {policy.digest[:12]}")
    return version


@task(name="gate", task_run_name="gate", persist_result=False, cache_policy=NO_CACHE)
@counted
def decide(
    context: Context,
    version: str,
    stages: dict[str, CheckpointRecord],
    policy: CheckpointRecord,
    before: EvaluationRecord,
    evaluation: EvaluationRecord,
    champion: Compared | None,
) -> Decision:
    """Apply the gates to the version, write the run's report, and return the decision.

    The gates are conditions of promotion. `stages` has the records of the run's stages by their names, and
    `policy` is that of the version's checkpoint. `before` and `evaluation` are the evaluations of the run's
    first policy and of the version. `champion` is the evaluation of the champion, the promoted version; if it
    is None, the version is compared with no champion. Raises UserError if a file of the checkpoint is
    damaged.
    """
    run = context.run
    # One of the gates checks that the report is complete, so the report is first written without a decision.
    write_run_report(context, stages, before, evaluation, None, version)
    decision = gate_runner.run_gates(
        run.params,
        load(context, evaluation),
        load(context, before),
        load_evaluation(run.home / champion.evaluation) if champion is not None else None,
        context.pool,
        context.progress,
        checkpoint=policy.output(run.home),
        registered_digest=policy.digest,
        report=run.folder / "report.html",
        epoch=run.run_id,
    )
    write_run_report(context, stages, before, evaluation, decision, version)
    for gate in decision.gates:
        get_run_logger().log(logging.INFO if gate.passed else logging.WARNING, gate.sentence)
    return decision


@task(name="promote", task_run_name="promote", persist_result=False, cache_policy=NO_CACHE)
@counted
def promote(context: Context, version: str, decision: Decision, champion: Compared | None) -> None:
    """Apply the decision of the gates to the model registry, with an entry in the log of decisions.

    Before, waiting versions whose deadline has passed expire. `champion` is the champion (promoted version)
    with which the gates compared the version, or None if there was none. A version that waits for a person
    keeps the alias `candidate`. If the version is refused or has learned nothing, the decision is also
    written to refusal.json in the run's folder. Raises UserError if the champion or a file of the version has
    changed since the gates.
    """
    run = context.run
    context.promotion.expire()
    context.promotion.apply_decision(
        version,
        decision,
        champion=champion,
        approval_seconds=run.params.gate.approval_seconds,
        key=digest_json([run.key, decision.model_dump(mode="json")]),
    )
    get_run_logger().info(f"version {version}: {decision.verdict}; {' '.join(decision.reasons)}")
    if decision.verdict in REFUSALS:
        write_json(run.folder / "refusal.json", decision.model_dump(mode="json"))


def evaluate_champion(context: Context, version: str) -> Compared | None:
    """Evaluate the champion, the promoted model version, on this run's tasks with this run's parameters.

    Returns the champion's version with the path and digest of the results, or None if there is no champion
    besides `version`. The figures of the champion's own run are not used, because they may come from another
    data set or machine. Raises UserError if the copy of the champion's checkpoint in the home (the folder of
    all runs) does not match the registered one.
    """
    champion = models.champion_besides(context.promotion.aliases(), version)
    if champion is None:
        return None
    folder = keep_checkpoint(context.promotion, champion)
    digest = read_json(folder / MANIFEST)["digest"]
    checkpoint = folder.relative_to(context.run.home).as_posix()
    record = evaluate_checkpoint(context, "evaluation (champion)", checkpoint, digest)
    return Compared(version=champion, evaluation=record.results, digest=record.digest)


def write_run_report(
    context: Context,
    stages: dict[str, CheckpointRecord],
    before: EvaluationRecord,
    after: EvaluationRecord,
    decision: Decision | None,
    version: str,
) -> None:
    """Write the report of the run to report.html in the run's folder.

    `stages` has the records of the run's stages by their names, and `before` and `after` are the evaluations
    of the run's first and last policy. `version` is the number of the model version that the run made. If
    `decision` is None, the report has no section on the gates, the conditions of promotion.
    """
    from components.evaluation.report import load_report_data, write_report  # imports matplotlib

    run, client = context.run, context.tracking.client
    model = run.params.registry.model
    meta = {
        "run_id": run.run_id,
        "profile": run.profile,
        "device": run.params.device,
        "created": read_json(run.folder / "started.json")["created"],
        "model": {"name": model, "version": version},
        "descent": descent(client, model, version),
        "environment": {
            "code": run.code[:12],
            "dataset": context.dataset.version[:12],
            "policy": digest_json(run.params.policy.model_dump())[:12],
        },
    }
    data = load_report_data(
        context.dataset_folder,
        {name: run.home / stage.folder for name, stage in stages.items()},
        before.output(run.home),
        after.output(run.home),
        [gate.model_dump() | {"decisive": gate.decisive} for gate in decision.gates] if decision else [],
        meta | ({"verdict": decision.verdict, "reasons": list(decision.reasons)} if decision else {}),
    )
    write_report(run.folder / "report.html", data)
