"""This module collects the evidence of a model version from its files and runs the gates on it.

The nightly flow runs the gates after an evaluation. `cuda-agent models gate` runs them again at any time.
"""

import tempfile
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from components.agent.policies import checkpoint_policy
from components.core.errors import UserError
from components.core.files import digest_file, digest_json, verify_files
from components.core.params import GateThresholds, Params
from components.core.progress import Progress
from components.core.task import KernelTask
from components.evaluation.evaluate import evaluate
from components.evaluation.metrics import Evaluation, load_evaluation
from components.judge.pool.local_pool import JudgePool
from components.judge.verdict import Labels
from components.registry import gates, models
from components.registry.exploits import Sample, try_exploits
from components.registry.gates import Decision, Gate

# Prefix of a version's tags about the champion with which the gates compared it. The tags are
# compared.version, compared.evaluation and compared.digest.
COMPARED = "compared"


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
    """Run all gates on a model version, and return the decision.

    The gates compare `after`, the evaluation of the version, with the thresholds and with the evaluation of
    the champion on the same tasks, which is None if there is no champion. They verify that the files of
    `checkpoint` match the registered digest and that `report` is complete. The judge also judges a sample of
    exploits, or reuses its stored verdicts on them if they have the same `epoch`. If all gates pass, the
    verdict is `waiting` if gate.approval is `person`, and `promoted` otherwise. Raises UserError if a file of
    the checkpoint is damaged.
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
    """Return all gates for the evaluation `after` of a version.

    `champion` is the evaluation of the champion on the same tasks, or None if there is no champion. `sample`
    has the verdicts on the exploits. The gate on exploits fails if they ran on another device than the
    evaluation.
    """
    found = gates.floors(after.overall, after.levels, thresholds)
    if champion is not None:
        found += gates.regression(after.tasks, champion.tasks, thresholds)
    other_devices = {str(row.evidence["device"]) for row in after.tasks if "device" in row.evidence} - {
        sample.device
    }
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
    """Return whether the HTML file of the report exists and contains its end."""
    return report.is_file() and "</html>" in report.read_text()[-200:]


def gate_again(
    params: Params, client: MlflowClient, home: Path, version: str, pool: JudgePool, progress: Progress
) -> tuple[str, Decision, str | None]:
    """Run the gates again on a registered version, with the present thresholds and the present champion.

    The figures of the version are read from its stored evaluation. The champion is evaluated on the same
    tasks unless such an evaluation is stored. If all gates pass, the verdict is `waiting`, never `promoted`.

    Returns the number of the version, the decision, and the number of the champion, which is None if there is
    no champion. Raises UserError if the version was evaluated on another device or in another precision than
    `params` say, or if its evaluation or its checkpoint is missing or changed.
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
    if after.labels != Labels():
        raise UserError(f"version {number}: was measured with {after.labels}; evaluate it with {Labels()}.")
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
    """Return an evaluation of the champion on the tasks of `after`, the evaluation of the compared version.

    If `tags`, the tags of that version, name such an evaluation and its file is unchanged, it is loaded.
    Otherwise the champion is evaluated.
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
