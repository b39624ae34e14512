"""Collection of a version's evidence from its files, and the run of the gates on it.

The nightly flow does this after an evaluation. A person may repeat it at any time.
"""

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
"""Prefix of the tags that name the champion's evaluation which the gates used.

The tags are compared.version, compared.evaluation and compared.digest.
"""


def run_gates(
    params: Params,
    after: Evaluation,
    champion: Evaluation | None,
    pool: JudgePool,
    progress: Progress,
    *,
    checkpoint: Path,
    registered_digest: str,
    report: Path,
    epoch: str,
) -> Decision:
    """Compare an evaluation with the thresholds and the champion, and try exploits on the judge.

    `after` is the version's evaluation, `champion` the champion's on the same tasks (None without one). The
    files of `checkpoint` are verified against the digest at registration, `report` has to be complete, and a
    sample of exploits is judged anew in each `epoch`. A decision that passes says `promoted` or, when
    gate.approval is `person`, `waiting`.
    """
    sample = try_exploits(params.device, pool, epoch=epoch, progress=progress)
    found = evaluate_gates(
        params.gate,
        after,
        champion,
        sample,
        digests_match=verify_files(checkpoint) == registered_digest == after.policy_digest,
        report_complete=is_complete(report),
    )
    return gates.decide(found, params.gate.approval)


def evaluate_gates(
    thresholds: GateThresholds,
    after: Evaluation,
    champion: Evaluation | None,
    sample: Sample,
    *,
    digests_match: bool,
    report_complete: bool,
) -> list[Gate]:
    """Return all gates of one evaluation.

    `champion` is the champion's evaluation on the same tasks, None without a champion.
    """
    found = gates.floors(after.overall, after.levels, thresholds)
    if champion is not None:
        found += gates.regression(after.tasks, champion.tasks, thresholds)
    other_devices = {str(row.evidence["device"]) for row in after.tasks if "device" in row.evidence}
    other_devices -= {sample.device}
    wrong = list(sample.wrong)
    if other_devices and sample.device:
        wrong.append(
            f"the sample ran on {sample.device}, the evaluation on {', '.join(sorted(other_devices))}"
        )
    return found + gates.integrity(
        after.overall,
        thresholds,
        digests_match=digests_match,
        isolated=all(row.evidence.get("isolation", "bubblewrap") != "none" for row in after.tasks),
        report_complete=report_complete,
        exploits=gates.exploits_gate(0 if other_devices else sample.refused, sample.tried, wrong, thresholds),
    )


def is_complete(report: Path) -> bool:
    """Return whether a report was written to its end."""
    return report.is_file() and "</html>" in report.read_text()[-200:]


def gate_again(
    params: Params, client: MlflowClient, home: Path, version: str, pool: JudgePool, progress: Progress
) -> tuple[str, Decision, str | None]:
    """Run the gates of a registered version with the present thresholds and champion.

    The version's figures are those of its evaluation. The champion is measured on the same tasks unless that
    was done before, and the sample of exploits is tried anew. A decision that passes says `waiting`, never
    `promoted`. Returns the version's number, the decision, and the champion's version (None without one).
    """
    model = params.registry.model
    found = models.find(client, model, version)
    number, tags = str(found.version), found.tags
    after = _evaluation(home, tags, number)
    if after.device != params.device or after.precision != params.precision:
        raise UserError(
            f"version {number}: was measured on {after.device} in {after.precision}; "
            f"give --set device={after.device} and its precision."
        )
    champion = models.champion_besides(models.aliases(client, model), number)
    by_person = params.model_copy(update={"gate": params.gate.model_copy(update={"approval": "person"})})
    with tempfile.TemporaryDirectory(prefix="cuda-agent-") as scratch:
        decision = run_gates(
            by_person,
            after,
            _champion(params, client, home, champion, tags, after, pool, progress, Path(scratch))
            if champion is not None
            else None,
            pool,
            progress,
            checkpoint=models.checkpoint(client, model, number, Path(scratch)),
            registered_digest=tags.get("checkpoint.digest", ""),
            report=Path(tags.get("report", "")),
            epoch=digest_json([number, after.epoch, champion])[:12],
        )
    return number, decision, champion


def _evaluation(home: Path, tags: dict[str, Any], version: str) -> Evaluation:
    results = home / tags.get("evaluation", "")
    if not results.is_file() or digest_file(results) != tags.get("evaluation.digest"):
        raise UserError(
            f"{results}: the evaluation of version {version} is missing or changed; "
            "restore it, or run the night again."
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
    """Return the champion's evaluation on the candidate's tasks.

    It is the one that the version's tags name, or a new one.
    """
    if tags.get(f"{COMPARED}.version") == champion:
        results = home / tags[f"{COMPARED}.evaluation"]
        if results.is_file() and digest_file(results) == tags[f"{COMPARED}.digest"]:
            return load_evaluation(results)
    tasks = [KernelTask(code=row.source, ops=row.ops, name=row.name, level=row.level) for row in after.tasks]
    folder = models.checkpoint(client, params.registry.model, champion, scratch)
    policy = checkpoint_policy(folder, params)
    settings = params.model_dump(mode="json", exclude={"home", "gate"})
    epoch = digest_json([policy.digest, after.suite_digest, after.epoch, settings])[:12]
    return evaluate(
        policy, tasks, pool, home / "evaluations" / epoch, epoch=epoch, progress=progress, seed=params.seed
    )
