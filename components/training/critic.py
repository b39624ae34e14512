"""Stage 3: value pretraining. A critic learns the values of all trajectories so far, the failures too.

Without it the first critic of stage 4 explained less than nothing and the policy collapsed (paper, section 4.2 and
Fig. 5). Targets are Monte Carlo returns at lambda 1; below, they are made anew from the critic itself every pass: frozen
targets of an untrained critic are zero a hundred tokens from the end (knowledge: training, A4).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.agent.trajectory import Trajectory, load_trajectories
from components.core.errors import StageFailed, UserError
from components.policy.checkpoint import load_model, load_tokenizer, verify_checkpoint
from components.training.advantages import explained_variance, gae
from components.training.batches import Rollout, collate
from components.training.checkpointing import load_state, save_state
from components.training.collapse_detection import Terminated, Termination
from components.training.engine import DTYPES, DeepSpeedEngine, Engine, join_world
from components.training.losses import value_loss_sum
from components.training.microbatching import MetricSums, evaluate, train_step
from components.training.networks import VALUE_HEAD, critic_from_actor
from components.training.rollouts import derived_seed, trainable
from components.training.stage import Metrics, Stage, StageResult, finish, load_result


@dataclass(frozen=True)
class Targets(Rollout):
    """Trajectories with the values that the critic shall learn; [batch, seq], units of the reward."""

    returns: Tensor


def run(stage: Stage) -> StageResult:
    """Make a critic from `stage.actor` and fit it to `stage.trajectories`; StageFailed below the required explained variance."""
    if (done := load_result(stage.out)) is not None:
        return done
    started = time.monotonic()
    params, critic, settings = stage.params, stage.params.critic, stage.params.engine
    gamma, budget = params.agentic.gamma, settings.tokens_per_microbatch
    verify_checkpoint(stage.actor, stage.params.device)
    trajectories = read_all(stage.trajectories)
    taught, held_out = split_by_task(trajectories, critic.held_out_share, seed=params.seed)
    batch, unseen = collate(taught), collate(held_out)

    world = join_world(params.device, settings.collective_seconds)
    tokenizer = load_tokenizer(stage.actor)
    network = critic_from_actor(load_model(stage.actor, dtype=DTYPES[settings.dtype], device=params.device))
    network.baseline.fill_(float(_monte_carlo(batch, gamma)[batch.action_mask].mean()))
    engine = DeepSpeedEngine(
        network, settings, device=params.device, gradient_clip=params.agentic.gradient_clip
    )

    start = load_state(stage.out, {"critic": engine}, settings, world)
    metrics = Metrics(stage.out, world, start=start)
    total = critic.epochs * -(-len(taught) // critic.batch)
    with Termination() as termination:
        for epoch in range(start, critic.epochs):
            clock, sums, norms = time.monotonic(), MetricSums(), []
            targets = Targets(**vars(batch), returns=_returns(engine, batch, gamma, critic.lam, budget))
            order = list(range(len(taught)))
            random.Random(derived_seed(params.seed, "critic", epoch)).shuffle(order)
            for first in range(0, len(order), critic.batch):
                done_steps = (epoch * len(order) + first) / critic.batch
                learning_rate = critic.learning_rate * max(0.0, 1 - done_steps / total)
                norms.append(
                    train_step(
                        engine,
                        targets,
                        order[first : first + critic.batch],
                        _loss,
                        sums,
                        budget=budget,
                        learning_rate=learning_rate,
                    )
                )
            figures = sums.means(world, batch.tokens) | {"critic_gradient_norm": sum(norms) / len(norms)}
            figures["explained_variance_held_out"] = _explained(engine, unseen, gamma, budget)
            figures["seconds"] = time.monotonic() - clock
            metrics.write(epoch, figures)
            stage.progress.update(stage.name, epoch + 1, critic.epochs, value_loss=figures["value_loss"])
            save_state(stage.out, epoch + 1, {"critic": engine}, settings, world, kept=critic.epochs)
            if termination.asked(world) and epoch + 1 < critic.epochs:
                raise Terminated(
                    f"{stage.name}: ended by SIGTERM after pass {epoch + 1} of {critic.epochs}, whose state is saved; the same command continues"
                )

    # The pass that explained most: a small set of trajectories is soon memorised.
    passes = [(record["explained_variance_held_out"], record["step"]) for record in metrics.records]
    measured = [(value, int(step)) for value, step in passes if value is not None and step is not None]
    if measured:
        best, epoch = max(measured, key=lambda item: (item[0], item[1]))
        load_state(stage.out, {"critic": engine}, settings, world, before=epoch + 2)
        if best < critic.min_explained_variance:
            raise StageFailed(
                f"{stage.name}: the critic's held-out explained variance {best:.3f} is below critic.min_explained_variance "
                f"{critic.min_explained_variance:g}; sample more trajectories or raise critic.epochs."
            )
    figures = {
        "trajectories": float(len(taught)),
        "held_out": float(len(held_out)),
        "explained_variance": _explained(engine, batch, gamma, budget),
        "explained_variance_held_out": _explained(engine, unseen, gamma, budget),
        "value_loss": metrics.mean("value_loss", slice(-1, None)),
    }
    backbone = network.backbone
    assert isinstance(backbone, PreTrainedModel)
    with engine.whole():
        return finish(
            stage,
            world,
            backbone,
            tokenizer,
            rewards=(None, None),
            figures=figures,
            seconds=time.monotonic() - started,
            stopped=""
            if measured
            else "all held-out rewards are equal, so the explained variance is undefined and was not required",
            extra={VALUE_HEAD: network.extra()},
        )


def read_all(folders: Sequence[Path]) -> list[Trajectory]:
    """Every trajectory below the folders that the judge did not fail on."""
    found = sorted({file.parent for folder in folders for file in folder.rglob("trajectories.jsonl")})
    trajectories = [trajectory for folder in found for trajectory in checked(folder)]
    if not trajectories:
        raise UserError(
            f"{', '.join(map(str, folders)) or 'no folder'}: no trajectory to learn values from; run the stages from warmup on."
        )
    return trainable(trajectories)


def checked(folder: Path) -> list[Trajectory]:
    """The trajectories of a folder, each with a mask and log-probabilities that fit its tokens; UserError names one that has not."""
    trajectories = load_trajectories(folder)
    for place, one in enumerate(trajectories):
        fits = len(one.ids) == len(one.action_mask) == len(one.sampler_logprob) and set(one.action_mask) <= {
            0,
            1,
        }
        if not fits or (one.action_mask and one.action_mask[0]) or any(p > 1e-3 for p in one.sampler_logprob):
            raise UserError(
                f"{folder}: action_mask or sampler_logprob of trajectory {place} does not fit its tokens; restore the folder from the run that wrote it."
            )
    return trajectories


def split_by_task(
    trajectories: Sequence[Trajectory], share: float, *, seed: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Trajectories to learn from and held-out ones; no task is on both sides, and each side has at least one task."""
    tasks = sorted(
        {trajectory.task_id for trajectory in trajectories},
        key=lambda task: derived_seed(seed, "held out", task),
    )
    if len(tasks) < 2:
        raise UserError(
            "critic: trajectories of a single task cannot be split into taught and held-out ones; give more tasks."
        )
    held_out = set(tasks[: min(len(tasks) - 1, max(1, round(share * len(tasks))))])
    return [t for t in trajectories if t.task_id not in held_out], [
        t for t in trajectories if t.task_id in held_out
    ]


def _loss(network: nn.Module, rows: Targets) -> tuple[Tensor, dict[str, Tensor]]:
    (values,) = network(rows.ids, rows.action_mask)
    total, _ = value_loss_sum(values, values.detach(), rows.returns, rows.action_mask, None)
    return total, {"value_loss": total}


def _monte_carlo(batch: Rollout, gamma: float) -> Tensor:
    """Discounted reward to go; independent of any critic."""
    return gae(batch.rewards, torch.zeros_like(batch.rewards), batch.action_mask, gamma, 1.0)[1]


def _returns(engine: Engine, batch: Rollout, gamma: float, lam: float, budget: int) -> Tensor:
    if lam == 1:
        return _monte_carlo(batch, gamma)
    (values,) = evaluate(engine.forward, engine.world, batch, budget)
    return gae(batch.rewards, values, batch.action_mask, gamma, lam)[1]


def _explained(engine: Engine, batch: Rollout, gamma: float, budget: int) -> float:
    """Explained variance of the Monte Carlo returns, whatever lambda was trained with."""
    (values,) = evaluate(engine.forward, engine.world, batch, budget)
    return explained_variance(values, _monte_carlo(batch, gamma), batch.action_mask)
