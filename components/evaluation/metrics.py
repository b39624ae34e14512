"""The figures of an evaluation, each with an interval, and their changes between two evaluations.

The figures include rates, geometric means of speed-ups, rewards, and fast_p, the share of tasks whose
solution is correct and more than p times as fast as a baseline. Where KernelBench has the same figure, its
definition is used with three corrections. Every task is included in the denominator of every rate of tasks,
the geometric mean is the exponential of the mean log, and a speed-up is used only if it is positive and
finite.

Every figure but pass@k is computed as a ratio of two sums over tasks, because each of these sums, for all
bootstrap samples together, is then one matrix product.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from components.evaluation.results import (
    BASELINES,
    Counts,
    Estimate,
    FastP,
    Figures,
    Interval,
    Summary,
    TaskResult,
)
from components.judge.verdict import MARGIN

# Number of bootstrap samples, and share of them that an interval covers.
RESAMPLES = 2000
COVERAGE = 0.95
FAST_P = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)
# Prefixes of the names of the figures that are shares of tasks.
SHARES = ("pass_rate", "faster_rate", "beyond_margin", "fast_p")

Array = NDArray[np.float64]


def summarise(rows: Sequence[TaskResult]) -> Summary:
    """Return the figures over the results of tasks, with 95 % intervals from bootstrap samples of the tasks.

    The interval of a share of tasks that is 0 or 1 is the exact binomial one. If `rows` is empty, rates and
    means are None, both ends of each interval are None, the shares in `fast_p` and all counts are 0, and
    `pass_at` is empty.
    """
    samples = bootstrap_counts(len(rows))
    values: dict[str, float | None] = {}
    intervals: dict[str, Interval] = {}
    for name, figure in _figures(rows).items():
        found = _estimate(name, quotients(figure, samples))
        values[name], intervals[name] = found.value, Interval(low=found.low, high=found.high)
        if rows and name.startswith(SHARES) and found.value in (0, 1):
            # The exact binomial bound is used, because all bootstrap samples of equal outcomes are equal.
            miss = ((1 - COVERAGE) / 2) ** (1 / len(rows))
            intervals[name] = Interval(low=miss, high=1) if found.value else Interval(low=0, high=1 - miss)

    def pair(figure: str) -> Figures:
        return Figures(eager=values[f"{figure}.eager"], compile=values[f"{figure}.compile"])

    shares = {b: tuple(values[f"fast_p.{b}.{p:g}"] or 0.0 for p in FAST_P) for b in BASELINES}
    return Summary(
        tasks=len(rows),
        correct=sum(row.correct for row in rows),
        errors=sum(row.error for row in rows),
        pass_rate=values["pass_rate"],
        faster_rate=pair("faster_rate"),
        beyond_margin=pair("beyond_margin"),
        geomean=pair("geomean"),
        geomean_over=Counts(**{b: sum(row.ratio(b) is not None for row in rows) for b in BASELINES}),
        fast_p=FastP(p=FAST_P, **shares),
        mean_reward=values["mean_reward"],
        milestones={
            str(level): sum(row.milestone == level and not row.error for row in rows)
            for level in (-1, 1, 2, 3)
        },
        attempts_mean_reward=values["attempts_mean_reward"],
        attempts_pass_rate=values["attempts_pass_rate"],
        pass_at=_pass_at(rows),
        intervals=intervals,
        attained=values["attained"],
        limit_score=values["limit_score"],
    )


def by_level(results: Sequence[TaskResult]) -> dict[str, Summary]:
    """Return the figures (`summarise`) of the tasks of each level of the suite, by the level as text.

    Results without a level are left out, so the dict is empty if no task has one.
    """
    levels = sorted({row.level for row in results if row.level is not None})
    return {str(level): summarise([row for row in results if row.level == level]) for level in levels}


def changes(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> dict[str, Estimate]:
    """Return the change of each figure, by name, over the tasks that `before` and `after` have in common.

    Tasks on which the judge or the policy's server failed on either side are left out. The figures are
    those of `Summary.intervals`. A change is the figure after minus the figure before. For geometric
    means it is their ratio, over the tasks whose speed-up was measured on both sides. For the intervals,
    each bootstrap sample draws the same tasks before and after.
    """
    pairs = measured_pairs(before, after)
    old, new = _figures([pair[0] for pair in pairs]), _figures([pair[1] for pair in pairs])
    for name in (f"geomean.{baseline}" for baseline in BASELINES):
        both = old[name][1] * new[name][1]
        old[name], new[name] = (old[name][0] * both, both), (new[name][0] * both, both)
    samples = bootstrap_counts(len(pairs))
    return {
        name: _estimate(name, quotients(new[name], samples) - quotients(old[name], samples)) for name in new
    }


def measured_pairs(
    before: Sequence[TaskResult], after: Sequence[TaskResult]
) -> list[tuple[TaskResult, TaskResult]]:
    """Return the results of both sides on each task that was measured on both, in the order of `after`."""
    earlier = {row.task_id: row for row in before if not row.error}
    return [(earlier[row.task_id], row) for row in after if row.task_id in earlier and not row.error]


def _figures(rows: Sequence[TaskResult]) -> dict[str, tuple[Array, Array]]:
    """Return, by the name of each figure, the summands of each task in its numerator and in its denominator.

    Both arrays have the shape [tasks], and a figure is the sum of the first divided by the sum of the second.
    For geometric means, the summands are those of the mean log. Pass@k is not among the figures.
    """
    every = np.ones(len(rows))
    judged = np.array([not row.error for row in rows], dtype=float)
    attempts = [[one for one in row.attempts if one.status != "infrastructure"] for row in rows]
    tried = np.array([len(each) for each in attempts], dtype=float)
    solved = [sum(attempt.status == "correct" for attempt in each) for each in attempts]
    rewards = [math.fsum(one.reward for one in each if one.reward is not None) for each in attempts]
    figures = {
        "pass_rate": (np.array([row.correct for row in rows], dtype=float), every),
        "mean_reward": (np.array([row.milestone for row in rows], dtype=float) * judged, judged),
        "attempts_pass_rate": (np.array(solved, dtype=float), tried),
        "attempts_mean_reward": (np.array(rewards, dtype=float), tried),
    }
    solutions = [row for row in rows if row.correct]
    # The limit score of a task without a correct solution is 0 even if no limit is known. If no correct
    # solution has a score, a mean over these zeros would say nothing, so there is none.
    has_limits = any(row.limit_score is not None for row in solutions) or not solutions
    for name in ("attained", "limit_score"):
        values = [getattr(row, name) if not row.error and has_limits else None for row in rows]
        found = np.array(values, dtype=float)
        figures[name] = (np.nan_to_num(found), (~np.isnan(found)).astype(float))
    for baseline in BASELINES:
        ratios = np.array([row.ratio(baseline) or math.nan for row in rows], dtype=float)
        measured = (~np.isnan(ratios)).astype(float)
        faster = np.array([row.ratio_everywhere(baseline) for row in rows], dtype=float)
        figures[f"faster_rate.{baseline}"] = ((faster > 1).astype(float), every)
        figures[f"beyond_margin.{baseline}"] = ((faster > MARGIN).astype(float), every)
        figures[f"geomean.{baseline}"] = (
            np.where(measured > 0, np.log(np.where(measured > 0, ratios, 1)), 0.0),
            measured,
        )
        for p in FAST_P:
            # In KernelBench, fast_0 is the share of correct solutions, for which no ratio is needed.
            share = figures["pass_rate"][0] if p == 0 else (faster > p).astype(float)
            figures[f"fast_p.{baseline}.{p:g}"] = (share, every)
    return figures


def _estimate(name: str, values: Array) -> Estimate:
    """Return the value and the 95 % interval of the figure `name`, such as pass_rate or geomean.eager.

    `values`, with shape [1 + samples], has the value over all tasks, followed by the values for bootstrap
    samples of the tasks. If `name` contains geomean, they are logarithms, and the results are their
    exponentials. A value of NaN becomes None, and both ends of the interval are None if all samples are NaN.
    """
    interval = percentile_interval(values[1:])
    value, low, high = (
        None if number is None or math.isnan(number) else math.exp(number) if "geomean" in name else number
        for number in (float(values[0]), interval.low, interval.high)
    )
    return Estimate(value=value, low=low, high=high)


def _pass_at(rows: Sequence[TaskResult]) -> dict[str, float]:
    """Return pass@k by k as text: the mean over tasks of 1 - C(n - c, k) / C(n, k).

    n is the number of attempts on a task on which neither the judge nor the policy's server failed, and c the
    number of correct ones among them. k begins at 1, and the largest k is the smallest n of all tasks, so the
    result is empty if there is no task, or one without such attempts.
    """
    outcomes = [
        [attempt.status == "correct" for attempt in row.attempts if attempt.status != "infrastructure"]
        for row in rows
    ]
    return {
        str(k): math.fsum(1 - math.comb(len(a) - sum(a), k) / math.comb(len(a), k) for a in outcomes)
        / len(outcomes)
        for k in range(1, min(map(len, outcomes), default=0) + 1)
    }


def bootstrap_counts(tasks: int) -> Array:
    """Return how often each of `tasks` tasks occurs in the whole set, and in each bootstrap sample of it.

    The shape is [1 + RESAMPLES, tasks]. The first row, that of the whole set, is 1 everywhere. A fixed seed
    draws the same samples in every call with the same number of tasks.
    """
    if tasks == 0:
        return np.zeros((1 + RESAMPLES, 0))
    samples = np.random.default_rng(0).multinomial(tasks, np.full(tasks, 1 / tasks), size=RESAMPLES)
    return np.vstack([np.ones(tasks), samples])


def quotients(figure: tuple[Array, Array], counts: Array) -> Array:
    """Return the value of a figure for each of several samples of the tasks, with shape [samples].

    The figure is a ratio of two sums over tasks. `figure` has the numerator and the denominator of each task,
    both [tasks], and `counts` says how often each sample has each task, [samples, tasks]. The value is NaN if
    the sum of the denominators is 0.
    """
    numerator, denominator = counts @ figure[0], counts @ figure[1]
    quotient: Array = np.divide(
        numerator, denominator, out=np.full(len(counts), math.nan), where=denominator > 0
    )
    return quotient


def percentile_interval(samples: Array) -> Interval:
    """Return the 95 % percentile interval of a figure from its values for all bootstrap samples.

    `samples` has the shape [samples]. Samples that are NaN are left out. Both ends are None if all samples
    are NaN.
    """
    samples = samples[~np.isnan(samples)]
    if len(samples) == 0:
        return Interval(low=None, high=None)
    low, high = np.quantile(samples, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(low=float(low), high=float(high))
