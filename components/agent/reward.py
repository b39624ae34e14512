"""Rewards: the milestone of a verdict (CUDA Agent, eq. 1), and the raw speed-up of the paper's ablation.

This file imports nothing of the project at run time, because the judge, which is a lower layer than the
agent, imports it to compute the milestone of each verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from components.agent.trajectory import Trajectory
    from components.judge.verdict import Verdict

MARGIN = 1.05
"""Ratio of baseline time to candidate time above which a candidate is called faster."""


def milestone(verdict: Verdict) -> Literal[-1, 1, 2, 3]:
    """Return -1 if not correct, 1 if correct, 2 if faster than eager, 3 if faster than torch.compile too.

    The milestone is computed from the verdict's status and measured ratios. The field `milestone` of the
    verdict is not read.
    """
    if verdict.status != "correct":
        return -1
    eager, compiled = verdict.speedup.eager, verdict.speedup.compile
    if eager is None or not eager.estimate > MARGIN:  # `not … > …` is also True for NaN
        return 1
    return 3 if compiled is not None and compiled.estimate > MARGIN else 2


def training_rewards(
    trajectories: Sequence[Trajectory], shape: Literal["milestone", "speedup"]
) -> list[float]:
    """Return the reward that PPO maximises for each trajectory: its milestone or its speed-up over eager.

    `shape` selects one of them; the paper's ablation uses the speed-up in place of the milestone. The
    speed-up is replaced by -1 if the final candidate is not correct or its speed-up was not measured.
    """
    if shape == "milestone":
        return [trajectory.reward for trajectory in trajectories]
    finals = [trajectory.final for trajectory in trajectories]
    speedups = [final.speedup.eager if final.status == "correct" else None for final in finals]
    return [-1.0 if speedup is None else speedup.estimate for speedup in speedups]
