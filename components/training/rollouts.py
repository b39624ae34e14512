"""Sampling a step's trajectories, once: what a step sampled is on disk before anything is computed from it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.agent.rollout import RolloutRequest
from components.agent.trajectory import Trajectory, load_trajectories, save_trajectories
from components.core import config
from components.core.errors import UserError
from components.core.files import digest_json
from components.core.task import KernelTask
from components.policy.sampler import Sampler
from components.training.engine import World
from components.training.stage import Figures, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RunEpisodes = Callable[[RolloutRequest, Sampler, "PreTrainedTokenizerBase"], list[Trajectory]]
"""Type of `components.agent.token_rollout.run_episodes`: one trajectory per task of the request, in order."""


def agent_loop() -> RunEpisodes:
    """The real agent loop; tests give a smaller one."""
    from components.agent.token_rollout import run_episodes

    return run_episodes


def derived_seed(*parts: object) -> int:
    """A seed that depends on every part and on nothing else, so that a resumed step draws what it would have drawn."""
    return int(digest_json([str(part) for part in parts])[:15], 16)


class SolveRateTracker:
    """How the policy did on each task when this stage last met it."""

    def __init__(self) -> None:
        self.last: dict[str, list[bool]] = {}

    @classmethod
    def before(cls, out: Path, step: int) -> SolveRateTracker:
        """What a resumed stage has met already, from its trajectories on disk."""
        solved = cls()
        for earlier in range(step):
            solved.add(trainable(load_trajectories(step_folder(out, earlier))))
        return solved

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        met: dict[str, list[bool]] = {}
        for trajectory in trajectories:
            met.setdefault(trajectory.task_id, []).append(trajectory.reward > 0)
        self.last |= met

    def weight(self, task: KernelTask) -> float:
        """p (1 - p) for the share p of trajectories that solved the task, one success and one failure added: most for a task
        that is solved half the time or was never met, little for one that is always or never solved."""
        tries = self.last.get(task.task_id, [])
        p = (sum(tries) + 1) / (len(tries) + 2)
        return p * (1 - p)


def choose_tasks(
    tasks: Sequence[KernelTask],
    count: int,
    *,
    seed: int,
    step: int,
    solved: SolveRateTracker | None = None,
    share: float = 0.0,
) -> list[KernelTask]:
    """`count` tasks of a step: consecutive stretches of shuffled passes over all tasks, and of these a `share` drawn by the
    weights of `solved` instead. Passes depend on seed and step alone, draws also on what the steps before came to."""
    drawn = round(count * share) if solved is not None else 0
    chosen = _in_passes(tasks, count - drawn, seed, step)
    if solved is not None and drawn:
        rng = random.Random(derived_seed(seed, "solved", step))
        # Weighted, without replacement (Efraimidis and Spirakis, 2006); round again where there are fewer tasks.
        order = sorted(tasks, key=lambda task: rng.random() ** (1 / solved.weight(task)), reverse=True)
        chosen += itertools.islice(itertools.cycle(order), drawn)
    return chosen


def _in_passes(tasks: Sequence[KernelTask], count: int, seed: int, step: int) -> list[KernelTask]:
    chosen = []
    orders: dict[int, list[int]] = {}
    for position in range(step * count, (step + 1) * count):
        visit, place = divmod(position, len(tasks))
        if visit not in orders:
            orders[visit] = list(range(len(tasks)))
            random.Random(derived_seed(seed, "pass", visit)).shuffle(orders[visit])
        chosen.append(tasks[orders[visit][place]])
    return chosen


def collect(
    stage: Stage,
    world: World,
    tasks: Sequence[KernelTask],
    rollouts: config.Rollouts,
    *,
    step: int,
    total: int,
    sampler: Sampler | None,
    tokenizer: PreTrainedTokenizerBase,
    episodes: RunEpisodes,
) -> list[Trajectory]:
    """The trajectories of a step: those on disk, or newly sampled ones of every task, `rollouts.samples` times each.

    A step on which the judge failed altogether is not stored, so that the next run samples it again.
    """
    folder = step_folder(stage.out, step)
    if world.rank == 0 and not folder.is_dir():
        assert sampler is not None, "rank 0 samples"
        request = RolloutRequest(
            tasks=[task for task in tasks for _ in range(rollouts.samples)],
            params=stage.params,
            pool=stage.pool,
            epoch=f"{stage.out.name}/{step}",
            seed=derived_seed(stage.params.seed, stage.name, step),
            max_turns=rollouts.max_turns,
            max_new_tokens=rollouts.max_new_tokens,
            temperature=rollouts.temperature,
            on_progress=lambda done, of: stage.progress.update(stage.name, step, total, episodes=done, of=of),
        )
        sampled = episodes(request, sampler, tokenizer)
        trainable(sampled)
        save_trajectories(folder, sampled)
    world.barrier()
    # Read back also when just written: a fresh and a resumed step compute from the same bytes.
    return load_trajectories(folder)


def step_folder(out: Path, step: int) -> Path:
    return out / "trajectories" / f"step-{step:04d}"


def trainable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those that say something about the policy: it produced tokens, and the judge itself did not fail."""
    kept = [
        trajectory
        for trajectory in trajectories
        if any(trajectory.action_mask) and trajectory.final.status != "infrastructure"
    ]
    if not kept:
        reason = trajectories[0].final.reason if trajectories else "none was sampled"
        raise UserError(
            f"sandbox: the judge failed on every trajectory of a step ({reason}); run cuda-agent doctor."
        )
    return kept


def reward_figures(trajectories: Sequence[Trajectory]) -> Figures:
    """Mean reward, shares of the milestones, of length-clipped episodes and of tasks whose samples all earned the same."""
    count = len(trajectories)
    by_task: dict[str, set[float]] = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory.task_id, set()).add(trajectory.reward)
    figures = {"reward": sum(trajectory.reward for trajectory in trajectories) / count}
    figures |= {
        f"m_{m}": sum(trajectory.reward == m for trajectory in trajectories) / count for m in (-1, 1, 2, 3)
    }
    figures["truncated"] = sum(trajectory.finish_reason == "length" for trajectory in trajectories) / count
    figures["equal_reward_tasks"] = sum(len(rewards) == 1 for rewards in by_task.values()) / len(by_task)
    figures["turns"] = sum(len(trajectory.turns) for trajectory in trajectories) / count
    return figures
