"""What the judge says: the verdict about one candidate on one task, and whether a task is admitted, on which evidence."""

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


class Ratio(FrozenModel):
    """A paired speed-up: baseline seconds over candidate seconds, with a 95 % interval (block bootstrap)."""

    estimate: float
    low: float
    high: float


class Seconds(FrozenModel):
    """Seconds for one call, by arm; None where the arm was not measured."""

    candidate: float | None = None
    eager: float | None = None
    compile: float | None = None


class Speedup(FrozenModel):
    eager: Ratio | None = None
    compile: Ratio | None = None


class Verdict(FrozenModel):
    """DESIGN §4. `reason` is machine-readable; `log` is for the agent, cleaned and short."""

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
    """Whether a task can be judged, why not, and what was measured."""

    admitted: bool
    reason: str
    evidence: dict[str, Any]
