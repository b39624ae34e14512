"""The evaluation of one policy on one suite as a Prefect task, cached by the digests of policy and suite."""

import time
from pathlib import Path
from typing import Any

from components.agent.policies import checkpoint_policy
from components.core.files import digest_file, digest_json
from components.evaluation.evaluate import evaluate
from components.evaluation.metrics import RESULTS, Evaluation, Summary, TaskResult, load_evaluation
from components.evaluation.suites import load_suite
from components.judge.pool.local_pool import LocalPool
from flows.progress import RenamedProgress
from flows.steps import Context, EvaluationRecord


def evaluate_checkpoint(context: Context, title: str, checkpoint: str, digest: str) -> EvaluationRecord:
    """Evaluate a checkpoint on the run's suite, or return the cached record of its evaluation.

    `checkpoint` is a path relative to the home, and `digest` is that of the checkpoint's files. `title` is
    shown to people in order to distinguish the evaluations of one run. It is not part of the cache key,
    because the same policy under another title gives the same evaluation.
    """
    run, params = context.run, context.params
    suite = load_suite(params, context.dataset_folder)

    def work(folder: Path) -> EvaluationRecord:
        started = time.monotonic()
        evaluation = evaluate(
            checkpoint_policy(run.home / checkpoint, params),
            suite,
            context.pool,
            folder,
            # The judge reuses stored verdicts of the same epoch only. So a new evaluation measures every
            # task, and a resumed evaluation, which has the same folder, continues.
            epoch=folder.name,
            progress=RenamedProgress(context.progress, title),
            seed=params.seed,
            admit=context.pool.admit if isinstance(context.pool, LocalPool) else None,
        )
        results = folder / RESULTS
        return EvaluationRecord(
            results=results.relative_to(run.home).as_posix(),
            digest=digest_file(results),
            figures=figures(evaluation.overall),
            seconds=round(time.monotonic() - started, 3),
        )

    return context.stage(
        "evaluation",
        {"policy": digest, "suite": digest_json([kernel.task_id for kernel in suite])},
        work,
        EvaluationRecord,
        title=title,
    )


def load(context: Context, record: EvaluationRecord) -> Evaluation:
    return load_evaluation(record.output(context.run.home))


def figures(summary: Summary) -> dict[str, Any]:
    """Return the seven figures of an evaluation that `cuda-agent run --json` prints, by their names."""
    names = {"pass_rate", "faster_rate", "geomean", "mean_reward", "attempts_mean_reward", "tasks", "errors"}
    return summary.model_dump(include=names)


def table(results: tuple[TaskResult, ...]) -> list[dict[str, Any]]:
    """Return one row for each task's result, which maps columns to values.

    MLflow shows the rows of several runs side by side. The speedups are those over the two baselines.
    """
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
