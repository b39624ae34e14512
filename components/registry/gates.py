"""Promotion's rules, as pure functions: figures and thresholds in, gates out.

Floors come from `params.gate`. The comparison with the champion is paired by task, so that the tasks' own difficulty
cancels; a regression counts as one only when its whole interval says so, because a single noisy figure flaps
(DESIGN §10). Integrity is not a matter of degree: a task that the judge could not measure, or a checkpoint that does
not match its digests, refuses whatever the figures are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from components.config import Gate as Thresholds
from components.evaluation.metrics import Interval, Summary, TaskResult, changes
from components.sandbox.verdict import Frozen


class Gate(Frozen):
    """One rule: the figure with its interval, the threshold that it has to reach, and whether it did."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    threshold: float
    passed: bool

    @property
    def sentence(self) -> str:
        """What fell short by how much, or what held."""
        if self.value is None:
            return f"{self.name} could not be measured; at least {self.threshold:.3g} is needed."
        interval = f" (95 % interval {self.low:.3g} to {self.high:.3g})" if self.low is not None and self.high is not None else ""
        if self.passed:
            return f"{self.name} is {self.value:.3g}{interval}; at least {self.threshold:.3g} is needed."
        return f"{self.name} is {self.value:.3g}{interval}: {self.threshold - self.value:.3g} short of {self.threshold:.3g}."


class Decision(Frozen):
    """The gates' answer. `verdict` is waiting when they passed and a person has to approve."""

    verdict: Literal["promoted", "refused", "waiting"]
    gates: tuple[Gate, ...]
    reasons: tuple[str, ...]
    """One sentence per gate that refused, or the one that says why the version was promoted or waits."""


def floors(summary: Summary, thresholds: Thresholds) -> list[Gate]:
    """The figures of one evaluation against the lowest accepted ones."""

    def floor(name: str, value: float | None, threshold: float) -> Gate:
        interval = summary.intervals.get(name, Interval(low=None, high=None))
        # A figure over no task (no correct solution, so no geomean) passes only where nothing is asked of it.
        passed = threshold == 0 if value is None else value >= threshold
        return Gate(name=name, value=value, low=interval.low, high=interval.high, threshold=threshold, passed=passed)

    return [
        floor("pass_rate", summary.pass_rate, thresholds.pass_rate),
        floor("faster_rate.eager", summary.faster_rate.eager, thresholds.faster_rate_eager),
        floor("faster_rate.compile", summary.faster_rate.compile, thresholds.faster_rate_compile),
        floor("geomean.eager", summary.geomean.eager, thresholds.geomean_eager),
    ]


def regression(candidate: Sequence[TaskResult], champion: Sequence[TaskResult], thresholds: Thresholds) -> list[Gate]:
    """Paired change of the faster rates against the champion on the tasks that both have; at most the allowed drop."""
    found = changes(champion, candidate)
    gates = []
    for name in ("faster_rate.eager", "faster_rate.compile"):
        change = found[name]
        worst = change.high if change.high is not None else change.value
        passed = worst is None or worst >= -thresholds.regression
        gates.append(Gate(name=f"change.{name}", value=change.value, low=change.low, high=change.high, threshold=-thresholds.regression, passed=passed))
    return gates


def integrity(summary: Summary, *, digests_match: bool, isolated: bool, report_complete: bool) -> list[Gate]:
    """Rules of yes and no: every task was measured, in isolation, the checkpoint is what was evaluated, the report is there."""
    facts = {
        "integrity.measured": 1.0 if summary.tasks == 0 else 1 - summary.errors / summary.tasks,
        "integrity.digests": float(digests_match),
        "integrity.isolation": float(isolated),
        "integrity.report": float(report_complete),
    }
    return [Gate(name=name, value=value, threshold=1.0, passed=value >= 1.0) for name, value in facts.items()]


def decide(gates: Sequence[Gate], approval: Literal["automatic", "person"]) -> Decision:
    """Refused when any gate failed, with each reason; otherwise promoted, or waiting for a person's approval."""
    failed = tuple(gate.sentence for gate in gates if not gate.passed)
    if failed:
        return Decision(verdict="refused", gates=tuple(gates), reasons=failed)
    held = f"all {len(gates)} gates passed"
    if approval == "person":
        return Decision(verdict="waiting", gates=tuple(gates), reasons=(f"{held}; a person has to approve.",))
    return Decision(verdict="promoted", gates=tuple(gates), reasons=(f"{held}.",))


def as_rows(gates: Sequence[Gate]) -> list[dict[str, Any]]:
    """Gates in their JSON form, each with its sentence."""
    return [gate.model_dump() | {"sentence": gate.sentence} for gate in gates]
