"""The gates of promotion as pure functions of figures and thresholds.

Gates are the conditions under which a version of the policy becomes the champion, the promoted version. All
thresholds are parameters (`params.gate`). There are four kinds of gates:

- A floor requires that the lower end of a figure's 95 % confidence interval reaches a threshold, unless the
  threshold is 0. So the true figure is above the threshold with a confidence of 97.5 %, and a small suite,
  whose intervals are wide, needs a better figure than a large one.
- A regression gate compares the version with the champion task by task, so that the difficulty of the tasks
  cancels. It fails if a rate drops by more than is allowed and the drop is statistically significant.
- The gates `start` compare the version in the same way with the policy that the run began with. No figure may
  be worse beyond its 95 % interval, and at least one has to be better beyond it.
- An integrity gate has no interval. It fails if, for example, too few tasks were measured, an exploit
  succeeded, or a checkpoint does not match its digest.
"""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

from components.core.promotion_params import GateThresholds
from components.core.records import FrozenModel
from components.evaluation.metrics import COVERAGE, changes, measured_pairs
from components.evaluation.results import BASELINES, Estimate, Summary, TaskResult

# Figures in which a version is compared with the policy that its run began with. Pass rate and mean reward
# are over all attempts.
LEARNED = (
    *("attempts_pass_rate", "attempts_mean_reward", "faster_rate.eager", "faster_rate.compile"),
    *("geomean.eager", "geomean.compile"),
)
# Name of the gate that requires that one of these figures is better.
IMPROVEMENT = "start.better"
# Least number of tasks on which a figure may be called better. Even if each of fewer tasks gets better, a
# two-sided sign test shows no change, although a bootstrap interval of few tasks may be above it.
LEAST_COMPARED = math.ceil(1 - math.log2(1 - COVERAGE))
# Verdicts after which a version does not become the champion and does not wait for it.
REFUSALS = ("refused", "nothing_learned")


class Gate(FrozenModel):
    """The result of one gate, which is a condition for the promotion of a version of the policy.

    A gate compares the figure `value`, with the 95 % interval from `low` to `high`, with `threshold`. `value`
    is None if the figure could not be measured, and `low` and `high` are None without an interval. `passed`
    is true if the condition holds. `note` has further details, such as the names of exploits that succeeded.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    threshold: float
    passed: bool
    note: str = ""

    @property
    def decisive(self) -> float | None:
        """Return the number that is compared with the threshold.

        It is the lower end of the interval, and the upper end for changes from the policy that the run began
        with. If there is no interval, or the gate is on a change from the champion (the promoted version), it
        is the figure itself, which is None if it could not be measured.
        """
        if self.low is None or self.name.startswith("change."):
            return self.value
        return self.high if self.name.startswith("start.") else self.low

    @property
    def sentence(self) -> str:
        """Return a sentence with the figure, its interval and the threshold, followed by the note.

        For a gate that did not pass, the sentence also says by how much the decisive number is below the
        threshold.
        """
        more = f" {self.note}" if self.note else ""
        if self.value is None:
            return f"{self.name} could not be measured; at least {self.threshold:.3g} is needed.{more}"
        interval = (
            f" (95 % interval {self.low:.3g} to {self.high:.3g})"
            if self.low is not None and self.high is not None
            else ""
        )
        if self.passed or self.decisive is None:
            return (
                f"{self.name} is {self.value:.3g}{interval}; at least {self.threshold:.3g} is needed.{more}"
            )
        end = "upper" if self.name.startswith("start.") else "lower"
        what = f"its {end} end is" if interval and self.decisive in (self.low, self.high) else "that is"
        missing = f"{self.threshold - self.decisive:.3g} short of {self.threshold:.3g}"
        return f"{self.name} is {self.value:.3g}{interval}: {what} {missing}.{more}"


class Decision(FrozenModel):
    """The decision of the gates, the conditions for the promotion of a version of the policy.

    `promoted` means that all gates passed, and `waiting` that all passed and that a person has to approve.
    `nothing_learned` means that only the gate failed that requires that the version is better than the policy
    that its run began with, and `refused` that another gate failed. `reasons` has a sentence for each failed
    gate, or one on why the version is promoted or waits.
    """

    verdict: Literal["promoted", "refused", "waiting", "nothing_learned"]
    gates: tuple[Gate, ...]
    reasons: tuple[str, ...]


class Compared(FrozenModel):
    """The champion with which the gates compared a version, and its evaluation on the version's tasks.

    The champion is the promoted version. `version` is its version number. `evaluation` is the path of the
    results, relative to the home (the folder in which runs keep everything), and `digest` the SHA-256 of this
    file.
    """

    version: str
    evaluation: str
    digest: str


def floors(summary: Summary, levels: dict[str, Summary], thresholds: GateThresholds) -> list[Gate]:
    """Return the gates that compare the figures of one evaluation with their lowest accepted values.

    `summary` has the figures of all tasks, and `levels` those of the tasks of each level of the suite, by the
    level's number as a text. A gate with the threshold 0 always passes. Any other passes if the lower end of
    the figure's 95 % interval is at least the threshold, and fails if its figure or interval is missing.
    """

    def floor(name: str, figures: Summary | None, threshold: float, called: str = "") -> Gate:
        value = attrgetter(name)(figures) if figures is not None else None
        interval = figures.intervals.get(name) if figures is not None else None
        low, high = (interval.low, interval.high) if interval is not None else (None, None)
        # The figure is None if it covers no task: the geomean if no solution is correct, or a level that the
        # suite does not have. Without a figure or an interval, the gate passes only if the threshold is 0.
        passed = threshold == 0 or (value is not None and low is not None and low >= threshold)
        return Gate(name=called or name, value=value, low=low, high=high, threshold=threshold, passed=passed)

    return [
        floor("pass_rate", summary, thresholds.pass_rate),
        floor("faster_rate.eager", summary, thresholds.faster_rate_eager),
        floor("faster_rate.compile", summary, thresholds.faster_rate_compile),
        floor("geomean.eager", summary, thresholds.geomean_eager),
        floor("geomean.compile", summary, thresholds.geomean_compile),
        *([floor("limit_score", summary, thresholds.limit_score)] if thresholds.limit_score else ()),
        *(
            floor(
                "faster_rate.compile", levels.get(str(level)), threshold, f"faster_rate.compile.level_{level}"
            )
            for level, threshold in sorted(thresholds.faster_rate_compile_by_level.items())
        ),
    ]


def regression(
    candidate: Sequence[TaskResult], champion: Sequence[TaskResult], thresholds: GateThresholds
) -> list[Gate]:
    """Return the gates on the change of each rate from the champion to the candidate, paired by task.

    `candidate` has the results of the version that is to be promoted, and `champion` those of the promoted
    version. Only tasks on which both were measured are included. A gate fails if the rate drops by more than
    `thresholds.regression` and the 95 % confidence interval of the change is below 0.
    """
    found = changes(champion, candidate)

    def is_worse(change: Estimate) -> bool:
        is_below = change.value is not None and change.value < -thresholds.regression
        return is_below and change.high is not None and change.high < 0

    return [
        Gate(
            name=f"change.{name}",
            **dict(found[name]),
            threshold=-thresholds.regression,
            passed=not is_worse(found[name]),
        )
        for name in ("pass_rate", "faster_rate.eager", "faster_rate.compile")
    ]


def improvement(candidate: Sequence[TaskResult], start: Sequence[TaskResult]) -> list[Gate]:
    """Return the gates on the change of each figure from the policy that the run began with, paired by task.

    `candidate` has the results of the version that is to be promoted, and `start` those of the policy that
    the run began with. Only tasks on which both were measured are included. The gate of a figure fails if the
    whole 95 % interval of its change is below no change, which is a ratio of 1 for a geometric mean and a
    difference of 0 for any other figure. One more gate (IMPROVEMENT) requires that the whole interval of at
    least one figure, which both have on LEAST_COMPARED tasks or more, is above no change.
    """
    found, pairs = changes(start, candidate), measured_pairs(start, candidate)
    compared = {
        f"geomean.{baseline}": sum(None not in (a.ratio(baseline), b.ratio(baseline)) for a, b in pairs)
        for baseline in BASELINES
    }
    # Values of no change: the ratio 1 of geometric means, and the difference 0 of other figures.
    neutral = {name: 1.0 if name.startswith("geomean") else 0.0 for name in LEARNED}
    better = [
        name
        for name, none in neutral.items()
        if compared.get(name, len(pairs)) >= LEAST_COMPARED
        and (low := found[name].low) is not None
        and low > none
    ]
    note = (
        f"Better than at the start: {', '.join(better)}."
        if better
        else "Nothing learned: no figure is better than that of the policy the run began with, beyond the "
        "95 % interval of the difference."
    )
    return [
        *(
            Gate(
                name=f"start.{name}",
                **dict(found[name]),
                threshold=none,
                passed=(high := found[name].high) is None or high >= none,
            )
            for name, none in neutral.items()
        ),
        Gate(name=IMPROVEMENT, value=float(len(better)), threshold=1.0, passed=bool(better), note=note),
    ]


def too_few_tasks(thresholds: GateThresholds, tasks: int) -> list[str]:
    """Return a sentence for each gate that no version can pass on a suite with this number of tasks.

    `tasks` is at least 1. The gate on a share cannot be passed if its threshold is above the lower end of the
    exact binomial interval of a share of 1, which is ((1 - COVERAGE) / 2) ** (1 / tasks). The gate on
    improvement (gate.improvement) needs a suite of at least LEAST_COMPARED tasks.
    """
    outside = (1 - COVERAGE) / 2
    highest = outside ** (1 / tasks)
    shares = {
        "gate.pass_rate": thresholds.pass_rate,
        "gate.faster_rate_eager": thresholds.faster_rate_eager,
        "gate.faster_rate_compile": thresholds.faster_rate_compile,
    }
    found = [
        f"{name} is {share:g}, and {tasks} tasks show at most {highest:.3f}: no version can pass; "
        + (
            f"evaluate at least {math.ceil(math.log(outside) / math.log(share))} tasks."
            if share < 1
            else "no suite is large enough, so lower it."
        )
        for name, share in shares.items()
        if share > highest
    ]
    if thresholds.improvement and tasks < LEAST_COMPARED:
        found.append(
            f"gate.improvement: {tasks} tasks are too few for a change; evaluate at least {LEAST_COMPARED}."
        )
    return found


def integrity(
    summary: Summary,
    thresholds: GateThresholds,
    *,
    digests_match: bool,
    isolated: bool,
    report_complete: bool,
    exploits: Gate | None = None,
) -> list[Gate]:
    """Return the gates that have no interval.

    They require that enough tasks were measured, that all were measured in the sandbox (`isolated`), that the
    checkpoint is the evaluated one (`digests_match`), and that the report is complete (`report_complete`).
    `exploits`, the result of `exploits_gate`, is appended if it is given.
    """
    measured = 1.0 if summary.tasks == 0 else 1 - summary.errors / summary.tasks
    facts = {
        "integrity.digests": digests_match,
        "integrity.isolation": isolated,
        "integrity.report": report_complete,
    }
    return [
        Gate(
            name="integrity.measured",
            value=measured,
            threshold=thresholds.measured,
            passed=measured >= thresholds.measured,
        ),
        *(Gate(name=name, value=float(value), threshold=1.0, passed=value) for name, value in facts.items()),
        *([exploits] if exploits is not None else []),
    ]


def exploits_gate(refused: int, tried: int, believed: Sequence[str], thresholds: GateThresholds) -> Gate:
    """Return the gate on the judge's verdicts on a sample of exploits and honest kernels.

    Exploits are kernels that break a rule. The judge refused `refused` of the `tried` exploits, as it should
    have refused all. The gate passes if the share of refused exploits is at least `thresholds.exploits`.
    `believed` names the exploits that the judge accepted and the honest kernels that it refused, for the
    gate's note.
    """
    share = refused / tried if tried else 0.0
    return Gate(
        name="integrity.exploits",
        value=share,
        threshold=thresholds.exploits,
        passed=share >= thresholds.exploits,
        note=f"Wrongly judged: {', '.join(believed)}." if believed else "",
    )


def decide(gates: Sequence[Gate], approval: Literal["automatic", "person"]) -> Decision:
    """Return the decision that follows from the results of all gates.

    The verdict is `nothing_learned` if only the gate IMPROVEMENT failed, and `refused` if another gate
    failed. If all passed, it is `waiting` if `approval` is `person`, and `promoted` if it is `automatic`.
    """
    if failed := [gate for gate in gates if not gate.passed]:
        return Decision(
            verdict="nothing_learned" if [gate.name for gate in failed] == [IMPROVEMENT] else "refused",
            gates=tuple(gates),
            reasons=tuple(gate.note if gate.name == IMPROVEMENT else gate.sentence for gate in failed),
        )
    is_waiting = approval == "person"
    reason = f"all {len(gates)} gates passed{'; a person has to approve' if is_waiting else ''}."
    return Decision(verdict="waiting" if is_waiting else "promoted", gates=tuple(gates), reasons=(reason,))
