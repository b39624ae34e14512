"""What the judge says: the verdict about one candidate on one task, and whether a task is admitted, on which evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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
MARGIN = 1.05
"""More than 5 % faster counts as faster (paper, eq. 1)."""


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


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


def milestone_of(status: str, speedup: Speedup) -> Literal[-1, 1, 2, 3]:
    """Milestone reward of the paper, eq. 1: -1 not correct, 1 correct, 2 faster than eager, 3 faster than both."""
    if status != "correct":
        return -1
    faster_than_eager = speedup.eager is not None and speedup.eager.estimate > MARGIN
    faster_than_compile = speedup.compile is not None and speedup.compile.estimate > MARGIN
    if faster_than_eager and faster_than_compile:
        return 3
    return 2 if faster_than_eager else 1


def clean(text: str, limit: int = 2000) -> str:
    """Printable text of at most `limit` characters, its head and tail kept."""
    text = "".join(c for c in text if c == "\n" or (c.isprintable() and c != "\x7f"))
    if len(text) <= limit:
        return text
    half = (limit - 40) // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"


def geometric_mean(values: list[float]) -> float:
    """exp of the mean log, so that neither products nor powers overflow; NaN for no values."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan
