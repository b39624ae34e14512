"""Gates of a version from its files: what the nightly flow asks after an evaluation, and a person may ask again later."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from components.agent.policies import checkpoint_policy
from components.core.config import GateThresholds, Params
from components.core.errors import UserError
from components.core.files import digest_file, digest_json, verify_files
from components.core.progress import Progress
from components.core.task import KernelTask
from components.evaluation.evaluate import evaluate
from components.evaluation.exploits import Sample, try_exploits
from components.evaluation.results import Evaluation, load_evaluation
from components.judge.pool import JudgePool
from components.registry import gates, models
from components.registry.gates import Decision, Gate

COMPARED = "compared"
"""Tags compared.version, compared.evaluation, compared.digest: the champion's evaluation that the gates used."""


def evaluate_gates(
    thresholds: GateThresholds,
    after: Evaluation,
    champion: Evaluation | None,
    sample: Sample,
    *,
    digests_match: bool,
    report_complete: bool,
) -> list[Gate]:
    """Every gate of one evaluation. `champion` is the champion's evaluation on the same tasks, None when there is none."""
    found = gates.floors(after.overall, after.levels, thresholds)
    if champion is not None:
        found += gates.regression(after.tasks, champion.tasks, thresholds)
    measured_on = {str(row.evidence["device"]) for row in after.tasks if "device" in row.evidence}
    wrong = list(sample.wrong)
    if measured_on - {sample.device} and sample.device:
        wrong.append(f"the sample ran on {sample.device}, the evaluation on {', '.join(sorted(measured_on))}")
    exploits = gates.exploits_gate(
        0 if measured_on - {sample.device} else sample.refused, sample.tried, wrong, thresholds
    )
    isolated = all(row.evidence.get("isolation", "bubblewrap") != "none" for row in after.tasks)
    return found + gates.integrity(
        after.overall,
        thresholds,
        digests_match=digests_match,
        isolated=isolated,
        report_complete=report_complete,
        exploits=exploits,
    )


def complete(report: Path) -> bool:
    """Whether a report was written to its end."""
    return report.is_file() and "</html>" in report.read_text()[-200:]


def gate_again(
    params: Params, client: MlflowClient, home: Path, version: str, pool: JudgePool, progress: Progress
) -> tuple[str, Decision, str | None]:
    """Hold a registered version against today's thresholds and today's champion: its number, the decision, the champion.

    Its own figures are those that were measured; the champion is measured on the same tasks where that was not done yet,
    and the sample of exploits is tried anew. A decision that passes says `waiting`: a person asked, a person decides.
    """
    model = params.registry.model
    found = models.find(client, model, version)
    number, tags = str(found.version), found.tags
    after = _evaluation(home, tags, number)
    if after.device != params.device or after.precision != params.precision:
        raise UserError(
            f"version {number}: was measured on {after.device} in {after.precision}; give --set device={after.device} and its precision."
        )
    reigning = models.aliases(client, model)
    champion = reigning.get(models.CHAMPION)
    champion = reigning.get(models.PREVIOUS) if champion == number else champion
    with tempfile.TemporaryDirectory(prefix="cuda-agent-") as scratch:
        digest = verify_files(models.checkpoint(client, model, number, Path(scratch)))
        against = None
        if champion is not None:
            against = _champion(params, client, home, champion, tags, after, pool, progress, Path(scratch))
    epoch = digest_json([number, after.epoch, champion])[:12]
    sample = try_exploits(params.device, pool, epoch=epoch, progress=progress)
    matching = digest == after.policy_digest == tags.get("checkpoint.digest")
    rules = evaluate_gates(
        params.gate,
        after,
        against,
        sample,
        digests_match=matching,
        report_complete=complete(Path(tags.get("report", ""))),
    )
    return number, gates.decide(rules, "person"), champion


def _evaluation(home: Path, tags: dict[str, Any], version: str) -> Evaluation:
    results = home / tags.get("evaluation", "")
    if not results.is_file() or digest_file(results) != tags.get("evaluation.digest"):
        raise UserError(
            f"{results}: the evaluation of version {version} is missing or changed; restore it, or run the night again."
        )
    return load_evaluation(results)


def _champion(
    params: Params,
    client: MlflowClient,
    home: Path,
    champion: str,
    tags: dict[str, Any],
    after: Evaluation,
    pool: JudgePool,
    progress: Progress,
    scratch: Path,
) -> Evaluation:
    """The champion on the candidate's tasks: as the night measured it, or measured now."""
    if tags.get(f"{COMPARED}.version") == champion:
        results = home / tags[f"{COMPARED}.evaluation"]
        if results.is_file() and digest_file(results) == tags[f"{COMPARED}.digest"]:
            return load_evaluation(results)
    tasks = [KernelTask(code=row.source, ops=row.ops, name=row.name, level=row.level) for row in after.tasks]
    folder = models.checkpoint(client, params.registry.model, champion, scratch)
    policy = checkpoint_policy(folder, params)
    epoch = digest_json(
        [
            policy.digest,
            after.suite_digest,
            after.epoch,
            params.model_dump(mode="json", exclude={"home", "gate"}),
        ]
    )[:12]
    return evaluate(
        policy, tasks, pool, home / "evaluations" / epoch, epoch=epoch, progress=progress, seed=params.seed
    )
