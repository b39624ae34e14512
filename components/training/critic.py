"""Stage 3: value pretraining. A critic learns values from all stored trajectories, including failed ones.

Without this stage the values of the critic of stage 4 would at first be unrelated to the returns, and the
policy would collapse (paper, section 4.2 and Fig. 5). If critic.lam is 1, the targets are Monte Carlo
returns. If it is lower, the targets are computed again from the current critic before every pass, because
targets computed once from an untrained critic would hardly depend on a reward that comes a hundred tokens
later.
"""

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
from components.training.engine import DTYPES, DeepSpeedEngine, join_world
from components.training.losses import value_loss_sum
from components.training.microbatching import MetricSums, evaluate, train_step
from components.training.networks import VALUE_HEAD, critic_from_actor
from components.training.rollouts import derived_seed, trainable
from components.training.stage import Stage, StageResult
from components.training.training_loop import StepRecord, finish, fit, resume


@dataclass(frozen=True)
class Targets(Rollout):
    """Trajectories with the returns that the critic learns, [batch, seq], in units of the reward."""

    returns: Tensor


def run(stage: Stage) -> StageResult:
    """Make a critic from the checkpoint `stage.actor` and train it on the trajectories of the stage.

    Raises StageFailed if the explained variance of the held-out returns is below
    critic.min_explained_variance.
    """
    started, params, settings = time.monotonic(), stage.params, stage.params.critic
    verify_checkpoint(stage.actor, params.device)
    taught, held_out = split_by_task(
        read_trajectories(stage.trajectories), settings.held_out_share, seed=params.seed
    )
    batch, unseen = collate(taught), collate(held_out)

    join_world(params.device, params.engine.collective_seconds)
    tokenizer = load_tokenizer(stage.actor)
    model = load_model(stage.actor, dtype=DTYPES[params.engine.dtype], device=params.device)
    network, gamma = critic_from_actor(model), params.agentic.gamma
    network.baseline.fill_(float(_monte_carlo(batch, gamma)[batch.action_mask].mean()))
    critic = DeepSpeedEngine(
        network, params.engine, device=params.device, gradient_clip=params.agentic.gradient_clip
    )
    steps_of_all_passes = settings.epochs * -(-len(taught) // settings.batch)

    def critic_pass(epoch: int, record: StepRecord) -> None:
        sums, norms = MetricSums(), []
        targets = Targets(**vars(batch), returns=_returns(critic, batch, gamma, settings.lam))
        order = list(range(len(taught)))
        random.Random(derived_seed(params.seed, "critic", epoch)).shuffle(order)
        for first in range(0, len(order), settings.batch):
            steps = (epoch * len(order) + first) / settings.batch
            learning_rate = settings.learning_rate * max(0.0, 1 - steps / steps_of_all_passes)
            rows = order[first : first + settings.batch]
            norms.append(train_step(critic, targets, rows, _loss, sums, learning_rate=learning_rate))
        record.figures |= sums.means(critic.world, batch.tokens)
        record.figures |= {
            "critic_gradient_norm": sum(norms) / len(norms),
            "explained_variance_held_out": _explained(critic, unseen, gamma),
        }

    state = resume(stage, {"critic": critic}, kept_states=settings.epochs)
    fit(state, settings.epochs, critic_pass, shown=("value_loss",))

    # Use the weights of the pass with the highest held-out explained variance, because later passes may only
    # memorise a small set of trajectories.
    measured = [
        (value, int(record["step"] or 0))
        for record in state.metrics.records
        if (value := record["explained_variance_held_out"]) is not None
    ]
    if measured:
        best, epoch = max(measured)
        state.saved.load(before=epoch + 2)
        if best < settings.min_explained_variance:
            raise StageFailed(
                f"{stage.name}: the critic's held-out explained variance {best:.3f} is below "
                f"critic.min_explained_variance {settings.min_explained_variance:g}; "
                "sample more trajectories or raise critic.epochs."
            )
    backbone = network.backbone
    assert isinstance(backbone, PreTrainedModel)
    return finish(
        state,
        critic,
        backbone,
        tokenizer,
        started=started,
        figures={
            "trajectories": float(len(taught)),
            "held_out": float(len(held_out)),
            "explained_variance": _explained(critic, batch, gamma),
            "explained_variance_held_out": _explained(critic, unseen, gamma),
            "value_loss": state.metrics.mean("value_loss", slice(-1, None)),
        },
        stopped=""
        if measured
        else "all held-out rewards are equal, so the explained variance is undefined and was not required",
        extra=lambda: {VALUE_HEAD: network.extra()},
    )


def read_trajectories(folders: Sequence[Path]) -> list[Trajectory]:
    """Return every trainable trajectory stored below the folders (see `rollouts.trainable`).

    Raises UserError if there is no trajectory, or if the mask or the log-probabilities of a trajectory do not
    fit its tokens.
    """
    trajectories: list[Trajectory] = []
    for folder in sorted({file.parent for root in folders for file in root.rglob("trajectories.jsonl")}):
        trajectories += (loaded := load_trajectories(folder))
        for index, one in enumerate(loaded):
            fits = len(one.ids) == len(one.action_mask) == len(one.sampler_logprob)
            starts_with_action = bool(one.action_mask and one.action_mask[0])
            is_probability = all(logprob <= 1e-3 for logprob in one.sampler_logprob)
            if not fits or starts_with_action or not is_probability or not set(one.action_mask) <= {0, 1}:
                raise UserError(
                    f"{folder}: action_mask or sampler_logprob of trajectory {index} does not fit its "
                    "tokens; restore the folder from the run that wrote it."
                )
    if not trajectories:
        raise UserError(
            f"{', '.join(map(str, folders)) or 'no folder'}: no trajectory to learn values from; "
            "run the stages from warmup on."
        )
    return trainable(trajectories)


def split_by_task(
    trajectories: Sequence[Trajectory], share: float, *, seed: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return the trajectories to learn from and the held-out trajectories.

    About `share` of the tasks are held out, with all of their trajectories. Each part has at least one task.
    Raises UserError if there are fewer than two tasks.
    """
    tasks = sorted(
        {trajectory.task_id for trajectory in trajectories},
        key=lambda task: derived_seed(seed, "held out", task),
    )
    if len(tasks) < 2:
        raise UserError(
            "critic: trajectories of a single task cannot be split into taught and held-out ones; "
            "give more tasks."
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
    """Return the discounted sum of rewards from each token of the policy to the end, [batch, seq]."""
    return gae(batch.rewards, torch.zeros_like(batch.rewards), batch.action_mask, gamma, 1.0)[1]


def _values(engine: DeepSpeedEngine, batch: Rollout) -> Tensor:
    return evaluate(engine.forward, engine.world, batch, engine.settings.tokens_per_microbatch)[0]


def _returns(engine: DeepSpeedEngine, batch: Rollout, gamma: float, lam: float) -> Tensor:
    """Return the returns that the critic is to learn in the next pass, [batch, seq]."""
    if lam == 1:
        return _monte_carlo(batch, gamma)
    return gae(batch.rewards, _values(engine, batch), batch.action_mask, gamma, lam)[1]


def _explained(engine: DeepSpeedEngine, batch: Rollout, gamma: float) -> float:
    """Return the share of the variance of the Monte Carlo returns that the critic's values explain."""
    return explained_variance(_values(engine, batch), _monte_carlo(batch, gamma), batch.action_mask)
