"""Registration and promotion: a model version per night, gates, approval, and the move of the aliases.

Each task may be repeated after a kill: the version is found by the run's key, a decision is written again with the
same content, and a champion that is the version already stays as it is.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.core.errors import UserError
from components.core.files import (
    MANIFEST,
    atomic_folder,
    digest_file,
    digest_json,
    read_json,
    verify_files,
    write_json,
)
from components.evaluation.exploits import try_exploits
from components.evaluation.report import load_report_data, write_report
from components.registry import gate_runner, gates, models
from components.registry.gates import Decision
from components.registry.promotion import Promotion
from components.registry.tracking import numbers
from flows.evaluation import evaluate_checkpoint, load
from flows.steps import Context, Record


@task(name="register", task_run_name="register", persist_result=False, cache_policy=NO_CACHE)
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
            "manifest.digest": digest_file(night.home / policy["checkpoint"] / MANIFEST),
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


@dataclass(frozen=True)
class Champion:
    """The champion that a night's version is compared with: its version and its evaluation on the night's tasks."""

    version: str
    record: Record


@task(name="gate", task_run_name="gate", persist_result=False, cache_policy=NO_CACHE)
def decide(
    context: Context,
    version: str,
    policy: Record,
    evaluation: Record,
    champion: Champion | None,
    stages: dict[str, Path],
    before: Record,
) -> Decision:
    """Hold the evaluation against the thresholds and the champion, and the judge against a sample of exploits."""
    night, client, model = context.night, context.tracking.client, context.night.params.registry.model
    after = load(context, evaluation)
    write_night_report(context, stages, before, evaluation, None, version)
    sample = try_exploits(night.params.device, context.pool, epoch=night.run_id, progress=context.progress)
    if champion is not None:
        for name, value in {
            "version": champion.version,
            "evaluation": champion.record["results"],
            "digest": champion.record["digest"],
        }.items():
            client.set_model_version_tag(model, version, f"{gate_runner.COMPARED}.{name}", value)
    found = gate_runner.evaluate_gates(
        night.params.gate,
        after,
        load(context, champion.record) if champion is not None else None,
        sample,
        digests_match=verify_files(night.home / policy["checkpoint"])
        == policy["digest"]
        == after.policy_digest,
        report_complete=gate_runner.complete(night.folder / "report.html"),
    )
    decision = gates.decide(found, night.params.gate.approval)
    write_night_report(context, stages, before, evaluation, decision, version)
    return decision


@task(name="promote", task_run_name="promote", persist_result=False, cache_policy=NO_CACHE)
def promote(context: Context, version: str, decision: Decision, champion: Champion | None) -> None:
    """Settle the version as the decision says, with its entry in the audit chain; one that waits stays `candidate`."""
    night = context.night
    promotion = Promotion(context.tracking.client, night.params.registry, night.home)
    promotion.expire()
    promotion.apply_decision(
        version,
        decision,
        champion=champion.version if champion is not None else None,
        approval_seconds=night.params.gate.approval_seconds,
        key=digest_json([night.key, decision.model_dump(mode="json")]),
    )
    if decision.verdict == "refused":
        write_json(night.folder / "refusal.json", decision.model_dump(mode="json"))


def evaluate_champion(context: Context, version: str) -> Champion | None:
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
    if not (folder / "checkpoint" / MANIFEST).is_file():
        with atomic_folder(folder) as temporary:
            shutil.copytree(
                models.checkpoint(client, model, reigning, temporary / "download"), temporary / "checkpoint"
            )
            shutil.rmtree(temporary / "download", ignore_errors=True)
    if verify_files(folder / "checkpoint") != digest:
        raise UserError(
            f"{folder}: holds another checkpoint than version {reigning} registered; delete the folder and restore the artifact store."
        )
    checkpoint = (folder / "checkpoint").relative_to(context.night.home).as_posix()
    return Champion(
        reigning, evaluate_checkpoint(context, "champion", {"checkpoint": checkpoint, "digest": digest})
    )


def write_night_report(
    context: Context,
    stages: dict[str, Path],
    before: Record,
    after: Record,
    decision: Decision | None,
    version: str,
) -> None:
    """The HTML report; without a decision first, since the gates ask whether it is complete."""
    night = context.night
    meta: dict[str, Any] = {
        "run_id": night.run_id,
        "profile": night.profile,
        "device": night.params.device,
        "created": read_json(night.folder / "started.json")["created"],
        "model": {"name": night.params.registry.model, "version": version},
        "environment": {
            "code": night.code[:12],
            "dataset": context.dataset["version"][:12],
            "policy": digest_json(night.params.policy.model_dump())[:12],
        },
    }
    rows: list[dict[str, Any]] = []
    if decision is not None:
        meta |= {"verdict": decision.verdict, "reasons": list(decision.reasons)}
        rows = [gate.model_dump() for gate in decision.gates]
    data = load_report_data(
        context.dataset_folder,
        stages,
        night.home / before["results"],
        night.home / after["results"],
        rows,
        meta,
    )
    write_report(night.folder / "report.html", data)
