"""Registration and promotion: a model version per night, gates, approval, and the move of the aliases.

Each task may be repeated after a kill: the version is found by the run's key, a decision is written again with the
same content, and a champion that is the version already stays as it is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.evaluation.report import collect, write_report
from components.files import atomic_folder, digest_json, read_json, write_json
from components.registry import gates, models
from components.registry.gates import Decision
from components.registry.tracking import numbers
from flows.evaluation import evaluate_checkpoint, load
from flows.runs import MANIFEST, verify_files
from flows.steps import Context, Record


@task(name="register", persist_result=False, cache_policy=NO_CACHE)
def register(context: Context, policy: Record, evaluation: Record) -> str:
    """The night's model version: a copy of the checkpoint with its evidence."""
    night, tracking = context.night, context.tracking
    version = models.register(
        tracking.client,
        model=night.params.registry.model,
        run_key=night.key,
        run_id=tracking.run_id,
        experiment_id=tracking.experiment_id,
        checkpoint=night.home / policy["checkpoint"],
        tags={
            "dataset.version": context.dataset["version"],
            "code.revision": night.code,
            "checkpoint.digest": policy["digest"],
            "evaluation": evaluation["results"],
            "evaluation.digest": evaluation["digest"],
            "report": str(night.folder / "report.html"),
            "profile": night.profile,
            "device": night.params.device,
        },
        figures=numbers(evaluation["figures"]),
    )
    models.propose(tracking.client, night.params.registry.model, version)
    return version


@task(name="gate", persist_result=False, cache_policy=NO_CACHE)
def decide(context: Context, version: str, policy: Record, evaluation: Record, champion: Record | None, stages: dict[str, Path], before: Record) -> Decision:
    """Hold the evaluation against the thresholds and the champion, and leave the decision where it can be audited."""
    night, client, model = context.night, context.tracking.client, context.night.params.registry.model
    after = load(context, evaluation)
    report = night.folder / "report.html"
    found = gates.floors(after.overall, night.params.gate)
    if champion is not None:
        found += gates.regression(after.tasks, load(context, champion).tasks, night.params.gate)
    write_night_report(context, stages, before, evaluation, None, version)
    found += gates.integrity(
        after.overall,
        digests_match=verify_files(night.home / policy["checkpoint"]) == policy["digest"] == after.policy_digest,
        isolated=all(row.evidence.get("isolation", "bubblewrap") != "none" for row in after.tasks),
        report_complete=report.is_file() and "</html>" in report.read_text()[-200:],
    )
    decision = gates.decide(found, night.params.gate.approval)
    models.record_decision(client, model, version, decision)
    write_night_report(context, stages, before, evaluation, decision, version)
    return decision


@task(name="promote", persist_result=False, cache_policy=NO_CACHE)
def promote(context: Context, version: str, decision: Decision) -> None:
    """Move the aliases as the decision says; a version that waits for a person stays `candidate`."""
    night, client, model = context.night, context.tracking.client, context.night.params.registry.model
    match decision.verdict:
        case "promoted":
            models.promote(client, model, version, night.home / "mlflow" / "promotion.lock")
        case "refused":
            models.retire_candidate(client, model, version)
            write_json(night.folder / "refusal.json", decision.model_dump(mode="json"))
        case "waiting":
            pass


def evaluate_champion(context: Context, version: str) -> Record | None:
    """The reigning champion, measured on this night's tasks with this night's parameters; None when there is none.

    A figure from another night was taken on another data set or machine; only the same tasks make it comparable. The
    version's own checkpoint being champion (a night continued after its promotion) means the one before it.
    """
    client, model = context.tracking.client, context.night.params.registry.model
    aliases = models.aliases(client, model)
    reigning = aliases.get(models.CHAMPION)
    if reigning == version:
        reigning = aliases.get(models.PREVIOUS)
    if reigning is None:
        return None
    tags: dict[str, Any] = models.describe(client, model, reigning)["tags"]
    digest = tags["checkpoint.digest"]
    folder = context.night.home / "champions" / digest[:12]
    if not (folder / MANIFEST).is_file():
        with atomic_folder(folder) as temporary:
            downloaded = models.download(client, model, reigning, temporary / "download")
            for path in sorted(downloaded.iterdir()):
                path.rename(temporary / path.name)
            shutil.rmtree(temporary / "download", ignore_errors=True)
    verify_files(folder)
    return evaluate_checkpoint(context, "champion", {"checkpoint": folder.relative_to(context.night.home).as_posix(), "digest": digest})


def write_night_report(context: Context, stages: dict[str, Path], before: Record, after: Record, decision: Decision | None, version: str) -> None:
    """The HTML report; without a decision first, since the gates ask whether it is complete."""
    night = context.night
    meta: dict[str, Any] = {
        "run_id": night.run_id,
        "profile": night.profile,
        "device": night.params.device,
        "created": read_json(night.folder / "started.json")["created"],
        "model": {"name": night.params.registry.model, "version": version},
        "environment": {"code": night.code[:12], "dataset": context.dataset["version"][:12], "policy": digest_json(night.params.policy.model_dump())[:12]},
    }
    rows: list[dict[str, Any]] = []
    if decision is not None:
        meta |= {"verdict": decision.verdict, "reasons": list(decision.reasons)}
        rows = [gate.model_dump() for gate in decision.gates]
    data = collect(context.dataset_folder, stages, night.home / before["results"], night.home / after["results"], rows, meta)
    write_report(night.folder / "report.html", data)
