"""Advantages without a critic: the baseline is the mean over the other trajectories of the same task.

In the mode `group`, all own tokens of a trajectory have one advantage, the trajectory's reward less the mean
reward of the other trajectories of its task (REINFORCE leave-one-out, Ahmadian et al., arXiv 2402.14740). The
trajectory itself is not part of its baseline, because that would scale the gradient by (n - 1) / n for n
trajectories of the task.

In the mode `turns`, each turn t of trajectory i has the advantage G_it - b_it (TRLOO in Dr. Kernel, Liu et
al., arXiv 2602.05885). G_it is the sum over the turns t' >= t of gamma^(t' - t) r_it', and b_it is the mean
of G_jt over the task's other trajectories j that have a turn t. `turn_rewards` defines the reward r_it of a
turn. If each trajectory has one turn, `turns` equals `group`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from components.agent.trajectory import Trajectory
from components.judge.verdict import Verdict, milestone

Shape = Literal["milestone", "speedup", "log_speedup"]


def verdict_reward(verdict: Verdict, shape: Shape) -> float:
    """Return the reward of a verdict: its milestone, its speed-up s over eager mode, or log2(1 + s).

    `shape` selects one of these three. For the last two, the reward is -1 if the candidate is not correct or
    its speed-up was not measured.
    """
    if shape == "milestone":
        return float(milestone(verdict))
    speedup = verdict.speedup.eager if verdict.status == "correct" else None
    if speedup is None:
        return -1.0
    return speedup.estimate if shape == "speedup" else math.log2(1 + speedup.estimate)


def trajectory_reward(trajectory: Trajectory, shape: Shape = "milestone") -> float:
    """Return the reward of a trajectory that training maximises.

    It is the reward of the final verdict, as `verdict_reward` defines it.
    """
    return trajectory.reward if shape == "milestone" else verdict_reward(trajectory.final, shape)


def leave_one_out(rewards: Sequence[float], tasks: Sequence[str]) -> list[float]:
    """Return each reward less the mean of the other rewards of the same task.

    `tasks` has the task id of each reward. A reward that is the only one of its task gives 0.
    """
    rewards_of: dict[str, list[float]] = defaultdict(list)
    for task, reward in zip(tasks, rewards, strict=True):
        rewards_of[task].append(reward)
    means = {task: sum(group) / len(group) for task, group in rewards_of.items()}
    # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1). Equal rewards give exactly 0, also where their mean
    # is rounded.
    return [
        0.0
        if len(group := rewards_of[task]) == 1 or min(group) == max(group)
        else (reward - means[task]) * len(group) / (len(group) - 1)
        for task, reward in zip(tasks, rewards, strict=True)
    ]


def tasks_with_one_sample(tasks: Sequence[str]) -> int:
    """Return the number of task ids that occur once in `tasks`; `leave_one_out` gives 0 for them."""
    return sum(count == 1 for count in Counter(tasks).values())


def turn_of_token(action_mask: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of the turn, from 0, of each own token; the result is [own tokens].

    The own tokens are the tokens with `action_mask` 1. A turn is a maximal run of them: the agent loop
    appends the tokens of a turn at once, and observations between two turns.
    """
    mask = np.asarray(action_mask, dtype=bool)
    begins = mask & ~np.concatenate(([False], mask[:-1]))
    turns: NDArray[np.int64] = (np.cumsum(begins) - 1)[mask]
    return turns


def turn_rewards(trajectory: Trajectory, shape: Shape = "milestone") -> list[float]:
    """Return the reward of each turn of a trajectory that has own tokens.

    The last turn earns the reward of the trajectory, which is the reward of the verdict on its final files.
    An earlier turn earns the reward of the last verdict that the judge gave during the turn, and 0 if there
    was none. A verdict with the status `infrastructure` says nothing about the candidate and is ignored. In
    Dr. Kernel, every turn is an answer that is judged. In a workspace, a turn may only read or write files.

    Raises ValueError if the number of turns differs from the number of runs of own tokens. Only the last turn
    may be empty; its reward then belongs to the turn before it.
    """
    turns = int(turn_of_token(trajectory.action_mask)[-1]) + 1
    if not turns <= len(trajectory.turns) <= turns + 1:
        raise ValueError(
            f"a trajectory of task {trajectory.task_id} has {len(trajectory.turns)} turns and {turns} runs "
            "of own tokens"
        )
    left = iter(trajectory.verdicts)
    rewards = []
    for turn in trajectory.turns[: turns - 1]:
        given = list(islice(left, sum(call.verdicts for call in turn.calls)))
        judged = [verdict for verdict in given if verdict.status != "infrastructure"]
        rewards.append(verdict_reward(judged[-1], shape) if judged else 0.0)
    return [*rewards, trajectory_reward(trajectory, shape)]


def turn_advantages(
    rewards: Sequence[Sequence[float]], tasks: Sequence[str], gamma: float
) -> list[list[float]]:
    """Return the advantage of each turn of each trajectory.

    `rewards` has the rewards of the turns of each trajectory, and `tasks` has the task id of each trajectory.
    `gamma` is the discount of one turn. The advantage is the turn's return less the mean of the returns of
    the same turn in the task's other trajectories (`leave_one_out`). A turn that no other trajectory of the
    task reached has no baseline and the advantage 0. Dr. Kernel's code uses the return itself there, which
    would favour whatever makes a trajectory the longest of its task.
    """
    returns = []
    for earned in rewards:
        following, own = 0.0, []
        for reward in reversed(earned):
            following = reward + gamma * following
            own.append(following)
        returns.append(own[::-1])
    advantages: list[list[float]] = [[] for _ in returns]
    for turn in range(max(map(len, returns), default=0)):
        reached = [index for index, own in enumerate(returns) if len(own) > turn]
        found = leave_one_out([returns[i][turn] for i in reached], [tasks[i] for i in reached])
        for index, advantage in zip(reached, found, strict=True):
            advantages[index].append(advantage)
    return advantages


def token_advantages(
    trajectories: Sequence[Trajectory],
    mode: Literal["group", "turns"],
    gamma: float,
    shape: Shape = "milestone",
) -> list[NDArray[np.float32]]:
    """Return the advantages of the own tokens of each trajectory, in order, as an array [own tokens].

    The own tokens are the tokens with `action_mask` 1, of which each trajectory needs at least one. `gamma`
    is the discount of one turn; the mode `group` does not use it. `shape` selects the reward. The advantages
    are not whitened. They are all 0 if the trajectories of each task have equal rewards in all turns.
    """
    tasks = [trajectory.task_id for trajectory in trajectories]
    turns = [turn_of_token(trajectory.action_mask) for trajectory in trajectories]
    match mode:
        case "group":
            rewards = [trajectory_reward(trajectory, shape) for trajectory in trajectories]
            return [
                np.full(len(own), advantage, dtype=np.float32)
                for own, advantage in zip(turns, leave_one_out(rewards, tasks), strict=True)
            ]
        case "turns":
            by_turn = turn_advantages(
                [turn_rewards(trajectory, shape) for trajectory in trajectories], tasks, gamma
            )
            return [
                np.array(advantages, dtype=np.float32)[own]
                for own, advantages in zip(turns, by_turn, strict=True)
            ]
