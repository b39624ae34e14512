"""The record of an evaluation: the results of its tasks, its figures, and the file that stores them."""

import math
from pathlib import Path
from typing import Any, Generic, Literal, Self

from pydantic import Field

from components.agent.trajectory import Trajectory
from components.core.errors import refuse
from components.core.records import FrozenModel, T, TaskDtype, read_as
from components.judge.verdict import (
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


class Interval(FrozenModel):
    """A 95 % interval from bootstrap samples of the tasks, or an exact binomial one for shares of 0 and 1.

    `low` and `high` are its ends, in the unit of the figure. Both are None if there is no task on which the
    figure is defined.
    """

    low: float | None
    high: float | None


class Estimate(Interval):
    """The value of a figure, or of its change between two evaluations, with its 95 % interval.

    `value` is None if there is no task on which the figure is defined.
    """

    value: float | None


class Measurement(FrozenModel):
    """The status of one judged kernel and, if it was measured, its speed-up over eager PyTorch (`eager`).

    The speed-up is the time of eager PyTorch divided by the time of the kernel. `eager` is None if it was not
    measured.
    """

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
    `turns` is the number of its turns, and `finish_reason` says why it ended, such as stop or turns
    (`Trajectory`). `first` is the status and speed-up of the first kernel that was judged within the episode,
    or None in records that do not have it.
    """

    status: Status
    reward: float | None
    turns: int = 0
    finish_reason: str = ""
    first: Measurement | None = None

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        """Return the record of `trajectory`.

        The first kernel has the status `infrastructure` if the policy's server answered no turn.
        """
        by_server = trajectory.finish_reason == "server"
        return cls(
            status="infrastructure" if by_server else trajectory.final.status,
            reward=trajectory.reward,
            turns=len(trajectory.turns),
            finish_reason=trajectory.finish_reason,
            first=Measurement.of(trajectory.verdicts[0])
            if trajectory.turns or not by_server
            else Measurement(status="infrastructure"),
        )


def _milestone(fields: dict[str, Any]) -> Literal[-1, 1, 2, 3]:
    return milestone(
        Verdict(status=fields["status"], speedup=fields["speedup"], workloads=fields["workloads"])
    )


class TaskResult(FrozenModel):
    """Result of one task in an evaluation.

    After the episodes, the evaluation measures the final files of the first attempt again, unless they were
    wrong or did not build. `status`, `reason`, `milestone`, `seconds`, `speedup`, `workloads` and `evidence`
    (the record of the measurements) are from the verdict of this final measurement, or else from the verdict
    at the end of the episode. `milestone` is -1 for a kernel that is not correct, 1 for a correct one, 2 if
    it is also faster than eager, and 3 if it is also faster than torch.compile. If it is not given, it is
    computed from `status`, `speedup` and `workloads` (the figures on each call of the task's `get_inputs`
    that its source lists). `attempts` are all attempts, with the verdicts from the end of their episodes.
    `source` is the source of the task, and `files` are the final files of the first attempt by workspace
    path. `degenerate` is the reason why a wrong kernel could pass on this task. It is empty if there is no
    such reason, and for a task without a correct result.
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
        """Return the measured speed-up: the time of `baseline` divided by that of the solution.

        Returns None if the solution is not correct, or if the speed-up was not measured or is not positive
        and finite.
        """
        ratio: Ratio | None = getattr(self.speedup, baseline)
        if not self.correct or ratio is None or not math.isfinite(ratio.estimate) or ratio.estimate <= 0:
            return None
        return ratio.estimate

    def ratio_everywhere(self, baseline: Baseline) -> float:
        """Return the speed-up by which a solution counts as faster than `baseline`.

        It is `ratio`, or 0 if there is none or if the solution is slower on one workload (shape) of its task.
        """
        return (self.ratio(baseline) or 0.0) if holds_everywhere(self.workloads, baseline) else 0.0

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
        for a solution that takes as long as this baseline, 1 for one that takes as long as the limit or less,
        and 0 without a correct solution. It is None if one of these times is not known, or if the limit is
        not below the baseline.
        """
        if not self.correct:
            return 0.0
        own, baseline = self.attained, self.baseline_attained
        if own is None or baseline is None or baseline >= 1:
            return None
        return 1 / (1 + max(0.0, 1 / own - 1) / (1 / baseline - 1))


class Pair(FrozenModel, Generic[T]):
    """The values of one figure against the two baselines, eager PyTorch and torch.compile.

    A value is None if there is no task on which the figure is defined.
    """

    eager: T
    compile: T


# Not made in another class, because pickle finds only what has a name in this module.
Figures = Pair[float | None]
Counts = Pair[int]


class FastP(Pair[tuple[float, ...]]):
    """Shares of tasks that are solved and more than p times as fast as each baseline, for each p in `p`.

    `eager` and `compile` have one share for each p, in the order of `p`. For p = 0, the share is that of the
    solved tasks.
    """

    p: tuple[float, ...]


class Summary(FrozenModel):
    """Figures over one set of tasks.

    The denominator of all rates of tasks is `tasks`, the number of tasks, which includes errors, that is,
    tasks on which the judge or the policy's server failed; `errors` is their number. `correct` is the number
    of tasks with a correct solution. `faster_rate` is the share of tasks whose solution is correct and faster
    than the baseline. `beyond_margin` is the share of tasks whose solution is correct and more than 5 %
    faster. `geomean` is the geometric mean of the speed-ups of the correct solutions whose speed-up was
    measured, whose number is `geomean_over`. `mean_reward` is the mean milestone (`TaskResult`: -1, 1, 2 or
    3) of the tasks without the errors, whatever function the parameter `reward` names. `milestones` gives the
    number of tasks for each milestone as text, without the errors.

    `attempts_mean_reward` (of the rewards of the trajectories), `attempts_pass_rate` and `pass_at` (unbiased
    pass@k, by k) are computed on all attempts on which neither the judge nor the policy's server failed, with
    the verdicts at the end of their episodes. All other figures are computed on the results of the tasks, of
    which those that may be correct are measured after the episodes (`TaskResult`). `intervals` has one entry
    for each figure but `pass_at`, by its dotted name, such as `fast_p.eager.1.5`. `attained` and
    `limit_score` are the means of these figures of `TaskResult` over the tasks that have one. A figure is
    None if there is no task on which it is defined.
    """

    tasks: int
    correct: int
    errors: int
    pass_rate: float | None
    faster_rate: Figures
    beyond_margin: Figures
    geomean: Figures
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
    """Task that the judge cannot measure on the device, and the reason as text.

    `name` is the task's name or "", and `level` its level in the suite, or None if it has none.
    """

    task_id: str
    name: str
    level: int | None
    reason: str


class Evaluation(FrozenModel):
    """Record of one evaluation, which is the contents of results.json.

    `suite` is the value of the parameter evaluation.suite, and `policy` the name of the policy;
    `policy_digest` is equal for equal policies. `suite_digest` is that of the task ids in order; two
    evaluations with equal digests have the same tasks. `dtype` is the one to which the tasks were cast
    (`evaluation.dtype`), and `labels` are the rules under which verdicts were reached; figures with others
    are not comparable. `epoch` is the name of the evaluation in the keys of the judge's verdicts, and `seed`
    that of the sampling. `overall` has the figures of all tasks, and `levels` those of each level of the
    suite, by the level as text. `errors` is the number of tasks on which the judge or the policy's server
    failed, so that they were neither solved nor failed. `not_measurable` are the tasks of the suite that are
    not among `tasks`, because they do not run or take too much memory.
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
    return read_as(Evaluation, file, "evaluate again into an empty folder")


def require_equal_labels(name: str, one: Evaluation, other_name: str, other: Evaluation) -> None:
    """Raise UserError unless the judge's labels and the dtypes of two evaluations are equal.

    The labels are the rules by which verdicts were reached (`judge.verdict.Labels`), and a dtype is the one
    to which the tasks were cast. The message calls the evaluations `name` and `other_name`.
    """
    refuse(
        (
            one.dtype != other.dtype,
            f"{name}: its tasks were cast to {one.dtype}, and those of {other_name} to {other.dtype}; "
            "evaluate both with the same evaluation.dtype.",
        ),
        (
            one.labels != other.labels,
            f"{name}: judged with {one.labels}, and {other_name} with {other.labels}; "
            "evaluate both with the same labels.",
        ),
    )
