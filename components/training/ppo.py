"""Proximal policy optimisation, the loop of stages 1 and 4.

Each step: sample trajectories, score them with the trainer's actor, reference and critic, estimate advantages, update
the critic and then the actor on minibatches, log, save. gamma 1 and a terminal reward (paper, section 4.2); separate
lambdas for the actor's advantages and the critic's targets: at lambda .95 a fresh critic would be taught nothing beyond
about a hundred tokens from the end (knowledge: training, A4).
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from components.agent.reward import raw_speedup
from components.agent.trajectory import Trajectory
from components.core.config import Ppo
from components.policy.checkpoint import load_model, load_tokenizer, verify_checkpoint
from components.training.advantages import explained_variance, gae, whiten
from components.training.batches import Rollout, collate
from components.training.checkpointing import load_state, save_state
from components.training.collapse_detection import KEPT, Terminated, Termination, collapse
from components.training.engine import DTYPES, DeepSpeedEngine, Engine, NotFinite, join_world
from components.training.losses import (
    effective_sample_size,
    importance_weights,
    kl_k2,
    kl_k3,
    likelihood_loss_sum,
    masked_sum,
    policy_loss_sum,
    value_loss_sum,
)
from components.training.microbatching import Loss, MetricSums, evaluate, train_step
from components.training.networks import Actor, Critic
from components.training.rollouts import (
    RunEpisodes,
    SolveRateTracker,
    choose_tasks,
    collect,
    derived_seed,
    reward_figures,
    trainable,
)
from components.training.stage import Figures, Metrics, Stage, StageResult, finish, load_result
from components.training.weight_sync import open_policy_sampler


@dataclass(frozen=True)
class Experience(Rollout):
    """A step's trajectories with all that the updates need; every tensor is [batch, seq]."""

    old_logprob: Tensor
    reference_logprob: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    importance: Tensor
    best: Tensor
    """True on own tokens of trajectories that earned more than 0 and no less than any other of their task."""


def run_ppo(stage: Stage, ppo: Ppo, make_critic: Callable[[], Critic], episodes: RunEpisodes) -> StageResult:
    """Train the actor of `stage` for `ppo.steps` updates, from where a killed run was."""
    if (done := load_result(stage.out)) is not None:
        return done
    started = time.monotonic()
    params, settings = stage.params, stage.params.engine
    digest = verify_checkpoint(stage.actor, stage.params.device).digest
    tasks = stage.tasks()
    world = join_world(params.device, settings.collective_seconds)
    tokenizer = load_tokenizer(stage.actor)
    policy = load_model(stage.actor, dtype=DTYPES[settings.dtype], device=params.device)
    sampling = open_policy_sampler(
        policy, tokenizer, params, world, checkpoint=stage.actor, digest=digest, out=stage.out
    )
    reference = Actor(copy.deepcopy(policy), ppo.rollouts.temperature)
    actor = DeepSpeedEngine(
        Actor(policy, ppo.rollouts.temperature),
        settings,
        device=params.device,
        gradient_clip=ppo.gradient_clip,
    )
    critic_network = make_critic()
    critic = DeepSpeedEngine(critic_network, settings, device=params.device, gradient_clip=ppo.gradient_clip)
    engines = {"actor": actor, "critic": critic}

    start = load_state(stage.out, engines, settings, world)
    if start == 0:
        # A policy that collapses before its first state goes back to what it started from.
        save_state(stage.out, 0, engines, settings, world)
    metrics = Metrics(stage.out, world, start=start)
    solved = SolveRateTracker.before(stage.out, start) if ppo.solve_rate_share else None
    earlier_seconds = sum(record["seconds"] or 0.0 for record in metrics.records)
    stopped = ""
    with Termination() as termination:
        for step in range(start, ppo.steps):
            clock = Clock()
            sampler = sampling.publish(actor, step)
            published = clock.lap("publish")
            chosen = choose_tasks(
                tasks,
                ppo.rollouts.tasks,
                seed=params.seed,
                step=step,
                solved=solved,
                share=ppo.solve_rate_share,
            )
            trajectories = collect(
                stage,
                world,
                chosen,
                ppo.rollouts,
                step=step,
                total=ppo.steps,
                sampler=sampler,
                tokenizer=tokenizer,
                episodes=episodes,
            )
            sampling.rest()
            usable = trainable(trajectories)
            if solved is not None:
                solved.add(usable)
            figures = reward_figures(usable) | published
            figures["dropped"] = len(trajectories) - len(usable)
            if ppo.reward == "speedup":
                usable = [
                    replace(trajectory, reward=raw_speedup(trajectory.verdicts[-1])) for trajectory in usable
                ]
            rollout = collate(usable)
            figures["tokens"] = rollout.tokens
            figures |= clock.lap("rollout", rollout.tokens)

            if step == 0 and stage.critic is None:
                critic_network.baseline.fill_(figures["reward"])
            experience, scored = score(
                rollout, usable, actor, reference, critic, ppo, settings.tokens_per_microbatch
            )
            figures |= scored | clock.lap("score", int(rollout.valid.sum()))
            if stopped := collapse(ppo, figures, metrics.records):
                load_state(stage.out, engines, settings, world, before=step)
                metrics.write(step, figures | clock.total())
                break

            try:
                figures |= update_critic(
                    experience,
                    critic,
                    ppo,
                    settings.tokens_per_microbatch,
                    derived_seed(params.seed, "critic", step),
                )
                figures |= clock.lap("critic", int(rollout.valid.sum()) * ppo.epochs)
                if step >= ppo.critic_warmup_steps and not figures["equal_rewards"]:
                    seed = derived_seed(params.seed, "actor", step)
                    figures |= update_actor(
                        experience,
                        actor,
                        ppo,
                        settings.tokens_per_microbatch,
                        seed,
                        step - ppo.critic_warmup_steps,
                    )
                    figures |= clock.lap("actor", int(rollout.valid.sum()) * ppo.epochs)
            except NotFinite as error:
                # The update before may have made weights that only now show: go back beyond it.
                load_state(stage.out, engines, settings, world, before=max(1, step))
                stopped = f"{error} in update {step + 1}; {KEPT}"
                metrics.write(step, figures | clock.total())
                break
            metrics.write(step, figures | clock.total())
            shown = ("reward", "m_-1", "m_1", "m_2", "m_3", "entropy")
            stage.progress.update(stage.name, step + 1, ppo.steps, **{name: figures[name] for name in shown})
            asked = termination.asked(world)
            if (step + 1) % ppo.checkpoint_every == 0 or step + 1 == ppo.steps or asked:
                save_state(stage.out, step + 1, engines, settings, world)
            if asked and step + 1 < ppo.steps:
                raise Terminated(
                    f"{stage.name}: ended by SIGTERM after update {step + 1} of {ppo.steps}, whose state is saved; the same command continues"
                )
    if not stopped and metrics.records and all(record["equal_rewards"] for record in metrics.records):
        stopped = "the rewards of every batch were all equal, so the policy was not changed; give tasks of mixed difficulty or more samples"

    before, after = metrics.mean("reward", slice(0, 2)), metrics.mean("reward", slice(-2, None))
    summary = {
        name: metrics.mean(name, slice(-2, None))
        for name in ("m_-1", "m_1", "m_2", "m_3", "entropy", "kl_start", "explained_variance", "truncated")
    }
    with actor.whole():
        return finish(
            stage,
            world,
            policy,
            tokenizer,
            rewards=(before, after),
            figures=summary | {"steps": float(len(metrics.records))},
            seconds=earlier_seconds + time.monotonic() - started,
            stopped=stopped,
        )


def score(
    rollout: Rollout,
    trajectories: Sequence[Trajectory],
    actor: Engine,
    reference: Actor,
    critic: Engine,
    ppo: Ppo,
    budget: int,
) -> tuple[Experience, Figures]:
    """What the trainer's networks say about the trajectories before any update: the whole batch, on every rank."""
    old_logprob, entropy = evaluate(actor.forward, actor.world, rollout, budget)
    (old_values,) = evaluate(critic.forward, actor.world, rollout, budget)
    with torch.no_grad():
        reference_logprob, _ = evaluate(reference, actor.world, rollout, budget)
    mask, own = rollout.action_mask, rollout.tokens
    advantages, _ = gae(rollout.rewards, old_values, mask, ppo.gamma, ppo.lam)
    _, returns = gae(rollout.rewards, old_values, mask, ppo.gamma, ppo.critic_lam)
    experience = Experience(
        **vars(rollout),
        old_logprob=old_logprob,
        reference_logprob=reference_logprob,
        old_values=old_values,
        advantages=whiten(advantages, mask) if ppo.whiten else advantages,
        returns=returns,
        importance=importance_weights(old_logprob, rollout.sampler_logprob, mask, ppo.importance_cap),
        best=mask & best_of_task(trajectories)[:, None],
    )
    difference = old_logprob - rollout.sampler_logprob
    return experience, {
        "entropy": float(entropy.sum() / own),
        "kl_start": float(masked_sum(kl_k3(old_logprob, reference_logprob), mask) / own),
        "sampler_difference": float(masked_sum(difference.abs(), mask) / own),
        "importance": float(masked_sum(experience.importance, mask) / own),
        "effective_share": effective_sample_size(old_logprob, rollout.sampler_logprob, mask),
        # Advantages of such a batch are the critic's errors alone, and whitening would make them large.
        "equal_rewards": float(len({trajectory.reward for trajectory in trajectories}) == 1),
        "explained_variance": explained_variance(old_values, returns, mask),
        "value": float(old_values.sum() / own),
    }


def update_critic(experience: Experience, critic: Engine, ppo: Ppo, budget: int, seed: int) -> Figures:
    """Fit the values to the returns."""

    def loss(network: nn.Module, rows: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        (values,) = network(rows.ids, rows.action_mask)
        total, parts = value_loss_sum(values, rows.old_values, rows.returns, rows.action_mask, ppo.value_clip)
        return total, parts | {"value_loss": total}

    figures = update(experience, critic, loss, ppo, budget, seed, ppo.critic_learning_rate)
    return figures | {"critic_gradient_norm": figures.pop("gradient_norm")}


def update_actor(
    experience: Experience, actor: Engine, ppo: Ppo, budget: int, seed: int, updates: int
) -> Figures:
    """Move the policy along the clipped surrogate; `updates` counts the actor's steps so far, for the warm-up."""
    learning_rate = ppo.learning_rate * min(1.0, (updates + 1) / max(1, ppo.learning_rate_warmup_steps))

    def loss(network: nn.Module, rows: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        logprob, _ = network(rows.ids, rows.action_mask)
        surrogate, parts = policy_loss_sum(
            logprob,
            rows.old_logprob,
            rows.advantages,
            rows.action_mask,
            ppo.clip_low,
            ppo.clip_high,
            rows.importance,
        )
        total = surrogate
        if ppo.kl_coefficient > 0:
            total = total + ppo.kl_coefficient * masked_sum(
                kl_k2(logprob, rows.reference_logprob), rows.action_mask
            )
        if ppo.replay_coefficient > 0:
            total = total + ppo.replay_coefficient * likelihood_loss_sum(logprob, rows.best)
        return total, parts | {"policy_loss": surrogate}

    return update(experience, actor, loss, ppo, budget, seed, learning_rate) | {
        "learning_rate": learning_rate
    }


def update(
    experience: Experience,
    engine: Engine,
    loss: Loss[Experience],
    ppo: Ppo,
    budget: int,
    seed: int,
    learning_rate: float,
) -> Figures:
    """`ppo.epochs` passes over the batch in `ppo.minibatches` shuffled optimizer steps; the means of their metrics."""
    order, norms, sums, shuffler = list(range(len(experience.ids))), [], MetricSums(), random.Random(seed)
    for _ in range(ppo.epochs):
        shuffler.shuffle(order)
        for part in range(min(ppo.minibatches, len(order))):
            norms.append(
                train_step(
                    engine,
                    experience,
                    order[part :: ppo.minibatches],
                    loss,
                    sums,
                    budget=budget,
                    learning_rate=learning_rate,
                )
            )
    return sums.means(engine.world, experience.tokens * ppo.epochs) | {
        "gradient_norm": sum(norms) / len(norms)
    }


def best_of_task(trajectories: Sequence[Trajectory]) -> Tensor:
    """[batch] True where a trajectory earned more than 0 and no less than any other of its task."""
    highest: dict[str, float] = {}
    for trajectory in trajectories:
        highest[trajectory.task_id] = max(trajectory.reward, highest.get(trajectory.task_id, 0.0))
    return torch.tensor([0 < trajectory.reward == highest[trajectory.task_id] for trajectory in trajectories])


class Clock:
    """Seconds and tokens per second of a step's phases."""

    def __init__(self) -> None:
        self.started = self.last = time.monotonic()

    def lap(self, phase: str, tokens: int = 0) -> Figures:
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        return {f"seconds_{phase}": seconds} | (
            {f"tokens_per_second_{phase}": tokens / seconds} if tokens else {}
        )

    def total(self) -> Figures:
        return {"seconds": time.monotonic() - self.started}
