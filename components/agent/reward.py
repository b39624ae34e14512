"""Reward of a trajectory: the milestone of its final verdict (CUDA Agent, eq. 1). The only definition.

This file imports nothing at run time: the judge, a layer below, writes the milestone into each verdict with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from components.judge.verdict import Verdict

MARGIN = 1.05
"""Smallest speed-up, as a ratio of baseline to candidate time, that does not count as faster."""


def milestone(verdict: Verdict) -> Literal[-1, 1, 2, 3]:
    """Return -1 for not correct, 1 for correct, 2 for faster than eager, 3 for faster than eager and torch.compile.

    Only the verdict's status and measured ratios count; its own `milestone` field is not read.
    """
    if verdict.status != "correct":
        return -1
    eager, compiled = verdict.speedup.eager, verdict.speedup.compile
    if eager is None or eager.estimate <= MARGIN:
        return 1
    return 3 if compiled is not None and compiled.estimate > MARGIN else 2


def raw_speedup(verdict: Verdict) -> float:
    """Return the measured speed-up over eager, or -1 for an incorrect candidate (the paper's ablation of milestones)."""
    eager = verdict.speedup.eager
    return eager.estimate if verdict.status == "correct" and eager is not None else -1.0
