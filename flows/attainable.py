"""Run the schedule search as a Prefect task, and compare the policies of a run with its result.

A schedule search judges the kernels of random schedules on the tasks of the run's evaluation suite, to find
the speed-up that is attainable on each task.
"""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from components.core.files import digest_file, digest_json, read_json
from components.evaluation.attainable import FINALISTS, TITLE, search
from components.evaluation.captured_share import Attainable, SearchSummary, summarise_search
from components.evaluation.metrics import RESULTS
from components.evaluation.suites import load_suite
from components.judge.version import VERSION
from flows.evaluation import load
from flows.steps import Context, EvaluationRecord

# Largest share of a night's time budget that the search takes.
BUDGET_SHARE = 0.1


def search_schedules(context: Context, deadline: float | None) -> EvaluationRecord | None:
    """Run the schedule search on the tasks of the run's suite, or return the cached record of the search.

    `deadline` is the time.time() at which training has to end, or None without a time budget. With a
    deadline, the search ends by then and takes at most BUDGET_SHARE of the budget. If it is not finished, the
    next run continues it. Returns None if the search is not finished, if `evaluation.schedules` is 0, or if
    the policy is not one made from scratch.
    """
    run, params = context.run, context.params
    if not params.evaluation.schedules or params.policy.source != "scratch":
        return None
    limit = None
    if deadline is not None:
        limit = min(deadline, time.time() + BUDGET_SHARE * params.night.hours * 3600)
    suite = load_suite(params, context.dataset_folder)

    def work(folder: Path) -> EvaluationRecord:
        """Search in `folder`, and return the record, which is unfinished if the time was not enough."""
        started = time.monotonic()
        found = search(
            suite,
            params,
            context.pool,
            folder,
            schedules=params.evaluation.schedules,
            # Searches of other data sets, or with another number of schedules, share their measurements.
            epoch=f"attainable/{VERSION}/{run.rerun_number('evaluation')}",
            progress=context.progress,
            finalists=FINALISTS,
            deadline=limit,
        )
        results = folder / RESULTS
        return EvaluationRecord(
            results=results.relative_to(run.home).as_posix(),
            digest=digest_file(results) if found else "",
            figures=found.model_dump(exclude={"schedules", "tasks"}) if found else {},
            seconds=round(time.monotonic() - started, 3),
            is_finished=found is not None,
        )

    record = context.stage(
        "evaluation",
        {"suite": digest_json([kernel.task_id for kernel in suite])},
        work,
        EvaluationRecord,
        name="attainable",
        title=TITLE,
    )
    return record if record.is_finished else None


def summarise(
    context: Context,
    searched: EvaluationRecord | None,
    stages: Collection[str],
    before: EvaluationRecord,
    after: EvaluationRecord,
    begins: str,
) -> SearchSummary | None:
    """Compare the run's first and last policy with the result of the schedule search.

    `searched` is the record of the search. Returns None if it is None. `before` and `after` are the
    evaluations of the first and the last policy. `begins` is the kind of the first policy, such as "cold
    start", and `stages` are the names of the run's stages; both are used in the names of the policies.
    """
    if searched is None:
        return None
    last = "after stage 4" if "agentic" in stages else "after training"
    evaluations = {f"after the {begins}": load(context, before), last: load(context, after)}
    attainable = Attainable.model_validate(read_json(searched.output(context.run.home)))
    return summarise_search(evaluations, attainable)


def headline(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the most important figures of a comparison with the schedule search, by their MLflow metrics.

    `summary` is a SearchSummary as JSON. The figures are those of the run's last policy, except that
    `captured_share_before` is that of the first.
    """
    before, after = summary["rows"][:2]
    return {
        "captured_share": after["captured_share"],
        "captured_share_before": before["captured_share"],
        "search_equivalence": after["search_equivalence"],
        "gain_per_turn": after["gain_per_turn"],
    }
