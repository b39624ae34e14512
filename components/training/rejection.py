"""Rejection fine-tuning (stage 2): the policy of the warm-up learns from a selection of its attempts.

The policy samples in the agent loop, and `fine_tuning.select` chooses the trajectories.
rejection.replay_share sets the share of cold-start demonstrations in each batch. Without them, a small policy
memorises the tasks that it is tuned on and can no longer solve others. Rejected trajectories are stored too,
because value pretraining learns from all trajectories.
"""

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from components.agent.trajectory import Trajectory
from components.core.errors import StageFailed
from components.core.stage_params import Rejection
from components.core.task import KernelTask
from components.training.engine import DeepSpeedEngine
from components.training.fine_tuning import Row, demonstrations, fine_tune, select
from components.training.metrics import reward_figures
from components.training.networks import Actor
from components.training.rollouts import RunEpisode, TrainedPolicy, choose_tasks
from components.training.stage import Stage, StageResult, derived_seed
from components.training.training_loop import finish

# Maximum number of tasks that are sampled again after the fine-tuning, to measure its effect.
MAX_TASKS_AFTER = 32


def run(stage: Stage, episode: RunEpisode) -> StageResult:
    """Sample trajectories with the policy of the checkpoint `stage.actor`, and fine-tune it on a selection.

    `fine_tuning.select` chooses trajectories with a high reward and without faulty tool calls. `episode`
    is the function that samples one trajectory. After the fine-tuning, the policy is sampled again on some of
    the tasks, to measure its effect. Raises StageFailed if fewer than rejection.min_kept trajectories are
    chosen.
    """
    started, params, rejection = time.monotonic(), stage.params, stage.params.rejection
    rollouts = rejection.rollouts

    def choose(tasks: Sequence[KernelTask], wave: int) -> list[KernelTask]:
        """Return the task of each trajectory to sample before (wave 0) or after the fine-tuning (wave 1).

        Before it, each task occurs `rollouts.samples` times. After it, at most MAX_TASKS_AFTER of the tasks
        are sampled, once each.
        """
        chosen = choose_tasks(tasks, rollouts.tasks, seed=params.seed, step=0)
        return (
            chosen[:MAX_TASKS_AFTER] if wave else [task for task in chosen for _ in range(rollouts.samples)]
        )

    policy = TrainedPolicy(stage, rollouts, episode, choose)
    with closing(policy):
        actor = DeepSpeedEngine(
            Actor(policy.model, rollouts.temperature),
            params.engine,
            device=params.device,
            gradient_clip=params.warmup.gradient_clip,
        )
        policy.publish(actor, 0)
        sampled, sampling = policy.sample(rollouts.tasks * rollouts.samples, step=0, steps=1)
        kept, reasons = select(sampled, rejection)
        outcomes = ", ".join(f"{count} {name}" for name, count in reasons.most_common())
        few_kept = (
            f"too few trajectories passed the filters to train on ({outcomes}), and the judge failed "
            f"on {sampling['dropped']} more; give easier tasks or more samples"
        )
        if len(kept) < rejection.min_kept:
            raise StageFailed(f"{stage.name}: {few_kept}.")
        batches = schedule(
            kept, rejection, lambda count: demonstrations(params, policy.tokenizer, count), seed=params.seed
        )
        state, end = fine_tune(
            stage,
            actor,
            len(batches),
            batches.__getitem__,
            lambda step: rejection.learning_rate * (1 - step / len(batches)),
            save_every=len(batches) // rejection.epochs,
        )

        before = after = reward_figures(sampled)
        if batches and not end.progress:
            policy.publish(actor, len(batches))
            count = min(rollouts.tasks, MAX_TASKS_AFTER)
            after = reward_figures(policy.sample(count, step=1, steps=2)[0])
    return finish(
        state,
        policy.model,
        policy.tokenizer,
        started=started,
        rewards=(before["reward"], after["reward"]),
        figures={f"trajectories_{name}": float(count) for name, count in sorted(reasons.items())}
        | {f"before_{name}": value for name, value in before.items()}
        | {f"after_{name}": value for name, value in after.items()}
        | {"steps": float(len(batches)), "loss": state.metrics.mean("loss", slice(-1, None))},
        end=end,
        remark="; ".join(filter(None, (policy.left_out, "" if batches else few_kept))),
    )


def schedule(
    kept: Sequence[Trajectory], rejection: Rejection, replay: Callable[[int], list[Row]], *, seed: int
) -> list[list[Row]]:
    """Return the rows of every optimizer step, made by `rejection.epochs` shuffled passes over `kept`.

    A row is a pair of token ids and action mask. `rejection.replay_share` sets the share of demonstrations,
    which are conversations of the cold start before stage 1, in each batch of `rejection.batch` rows.
    `replay` takes a number and returns that many rows of demonstrations. `seed` determines the order of the
    passes. The result is empty if `kept` is empty.
    """
    replayed = rejection.replayed
    kept_rows = max(1, rejection.batch - replayed)
    batches: list[list[Row]] = []
    for epoch in range(rejection.epochs):
        order = [(trajectory.ids, trajectory.action_mask) for trajectory in kept]
        random.Random(derived_seed(seed, "rejection", epoch)).shuffle(order)
        batches += [list(order[first : first + kept_rows]) for first in range(0, len(order), kept_rows)]
    if not replayed:
        return batches
    # A smaller last batch of a pass gets fewer demonstrations, so that their share stays the same.
    counts = [math.ceil(replayed * len(batch) / kept_rows) for batch in batches]
    made = iter(replay(sum(counts)))
    return [batch + list(itertools.islice(made, count)) for batch, count in zip(batches, counts, strict=True)]
