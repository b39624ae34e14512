"""Rewards: the milestone of a verdict (CUDA Agent, eq. 1), and the raw speed-up of the paper's ablation.

This file imports nothing at run time, since the judge, a lower layer, writes the milestone into each verdict
with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from components.agent.trajectory import Trajectory
    from components.judge.verdict import Verdict

MARGIN = 1.05
"""Smallest speed-up, as a ratio of baseline to candidate time, that does not count as faster."""


def milestone(verdict: Verdict) -> Literal[-1, 1, 2, 3]:
    """Return -1 for not correct, 1 for correct, 2 for faster than eager, 3 for faster than torch.compile too.

    Only the verdict's status and measured ratios count; its own `milestone` field is not read.
    """
    if verdict.status != "correct":
        return -1
    eager, compiled = verdict.speedup.eager, verdict.speedup.compile
    if eager is None or not eager.estimate > MARGIN:  # NaN is not faster
        return 1
    return 3 if compiled is not None and compiled.estimate > MARGIN else 2


def training_rewards(
    trajectories: Sequence[Trajectory], shape: Literal["milestone", "speedup"]
) -> list[float]:
    """Return what PPO maximises for each trajectory: its milestone, or its measured speed-up over eager.

    The speed-up is the paper's ablation of the milestones; it is -1 for an incorrect candidate.
    """
    if shape == "milestone":
        return [trajectory.reward for trajectory in trajectories]
    finals = [trajectory.final for trajectory in trajectories]
    speedups = [final.speedup.eager if final.status == "correct" else None for final in finals]
    return [-1.0 if speedup is None else speedup.estimate for speedup in speedups]
