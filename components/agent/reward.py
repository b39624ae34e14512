"""The milestone reward (paper, eq. 1): -1 not correct, 1 correct, 2 faster than eager, 3 faster than both baselines."""

from __future__ import annotations

from components.sandbox.verdict import Verdict, milestone_of


def milestone(verdict: Verdict) -> int:
    """Reward of a verdict, from its status and measured ratios alone; 5 % is the margin."""
    return milestone_of(verdict.status, verdict.speedup)
