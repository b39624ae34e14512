"""Proximal policy optimisation: stage 1 (`warmup`), stage 4 (`agentic`) and their loop (`run_ppo`).

Stage 1 is single-turn PPO, which teaches the policy to write kernels that build; its critic starts as a copy
of the actor. Stage 4 is multi-turn PPO in the workspace, from the actor of rejection fine-tuning and the
critic of value pretraining.

Each step samples trajectories, evaluates actor, reference and critic on them, estimates advantages, and
updates first the critic and then the actor on minibatches. The reward is given at the last token that the
policy sampled; the discount gamma is a parameter, 1 in the CUDA Agent paper (section 4.2). The actor's
advantages and the critic's targets use separate lambdas: with a lambda of 0.95 the targets of an untrained
critic would hardly depend on a reward that comes more than about a hundred tokens later.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from components.agent.trajectory import Trajectory
from components.core.errors import StageFailed, UserError
from components.core.stage_params import Ppo
from components.core.task import KernelTask
from components.policy.adapter import adapter_disabled
from components.policy.checkpoint import verify_checkpoint
from components.training.advantages import explained_variance, leave_one_out, row_gae, whiten
from components.training.batches import Packed, Rollout, collate, stream
from components.training.engine import (
    DeepSpeedEngine,
    FrozenNetwork,
    Loss,
    MetricSums,
    evaluate,
    train_step,
)
from components.training.losses import (
    effective_sample_size,
    importance_weights,
    kl_k2,
    kl_k3,
    policy_loss_sum,
)
from components.training.metrics import Collapsed, Figures, collapse, reward_figures
from components.training.networks import (
    Actor,
    Critic,
    Targets,
    check_critic,
    load_critic,
    load_policy,
    value_loss,
)
from components.training.rollouts import RunEpisode, TrainedPolicy, choose_tasks
from components.training.stage import Stage, StageResult, derived_seed
from components.training.training_loop import StepRecord, finish, fit, resume

# Metrics of a step that the progress display shows.
SHOWN = ("reward", "m_-1", "m_1", "m_2", "m_3", "entropy")
# Metrics whose means over the last steps are included in the figures of the stage.
SUMMARY = ("m_-1", "m_1", "m_2", "m_3", "entropy", "kl_start", "explained_variance", "truncated")
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Experience(Targets):
    """What the updates of a step need of each own token of a batch, the tokens that the policy sampled.

    Each tensor is [own tokens]. The log-probabilities (nats) are those of the actor before the step's updates
    (`old_logprob`) and of the policy that the stage started from (`reference_logprob`; zeros if no loss or
    metric needs them). `advantages` are whitened if `Ppo.whiten` is set. `importance` has the weights of
    truncated importance sampling (`importance_weights`). The returns are zeros if the stage has no critic.
    """

    old_logprob: Tensor
    reference_logprob: Tensor
    advantages: Tensor
    importance: Tensor


@dataclass(frozen=True)
class Networks:
    """The networks of a PPO stage.

    `critic` is None if advantages are computed from groups of trajectories of a task. `reference` returns the
    log-probabilities (nats) of a batch's own tokens, those that were sampled, [own tokens], under the policy
    with the weights at the start of the stage; it is None if no loss or metric needs them.
    """

    actor: DeepSpeedEngine
    critic: DeepSpeedEngine | None
    reference: Callable[[Rollout], Tensor] | None


def agentic(stage: Stage, episode: RunEpisode) -> StageResult:
    """Train the policy of the checkpoint `stage.actor` with multi-turn PPO (stage 4), and return the result.

    `episode` is the function that samples one trajectory. The critic starts from the checkpoint
    `stage.critic`, which must be None if and only if agentic.advantages needs no critic. Raises UserError if
    the checkpoint is no critic, or if its tokenizer differs from the actor's, and StageFailed if fewer than
    `agentic.min_updates` steps updated the actor (`run_ppo`).
    """
    critic = stage.critic
    if critic is None:
        return run_ppo(stage, stage.params.agentic, stage.actor, episode)
    tokenizers = [verify_checkpoint(folder).files.get(TOKENIZER) for folder in (stage.actor, critic)]
    if tokenizers[0] != tokenizers[1]:
        raise UserError(
            f"{critic / TOKENIZER}: the critic reads other tokens than the actor in {stage.actor}; "
            "give the critic that was made from this actor."
        )
    check_critic(critic)
    return run_ppo(stage, stage.params.agentic, critic, episode)


def load_networks(stage: Stage, ppo: Ppo, policy: TrainedPolicy, critic_folder: Path) -> Networks:
    """Load the networks of a PPO stage and prepare the trained ones for training; every rank must call this.

    `policy` has loaded the actor's model already. `critic_folder` is the checkpoint from which the critic
    starts, which may be that of an actor; it is not read if `ppo.advantages` needs no critic. The reference,
    which is the policy at the start of the stage, is loaded only if a loss or a metric needs it.
    """

    def engine(network: nn.Module) -> DeepSpeedEngine:
        return DeepSpeedEngine(
            network, stage.params.engine, device=stage.params.device, gradient_clip=ppo.gradient_clip
        )

    actor = engine(Actor(policy.model, ppo.rollouts.temperature))
    critic = engine(load_critic(critic_folder, stage.params)) if ppo.advantages == "critic" else None
    needs_reference = ppo.kl_coefficient > 0 or ppo.measure_kl
    return Networks(actor, critic, _reference(stage, ppo, policy, actor) if needs_reference else None)


def _reference(
    stage: Stage, ppo: Ppo, policy: TrainedPolicy, actor: DeepSpeedEngine
) -> Callable[[Rollout], Tensor]:
    """Return a function that computes the log-probabilities of a batch under the reference policy.

    The reference policy is the policy with the weights at the start of the stage. The function returns the
    log-probabilities (nats) of the batch's own tokens, those that the policy sampled: [own tokens].
    """
    engine: DeepSpeedEngine | FrozenNetwork = actor
    context: Callable[[], AbstractContextManager[None]] = partial(adapter_disabled, policy.model)
    if not stage.params.policy.adapter.rank:
        first = Actor(load_policy(stage.actor, stage.params), ppo.rollouts.temperature)
        engine = FrozenNetwork(first, stage.params.engine, device=stage.params.device)
        context = engine.on_device

    def reference_logprob(batch: Rollout) -> Tensor:
        with context():
            return evaluate(engine, batch)[0]

    return reference_logprob


def run_ppo(stage: Stage, ppo: Ppo, critic_folder: Path, episode: RunEpisode) -> StageResult:
    """Train the actor of `stage` for `ppo.steps` steps from the last saved state, and return the result.

    A state has the weights and the optimizer states after a step. `critic_folder` is the checkpoint that the
    critic starts with, if there is a critic, and `episode` is the function that samples one trajectory. A
    step whose rewards are all equal (without a critic: equal within each task) does not update the actor.
    Raises StageFailed if fewer than `ppo.min_updates` steps updated the actor, unless the policy collapsed or
    the time budget ended the training.
    """
    started, params, rollouts = time.monotonic(), stage.params, ppo.rollouts

    def choose(tasks: Sequence[KernelTask], wave: int) -> list[KernelTask]:
        return [
            task
            for task in choose_tasks(tasks, rollouts.tasks, seed=params.seed, step=wave)
            for _ in range(rollouts.samples)
        ]

    # Advantages without a critic compare all samples of a task.
    group = 1 if ppo.advantages == "critic" else rollouts.samples
    policy = TrainedPolicy(stage, rollouts, episode, choose, staleness=ppo.staleness, group=group)
    networks = load_networks(stage, ppo, policy, critic_folder)
    actor, critic = networks.actor, networks.critic
    engines = {"actor": actor} | ({"critic": critic} if critic else {})
    state = resume(stage, engines, rolls_back=True)

    def ppo_step(step: int, record: StepRecord) -> None:
        policy.publish(actor, step)
        record.end_phase("publish")
        trajectories, figures = policy.sample(rollouts.tasks * rollouts.samples, step=step, steps=ppo.steps)
        batch = collate(trajectories)
        record.figures |= figures | reward_figures(trajectories) | {"tokens": batch.tokens}
        record.end_phase("rollout", batch.tokens)

        if critic is not None and step == 0 and stage.critic is None:
            assert isinstance(critic.module, Critic)
            critic.module.baseline.fill_(record.figures["reward"])
        experience, scores = score(batch, trajectories, networks, ppo)
        # If all rewards are equal, the actor is not updated, because the advantages are then only errors of
        # the critic, which whitening would scale up. Without a critic, all advantages are 0 if the rewards
        # are equal within each task.
        equal_rewards = (
            len({trajectory.reward for trajectory in trajectories}) == 1
            if critic
            else not experience.advantages.any()
        )
        record.figures |= scores | {
            "equal_rewards": float(equal_rewards),
            "equal_rewards_after_drops": float(equal_rewards and figures["dropped"] > 0),
        }
        tokens = sum(batch.lengths)
        record.end_phase("score", tokens)
        if reason := collapse(ppo, record.figures, state.metrics.records):
            raise Collapsed(reason)

        if critic is not None:
            record.figures |= update_critic(
                batch, experience, critic, ppo, derived_seed(params.seed, "critic", step)
            )
            record.end_phase("critic", tokens * ppo.epochs)
        updates = step - (ppo.critic_warmup_steps if critic else 0)
        if updates >= 0 and not equal_rewards:
            record.figures |= update_actor(
                batch, experience, actor, ppo, derived_seed(params.seed, "actor", step), updates
            )
            record.end_phase("actor", tokens * ppo.epochs)

    with closing(policy):
        end = fit(state, ppo.steps, ppo_step, shown=SHOWN, save_every=ppo.checkpoint_every)
    metrics = state.metrics
    of_actor = metrics.records[ppo.critic_warmup_steps if critic else 0 :]
    updates = sum(not record["equal_rewards"] for record in of_actor)
    if updates < ppo.min_updates and not end.reason and not end.progress:
        raise StageFailed(f"{stage.name}: {equal_rewards_text(of_actor)}.")
    unchanged = "" if updates or not of_actor else equal_rewards_text(of_actor)
    ends = 2 if len(metrics.records) >= 4 else 1
    last = slice(-ends, None)
    return finish(
        state,
        policy.model,
        policy.tokenizer,
        started=started,
        rewards=(metrics.mean("reward", slice(0, ends)), metrics.mean("reward", last)),
        figures={name: metrics.mean(name, last) for name in SUMMARY} | {"steps": float(len(metrics.records))},
        end=end,
        remark="; ".join(filter(None, (policy.left_out, unchanged))),
    )


def equal_rewards_text(records: Sequence[Mapping[str, float | None]]) -> str:
    """Return a clause on the steps from which the actor learned nothing because the rewards were equal.

    `records` are the metrics of all steps of the stage that train the actor. The clause says whether all
    trajectories earned equal rewards, or only those that were left after others had been dropped, on which
    the judge, which measures kernels, had failed.
    """
    equal = [record for record in records if record["equal_rewards"]]
    reason = (
        f"the rewards of a batch were all equal in {len(equal)} of {len(records)} steps, which did not "
        "change the policy"
    )
    after_drops = sum(record["equal_rewards_after_drops"] or 0 for record in equal)
    if not after_drops:
        return f"{reason}; give tasks of mixed difficulty or more samples"
    dropped = sum(record["dropped"] or 0 for record in equal)
    return (
        f"{reason}, but in {after_drops:.0f} of them only after trajectories were dropped, {dropped:.0f} in "
        "all, because the judge failed on them; run cuda-agent doctor, and repeat the stage in a new folder"
    )


def score(
    batch: Rollout, trajectories: Sequence[Trajectory], networks: Networks, ppo: Ppo
) -> tuple[Experience, Figures]:
    """Evaluate the networks on the batch of `trajectories`, and return its Experience and metrics.

    The Experience has what the updates need of each sampled token. Every rank must call this, before the
    step's updates. The metrics are the means over sampled tokens of the entropy in nats (`entropy`), of the
    distance of the actor's from the sampler's log-probabilities (`sampler_difference`) and of the importance
    weights (`importance`), and the effective sample size as a share of the tokens (`effective_share`). With a
    reference policy, `kl_start` is the mean KL divergence from it in nats. With a critic, there are
    `explained_variance` and the mean value (`value`); without one, the number of tasks with a single
    trajectory (`single_sample_tasks`).
    """
    old_logprob, entropy = evaluate(networks.actor, batch)
    figures: Figures = {
        "entropy": float(entropy.mean()),
        "sampler_difference": float((old_logprob - batch.sampler_logprob).abs().mean()),
        "effective_share": effective_sample_size(old_logprob, batch.sampler_logprob),
    }
    reference_logprob = returns = stream(batch.tokens)
    if networks.reference is not None:
        reference_logprob = networks.reference(batch)
        figures["kl_start"] = float(kl_k3(old_logprob, reference_logprob).mean())
    if ppo.advantages == "critic":
        assert networks.critic is not None
        (values,) = evaluate(networks.critic, batch)
        advantages, _ = row_gae(batch, values, ppo.gamma, ppo.lam)
        _, returns = row_gae(batch, values, ppo.gamma, ppo.critic_lam)
        figures["explained_variance"] = explained_variance(values, returns)
        figures["value"] = float(values.mean())
    else:
        tasks = [trajectory.task_id for trajectory in trajectories]
        by_row = torch.tensor(leave_one_out([trajectory.earned for trajectory in trajectories], tasks))
        advantages = by_row.repeat_interleave(torch.from_numpy(np.diff(batch.offsets)))
        figures["single_sample_tasks"] = float(sum(count == 1 for count in Counter(tasks).values()))
    importance = importance_weights(old_logprob, batch.sampler_logprob, ppo.importance_cap)
    figures["importance"] = float(importance.mean())
    return Experience(
        old_logprob=old_logprob,
        reference_logprob=reference_logprob,
        advantages=whiten(advantages) if ppo.whiten else advantages,
        returns=returns,
        importance=importance,
    ), figures


def update_critic(
    batch: Rollout, experience: Experience, critic: DeepSpeedEngine, ppo: Ppo, seed: int
) -> Figures:
    """Update the critic so that its values approach the returns, and return the metrics.

    `experience` has the returns. The metrics are `value_loss`, the mean over the tokens that the policy
    sampled, and `critic_gradient_norm`, the mean over optimizer steps. `seed` determines the order of the
    rows.
    """
    figures = update(batch, experience, critic, value_loss, ppo, seed, ppo.critic_learning_rate)
    return figures | {"critic_gradient_norm": figures.pop("gradient_norm")}


def update_actor(
    batch: Rollout, experience: Experience, actor: DeepSpeedEngine, ppo: Ppo, seed: int, updates: int
) -> Figures:
    """Update the actor with PPO's clipped surrogate loss and return the metrics.

    The metrics that the function `policy_loss_sum` returns, such as `clip_fraction`, and `policy_loss`, the
    loss without penalty, are means over the tokens that the policy sampled. `gradient_norm` is a mean over
    the optimizer steps of this call, and `learning_rate` is the same for all of them. If `ppo.kl_coefficient`
    is above 0, a penalty on the divergence from the reference policy, with which the stage started, is added
    to the loss. `updates` is the number of earlier steps of this stage in which the actor was trained; the
    learning rate rises linearly over the first `ppo.learning_rate_warmup_steps` of them. `seed` determines
    the order of the rows.
    """
    learning_rate = ppo.learning_rate * min(1.0, (updates + 1) / max(1, ppo.learning_rate_warmup_steps))

    def loss(network: nn.Module, packed: Packed, own: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        logprob, _ = network(packed)
        surrogate, parts = policy_loss_sum(
            logprob,
            own.old_logprob,
            own.advantages,
            torch.ones_like(logprob, dtype=torch.bool),
            ppo.clip_low,
            ppo.clip_high,
            own.importance,
        )
        total = surrogate
        if ppo.kl_coefficient > 0:
            total = total + ppo.kl_coefficient * kl_k2(logprob, own.reference_logprob).sum()
        return total, parts | {"policy_loss": surrogate}

    return update(batch, experience, actor, loss, ppo, seed, learning_rate) | {"learning_rate": learning_rate}


def update(
    batch: Rollout,
    experience: Experience,
    engine: DeepSpeedEngine,
    loss: Loss[Experience],
    ppo: Ppo,
    seed: int,
    learning_rate: float,
) -> Figures:
    """Train the network of `engine` for `ppo.epochs` passes over the rows, and return the mean metrics.

    The rows are those of `batch`, and `experience` has what `loss` needs of each token that the policy
    sampled. Each pass shuffles the rows, in an order that `seed` determines, and divides them among
    `ppo.minibatches` optimizer steps, or among as many steps as there are rows if these are fewer. The
    metrics of `loss` are means over the sampled tokens, and `gradient_norm` is a mean over optimizer steps.
    """
    order, norms, sums, shuffler = list(range(len(batch.ids))), [], MetricSums(), random.Random(seed)
    for _ in range(ppo.epochs):
        shuffler.shuffle(order)
        for part in range(min(ppo.minibatches, len(order))):
            rows = order[part :: ppo.minibatches]
            norms.append(train_step(engine, batch, experience, rows, loss, sums, learning_rate=learning_rate))
    return sums.means(engine.world, batch.tokens * ppo.epochs) | {"gradient_norm": sum(norms) / len(norms)}
