"""Metrics of the trajectories of a step, and of the time that sampler and judge spend idle."""

import time
from collections.abc import Sequence

from components.agent.in_flight import BusyMeter
from components.agent.trajectory import Trajectory
from components.training.metrics_file import Figures
from components.training.trajectory_queue import updates_of


class IdleTimes:
    """Meter of the seconds in which the sampler, and in which the judge, is idle.

    The sampler is idle while no completion is waited for or while it is paused, and the judge while no
    verdict is waited for. `sampling` and `judging` measure the seconds in which at least one completion, or
    one verdict, is waited for.
    """

    def __init__(self, sampling: BusyMeter, judging: BusyMeter):
        self.sampling, self.judging = sampling, judging
        self.last = time.monotonic()
        self.last_judging = self.last_sampling = self.sampled = 0.0

    def pause(self) -> None:
        self.sampled += self.sampling.seconds() - self.last_sampling

    def resume(self) -> None:
        self.last_sampling = self.sampling.seconds()

    def since_last(self) -> Figures:
        """Return the idle seconds since the last call, or since this object was made if this is the first.

        The keys are `idle_sampler` and `idle_judge`.
        """
        self.pause()
        self.resume()
        now, judging = time.monotonic(), self.judging.seconds()
        figures = {
            "idle_sampler": now - self.last - self.sampled,
            "idle_judge": now - self.last - (judging - self.last_judging),
        }
        self.last, self.last_judging, self.sampled = now, judging, 0.0
        return figures


def ages(trajectories: Sequence[Trajectory], step: int) -> Figures:
    """Return the mean age (`age`) and the largest age (`age_max`) of the own tokens of the trajectories.

    The age of a token is the number of steps, up to `step`, that the policy was trained after the weights
    that sampled the token. The result is empty if the trajectories have no own tokens.
    """
    spans = [
        (step - updates_of(version), tokens)
        for trajectory in trajectories
        for version, tokens in trajectory.versions
    ]
    total = sum(tokens for _, tokens in spans)
    if not total:
        return {}
    return {
        "age": sum(age * tokens for age, tokens in spans) / total,
        "age_max": float(max(age for age, _ in spans)),
    }


def reward_figures(trajectories: Sequence[Trajectory]) -> Figures:
    """Return metrics of the trajectories of a step.

    They are the mean reward (`reward`), the share of each milestone (`m_-1` to `m_3`), the share of
    trajectories cut off at the length limit (`truncated`), the share of tasks whose trajectories all have the
    same reward (`equal_reward_tasks`), and the mean number of turns (`turns`).
    """
    count = len(trajectories)
    by_task: dict[str, set[float]] = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory.task_id, set()).add(trajectory.reward)
    return {
        "reward": sum(trajectory.reward for trajectory in trajectories) / count,
        **{
            f"m_{m}": sum(trajectory.reward == m for trajectory in trajectories) / count
            for m in (-1, 1, 2, 3)
        },
        "truncated": sum(trajectory.finish_reason == "length" for trajectory in trajectories) / count,
        "equal_reward_tasks": sum(len(rewards) == 1 for rewards in by_task.values()) / len(by_task),
        "turns": sum(len(trajectory.turns) for trajectory in trajectories) / count,
    }
