"""The metrics of a training step, the check of whether the policy has collapsed, and the file of metrics.

The file metrics.jsonl of a stage has one JSON object per step and is readable while the stage runs. The
metrics of a step show a collapse before the step's updates are made (CUDA Agent paper, Fig. 5). This module
does not import torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from components.agent.trajectory import Trajectory, updates_of
from components.core.files import atomic_write
from components.core.stage_params import Ppo
from components.judge.verdict import milestone

# Metrics of a step or of a whole stage, by name.
Figures = dict[str, float]
METRICS = "metrics.jsonl"
# Number of successive steps with a low explained variance that make a collapse. It is more than 1 because the
# explained variance of a single batch is noisy.
PATIENCE = 3


class MetricsFile:
    """Metrics of the finished steps of a training stage, in memory and in the stage's file metrics.jsonl.

    A stage that is resumed from a saved state repeats the steps after this state. Their earlier metrics are
    dropped.
    """

    def __init__(self, stage_folder: Path, *, start: int, writes: bool):
        """Read the file's records of the steps before `start`; `writes` must be True only on rank 0.

        The file is metrics.jsonl in the folder `stage_folder` of a training stage. If it does not exist,
        there are no records.
        """
        self.path = stage_folder / METRICS
        self.writes = writes
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        self.records: list[dict[str, float | None]] = [
            record for record in map(json.loads, lines) if record["step"] < start
        ]

    def write(self, step: int, figures: Figures) -> None:
        """Append the record of a step, its number and its metrics, and write the file if `writes` is true.

        A metric that is NaN or infinite becomes null in the file, and None in memory.
        """
        self.records.append(
            {"step": step}
            | {name: float(value) if math.isfinite(value) else None for name, value in figures.items()}
        )
        if self.writes:
            atomic_write(self.path, "".join(json.dumps(record) + "\n" for record in self.records))

    def mean(self, name: str, records: slice) -> float:
        """Return the mean of the metric `name` over a slice of the records, one for each step.

        Records without the metric, or in which it is None, are left out; NaN if none is left.
        """
        values = [value for record in self.records[records] if (value := record.get(name)) is not None]
        return math.fsum(values) / len(values) if values else math.nan


def newest_figures(home: Path, stage: str) -> Figures:
    """Return the last record of the most recently written metrics file of a stage named `stage`.

    `home` is the folder that holds everything a run writes, and the files are those in its folders
    stages/`stage`-*. The record has the metrics of a training step by name, and the step's number under
    `step`; null figures are left out. Returns an empty dictionary if there is no record.
    """
    files = sorted(home.glob(f"stages/{stage}-*/{METRICS}"), key=lambda path: path.stat().st_mtime)
    lines = files[-1].read_text().splitlines() if files else []
    record = json.loads(lines[-1]) if lines else {}
    return {name: float(value) for name, value in record.items() if isinstance(value, int | float)}


def ages(trajectories: Sequence[Trajectory], step: int) -> Figures:
    """Return the mean age (`age`) and the largest age (`age_max`) of the own tokens of the trajectories.

    Own tokens are those that the policy sampled. The age of a token is `step`, the number of steps that the
    policy has been trained, less the number of steps that the weights which sampled the token had been
    trained. The result is empty if the trajectories have no own tokens.
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
    """Return metrics of the trajectories of a step, of which there must be at least one.

    They are the mean reward (`reward`), the share of trajectories with each milestone (`m_-1`, `m_1`, `m_2`
    and `m_3`), the share of trajectories cut off at the length limit (`truncated`), the share of tasks whose
    trajectories all have the same reward (`equal_reward_tasks`), and the mean numbers of turns (`turns`) and
    of verdicts (`verdicts`). The milestone grades the last verdict, which is what the judge found about the
    trajectory's kernel: -1 if it is not correct, 1 if it is, 2 if the kernel is also faster than eager mode,
    and 3 if it is also faster than torch.compile (judge/verdict.py).
    """
    count, milestones = len(trajectories), [milestone(trajectory.final) for trajectory in trajectories]
    by_task: dict[str, set[float]] = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory.task_id, set()).add(trajectory.earned)
    return {
        "reward": sum(trajectory.earned for trajectory in trajectories) / count,
        **{f"m_{value}": milestones.count(value) / count for value in (-1, 1, 2, 3)},
        "truncated": sum(trajectory.finish_reason == "length" for trajectory in trajectories) / count,
        "equal_reward_tasks": sum(len(rewards) == 1 for rewards in by_task.values()) / len(by_task),
        "turns": sum(len(trajectory.turns) for trajectory in trajectories) / count,
        "verdicts": sum(len(trajectory.verdicts) for trajectory in trajectories) / count,
    }


class Collapsed(Exception):
    """Error raised if the policy that sampled a step's trajectories has collapsed (see `collapse`).

    A policy has collapsed if, for instance, its entropy has left the allowed range. The message is a clause,
    such as "entropy is not a number", which the training loop puts into a sentence.
    """


def collapse(ppo: Ppo, figures: Figures, earlier: Sequence[Mapping[str, float | None]]) -> str:
    """Return a clause that states how the policy has collapsed, such as "entropy is not a number", or "".

    `ppo` has the limits. `figures` are the metrics of the step whose trajectories the policy sampled: the
    mean `entropy` (nats), the share `truncated` of trajectories that were cut off, `effective_share`, the
    effective sample size as a share of the tokens, and, with a critic, `explained_variance`. `earlier` are
    the metrics of the steps before that step, in order. A policy has collapsed if its entropy is not a
    number, or if one of these metrics is beyond its limit, `explained_variance` in PATIENCE successive steps.
    The result is "" if it has not collapsed.
    """
    entropy, truncated, share = (figures[name] for name in ("entropy", "truncated", "effective_share"))
    limit = ppo.min_explained_variance
    explained = [*(record.get("explained_variance") for record in earlier), figures.get("explained_variance")]
    last = [value for value in explained[-PATIENCE:] if value is not None and math.isfinite(value)]
    signs = [
        (not math.isfinite(entropy), "entropy is not a number"),
        (
            entropy > ppo.max_entropy,
            f"entropy {entropy:.2f} nats is above max_entropy {ppo.max_entropy:g}",
        ),
        (
            entropy < ppo.min_entropy,
            f"entropy {entropy:.4f} nats is below min_entropy {ppo.min_entropy:g}",
        ),
        (
            truncated > ppo.max_truncated,
            f"length-clipped share {truncated:.2f} is above max_truncated {ppo.max_truncated:g}",
        ),
        (
            share < ppo.min_effective_share,
            "importance weights between sampler and trainer leave an effective share of "
            f"{share:.2f} of the tokens, below min_effective_share {ppo.min_effective_share:g}",
        ),
        (
            limit is not None and len(last) == PATIENCE and max(last) < limit,
            f"explained variance was below min_explained_variance {limit} on {PATIENCE} steps in a row",
        ),
    ]
    return next((clause for collapsed, clause in signs if collapsed), "")
