"""The record of an evaluation, and the computation of its figures, each with an interval.

The figures include rates, geometric means of speed-ups, fast_p and rewards. Where KernelBench has the same
figure, its definition is used with three corrections. Every task is included in the denominator of every rate
of tasks, the geometric mean is the exponential of the mean log, and a speed-up is used only if it is positive
and finite.

Every figure but pass@k is computed as a ratio of two sums over tasks, because each of these sums, for all
bootstrap samples together, is then one matrix product.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field

from components.core.errors import UserError
from components.core.files import read_json
from components.core.records import FrozenModel, TaskDtype
from components.evaluation.intervals import (
    COVERAGE,
    Array,
    Estimate,
    Interval,
    bootstrap_counts,
    percentile_interval,
    quotients,
)
from components.judge.verdict import (
    MARGIN,
    Labels,
    Ratio,
    Seconds,
    Speedup,
    Status,
    Verdict,
    WorkloadFigures,
    holds_everywhere,
    milestone,
)

Baseline = Literal["eager", "compile"]
BASELINES: tuple[Baseline, ...] = ("eager", "compile")
# File with the record of an evaluation, in its folder.
RESULTS = "results.json"
FAST_P = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)
# Prefixes of the names of the figures that are shares of tasks.
SHARES = ("pass_rate", "faster_rate", "beyond_margin", "fast_p")


class Measurement(FrozenModel):
    """The status of one judged kernel and, if it was measured, its speed-up over eager."""

    status: Status
    eager: float | None = None

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        ratio = verdict.speedup.eager
        return cls(status=verdict.status, eager=None if ratio is None else ratio.estimate)

    @property
    def error(self) -> bool:
        """Whether the judge or the policy's server failed, so that there is no result on the kernel."""
        return self.status == "infrastructure"


class Attempt(FrozenModel):
    """One trajectory on a task.

    `status` is that of the verdict on the final answer at the end of the episode, or `infrastructure` if the
    policy's server ended the episode. `reward` is that of the trajectory, or None if the judge failed.
    `finish_reason` is that of the trajectory, such as stop or turns. `first` is the status and speed-up of
    the first kernel that was judged within the episode, or None in records without it.
    """

    status: Status
    reward: float | None
    turns: int = 0
    finish_reason: str = ""
    first: Measurement | None = None


def _milestone(fields: dict[str, Any]) -> Literal[-1, 1, 2, 3]:
    return milestone(
        Verdict(status=fields["status"], speedup=fields["speedup"], workloads=fields["workloads"])
    )


class TaskResult(FrozenModel):
    """Result of one task in an evaluation.

    After the episodes, the evaluation measures the final files of the first attempt again. `status`,
    `reason`, `milestone`, `seconds`, `speedup`, `workloads` and `evidence` (the record of the measurements)
    are from the verdict of this final measurement. `milestone` is -1 for a kernel that is not correct, 1 for
    a correct one, 2 if it is also faster than eager, and 3 if it is also faster than torch.compile. If it is
    not given, it is computed from `status`, `speedup` and `workloads`. `attempts` are all attempts, with the
    verdicts from the end of their episodes. `source` is the source of the task, and `files` are the final
    files of the first attempt by workspace path. `degenerate` is the reason why a wrong kernel could pass on
    this task, or empty if there is no such reason.
    """

    task_id: str
    name: str = ""
    ops: tuple[str, ...] = ()
    level: int | None = None
    status: Status
    reason: str = ""
    seconds: Seconds = Seconds()
    speedup: Speedup = Speedup()
    workloads: tuple[WorkloadFigures, ...] = ()
    milestone: Literal[-1, 1, 2, 3] = Field(default_factory=_milestone)
    attempts: tuple[Attempt, ...] = ()
    source: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    evidence: dict[str, Any] = Field(default_factory=dict)
    degenerate: str = ""

    @property
    def correct(self) -> bool:
        return self.status == "correct"

    @property
    def error(self) -> bool:
        """Whether the judge or the policy's server failed, so that the task was neither solved nor failed."""
        return self.status == "infrastructure"

    def ratio(self, baseline: Baseline) -> float | None:
        """Return the measured speed-up over `baseline`.

        Returns None if the solution is not correct, or if the speed-up was not measured or is not positive
        and finite.
        """
        ratio: Ratio | None = getattr(self.speedup, baseline)
        if not self.correct or ratio is None or not math.isfinite(ratio.estimate) or ratio.estimate <= 0:
            return None
        return ratio.estimate

    @property
    def attained(self) -> float | None:
        """The least time that any kernel of the task needs, divided by the time of the solution.

        The least time is `seconds.limit`, a lower bound that follows from the speed of the device. The value
        is 1 for the fastest possible kernel. It is None if one of the times is not known, or if the solution
        is not correct.
        """
        limit, seconds = self.seconds.limit, self.seconds.candidate
        return limit / seconds if self.correct and limit and seconds else None

    @property
    def baseline_attained(self) -> float | None:
        """The least time that any kernel of the task needs, divided by the time of the faster baseline.

        The least time is `seconds.limit`, and the baselines are eager and torch.compile. The value is None if
        the least time is not known or no baseline was measured.
        """
        limit, times = self.seconds.limit, (self.seconds.eager, self.seconds.compile)
        return max((limit / seconds for seconds in times if seconds), default=None) if limit else None

    @property
    def limit_score(self) -> float | None:
        """Return 1 / (1 + (t - limit) / (baseline - limit)), as in SOL-ExecBench.

        t is the time of the solution, limit the least time that any kernel of the task needs
        (`seconds.limit`), and baseline the time of the faster of eager and torch.compile. The score is 0.5
        for a solution that takes as long as this baseline, 1 at the limit, and 0 without a correct solution.
        It is None if one of these times is not known, or if the limit leaves no room below the baseline.
        """
        if not self.correct:
            return 0.0
        own, baseline = self.attained, self.baseline_attained
        if own is None or baseline is None or baseline >= 1:
            return None
        return 1 / (1 + max(0.0, 1 / own - 1) / (1 / baseline - 1))


class Pair(FrozenModel):
    """The values of one figure against the two baselines, eager PyTorch and torch.compile.

    A value is None if there is no task on which the figure is defined.
    """

    eager: float | None
    compile: float | None


class Counts(FrozenModel):
    """Numbers of tasks, one for each of the baselines eager PyTorch and torch.compile."""

    eager: int
    compile: int


class FastP(FrozenModel):
    """Shares of tasks that are solved and more than p times as fast as each baseline, for each p in `p`.

    `eager` and `compile` have one share for each p, in the order of `p`. For p = 0, the share is that of the
    solved tasks.
    """

    p: tuple[float, ...]
    eager: tuple[float, ...]
    compile: tuple[float, ...]


class Summary(FrozenModel):
    """Figures over one set of tasks.

    The denominator of all rates of tasks is `tasks`, the number of tasks, which includes errors, that is,
    tasks on which the judge or the policy's server failed; `errors` is their number. `faster_rate` is the
    share of tasks whose solution is correct and faster than the baseline. `beyond_margin` is the share of
    tasks whose solution is correct and more than 5 % faster. `geomean` is the geometric mean of the speed-ups
    of the correct solutions whose speed-up was measured, whose number is `geomean_over`. `mean_reward` is the
    mean milestone (`TaskResult`: -1, 1, 2 or 3) of the tasks without the errors, whatever function the
    parameter `reward` names. `milestones` gives the number of tasks for each milestone as text, without the
    errors.

    `attempts_mean_reward` (of the rewards of the trajectories), `attempts_pass_rate` and `pass_at` (unbiased
    pass@k, by k) are computed on all attempts on which neither the judge nor the policy's server failed, with
    the verdicts at the end of their episodes. All other figures are computed on the final measurement of each
    task, which is made after the episodes (`TaskResult`). `intervals` has one entry for each figure but
    `pass_at`, by its dotted name, such as `fast_p.eager.1.5`. `attained` and `limit_score` are the means of
    these figures of `TaskResult` over the tasks that have one. A figure is None if there is no task on which
    it is defined.
    """

    tasks: int
    correct: int
    errors: int
    pass_rate: float | None
    faster_rate: Pair
    beyond_margin: Pair
    geomean: Pair
    geomean_over: Counts
    fast_p: FastP
    mean_reward: float | None
    milestones: dict[str, int]
    attempts_mean_reward: float | None
    attempts_pass_rate: float | None
    pass_at: dict[str, float]
    intervals: dict[str, Interval]
    attained: float | None = None
    limit_score: float | None = None


class NotMeasurable(FrozenModel):
    """Task that the judge cannot measure on the device, and the reason."""

    task_id: str
    name: str
    level: int | None
    reason: str


class Evaluation(FrozenModel):
    """Record of one evaluation, which is the contents of results.json.

    `suite` is the value of the parameter evaluation.suite, and `policy` the name of the policy.
    `suite_digest` is that of the task ids in order; two evaluations with equal digests have the same tasks.
    `dtype` is the one to which the tasks were cast (`evaluation.dtype`), and `labels` are the rules under
    which verdicts were reached; figures with others are not comparable. `epoch` is the name of the evaluation
    in the keys of the judge's verdicts. `levels` has the figures of each level of the suite, by the level as
    text. `errors` is the number of tasks on which the judge or the policy's server failed, so that they were
    neither solved nor failed. `not_measurable` are the tasks of the suite that are not among `tasks`, because
    they do not run or take too much memory.
    """

    suite: str
    suite_digest: str
    policy: str
    policy_digest: str
    device: str
    precision: str
    dtype: TaskDtype = "float32"
    labels: Labels = Labels()
    epoch: str
    seed: int
    tasks: tuple[TaskResult, ...]
    overall: Summary
    levels: dict[str, Summary]
    errors: int
    not_measurable: tuple[NotMeasurable, ...] = ()


def load_evaluation(path: Path) -> Evaluation:
    """Return the evaluation in `path`, which is a results.json or the folder that contains it.

    Raises UserError if the file is missing or damaged.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        return Evaluation.model_validate(read_json(file))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file}: not the results of an evaluation ({str(error).splitlines()[0]}); evaluate again "
            f"into an empty folder."
        ) from error


def require_equal_labels(name: str, one: Evaluation, other_name: str, other: Evaluation) -> None:
    """Raise UserError unless the judge's labels and the dtypes of two evaluations are equal.

    The labels are the rules by which verdicts were reached (`judge.verdict.Labels`). The message calls the
    evaluations `name` and `other_name`.
    """
    if one.dtype != other.dtype:
        raise UserError(
            f"{name}: its tasks were cast to {one.dtype}, and those of {other_name} to {other.dtype}; "
            "evaluate both with the same evaluation.dtype."
        )
    if one.labels != other.labels:
        raise UserError(
            f"{name}: judged with {one.labels}, and {other_name} with {other.labels}; "
            "evaluate both with the same labels."
        )


def summarise(rows: Sequence[TaskResult]) -> Summary:
    """Return the figures over the results of tasks, with bootstrap intervals.

    If there are no results, rates and means are None, both ends of each interval are None, the shares in
    `fast_p` and all counts are 0, and `pass_at` is empty.
    """
    samples = _all_and_samples(len(rows))
    values: dict[str, float | None] = {}
    intervals: dict[str, Interval] = {}
    for name, figure in _figures(rows).items():
        found = _estimate(name, quotients(figure, samples))
        values[name], intervals[name] = found.value, Interval(low=found.low, high=found.high)
        if rows and name.startswith(SHARES) and found.value in (0, 1):
            # The exact binomial bound is used, because all bootstrap samples of equal outcomes are equal.
            miss = ((1 - COVERAGE) / 2) ** (1 / len(rows))
            ends = (miss, 1.0) if found.value else (0.0, 1 - miss)
            intervals[name] = Interval(low=ends[0], high=ends[1])

    def pair(figure: str) -> Pair:
        return Pair(eager=values[f"{figure}.eager"], compile=values[f"{figure}.compile"])

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
    """Return one summary for each level, by the level as text. The dict is empty if no task has a level."""
    levels = sorted({row.level for row in results if row.level is not None})
    return {str(level): summarise([row for row in results if row.level == level]) for level in levels}


def changes(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> dict[str, Estimate]:
    """Return the change of each figure, by name, over the tasks that `before` and `after` have in common.

    The figures are those of `Summary.intervals`. A change is the figure after minus the figure before. For
    geometric means it is their ratio, over the tasks whose speed-up was measured on both sides. For the
    intervals, each bootstrap sample draws the same tasks before and after.
    """
    earlier = {row.task_id: row for row in before}
    pairs = [(earlier[row.task_id], row) for row in after if row.task_id in earlier]
    old, new = _figures([pair[0] for pair in pairs]), _figures([pair[1] for pair in pairs])
    for name in (f"geomean.{baseline}" for baseline in BASELINES):
        both = old[name][1] * new[name][1]
        old[name], new[name] = (old[name][0] * both, both), (new[name][0] * both, both)
    samples = _all_and_samples(len(pairs))
    return {
        name: _estimate(name, quotients(new[name], samples) - quotients(old[name], samples)) for name in new
    }


def _all_and_samples(tasks: int) -> Array:
    """Return how often each of `tasks` tasks occurs in the whole set, and in each bootstrap sample of it.

    The shape is [1 + RESAMPLES, tasks]. The first row, that of the whole set, is 1 everywhere.
    """
    return np.vstack([np.ones(tasks), bootstrap_counts(tasks)])


def _figures(rows: Sequence[TaskResult]) -> dict[str, tuple[Array, Array]]:
    """Return the summands of each task in the numerator and in the denominator of each figure, by name.

    A figure is the sum of its first array divided by the sum of its second array. Both arrays have the shape
    [tasks]. For geometric means, the summands are those of the mean log. Pass@k is not among the figures.
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
    for name in ("attained", "limit_score"):
        found = np.array([getattr(row, name) if not row.error else None for row in rows], dtype=float)
        figures[name] = (np.nan_to_num(found), (~np.isnan(found)).astype(float))
    for baseline in BASELINES:
        ratios = np.array([row.ratio(baseline) or math.nan for row in rows], dtype=float)
        measured = (~np.isnan(ratios)).astype(float)
        # Of a solution that is slower on a workload of its task, only the mean ratio counts.
        faster = np.where([holds_everywhere(row.workloads, baseline) for row in rows], ratios, 0.0)
        # A comparison with NaN is False, so a correct solution whose ratio was not measured is not faster.
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
    """Return pass@k by k: the mean over tasks of 1 - C(n - c, k) / C(n, k).

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
