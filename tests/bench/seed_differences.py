"""Figures over several seeds of an experiment, and paired differences between two runs of each seed.

The interval of a difference is that of bootstrap samples which draw both the seeds and the tasks, so it
includes what training from another seed changes. With three seeds it is still too narrow.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from captured_share import final_answer, first_answer

from components.evaluation.metrics import RESAMPLES, Array, percentile_interval
from components.evaluation.results import Evaluation, TaskResult

# The value of a figure for one task and its weight, or None where it is not known. The last argument is the
# attainable log speed-up of the task.
Figure = Callable[[TaskResult, float], tuple[float, float] | None]


def pass_rate(result: TaskResult, attainable: float) -> tuple[float, float] | None:
    return (float(result.correct), 1.0)


def mean_reward(result: TaskResult, attainable: float) -> tuple[float, float] | None:
    return None if result.error else (float(result.milestone), 1.0)


def captured_share(result: TaskResult, attainable: float) -> tuple[float, float] | None:
    first = first_answer(result)
    return None if first is None or math.isnan(attainable) else (first, attainable)


def gain_per_turn(result: TaskResult, attainable: float) -> tuple[float, float] | None:
    first, final = first_answer(result), final_answer(result)
    return None if first is None or final is None else (final - first, 1.0)


POOLED: tuple[Figure, ...] = (pass_rate, mean_reward, captured_share, gain_per_turn)


def bootstrap_weights(seeds: int, tasks: int) -> Array:
    """Return how often each task of each seed occurs in each sample, with shape [RESAMPLES, seeds, tasks]."""
    rng = np.random.default_rng(0)
    by_seed, by_task = (
        rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(float)
        for count in (seeds, tasks)
    )
    weights: Array = by_seed[:, :, None] * by_task[:, None, :]
    return weights


def pooled_text(
    pairs: Sequence[tuple[Evaluation, Evaluation]],
    figure: Figure,
    attainable: Mapping[str, float],
    is_reference: bool,
) -> str:
    """Return a figure of a run over all seeds, and its difference from the reference run with an interval.

    `pairs` has the evaluations of the run and of the reference run on the same tasks, for each seed. Tasks on
    which the figure is not known for one of them are left out. `attainable` has the attainable log speed-ups
    by task id. The difference is left out if `is_reference` says that both are the same run.
    """
    ids = sorted({result.task_id for pair in pairs for result in pair[0].tasks})
    own, other, weight = (np.zeros((len(pairs), len(ids))) for _ in range(3))
    for seed, pair in enumerate(pairs):
        results = [{result.task_id: result for result in evaluation.tasks} for evaluation in pair]
        for place, task_id in enumerate(ids):
            bound = attainable.get(task_id, math.nan)
            found = [figure(of[task_id], bound) for of in results if task_id in of]
            if len(found) == 2 and found[0] is not None and found[1] is not None:
                own[seed, place], weight[seed, place] = found[0]
                other[seed, place] = found[1][0]
    if weight.sum() <= 0:
        return "–"
    value = f"{own.sum() / weight.sum():.2f}"
    if is_reference:
        return value
    counts = bootstrap_weights(*weight.shape)
    samples = np.einsum("rst,st->r", counts, own - other) / np.einsum("rst,st->r", counts, weight)
    interval = percentile_interval(samples)
    change = (own - other).sum() / weight.sum()
    return f"{value}, {change:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"
