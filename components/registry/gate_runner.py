"""Collect the evidence of a model version from its files, and run the gates (gates.py) on it.

Gates are the conditions under which a version is promoted. The nightly flow runs the gates after an
evaluation. `cuda-agent models gate` runs them again at any time.
"""

import contextlib
import tempfile
from pathlib import Path

from components.agent.policies import checkpoint_policy
from components.core.errors import refuse
from components.core.files import digest_file, digest_json, verify_files
from components.core.params import Params
from components.core.progress import Progress
from components.core.promotion_params import GateThresholds
from components.core.task import KernelTask
from components.evaluation.evaluate import evaluate
from components.evaluation.results import RESULTS, Evaluation, load_evaluation
from components.judge.pool.local_pool import JudgePool, LocalPool
from components.judge.verdict import VERSION, Labels
from components.registry import gates, models
from components.registry.exploits import Sample, try_exploits
from components.registry.gates import Compared, Decision, Gate
from components.registry.promotion import Promotion


def run_gates(
    params: Params,
    after: Evaluation,
    start: Evaluation,
    champion: Evaluation | None,
    pool: JudgePool,
    progress: Progress,
    *,
    checkpoint: Path,
    registered_digest: str,
    report: Path,
    epoch: str,
) -> Decision:
    """Run all gates, the conditions of promotion, on a model version, and return the decision.

    The gates compare `after`, the evaluation of the version, with the thresholds, with `start`, the
    evaluation of the policy that the run began with, and with `champion`, the evaluation of the promoted
    version on the same tasks, which is None if there is none. They verify that the files in the folder
    `checkpoint` match the `registered_digest` and that `report`, the HTML file, is complete. `pool` also
    judges a sample of exploits (exploits.py), or reuses its stored verdicts on them if they have the same
    `epoch`, a name for one set of judgements. Raises UserError if a file of the checkpoint is damaged, and
    InfrastructureError if the judge fails on the sample.
    """
    found = evaluate_gates(
        params.gate,
        after,
        start,
        champion,
        try_exploits(params.device, pool, epoch=epoch, progress=progress),
        digests_match=verify_files(checkpoint) == registered_digest == after.policy_digest,
        report_complete=is_complete(report),
    )
    return gates.decide(found, params.gate.approval)


def evaluate_gates(
    thresholds: GateThresholds,
    after: Evaluation,
    start: Evaluation,
    champion: Evaluation | None,
    sample: Sample,
    *,
    digests_match: bool,
    report_complete: bool,
) -> list[Gate]:
    """Return the results of all gates, the conditions of promotion, for the evaluation `after` of a version.

    `start` is the evaluation of the policy that the run began with, and `champion` that of the promoted
    version, both on the same tasks; `champion` is None if no version is promoted. `sample` is the result of
    judging exploits (kernels that break a rule). `digests_match` says whether the checkpoint's files have the
    digests of the registration and of the evaluation, and `report_complete` whether the report was written to
    its end. Exploits that were tried on another device than that of the evaluation count as not refused.
    """
    found = gates.floors(after.overall, after.levels, thresholds)
    if thresholds.improvement:
        found += gates.improvement(after.tasks, start.tasks)
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
    """Return whether the HTML file `report` exists and has the tag `</html>` in its last 200 characters."""
    return report.is_file() and b"</html>" in report.read_bytes()[-200:]


def gate_again(
    params: Params, promotion: Promotion, version: str, pool: LocalPool, progress: Progress
) -> tuple[str, Decision, Compared | None]:
    """Run the gates again on a registered version, with the present thresholds and the present champion.

    Gates are the conditions of promotion, and the champion is the promoted version. If the version is the
    champion itself, it is compared with the previous champion. The figures of the version are read from its
    stored evaluation. The champion is evaluated on the same tasks unless such an evaluation is stored. If all
    gates pass, the verdict is `waiting` (for a person's approval), and `promoted` only if the version is the
    champion.

    `version` is a number or an alias. Returns the number of the version, the decision, and the champion with
    the path of its evaluation, which is None if there is no champion. Raises UserError if the version was
    evaluated on another device, in another precision or in another dtype than `params` say, or under other
    rules of the judge than the default ones (`Labels` in judge/verdict.py), or if its checkpoint or an
    evaluation is missing or changed.
    """
    home = promotion.home
    number, evidence = promotion.evidence(version)
    after = load_evaluation(home / evidence["evaluation"])
    settings = params.device, params.precision, params.evaluation.dtype
    refuse(
        (
            (after.device, after.precision, after.dtype) != settings,
            f"version {number}: was measured on {after.device} in {after.precision}, with tasks in "
            f"{after.dtype}; give --set device={after.device}, its precision and its evaluation.dtype.",
        ),
        (
            after.labels != Labels(),
            f"version {number}: was measured with {after.labels}; evaluate it with {Labels()}.",
        ),
    )
    aliases = promotion.aliases()
    approval = "automatic" if aliases.get(models.CHAMPION) == number else "person"
    gated = params.model_copy(update={"gate": params.gate.model_copy(update={"approval": approval})})
    champion = models.champion_besides(aliases, number)
    compared = (
        promotion.compared(number, champion) or _evaluate(params, promotion, champion, after, pool, progress)
        if champion is not None
        else None
    )
    with tempfile.TemporaryDirectory(prefix="cuda-agent-") as scratch:
        decision = run_gates(
            gated,
            after,
            load_evaluation(home / evidence["start.evaluation"]),
            load_evaluation(home / compared.evaluation) if compared is not None else None,
            pool,
            progress,
            checkpoint=models.checkpoint(promotion.client, promotion.model, number, Path(scratch)),
            registered_digest=evidence["checkpoint.digest"],
            report=home / evidence["report"],
            epoch=digest_json([number, after.epoch, champion, VERSION])[:12],
        )
    return number, decision, compared


def _evaluate(
    params: Params,
    promotion: Promotion,
    champion: str,
    after: Evaluation,
    pool: LocalPool,
    progress: Progress,
) -> Compared:
    """Evaluate the champion, the promoted version, on the tasks of the evaluation `after`.

    `champion` is the champion's version number, and `after` is the evaluation of the version to be compared
    with it. Returns `champion` with the path and the digest of the results. Raises UserError if a file of the
    champion is missing or changed.
    """
    promotion.evidence(champion)
    tasks = [KernelTask(code=row.source, ops=row.ops, name=row.name, level=row.level) for row in after.tasks]
    with tempfile.TemporaryDirectory(prefix="cuda-agent-") as scratch:
        folder = models.checkpoint(promotion.client, promotion.model, champion, Path(scratch))
        policy = checkpoint_policy(folder, params)
        settings = params.model_dump(mode="json", exclude={"home", "gate"})
        epoch = digest_json([policy.digest, after.suite_digest, after.epoch, settings, VERSION])[:12]
        folder = promotion.home / "evaluations" / epoch
        with contextlib.closing(policy):
            evaluate(
                policy,
                tasks,
                pool,
                folder,
                epoch=epoch,
                progress=progress,
                seed=params.seed,
            )
    results = folder / RESULTS
    return Compared(
        version=champion,
        evaluation=results.relative_to(promotion.home).as_posix(),
        digest=digest_file(results),
    )
