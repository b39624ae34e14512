"""Records that the judge returns: the verdict on one candidate, and the admission of a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from components.core.records import FrozenModel

Status = Literal[
    "correct",
    "build_failed",
    "load_failed",
    "crashed",
    "timed_out",
    "out_of_memory",
    "wrong_output",
    "forbidden",
    "infrastructure",
]
"""Result of a judgement; `infrastructure` is a fault of judge or task, never charged to the candidate."""


class Ratio(FrozenModel):
    """Paired speed-up, baseline seconds over candidate seconds, with a 95 % interval (block bootstrap)."""

    estimate: float
    low: float
    high: float


class Seconds(FrozenModel):
    """Median seconds of one call; None for what was not measured."""

    candidate: float | None = None
    eager: float | None = None
    compile: float | None = None


class Speedup(FrozenModel):
    """Speed-ups over each baseline; None for what was not measured."""

    eager: Ratio | None = None
    compile: Ratio | None = None


class Verdict(FrozenModel):
    """The judge's verdict on one candidate.

    `reason` is machine-readable, such as `max_error:given`; `log` is short readable text for the agent.
    `milestone` is computed by `components.agent.reward`, once, when the verdict is made.
    """

    status: Status
    reason: str = ""
    milestone: Literal[-1, 1, 2, 3] = -1
    device: str = "cpu"
    precision: str = "strict-fp32"
    seconds: Seconds = Seconds()
    speedup: Speedup = Speedup()
    evidence: dict[str, Any] = Field(default_factory=dict)
    log: str = ""


@dataclass(frozen=True)
class Admission:
    """Result of an admission: whether the task can be judged, the reason if not, and what was measured."""

    admitted: bool
    reason: str
    evidence: dict[str, Any]
