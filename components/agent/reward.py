"""The milestone reward (paper, eq. 1): -1 not correct, 1 correct, 2 faster than eager, 3 faster than both baselines."""

from __future__ import annotations

from components.judge.verdict import Verdict, milestone_of


def milestone(verdict: Verdict) -> int:
    """Reward of a verdict, from its status and measured ratios alone; 5 % is the margin."""
    return milestone_of(verdict.status, verdict.speedup)


def raw_speedup(verdict: Verdict) -> float:
    """What the paper's ablation without the milestones gives: the measured ratio to eager; -1 for what is not correct."""
    return (
        verdict.speedup.eager.estimate
        if verdict.status == "correct" and verdict.speedup.eager is not None
        else -1.0
    )
