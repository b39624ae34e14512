"""Proximal policy optimisation: stage 1 (`warmup`), stage 4 (`agentic`) and their loop (`run_ppo`).

Stage 1 is single-turn PPO, which teaches the policy to write kernels that build. Stage 4 is multi-turn PPO in
the workspace, from the actor of stage 2 and the critic of stage 3.

Each step samples trajectories, evaluates actor, reference and critic on them, estimates advantages, and
updates first the critic and then the actor on minibatches. The reward is given at the last token that the
policy sampled; the discount gamma is a parameter, 1 in the paper (section 4.2). The actor's advantages and
the critic's targets use separate lambdas: with a lambda of 0.95 the targets of an untrained critic would
hardly depend on a reward that comes more than about a hundred tokens later.
"""

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor, nn

from components.agent.trajectory import Trajectory
from components.core.errors import UserError
from components.core.params import Ppo
from components.policy.checkpoint import load_model, verify_checkpoint
from components.training.advantages import explained_variance, gae, whiten
from components.training.batches import Rollout, collate
from components.training.collapse_detection import Collapsed, collapse
from components.training.engine import DTYPES, DeepSpeedEngine
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
from components.training.metrics_file import Figures
from components.training.microbatching import Loss, MetricSums, evaluate, train_step
from components.training.networks import Actor, Critic, critic_from_actor, load_critic
from components.training.rollouts import (
    RunEpisodes,
    SolveRateTracker,
    TrainedPolicy,
    choose_tasks,
    derived_seed,
    reward_figures,
    trainable,
)
from components.training.stage import Stage, StageResult
from components.training.training_loop import StepRecord, finish, fit, resume

# Metrics of a step that the progress display shows.
SHOWN = ("reward", "m_-1", "m_1", "m_2", "m_3", "entropy")
# Metrics whose means over the last two steps are included in the figures of the stage.
SUMMARY = ("m_-1", "m_1", "m_2", "m_3", "entropy", "kl_start", "explained_variance", "truncated")
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Experience(Rollout):
    """Trajectories of a step with the tensors that the updates need; every tensor is [batch, seq]."""

    old_logprob: Tensor
    reference_logprob: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    importance: Tensor
    # True on own tokens of the trajectories with the highest reward of their task, if it is positive.
    best: Tensor


def warmup(stage: Stage, episodes: RunEpisodes) -> StageResult:
    """Train the policy of the checkpoint `stage.actor` (stage 1); `episodes` runs the agent loop.

    The critic starts as a copy of the actor. During the first `warmup.critic_warmup_steps` steps only the
    critic is trained.
    """
    dtype = DTYPES[stage.params.engine.dtype]
    return run_ppo(
        stage, stage.params.warmup, lambda: critic_from_actor(load_model(stage.actor, dtype=dtype)), episodes
    )


def agentic(stage: Stage, episodes: RunEpisodes) -> StageResult:
    """Train the policy of the checkpoint `stage.actor`, starting with the critic of `stage.critic` (stage 4).

    `episodes` runs the agent loop. Raises UserError if `stage.critic` is None, or if the critic's tokenizer
    differs from the actor's.
    """
    params, critic = stage.params, stage.critic
    if critic is None:
        raise UserError(f"{stage.name}: stage 4 needs the critic of stage 3; run the stages from critic on.")
    tokenizers = [verify_checkpoint(folder).files.get(TOKENIZER) for folder in (stage.actor, critic)]
    if tokenizers[0] != tokenizers[1]:
        raise UserError(
            f"{critic / TOKENIZER}: the critic reads other tokens than the actor in {stage.actor}; "
            "give the critic that was made from this actor."
        )
    return run_ppo(stage, params.agentic, lambda: load_critic(critic, DTYPES[params.engine.dtype]), episodes)


def run_ppo(stage: Stage, ppo: Ppo, make_critic: Callable[[], Critic], episodes: RunEpisodes) -> StageResult:
    """Train the actor of `stage` for `ppo.steps` steps, continuing from the last saved state.

    `make_critic` returns the critic to start with, and `episodes` runs the agent loop.
    """
    started, params, rollouts = time.monotonic(), stage.params, ppo.rollouts
    tasks = stage.tasks()
    policy = TrainedPolicy(stage, rollouts, episodes)
    reference = Actor(copy.deepcopy(policy.model), rollouts.temperature)

    def engine(network: nn.Module) -> DeepSpeedEngine:
        return DeepSpeedEngine(network, params.engine, device=params.device, gradient_clip=ppo.gradient_clip)

    actor = engine(Actor(policy.model, rollouts.temperature))
    critic_network = make_critic()
    critic = engine(critic_network)
    state = resume(stage, {"actor": actor, "critic": critic}, rolls_back=True)
    tracker = SolveRateTracker.before(stage.out, state.start) if ppo.solve_rate_share else None

    def ppo_step(step: int, record: StepRecord) -> None:
        policy.publish(actor, step)
        record.end_phase("publish")
        chosen = choose_tasks(
            tasks, rollouts.tasks, seed=params.seed, step=step, tracker=tracker, share=ppo.solve_rate_share
        )
        sampled = policy.sample(chosen, rollouts.samples, step=step, steps=ppo.steps)
        trajectories = trainable(sampled)
        if tracker is not None:
            tracker.add(trajectories)
        rewards = [training_reward(trajectory, ppo.reward) for trajectory in trajectories]
        batch = collate(trajectories, rewards)
        record.figures |= reward_figures(trajectories)
        record.figures |= {"dropped": len(sampled) - len(trajectories), "tokens": batch.tokens}
        record.end_phase("rollout", batch.tokens)

        if step == 0 and stage.critic is None:
            critic_network.baseline.fill_(record.figures["reward"])
        best = best_of_task(trajectories, rewards)
        experience, scores = score(batch, best, actor, reference, critic, ppo)
        # If all rewards are equal, the actor is not updated, because the advantages are then only errors of
        # the critic, which whitening would scale up.
        equal_rewards = len(set(rewards)) == 1
        record.figures |= scores | {"equal_rewards": float(equal_rewards)}
        tokens = int(batch.valid.sum())
        record.end_phase("score", tokens)
        if reason := collapse(ppo, record.figures, state.metrics.records):
            raise Collapsed(reason)

        seed = derived_seed(params.seed, "critic", step)
        record.figures |= update_critic(experience, critic, ppo, seed)
        record.end_phase("critic", tokens * ppo.epochs)
        if step >= ppo.critic_warmup_steps and not equal_rewards:
            seed = derived_seed(params.seed, "actor", step)
            record.figures |= update_actor(experience, actor, ppo, seed, step - ppo.critic_warmup_steps)
            record.end_phase("actor", tokens * ppo.epochs)

    stopped = fit(state, ppo.steps, ppo_step, shown=SHOWN, save_every=ppo.checkpoint_every)
    metrics = state.metrics
    if not stopped and metrics.records and all(record["equal_rewards"] for record in metrics.records):
        stopped = (
            "the rewards of every batch were all equal, so the policy was not changed; "
            "give tasks of mixed difficulty or more samples"
        )
    first, last = slice(0, 2), slice(-2, None)
    return finish(
        state,
        actor,
        policy.model,
        policy.tokenizer,
        started=started,
        rewards=(metrics.mean("reward", first), metrics.mean("reward", last)),
        figures={name: metrics.mean(name, last) for name in SUMMARY} | {"steps": float(len(metrics.records))},
        stopped=stopped,
    )


def score(
    batch: Rollout, best: Tensor, actor: DeepSpeedEngine, reference: Actor, critic: DeepSpeedEngine, ppo: Ppo
) -> tuple[Experience, Figures]:
    """Evaluate actor, reference and critic on the batch, and return the tensors for the updates and metrics.

    Every rank must call this, before the step's updates. `best` is [batch] and True for the trajectories
    whose likelihood the actor's loss also increases (with the weight ppo.replay_coefficient).
    """
    world, limit = actor.world, actor.settings.tokens_per_microbatch
    old_logprob, entropy = evaluate(actor.forward, world, batch, limit)
    (old_values,) = evaluate(critic.forward, world, batch, limit)
    with torch.no_grad():
        reference_logprob, _ = evaluate(reference, world, batch, limit)
    mask, own = batch.action_mask, batch.tokens
    advantages, _ = gae(batch.rewards, old_values, mask, ppo.gamma, ppo.lam)
    _, returns = gae(batch.rewards, old_values, mask, ppo.gamma, ppo.critic_lam)
    experience = Experience(
        **vars(batch),
        old_logprob=old_logprob,
        reference_logprob=reference_logprob,
        old_values=old_values,
        advantages=whiten(advantages, mask) if ppo.whiten else advantages,
        returns=returns,
        importance=importance_weights(old_logprob, batch.sampler_logprob, mask, ppo.importance_cap),
        best=mask & best[:, None],
    )
    difference = old_logprob - batch.sampler_logprob
    return experience, {
        "entropy": float(entropy.sum() / own),
        "kl_start": float(masked_sum(kl_k3(old_logprob, reference_logprob), mask) / own),
        "sampler_difference": float(masked_sum(difference.abs(), mask) / own),
        "importance": float(masked_sum(experience.importance, mask) / own),
        "effective_share": effective_sample_size(old_logprob, batch.sampler_logprob, mask),
        "explained_variance": explained_variance(old_values, returns, mask),
        "value": float(old_values.sum() / own),
    }


def update_critic(experience: Experience, critic: DeepSpeedEngine, ppo: Ppo, seed: int) -> Figures:
    """Update the critic so that its values approach the returns, and return the metrics."""

    def loss(network: nn.Module, rows: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        (values,) = network(rows.ids, rows.action_mask)
        total, parts = value_loss_sum(values, rows.old_values, rows.returns, rows.action_mask, ppo.value_clip)
        return total, parts | {"value_loss": total}

    figures = update(experience, critic, loss, ppo, seed, ppo.critic_learning_rate)
    return figures | {"critic_gradient_norm": figures.pop("gradient_norm")}


def update_actor(
    experience: Experience, actor: DeepSpeedEngine, ppo: Ppo, seed: int, updates: int
) -> Figures:
    """Update the actor with PPO's clipped surrogate loss and return the metrics.

    `updates` is the number of steps since the critic-only steps at the start of the stage. The warm-up of the
    learning rate depends on it.
    """
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
            kl = masked_sum(kl_k2(logprob, rows.reference_logprob), rows.action_mask)
            total = total + ppo.kl_coefficient * kl
        if ppo.replay_coefficient > 0:
            total = total + ppo.replay_coefficient * likelihood_loss_sum(logprob, rows.best)
        return total, parts | {"policy_loss": surrogate}

    figures = update(experience, actor, loss, ppo, seed, learning_rate)
    return figures | {"learning_rate": learning_rate}


def update(
    experience: Experience,
    engine: DeepSpeedEngine,
    loss: Loss[Experience],
    ppo: Ppo,
    seed: int,
    learning_rate: float,
) -> Figures:
    """Train the network of `engine` for `ppo.epochs` passes over the rows, and return the mean metrics.

    Each pass shuffles the rows and divides them into `ppo.minibatches` optimizer steps.
    """
    order, norms, sums, shuffler = list(range(len(experience.ids))), [], MetricSums(), random.Random(seed)
    for _ in range(ppo.epochs):
        shuffler.shuffle(order)
        for part in range(min(ppo.minibatches, len(order))):
            rows = order[part :: ppo.minibatches]
            norms.append(train_step(engine, experience, rows, loss, sums, learning_rate=learning_rate))
    figures = sums.means(engine.world, experience.tokens * ppo.epochs)
    return figures | {"gradient_norm": sum(norms) / len(norms)}


def training_reward(trajectory: Trajectory, shape: Literal["milestone", "speedup"]) -> float:
    """Return the reward of a trajectory that PPO maximises: its milestone or its speed-up over eager.

    `shape` selects one of them; the ablation of the CUDA Agent paper uses the speed-up in place of the
    milestone. The speed-up is replaced by -1 if the final candidate is not correct or its speed-up was not
    measured.
    """
    if shape == "milestone":
        return trajectory.reward
    speedup = trajectory.final.speedup.eager if trajectory.final.status == "correct" else None
    return -1.0 if speedup is None else speedup.estimate


def best_of_task(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> Tensor:
    """Return a mask [batch], True where a reward is positive and the highest of the trajectory's task."""
    pairs = [(trajectory.task_id, reward) for trajectory, reward in zip(trajectories, rewards, strict=True)]
    highest = dict(sorted(pairs, key=itemgetter(1)))  # the last pair of a task has its highest reward
    return torch.tensor([0 < reward == highest[task] for task, reward in pairs])
