"""Rejection fine-tuning (stage 2): the policy of the warm-up learns from a selection of its attempts.

The policy samples in the agent loop. A trajectory is kept if its reward is above rejection.min_reward and it
has no redundant or invalid calls (CUDA Agent paper, section 4.2). Only the best rejection.per_task
trajectories of each task are kept, because easy tasks would dominate otherwise. rejection.replay_share sets
the share of cold-start demonstrations in each batch. Without them, a small policy memorises the tasks that it
is tuned on and can no longer solve others. Rejected trajectories are stored too, because value pretraining
learns from all trajectories.
"""

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from torch import Tensor, nn

from components.agent.trajectory import Trajectory
from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.tokenizer import encode_conversations
from components.core.errors import StageFailed
from components.core.files import digest_json
from components.core.params import Params
from components.core.stage_params import Rejection
from components.core.task import KernelTask
from components.policy.checkpoint import load_tokenizer
from components.synthesis.compose import compose_training_tasks
from components.training.batches import Packed, Streams, make_batch
from components.training.engine import DeepSpeedEngine, MetricSums, train_step
from components.training.metrics import reward_figures
from components.training.networks import Actor
from components.training.rollouts import RunEpisode, TrainedPolicy, choose_tasks
from components.training.stage import Stage, StageResult, derived_seed
from components.training.training_loop import StepRecord, finish, fit, resume

# Token ids and action mask of a trajectory or demonstration.
Row = tuple[Sequence[int], Sequence[int]]
# Maximum number of tasks that are sampled again after the fine-tuning, to measure its effect.
MAX_TASKS_AFTER = 32


def run(stage: Stage, episode: RunEpisode) -> StageResult:
    """Sample trajectories with the policy of the checkpoint `stage.actor`, and fine-tune it on a selection.

    `select` chooses the trajectories. `episode` samples one trajectory. After the fine-tuning, the policy is
    sampled again on some of the tasks, to measure its effect. Raises StageFailed if fewer than
    rejection.min_kept trajectories are chosen.
    """
    started, params, rejection = time.monotonic(), stage.params, stage.params.rejection
    rollouts = rejection.rollouts

    def choose(tasks: Sequence[KernelTask], wave: int) -> list[KernelTask]:
        """Return the tasks of the attempts before the fine-tuning (wave 0), or of those after it."""
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
            kept, rejection, lambda count: demonstrations(params, stage.actor, count), seed=params.seed
        )

        def tuning_step(step: int, record: StepRecord) -> None:
            batch, sums = make_batch(batches[step]), MetricSums()
            rate = rejection.learning_rate * (1 - step / len(batches))
            rows = range(len(batch.ids))
            norm = train_step(actor, batch, Streams(), rows, likelihood_loss, sums, learning_rate=rate)
            record.figures |= sums.means(actor.world, batch.tokens)
            record.figures |= {"gradient_norm": norm, "learning_rate": rate}

        state = resume(stage, {"actor": actor})
        save_every = len(batches) // rejection.epochs
        end = fit(state, len(batches), tuning_step, shown=("loss",), save_every=save_every)

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
        stopped="; ".join(filter(None, (policy.left_out, "" if batches else few_kept))),
    )


def likelihood_loss(network: nn.Module, packed: Packed, _: Streams) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-likelihood of the own tokens, and the same value as the metric "loss".

    `network` is an Actor.
    """
    logprob, _ = network(packed)
    total = -logprob.sum()
    return total, {"loss": total}


def select(trajectories: Sequence[Trajectory], rejection: Rejection) -> tuple[list[Trajectory], Counter[str]]:
    """Return the trajectories to learn from, in their given order, and the number of trajectories by outcome.

    A trajectory is rejected for its `rejection_reason`, as a duplicate, or if its task has
    rejection.per_task better ones: with a higher reward, then a higher speed-up, then fewer tokens. The
    outcome is "kept" or the reason of the rejection, such as "low_reward" or "duplicate".
    """
    reasons: Counter[str] = Counter(kept=0)
    kept: dict[bytes, Trajectory] = {}  # by token ids
    for trajectory in trajectories:
        is_duplicate = bytes(trajectory.ids) in kept
        reason = rejection_reason(trajectory, rejection) or ("duplicate" if is_duplicate else "")
        if reason:
            reasons[reason] += 1
        else:
            kept[bytes(trajectory.ids)] = trajectory
    per_task: Counter[str] = Counter()
    for one in sorted(kept.values(), key=lambda one: (-one.earned, -_speedup(one), len(one.ids))):
        per_task[one.task_id] += 1
        if per_task[one.task_id] > rejection.per_task:
            reasons["over_task_limit"] += 1
            del kept[bytes(one.ids)]
    reasons["kept"] = len(kept)
    return list(kept.values()), reasons


def rejection_reason(trajectory: Trajectory, rejection: Rejection) -> str:
    """Return the reason why a trajectory is rejected, or "" if it may be learned from.

    The reasons are low_reward, length_clipped, invalid_call and redundant_call (`has_loop`).
    """
    if trajectory.earned <= rejection.min_reward:
        return "low_reward"
    if trajectory.finish_reason == "length":
        return "length_clipped"
    calls = [call for turn in trajectory.turns for call in turn.calls]
    if any(not call.valid for call in calls):
        return "invalid_call"
    return "redundant_call" if has_loop([digest_json([call.name, call.arguments]) for call in calls]) else ""


def has_loop(calls: Sequence[str]) -> bool:
    """Return whether a call is repeated and no call was made for the first time in between.

    `calls` are the digests of all tool calls of a trajectory (name and arguments), in order.
    """
    latest_new = 0
    last: dict[str, int] = {}
    for index, call in enumerate(calls):
        if call not in last:
            latest_new = index
        elif latest_new <= last[call]:
            return True
        last[call] = index
    return False


def _speedup(trajectory: Trajectory) -> float:
    ratio = trajectory.final.speedup.eager
    return ratio.estimate if ratio is not None else 0.0


def schedule(
    kept: Sequence[Trajectory], rejection: Rejection, replay: Callable[[int], list[Row]], *, seed: int
) -> list[list[Row]]:
    """Return the rows of every optimizer step, made by `rejection.epochs` shuffled passes over `kept`.

    rejection.replay_share sets the share of demonstrations that are added to each batch. `replay` takes a
    count and makes that many.
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


def demonstrations(params: Params, policy: Path, count: int) -> list[Row]:
    """Return `count` demonstrations of the kind on which the cold start trains a policy from scratch.

    A demonstration is a conversation in which a kernel for a composed task is written by rules. Equal counts
    give equal demonstrations. Their tasks are not those of the cold start. `policy` is the folder of the
    checkpoint whose tokenizer encodes them.
    """
    tokenizer, rng = load_tokenizer(policy), random.Random(params.coldstart.seed)
    # With another seed the tasks differ from the tasks of the cold start.
    tasks = compose_training_tasks(params.coldstart.seed + 1, params.data, params.device)
    conversations = (
        make_demonstration(task, rng, params.coldstart, params.device)
        for task in itertools.islice(tasks, count)
    )
    return list(encode_conversations(tokenizer, conversations))
