"""The gates of promotion as pure functions of figures and thresholds.

All thresholds are parameters (`params.gate`). There are three kinds of gates:

- A floor requires that the lower end of a figure's 95 % confidence interval reaches a threshold. So the true
  figure is above the threshold with a confidence of 97.5 %, and a small suite, whose intervals are wide,
  needs a better figure than a large one.
- A regression gate compares the version with the champion task by task, so that the difficulty of the tasks
  cancels. It fails if a rate drops by more than is allowed and the drop is statistically significant.
- An integrity gate has no interval. It fails if, for example, too few tasks were measured, an exploit
  succeeded, or a checkpoint does not match its digest.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

from components.core.params import GateThresholds
from components.core.records import FrozenModel
from components.evaluation.metrics import Summary, TaskResult, changes


class Gate(FrozenModel):
    """The result of one gate: a figure with its interval, the threshold, and whether the gate passed."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    threshold: float
    passed: bool
    # Further details, such as the names of exploits that succeeded.
    note: str = ""

    @property
    def decisive(self) -> float | None:
        """Return the number that is compared with the threshold.

        It is the lower end of the interval. If there is no interval, or the gate is on a change, it is the
        figure itself.
        """
        return self.low if self.low is not None and not self.name.startswith("change.") else self.value

    @property
    def sentence(self) -> str:
        """Return the figure, its interval, the threshold and the note as text."""
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
        what = "its lower end is" if interval and self.decisive == self.low else "that is"
        missing = f"{self.threshold - self.decisive:.3g} short of {self.threshold:.3g}"
        return f"{self.name} is {self.value:.3g}{interval}: {what} {missing}.{more}"


class Decision(FrozenModel):
    """The decision of the gates; `waiting` means that all gates passed and that a person has to approve."""

    verdict: Literal["promoted", "refused", "waiting"]
    gates: tuple[Gate, ...]
    # One sentence for each failed gate, or one sentence on why the version is promoted or waits.
    reasons: tuple[str, ...]


def floors(summary: Summary, levels: dict[str, Summary], thresholds: GateThresholds) -> list[Gate]:
    """Return the gates that compare the figures of one evaluation with their lowest accepted values.

    `levels` has the figures of the tasks of each level of the suite.
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

    Only tasks on which both were measured are included. A gate fails if the rate drops by more than
    gate.regression and the confidence interval of the change excludes 0.
    """
    failed = {row.task_id for row in (*candidate, *champion) if row.error}
    found = changes(
        [row for row in champion if row.task_id not in failed],
        [row for row in candidate if row.task_id not in failed],
    )

    def gate(name: str) -> Gate:
        value, low, high = found[name].value, found[name].low, found[name].high
        is_worse = value is not None and value < -thresholds.regression and high is not None and high < 0
        return Gate(
            name=f"change.{name}",
            value=value,
            low=low,
            high=high,
            threshold=-thresholds.regression,
            passed=not is_worse,
        )

    return [gate(name) for name in ("pass_rate", "faster_rate.eager", "faster_rate.compile")]


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

    They require that enough tasks were measured, that all were measured in isolation, that the checkpoint is
    the evaluated one, and that the report is complete. `exploits`, the result of `exploits_gate`, is
    appended.
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
    """Return the gate on the judge's verdicts on a sample of exploits and honest candidates.

    `refused` of the `tried` exploits failed, as they should. `believed` names the exploits that succeeded and
    the honest candidates that were refused.
    """
    share = refused / tried if tried else 0.0
    note = f"Wrongly judged: {', '.join(believed)}." if believed else ""
    return Gate(
        name="integrity.exploits",
        value=share,
        threshold=thresholds.exploits,
        passed=share >= thresholds.exploits,
        note=note,
    )


def decide(gates: Sequence[Gate], approval: Literal["automatic", "person"]) -> Decision:
    """Return the decision that follows from the gates.

    The verdict is `refused` if any gate failed. Otherwise it is `waiting` if `approval` is `person`, and
    `promoted` if it is `automatic`.
    """
    failed = tuple(gate.sentence for gate in gates if not gate.passed)
    if failed:
        return Decision(verdict="refused", gates=tuple(gates), reasons=failed)
    held = f"all {len(gates)} gates passed"
    if approval == "person":
        return Decision(verdict="waiting", gates=tuple(gates), reasons=(f"{held}; a person has to approve.",))
    return Decision(verdict="promoted", gates=tuple(gates), reasons=(f"{held}.",))
