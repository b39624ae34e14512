"""Rewards that PPO maximises: the milestone of a verdict, or the raw speed-up of the paper's ablation."""

from collections.abc import Sequence
from typing import Literal

from components.agent.trajectory import Trajectory
from components.judge.milestone import milestone as milestone


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
