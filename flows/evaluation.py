"""Evaluation as a Prefect task: one policy on one suite, cached by the digests of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import task

from components.agent.policies import checkpoint_policy
from components.core.files import digest_file, digest_json
from components.evaluation.evaluate import evaluate
from components.evaluation.metrics import Summary, TaskResult
from components.evaluation.results import RESULTS, Evaluation, load_evaluation
from components.evaluation.suites import load_suite
from components.judge.pool import LocalPool
from flows.progress import RenamedProgress
from flows.steps import SAMPLING, Context, Record


@task(persist_result=True, result_serializer="json")
def evaluate_policy(folder: Path, call: Callable[[Path], Record]) -> Record:
    """One evaluation in its folder."""
    return call(folder)


def evaluate_checkpoint(context: Context, name: str, policy: Record) -> Record:
    """Evaluate a checkpoint on the run's suite; `name` tells the evaluations of one night apart."""
    night = context.night
    suite = load_suite(night.params, context.dataset_folder)
    digests = {"policy": policy["digest"], "suite": digest_json([kernel.task_id for kernel in suite])}

    def call(folder: Path) -> Record:
        evaluation = evaluate(
            checkpoint_policy(night.home / policy["checkpoint"], night.params),
            suite,
            context.pool,
            folder,
            # The judge measures anew for every evaluation, and gives a resumed one what it measured already.
            epoch=folder.name,
            progress=RenamedProgress(context.progress, name),
            seed=night.params.seed,
            admit=context.pool.admit if isinstance(context.pool, LocalPool) else None,
        )
        results = folder / RESULTS
        return {
            "results": results.relative_to(night.home).as_posix(),
            "digest": digest_file(results),
            "figures": figures(evaluation.overall),
        }

    # Under one name in the key: the same policy measured for another purpose is the same evaluation.
    return context.step(
        evaluate_policy, "evaluation", (*SAMPLING, "evaluation"), digests, call, name="evaluation", title=name
    )


def load(context: Context, record: Record) -> Evaluation:
    return load_evaluation(context.night.home / record["results"])


def figures(summary: Summary) -> dict[str, Any]:
    """The evaluation's figures as `cuda-agent run --json` gives them (DESIGN §12)."""
    return {
        "pass_rate": summary.pass_rate,
        "faster_rate": summary.faster_rate.model_dump(),
        "geomean": summary.geomean.model_dump(),
        "mean_reward": summary.mean_reward,
        "attempts_mean_reward": summary.attempts_mean_reward,
        "tasks": summary.tasks,
        "errors": summary.errors,
    }


def table(results: tuple[TaskResult, ...]) -> list[dict[str, Any]]:
    """One row per task: what is compared between runs."""
    return [
        {
            "task_id": row.task_id,
            "ops": " ".join(row.ops),
            "status": row.status,
            "milestone": row.milestone,
            "speedup_eager": row.ratio("eager"),
            "speedup_compile": row.ratio("compile"),
            "compile_mode": row.evidence.get("compile_mode", ""),
            "reason": row.reason,
            "degenerate": row.degenerate,
            "level": row.level,
        }
        for row in results
    ]
