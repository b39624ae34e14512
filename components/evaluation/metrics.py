"""What an evaluation found, in figures: pass rate, faster rates, geometric means, fast_p, rewards, each with an interval.

The definitions are KernelBench's with its faults mended: every task stays in every rate's denominator (there, tasks
missing from the baseline file leave it silently), the geometric mean is exp of the mean log (a product of 250 ratios
overflows), and a ratio counts only if it is a positive finite number (a runtime of zero is not fast).

Every figure is a ratio of two sums over tasks, so one matrix product gives all bootstrap draws of all figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from components.agent.reward import MARGIN, milestone
from components.core.records import FrozenModel
from components.judge.verdict import Ratio, Seconds, Speedup, Status, Verdict

Baseline = Literal["eager", "compile"]
BASELINES: tuple[Baseline, ...] = ("eager", "compile")
FAST_P = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)
RESAMPLES = 2000
COVERAGE = 0.95
SHARES = ("pass_rate", "faster_rate", "beyond_margin", "fast_p")

Array = NDArray[np.float64]


class Attempt(FrozenModel):
    """One trajectory on a task: what the judge said of its final answer at the end of the episode."""

    status: Status
    reward: float
    turns: int = 0
    finish_reason: str = ""


class TaskResult(FrozenModel):
    """One task's result: the re-measured final answer of the first attempt, and what every attempt earned."""

    task_id: str
    name: str = ""
    ops: tuple[str, ...] = ()
    level: int | None = None
    status: Status
    reason: str = ""
    milestone: Literal[-1, 1, 2, 3] = -1
    seconds: Seconds = Seconds()
    speedup: Speedup = Speedup()
    attempts: tuple[Attempt, ...] = ()
    source: str = ""
    """The task's program."""
    files: dict[str, str] = Field(default_factory=dict)
    """The candidate's files by workspace path."""
    evidence: dict[str, Any] = Field(default_factory=dict)
    degenerate: str = ""
    """Why a cheat could pass on this task (zeros, an input that does not matter, …); empty for a sound one."""

    @model_validator(mode="before")
    @classmethod
    def _milestone_follows_from_the_measurement(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "milestone" not in values and "status" in values:
            verdict = Verdict(status=values["status"], speedup=values.get("speedup", Speedup()))
            return {**values, "milestone": milestone(verdict)}
        return values

    @property
    def correct(self) -> bool:
        return self.status == "correct"

    @property
    def error(self) -> bool:
        """The judge's own fault: neither a pass nor a miss."""
        return self.status == "infrastructure"

    def ratio(self, baseline: Baseline) -> float | None:
        """The measured speed-up of a correct solution; None where there is none."""
        ratio: Ratio | None = self.speedup.eager if baseline == "eager" else self.speedup.compile
        if not self.correct or ratio is None or not math.isfinite(ratio.estimate) or ratio.estimate <= 0:
            return None
        return ratio.estimate


class Interval(FrozenModel):
    """A 95 % bootstrap interval over tasks, exact binomial for shares of 0 and 1; None where no draw held a task that counts."""

    low: float | None
    high: float | None


class Pair(FrozenModel):
    """One figure against both baselines; None where it is over no task at all."""

    eager: float | None
    compile: float | None


class Counts(FrozenModel):
    eager: int
    compile: int


class FastP(FrozenModel):
    """Shares of all tasks that are correct and more than `p` times as fast, for each p in turn."""

    p: tuple[float, ...]
    eager: tuple[float, ...]
    compile: tuple[float, ...]


class Summary(FrozenModel):
    """Figures over one set of tasks.

    Rates are over all `tasks`, errors included. `geomean` is over the correct solutions whose ratio was measured, how
    many those are stands in `geomean_over`. `mean_reward` leaves out the errors: nobody is charged for the judge's own
    faults. `attempts_*` and `pass_at` are over all attempts as the episodes ended, before the final re-measurement.
    `intervals` has one entry per figure under its dotted name, for instance `faster_rate.compile` or `fast_p.eager.1.5`.
    """

    tasks: int
    correct: int
    errors: int
    pass_rate: float | None
    faster_rate: Pair
    beyond_margin: Pair
    """Share of all tasks that are correct and more than 5 % faster (the milestone's margin)."""
    geomean: Pair
    geomean_over: Counts
    fast_p: FastP
    mean_reward: float | None
    milestones: dict[str, int]
    attempts_mean_reward: float | None
    attempts_pass_rate: float | None
    pass_at: dict[str, float]
    """Unbiased pass@k over attempts, by k."""
    intervals: dict[str, Interval]


def summarise(results: Sequence[TaskResult | Mapping[str, Any]], *, seed: int = 0) -> Summary:
    """The figures of a suite, or of any part of it, with seeded bootstrap intervals over its tasks.

    Accepts records or their JSON form (rows of `tasks` in results.json). An empty sequence gives figures of None.
    """
    rows = [
        result if isinstance(result, TaskResult) else TaskResult.model_validate(result) for result in results
    ]
    figures = _figures(rows)
    values, intervals = _estimate(figures, len(rows), seed)

    def rate(name: str) -> float:
        value = values[name]
        return 0.0 if value is None else value

    over = {baseline: sum(row.ratio(baseline) is not None for row in rows) for baseline in BASELINES}
    tried = [attempt for row in rows for attempt in row.attempts if attempt.status != "infrastructure"]
    return Summary(
        tasks=len(rows),
        correct=sum(row.correct for row in rows),
        errors=sum(row.error for row in rows),
        pass_rate=values["pass_rate"],
        faster_rate=Pair(eager=values["faster_rate.eager"], compile=values["faster_rate.compile"]),
        beyond_margin=Pair(eager=values["beyond_margin.eager"], compile=values["beyond_margin.compile"]),
        geomean=Pair(eager=values["geomean.eager"], compile=values["geomean.compile"]),
        geomean_over=Counts(eager=over["eager"], compile=over["compile"]),
        fast_p=FastP(
            p=FAST_P,
            eager=tuple(rate(f"fast_p.eager.{p:g}") for p in FAST_P),
            compile=tuple(rate(f"fast_p.compile.{p:g}") for p in FAST_P),
        ),
        mean_reward=values["mean_reward"],
        milestones={
            str(level): sum(row.milestone == level and not row.error for row in rows)
            for level in (-1, 1, 2, 3)
        },
        attempts_mean_reward=sum(attempt.reward for attempt in tried) / len(tried) if tried else None,
        attempts_pass_rate=sum(attempt.status == "correct" for attempt in tried) / len(tried)
        if tried
        else None,
        pass_at=_pass_at(rows),
        intervals=intervals,
    )


def by_level(results: Sequence[TaskResult], *, seed: int = 0) -> dict[str, Summary]:
    """One summary per level that the suite names; empty for a suite without levels."""
    levels = sorted({row.level for row in results if row.level is not None})
    return {
        str(level): summarise([row for row in results if row.level == level], seed=seed) for level in levels
    }


class Change(FrozenModel):
    """After minus before on the tasks that both have, paired by task; for geomeans the ratio after / before."""

    value: float | None
    low: float | None
    high: float | None


def changes(before: Sequence[TaskResult], after: Sequence[TaskResult], *, seed: int = 0) -> dict[str, Change]:
    """Paired change of every figure: both sides are drawn with the same tasks, so that the tasks' difficulty cancels."""
    earlier = {row.task_id: row for row in before}
    pairs = [(earlier[row.task_id], row) for row in after if row.task_id in earlier]
    old, new = _figures([pair[0] for pair in pairs]), _figures([pair[1] for pair in pairs])
    counts = _draws(len(pairs), seed)
    found = {}
    for name in new:
        difference = _apply(new[name], counts) - _apply(old[name], counts)
        value = float(
            _apply(new[name], np.ones((1, len(pairs))))[0] - _apply(old[name], np.ones((1, len(pairs))))[0]
        )
        low, high = _quantiles(difference)
        scale = math.exp if name.startswith("geomean") else float
        found[name] = Change(
            value=_or_none(value, scale), low=_or_none(low, scale), high=_or_none(high, scale)
        )
    return found


def _figures(rows: Sequence[TaskResult]) -> dict[str, tuple[Array, Array]]:
    """By figure: what each task adds to the numerator and to the denominator."""
    every = np.ones(len(rows))
    judged = np.array([not row.error for row in rows], dtype=float)
    figures = {
        "pass_rate": (np.array([row.correct for row in rows], dtype=float), every),
        "mean_reward": (np.array([row.milestone for row in rows], dtype=float) * judged, judged),
    }
    for baseline in BASELINES:
        ratios = np.array([row.ratio(baseline) or math.nan for row in rows], dtype=float)
        measured = (~np.isnan(ratios)).astype(float)
        # A comparison with NaN is False: a correct solution whose ratio was not measured is not faster.
        figures[f"faster_rate.{baseline}"] = ((ratios > 1).astype(float), every)
        figures[f"beyond_margin.{baseline}"] = ((ratios > MARGIN).astype(float), every)
        figures[f"geomean.{baseline}"] = (
            np.where(measured > 0, np.log(np.where(measured > 0, ratios, 1)), 0.0),
            measured,
        )
        for p in FAST_P:
            # fast_0 is KernelBench's correctness: it needs no ratio.
            share = figures["pass_rate"][0] if p == 0 else (ratios > p).astype(float)
            figures[f"fast_p.{baseline}.{p:g}"] = (share, every)
    return figures


def _estimate(
    figures: dict[str, tuple[Array, Array]], tasks: int, seed: int
) -> tuple[dict[str, float | None], dict[str, Interval]]:
    counts, once = _draws(tasks, seed), np.ones((1, tasks))
    values, intervals = {}, {}
    for name, figure in figures.items():
        scale = math.exp if name.startswith("geomean") else float
        values[name] = _or_none(float(_apply(figure, once)[0]), scale)
        low, high = _quantiles(_apply(figure, counts))
        if tasks and name.startswith(SHARES):
            low, high = _exact_at_the_ends(values[name], low, high, tasks)
        intervals[name] = Interval(low=_or_none(low, scale), high=_or_none(high, scale))
    return values, intervals


def _draws(tasks: int, seed: int) -> Array:
    """How often each bootstrap sample holds each task, `[RESAMPLES, tasks]`."""
    if tasks == 0:
        return np.zeros((RESAMPLES, 0))
    return (
        np.random.default_rng(seed)
        .multinomial(tasks, np.full(tasks, 1 / tasks), size=RESAMPLES)
        .astype(float)
    )


def _apply(figure: tuple[Array, Array], counts: Array) -> Array:
    """The figure for each row of counts; NaN where the row holds no task that counts."""
    numerator, denominator = counts @ figure[0], counts @ figure[1]
    return np.divide(numerator, denominator, out=np.full(len(counts), math.nan), where=denominator > 0)


def _quantiles(draws: Array) -> tuple[float, float]:
    draws = draws[~np.isnan(draws)]
    if len(draws) == 0:
        return math.nan, math.nan
    low, high = np.quantile(draws, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


def _exact_at_the_ends(share: float | None, low: float, high: float, tasks: int) -> tuple[float, float]:
    """Seven passes of seven do not prove 100 %, but every draw of them says so: there the exact binomial bound holds."""
    if share == 1:
        return ((1 - COVERAGE) / 2) ** (1 / tasks), 1.0
    if share == 0:
        return 0.0, 1 - ((1 - COVERAGE) / 2) ** (1 / tasks)
    return low, high


def _or_none(value: float, scale: Any) -> float | None:
    return None if math.isnan(value) else float(scale(value))


def _pass_at(rows: Sequence[TaskResult]) -> dict[str, float]:
    """pass@k = mean over tasks of 1 - C(n - c, k) / C(n, k), for every k that all tasks have attempts for."""
    tried = [
        [attempt.status == "correct" for attempt in row.attempts if attempt.status != "infrastructure"]
        for row in rows
    ]
    fewest = min(map(len, tried), default=0)
    return {
        str(k): math.fsum(1 - math.comb(len(a) - sum(a), k) / math.comb(len(a), k) for a in tried)
        / len(tried)
        for k in range(1, fewest + 1)
    }
