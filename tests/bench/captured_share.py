"""Figures that compare a policy with a search of random schedules on the same tasks.

All functions are computed from the records of `schedule_search.py` and of evaluations. Speed-ups are those
over eager, and they enter as logarithms. A wrong or missing kernel has the logarithm 0, because its user
stays with eager. Kernels on which the judge failed are left out. More schedules attain more, so the figures
compare only at equal numbers of schedules, suite, device and precision.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from pydantic import Field

from components.core.records import FrozenModel
from components.evaluation.metrics import Array, bootstrap_counts, percentile_interval, quotients
from components.evaluation.results import Evaluation, Interval, Measurement, TaskResult

# Name of the row of the best fixed schedule in tables.
BEST_FIXED = "best fixed schedule"
# Logarithm of a wrong kernel's speed-up in the first measurement, so that other schedules are chosen first.
WRONG = -math.inf
# Difference of mean log speed-ups that rounding may cause.
ROUNDING = 1e-9

# Two logarithms of the speed-up of one schedule's kernel over eager: in its first measurement, by which
# schedules are chosen, and in the measurement that is reported. For a kernel that was wrong in the
# measurement, the former is WRONG and the latter 0.
Outcome = tuple[float, float]


class TaskSearch(FrozenModel):
    """The measurements of the search on one task.

    `kernels` has the name of the kernel of each schedule, in the order of `Attainable.schedules`; schedules
    that write the same text share a kernel. `first` and `second` map these names to the two measurements.
    `second` has only the kernels that were measured again.
    """

    task_id: str
    kernels: tuple[str, ...]
    first: dict[str, Measurement] = Field(default_factory=dict)
    second: dict[str, Measurement] = Field(default_factory=dict)

    def outcome(self, index: int) -> Outcome | None:
        """Return the `Outcome` of the schedule number `index`, or None if the judge failed on its kernel.

        The first measurement is reported if there is no second one.
        """
        kernel = self.kernels[index]
        first = self.first.get(kernel)
        second = self.second.get(kernel, first)
        if first is None or second is None or first.error or second.error:
            return None
        return WRONG if first.status != "correct" else log_speedup(first), log_speedup(second)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all schedules on whose kernels the judge did not fail."""
        found = (self.outcome(index) for index in range(len(self.kernels)))
        return [outcome for outcome in found if outcome is not None]


class Attainable(FrozenModel):
    """Record of a search, which is the content of its results.json.

    `schedules` has the choices of each drawn schedule by their names, and `space` is the number of schedules
    that they were drawn from. `left_out` is the number of tasks for which no kernels could be written.
    `judgements` is the number of measurements and `errors` that of those in which the judge failed.
    """

    schedules: tuple[dict[str, Any], ...]
    space: int
    tasks: tuple[TaskSearch, ...]
    left_out: int
    judgements: int
    errors: int


class ShareRow(FrozenModel):
    """Figures of one policy, or of a fixed schedule, against the search.

    An answer of a fixed schedule is its kernel. `captured_share` is the sum over tasks of the log speed-up of
    the first answers, divided by the sum of the attainable log speed-ups, and `interval` is its interval.
    `geomean` is the geometric mean of the speed-ups of the first answers. `search_equivalence` is the
    smallest number of random schedules whose search reaches this mean, and None if all `schedules` of the
    search do not reach it. `gain_per_turn` is the mean log speed-up of the final answers minus that of the
    first answers, and None for a fixed schedule. `tasks` is the number of tasks in these figures. Figures are
    None if no task has them. `choices` are those of a fixed schedule, and empty for a policy.
    """

    name: str
    captured_share: float | None
    interval: Interval
    search_equivalence: int | None
    geomean: float | None
    gain_per_turn: float | None
    tasks: int
    schedules: int
    choices: dict[str, Any] = Field(default_factory=dict)


def log_speedup(measurement: Measurement) -> float:
    """Return the logarithm of a speed-up over eager, or 0 if the kernel is wrong or was not measured."""
    eager = measurement.eager
    if measurement.status != "correct" or eager is None or not 0 < eager < math.inf:
        return 0.0
    return math.log(eager)


def attainable_log(outcomes: Sequence[Outcome]) -> float:
    """Return the reported log speed-up of the schedule that is best in the first measurement.

    It is at least 0, because the user can stay with eager, and 0 if there are no outcomes.
    """
    return max(0.0, max(outcomes, default=(WRONG, 0.0), key=lambda outcome: outcome[0])[1])


@cache
def _subset_shares(total: int) -> Array:
    """Return for each size of subsets, and each rank, the share of subsets whose best element has this rank.

    The shape is [total + 1, total]. Of the C(total, size) subsets of `total` elements, C(total - 1 - rank,
    size - 1) have their best element at `rank`, where 0 is the best rank.
    """
    sizes, worse = np.arange(total + 1)[:, None], np.arange(total - 1, 0, -1)
    # C(worse - 1, size - 1) / C(worse, size - 1), where `worse` elements are below a rank.
    factors = np.maximum(0, (worse - sizes + 1) / worse)
    return np.cumprod(np.concatenate([sizes / max(1, total), factors], axis=1), axis=1)[:, :total]


def expected_best(outcomes: Sequence[Outcome], most: int) -> Array:
    """Return the expected log speed-ups of searches of 0 to `most` random schedules, with shape [most + 1].

    Entry n is the exact mean of `attainable_log` over all subsets of n outcomes. If there are fewer than n
    outcomes, it is `attainable_log` of all of them.
    """
    ranked = sorted(outcomes, key=lambda outcome: -outcome[0])
    reported = np.array([max(0.0, reported) for _, reported in ranked], dtype=float)
    means: Array = _subset_shares(len(ranked)) @ reported
    return means[np.minimum(np.arange(most + 1), len(ranked))]


def search_equivalence(searches: Sequence[Sequence[Outcome]], mean_log: float, most: int) -> int | None:
    """Return the smallest number of random schedules whose search reaches the mean log speed-up `mean_log`.

    `searches` has the outcomes of each task. The result is 0 if `mean_log` is not above 0, the value of
    eager, and None if a search of `most` schedules does not reach `mean_log`.
    """
    means = np.mean([expected_best(outcomes, most) for outcomes in searches], axis=0)
    reached = np.flatnonzero(means >= mean_log - ROUNDING)
    return int(reached[0]) if len(reached) else None


def captured_share(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, Interval]:
    """Return the share of the attainable log speed-ups that the answers to tasks reach, and its interval.

    `pairs` has, for each task, the log speed-up of the answer and the attainable log speed-up, which is not
    negative. The share is the sum of the former divided by the sum of the latter, and None if nothing is
    attainable.
    """
    columns = np.array(pairs, dtype=float).reshape(-1, 2).T
    share = float(quotients((columns[0], columns[1]), np.ones((1, len(pairs))))[0])
    samples = quotients((columns[0], columns[1]), bootstrap_counts(len(pairs))[1:])
    return None if math.isnan(share) else share, percentile_interval(samples)


def best_fixed_schedule(tasks: Sequence[TaskSearch], count: int) -> int | None:
    """Return the index of the schedule with the greatest mean log speed-up in the first measurement.

    The mean is over tasks. `count` is the number of schedules. Tasks on whose kernel the judge failed are
    left out of a schedule's mean. The result is None if no schedule was measured.
    """

    def mean(index: int) -> float:
        found = [task.first.get(task.kernels[index]) for task in tasks]
        logs = [log_speedup(one) for one in found if one is not None and not one.error]
        return math.fsum(logs) / len(logs) if logs else WRONG

    best = max(range(count), key=mean, default=None)
    return None if best is None or mean(best) == WRONG else best


def _row(
    name: str,
    answers: Mapping[str, float],
    attainable: Attainable,
    *,
    gains: Sequence[float] = (),
    choices: dict[str, Any] | None = None,
) -> ShareRow:
    """Return the row with the name `name` and the figures of `answers`.

    `answers` maps the ids of tasks to the log speed-ups of the first answers. `gains` has the log speed-up of
    the final answer minus that of the first one for each task, and `choices` are those of a fixed schedule.
    Tasks on whose kernels the judge always failed are left out.
    """
    searches = {task.task_id: outcomes for task in attainable.tasks if (outcomes := task.outcomes())}
    common = [task_id for task_id in searches if task_id in answers]
    logs = [answers[task_id] for task_id in common]
    share, interval = captured_share([(answers[one], attainable_log(searches[one])) for one in common])
    mean = math.fsum(logs) / len(logs) if logs else None
    most = len(attainable.schedules)
    return ShareRow(
        name=name,
        captured_share=share,
        interval=interval,
        search_equivalence=None
        if mean is None
        else search_equivalence([searches[one] for one in common], mean, most),
        geomean=None if mean is None else math.exp(mean),
        gain_per_turn=math.fsum(gains) / len(gains) if gains else None,
        tasks=len(common),
        schedules=most,
        choices=choices or {},
    )


def first_answer(result: TaskResult) -> float | None:
    """Return the log speed-up of the first answer to a task, or None if it is not known."""
    first = result.attempts[0].first if result.attempts else None
    return None if first is None or first.error else log_speedup(first)


def final_answer(result: TaskResult) -> float | None:
    """Return the log speed-up of the final answer to a task, or None if the judge failed on it."""
    return None if result.error else math.log(result.ratio("eager") or 1.0)


def policy_row(name: str, evaluation: Evaluation, attainable: Attainable) -> ShareRow:
    """Return the figures of the policy of an evaluation on the tasks of a search.

    The first answer is that of the first attempt. Tasks on which the judge failed are left out.
    """
    searched = {task.task_id for task in attainable.tasks}
    results = {result.task_id: result for result in evaluation.tasks if result.task_id in searched}
    first = {task_id: log for task_id, one in results.items() if (log := first_answer(one)) is not None}
    final = {task_id: log for task_id in first if (log := final_answer(results[task_id])) is not None}
    gains = [log - first[task_id] for task_id, log in final.items()]
    return _row(name, first, attainable, gains=gains)


def best_fixed_row(attainable: Attainable) -> ShareRow | None:
    """Return the figures of the best fixed schedule with its choices, or None if nothing was measured."""
    index = best_fixed_schedule(attainable.tasks, len(attainable.schedules))
    if index is None:
        return None
    found = {task.task_id: task.outcome(index) for task in attainable.tasks}
    answers = {task_id: outcome[1] for task_id, outcome in found.items() if outcome is not None}
    return _row(BEST_FIXED, answers, attainable, choices=attainable.schedules[index])


def share_rows(evaluations: Mapping[str, Evaluation], attainable: Attainable) -> list[ShareRow]:
    """Return a row for the policy of each evaluation, and one for the best fixed schedule.

    `evaluations` maps the names of the rows to the evaluations.
    """
    rows = [policy_row(name, evaluation, attainable) for name, evaluation in evaluations.items()]
    fixed = best_fixed_row(attainable)
    return rows if fixed is None else [*rows, fixed]


def equivalence_text(row: ShareRow) -> str:
    """Return the search equivalence of a row as text, or ">N" if all N schedules do not reach the policy."""
    if row.geomean is None:
        return "–"
    return f">{row.schedules}" if row.search_equivalence is None else str(row.search_equivalence)


def share_text(row: ShareRow) -> str:
    """Return the captured share of a row with its interval as text, such as "0.44 [0.31, 0.58]"."""
    if row.captured_share is None or row.interval.low is None:
        return "–"
    return f"{row.captured_share:.2f} [{row.interval.low:.2f}, {row.interval.high:.2f}]"


def gain_text(row: ShareRow) -> str:
    """Return the gain per turn of a row as text, such as "+0.02", or a dash for a fixed schedule."""
    return "–" if row.gain_per_turn is None else f"{row.gain_per_turn:+.2f}"
