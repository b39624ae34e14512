"""Stage 2: rejection fine-tuning. The policy of stage 1 works in the agent loop; its good trajectories teach it.

Kept are those with a reward above the limit and no redundant or invalid calls (paper, section 4.2), a few per task, best
first: otherwise easy tasks dominate. Cold-start demonstrations are mixed in where the parameters say so: without them
a small policy memorised 24 tasks and forgot the others (knowledge: tiny_policy). Every trajectory is stored, the
rejected ones too: stage 3 learns values from all.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from components.agent.trajectory import Trajectory
from components.core.config import Rejection
from components.core.errors import UserError
from components.core.files import digest_json
from components.policy.checkpoint import load_model, load_tokenizer, verify_checkpoint
from components.training.batches import Batch, pad
from components.training.checkpointing import load_state, save_state
from components.training.collapse_detection import Terminated, Termination
from components.training.engine import DTYPES, DeepSpeedEngine, join_world
from components.training.losses import likelihood_loss_sum
from components.training.microbatching import MetricSums, train_step
from components.training.networks import Actor
from components.training.rollouts import (
    RunEpisodes,
    agent_loop,
    choose_tasks,
    collect,
    derived_seed,
    reward_figures,
    trainable,
)
from components.training.stage import Metrics, Stage, StageResult, finish, load_result
from components.training.weight_sync import open_policy_sampler

Row = tuple[Sequence[int], Sequence[int]]
"""Ids and action mask of a trajectory or demonstration."""
CHECKED = 32
"""Tasks that are sampled once more after the fine-tuning."""


def run(
    stage: Stage, episodes: RunEpisodes | None = None, replay: Callable[[int], list[Row]] | None = None
) -> StageResult:
    """Fine-tune `stage.actor`; `replay` gives that many cold-start demonstrations, the same ones whenever it is asked."""
    if (done := load_result(stage.out)) is not None:
        return done
    started = time.monotonic()
    params, rejection, settings = stage.params, stage.params.rejection, stage.params.engine
    digest = verify_checkpoint(stage.actor, stage.params.device).digest
    world = join_world(params.device, settings.collective_seconds)
    tokenizer = load_tokenizer(stage.actor)
    policy = load_model(stage.actor, dtype=DTYPES[settings.dtype], device=params.device)
    sampling = open_policy_sampler(
        policy, tokenizer, params, world, checkpoint=stage.actor, digest=digest, out=stage.out
    )
    network = Actor(policy, rejection.rollouts.temperature)
    actor = DeepSpeedEngine(
        network, settings, device=params.device, gradient_clip=params.warmup.gradient_clip
    )
    loop = episodes or agent_loop()
    tasks = choose_tasks(stage.tasks(), rejection.rollouts.tasks, seed=params.seed, step=0)

    sampler = sampling.publish(actor, 0)
    trajectories = collect(
        stage,
        world,
        tasks,
        rejection.rollouts,
        step=0,
        total=1,
        sampler=sampler,
        tokenizer=tokenizer,
        episodes=loop,
    )
    sampling.rest()
    kept, reasons = select(trainable(trajectories), rejection)
    batches = schedule(kept, rejection, replay, seed=params.seed)

    start = load_state(stage.out, {"actor": actor}, settings, world)
    metrics = Metrics(stage.out, world, start=start)
    with Termination() as termination:
        for step in range(start, len(batches)):
            batch, sums, clock = pad(batches[step]), MetricSums(), time.monotonic()
            learning_rate = rejection.learning_rate * (1 - step / len(batches))
            norm = train_step(
                actor,
                batch,
                range(len(batch.ids)),
                likelihood_loss,
                sums,
                budget=settings.tokens_per_microbatch,
                learning_rate=learning_rate,
            )
            figures = sums.means(world, batch.tokens) | {
                "gradient_norm": norm,
                "learning_rate": learning_rate,
                "seconds": time.monotonic() - clock,
            }
            metrics.write(step, figures)
            stage.progress.update(stage.name, step + 1, len(batches), loss=figures["loss"])
            asked = termination.asked(world)
            if (step + 1) % (len(batches) // rejection.epochs) == 0 or asked:
                save_state(stage.out, step + 1, {"actor": actor}, settings, world)
            if asked:
                raise Terminated(
                    f"{stage.name}: ended by SIGTERM after update {step + 1} of {len(batches)}, whose state is saved; the same command continues"
                )

    before = reward_figures(trainable(trajectories))
    after = before
    if batches:
        again = rejection.rollouts.model_copy(update={"samples": 1})
        sampler = sampling.publish(actor, len(batches))
        checked = collect(
            stage,
            world,
            tasks[:CHECKED],
            again,
            step=1,
            total=1,
            sampler=sampler,
            tokenizer=tokenizer,
            episodes=loop,
        )
        after = reward_figures(trainable(checked))
    with actor.whole():
        return finish(
            stage,
            world,
            policy,
            tokenizer,
            rewards=(before["reward"], after["reward"]),
            figures={f"trajectories_{name}": float(count) for name, count in sorted(reasons.items())}
            | {f"before_{name}": value for name, value in before.items()}
            | {f"after_{name}": value for name, value in after.items()}
            | {"steps": float(len(batches)), "loss": metrics.mean("loss", slice(-1, None))},
            seconds=time.monotonic() - started,
            stopped=""
            if batches
            else "no trajectory passed the filters; the weights are those the stage started from",
        )


def likelihood_loss(network: nn.Module, rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    logprob, _ = network(rows.ids, rows.action_mask)
    total = likelihood_loss_sum(logprob, rows.action_mask)
    return total, {"loss": total}


def select(trajectories: Sequence[Trajectory], rejection: Rejection) -> tuple[list[Trajectory], Counter[str]]:
    """The trajectories to learn from, in their order, and how many were kept or rejected for which reason."""
    reasons: Counter[str] = Counter(kept=0)
    candidates: list[tuple[int, Trajectory]] = []
    seen: set[tuple[int, ...]] = set()
    for place, trajectory in enumerate(trajectories):
        reason = rejected(trajectory, rejection) or ("duplicate" if trajectory.ids in seen else "")
        if reason:
            reasons[reason] += 1
        else:
            seen.add(trajectory.ids)
            candidates.append((place, trajectory))
    best_first = sorted(
        candidates, key=lambda item: (-item[1].reward, -_speedup(item[1]), len(item[1].ids), item[0])
    )
    per_task: Counter[str] = Counter()
    kept = []
    for place, trajectory in best_first:
        per_task[trajectory.task_id] += 1
        if per_task[trajectory.task_id] > rejection.per_task:
            reasons["over_task_limit"] += 1
        else:
            reasons["kept"] += 1
            kept.append((place, trajectory))
    return [trajectory for _, trajectory in sorted(kept, key=lambda item: item[0])], reasons


def rejected(trajectory: Trajectory, rejection: Rejection) -> str:
    """Why a trajectory is no example to learn from; empty when it is one."""
    if trajectory.reward <= rejection.min_reward:
        return "low_reward"
    if trajectory.finish_reason == "length":
        return "length_clipped"
    calls = [call for turn in trajectory.turns for call in turn.calls]
    if any(not call.valid for call in calls):
        return "invalid_call"
    return "redundant_call" if has_loop([digest_json([call.name, call.arguments]) for call in calls]) else ""


def has_loop(calls: Sequence[str]) -> bool:
    """Whether a call is repeated although nothing new was tried since: measuring again after an edit is no loop."""
    latest_new = 0
    last: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call not in last:
            latest_new = place
        elif latest_new <= last[call]:
            return True
        last[call] = place
    return False


def _speedup(trajectory: Trajectory) -> float:
    ratio = trajectory.final.speedup.eager
    return ratio.estimate if ratio is not None else 0.0


def schedule(
    kept: Sequence[Trajectory], rejection: Rejection, replay: Callable[[int], list[Row]] | None, *, seed: int
) -> list[list[Row]]:
    """The rows of every optimizer step: shuffled passes over the kept trajectories, each batch filled up with demonstrations."""
    replayed = round(rejection.batch * rejection.replay_share)
    if replayed and replay is None:
        raise UserError(
            "rejection.replay_share: this policy has no cold-start demonstrations to mix in; set it to 0."
        )
    own = max(1, rejection.batch - replayed)
    batches: list[list[Row]] = []
    for epoch in range(rejection.epochs):
        order = [(trajectory.ids, trajectory.action_mask) for trajectory in kept]
        random.Random(derived_seed(seed, "rejection", epoch)).shuffle(order)
        batches += [list(order[first : first + own]) for first in range(0, len(order), own)]
    if replay is not None and replayed:
        # The last batch of a pass may be small; its demonstrations shrink alike, so that the share holds.
        counts = [math.ceil(replayed * len(batch) / own) for batch in batches]
        demonstrations = iter(replay(sum(counts)))
        batches = [
            batch + [next(demonstrations) for _ in range(count)]
            for batch, count in zip(batches, counts, strict=True)
        ]
    return batches
