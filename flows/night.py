"""Decide how a night begins and ends: its first policy, its time budget, and its record of descent.

A night is one run of the pipeline in a series. Which policy a night starts from is decided once and stored in
night.json in the run's folder, so a killed night starts from the same policy again. If a night's time budget
ends before the last update, the next run with the same parameters (`PipelineRun.continues`) starts from the
same policy, so its stages have the same keys and the unfinished one continues in its folder. The record of
descent (`night_lineage`) says what the night's policy was trained from.
"""

import shutil
import time
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from components.core.config import flatten_values, result_values
from components.core.errors import UserError, refuse
from components.core.files import MANIFEST, atomic_folder, digest_json, read_json, verify_files, write_json
from components.core.params import Params
from components.core.records import FrozenModel, read_as
from components.evaluation.compare import SETTINGS
from components.registry import models
from components.registry.promotion import Promotion
from components.registry.tracking import RUN_KEY
from components.training.stage import StageName
from flows.run_context import PipelineRun, left_unfinished, newest_runs, record_of
from flows.steps import Context, EvaluationRecord

# File in a run's folder with its Night.
NIGHT = "night.json"
# The time that evaluation, gates and promotion take after training is expected to be at most this multiple of
# the time that was measured before.
MARGIN = 1.25
# Seconds that are reserved in addition, because short evaluations last several times as long on a busy
# machine.
SPARE_SECONDS = 20.0
# Least share of the time budget of a home's first run that is reserved for what follows training.
FIRST_SHARE = 0.1
# Largest length of a tag that MLflow stores.
MAX_TAG = 1000
# Largest number of ancestors in the table of descent.
MAX_ANCESTORS = 10


class StartPolicy(FrozenModel):
    """The champion, the promoted model version, that a run starts from.

    `version` is its number, and `digest` that of its checkpoint. `source` is the value of policy.source,
    `scratch` or a folder, from which the champion's line of training began.
    """

    version: str
    digest: str
    source: str


class Night(FrozenModel):
    """The decisions that are made once when a night, one run of the pipeline in a series, begins.

    `started` is when the night began (seconds of Unix time), before its data set was made. `champion` is the
    promoted version if the night starts from it, and None if it starts from another policy.
    """

    started: float
    champion: StartPolicy | None


def open_night(run: PipelineRun, client: MlflowClient, started: float) -> Night:
    """Return what was decided when this night began; at the first call, decide it and store the decision.

    A night is one run of the pipeline in a series. `started` is when it began, in seconds of Unix time. If
    the run continues another one, it starts from the same policy. Raises UserError if the kept copy of the
    champion's checkpoint is damaged.
    """
    file, remedy = run.folder / NIGHT, "restore it from a backup, or give another home with --home"
    if file.is_file():
        return read_as(Night, file, remedy)
    if run.continues:
        champion = read_as(Night, run.home / "runs" / run.continues / NIGHT, remedy).champion
    else:
        champion = find_champion(run, Promotion(client, run.params.registry, run.home))
    night = Night(started=started, champion=champion)
    write_json(file, night.model_dump(mode="json"))
    return night


def find_champion(run: PipelineRun, promotion: Promotion) -> StartPolicy | None:
    """Return the champion, the promoted version, if the run starts from it, and None otherwise.

    The run starts from it if the parameter policy.source is "champion" and a version was promoted. The
    champion's checkpoint is copied into the home, the folder of all runs. The `source` of the result is the
    policy.source that the checkpoint's manifest records, or policy.base if it records none. Raises UserError
    if the copy is damaged.
    """
    policy = run.params.policy
    version = promotion.aliases().get(models.CHAMPION) if policy.source == "champion" else None
    if version is None:
        return None
    manifest = read_json(keep_checkpoint(promotion, version) / MANIFEST)
    source = manifest["params"].get("policy", {}).get("source", policy.base)
    return StartPolicy(version=version, digest=manifest["digest"], source=source)


def keep_checkpoint(promotion: Promotion, version: str) -> Path:
    """Return the folder in the home with a copy of a version's checkpoint, which is made if it is missing.

    The home is the folder of all runs. `version` is a number or an alias. Raises UserError if the digest of
    the copy is not the recorded one, or if the audit chain has no entry of the version's registration.
    """
    number, evidence = promotion.evidence(version, verify=False)
    digest = evidence["checkpoint.digest"]
    folder: Path = promotion.home / "champions" / digest[:12]
    if not (folder / "checkpoint" / MANIFEST).is_file():
        with atomic_folder(folder) as temporary:
            shutil.copytree(
                models.checkpoint(promotion.client, promotion.model, number, temporary / "download"),
                temporary / "checkpoint",
            )
            shutil.rmtree(temporary / "download", ignore_errors=True)
    refuse(
        (
            verify_files(folder / "checkpoint") != digest,
            f"{folder}: holds another checkpoint than version {version} registered; "
            "delete the folder and restore the artifact store.",
        )
    )
    return folder / "checkpoint"


def night_params(params: Params, champion: StartPolicy | None) -> Params:
    """Return `params` with the value `champion` of policy.source replaced by `scratch` or a folder.

    `champion` is the promoted version that the run starts from. The new value is the `source` of `champion`,
    from which its line of training began, or policy.base if `champion` is None. Parameters with another
    policy.source are returned unchanged.
    """
    if params.policy.source != "champion":
        return params
    source = champion.source if champion else params.policy.base
    return params.model_copy(update={"policy": params.policy.model_copy(update={"source": source})})


def training_deadline(run: PipelineRun, night: Night, before: EvaluationRecord) -> float | None:
    """Return when training has to end (seconds of Unix time), or None without a time budget.

    The end is the beginning of `night` plus the budget night.hours, less a reserve for what follows training.
    `before` is the evaluation of the first policy of this run. What follows training is expected to last as
    long as in the newest finished run with the same profile in the folder of all runs, and at least as long
    as `before`. Without such a run at least FIRST_SHARE of the budget is reserved, because the gates
    (conditions of promotion) judge a sample of exploits too. Measured times are multiplied by MARGIN, and
    SPARE_SECONDS are added.
    """
    hours = run.params.night.hours
    if not hours:
        return None
    earlier = [
        record["tail_seconds"]
        for record in map(record_of, newest_runs(run.home))
        if record.get("profile") == run.profile and "tail_seconds" in record
    ]
    budget = hours * 3600
    least = MARGIN * float(earlier[0]) if earlier else FIRST_SHARE * budget
    return night.started + budget - max(MARGIN * before.seconds, least) - SPARE_SECONDS


def may_begin(run: PipelineRun, name: StageName, deadline: float | None) -> bool:
    """Return whether training stage `name` may be begun now, so that it makes an update before the deadline.

    `deadline` is in seconds of Unix time, or None without a time budget; without one, any stage may be begun.
    The stage `rejection` samples all its trajectories before its first update. It may be begun only if the
    time until the deadline is longer than the newest finished stage `rejection` in the folder of all runs
    took. If there is none, or its record is damaged, it may be begun until the deadline, as every other
    stage.
    """
    if deadline is None:
        return True
    expected = 0.0
    if name == "rejection":
        finished = (run.home / "stages").glob("rejection-*/stage.json")
        newest = max(finished, key=lambda path: path.stat().st_mtime, default=None)
        expected = record_of(newest.parent, newest.name).get("seconds", 0.0) if newest else 0.0
    return time.time() + expected < deadline


def changes_since(run: PipelineRun, client: MlflowClient, version: str) -> list[str]:
    """Return phrases that say in what a run differs from the run that registered a version.

    `version` is the number or an alias. There is a phrase such as "seed 1 -> 2", with the value of the
    version's run first, for each parameter that can change results and differs, and "code" if the sources
    differ. The list is empty if nothing differs, or if the settings of the version's run are damaged or are
    not in the home of `run`, the folder of all its runs. Raises UserError if there is no such version.
    """
    key = models.describe(client, run.params.registry.model, version)["tags"].get(RUN_KEY, "")
    settings = record_of(run.home / "runs" / key[:12], SETTINGS)
    if not settings:
        return []
    # They are not validated, because a run of another release may lack parameters.
    before, now = flatten_values(settings["params"]), result_values(run.params)
    found = [
        f"{name} {before.get(name)!r} -> {value!r}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    return found + (["code"] if digest_json(settings["sources"]) != run.code else [])


def night_lineage(context: Context, night: Night, unfinished: dict[str, Any] | None) -> dict[str, Any]:
    """Return the night's descent, which is what its policy was trained from, as a dictionary for JSON.

    A night is one run of the pipeline in a series. The keys are `hours` (the time budget), `start` (the first
    policy, such as "version 3", "scratch" or "cold start of models/smollm2"), `parent` (the version number of
    the promoted version, the champion, that the night started from, or None), `continues` (the stage of an
    earlier run that the night continued, as `left_unfinished` returns it, or None), `unfinished` (the
    argument: the stage that the night left unfinished in the same form, or None), and `new` (phrases on what
    differs from the champion's run).
    """
    run, champion = context.run, night.champion
    source = context.params.policy.source
    if source != "scratch" and context.params.coldstart.language_model:
        source = f"cold start of {source}"
    return {
        "hours": run.params.night.hours,
        "start": f"version {champion.version}" if champion else source,
        "parent": champion.version if champion else None,
        "continues": left_unfinished(run.home / "runs" / run.continues) if run.continues else None,
        "unfinished": unfinished,
        "new": changes_since(run, context.tracking.client, champion.version) if champion else [],
    }


def lineage_tags(lineage: dict[str, Any]) -> dict[str, str]:
    """Return the descent of a run's policy as tags for its model version and its MLflow run.

    `lineage` is a result of `night_lineage`. A tag has a name such as `lineage.parent`; tags without a text
    are left out.
    """
    tags = {
        "lineage.start": lineage["start"],
        "lineage.parent": lineage["parent"],
        "lineage.new": "; ".join(lineage["new"])[:MAX_TAG],
        "lineage.continues": _phrase(lineage["continues"]),
        "lineage.unfinished": _phrase(lineage["unfinished"]),
    }
    return {name: text for name, text in tags.items() if text}


def _phrase(stage: dict[str, Any] | None) -> str:
    if stage is None:
        return ""
    done, total = stage["progress"] or (0, 0)
    return f"{stage['stage']} after update {done} of {total or '?'}"


def descent(client: MlflowClient, model: str, version: str) -> list[dict[str, Any]]:
    """Return a row for a version and for each version that it descends from, the newest first.

    A row maps columns of the report's table, such as "version" and "started from", to texts, "" where nothing
    is known. There are at most MAX_ANCESTORS rows, and none for a version that was deleted and those before
    it. Raises UserError if the first version does not exist.
    """
    rows: list[dict[str, Any]] = []
    aliases = models.aliases(client, model)
    number: str | None = version
    while number and len(rows) < MAX_ANCESTORS:
        try:
            tags = models.describe(client, model, number)["tags"]
        except UserError:
            if not rows:
                raise
            break
        rows.append(
            {
                "version": number,
                "started from": tags.get("lineage.start", ""),
                "new": tags.get("lineage.new", ""),
                **{name: tags.get(f"figure.{name}", "") for name in ("pass_rate", "faster_rate.compile")},
                "suite": tags.get("suite.digest", "")[:12],
                "alias": ", ".join(alias for alias, at in aliases.items() if at == number),
            }
        )
        number = tags.get("lineage.parent")
    return rows
