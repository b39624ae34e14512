"""This module computes the reward of a trajectory, which PPO maximises.

The reward is the milestone of the final verdict. In the ablation of the CUDA Agent paper, it is the speed-up
over eager PyTorch instead.
"""

from typing import Literal

from components.agent.trajectory import Trajectory
from components.judge.verdict import milestone as milestone


def training_reward(trajectory: Trajectory, shape: Literal["milestone", "speedup"]) -> float:
    """Return the reward of a trajectory that PPO maximises: its milestone or its speed-up over eager.

    `shape` selects one of them; the paper's ablation uses the speed-up in place of the milestone. The
    speed-up is replaced by -1 if the final candidate is not correct or its speed-up was not measured.
    """
    if shape == "milestone":
        return trajectory.reward
    speedup = trajectory.final.speedup.eager if trajectory.final.status == "correct" else None
    return -1.0 if speedup is None else speedup.estimate
