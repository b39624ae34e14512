"""Value pretraining (stage 3): a critic learns values from all stored trajectories, including failed ones.

Without this stage the critic's values would be unrelated to the returns at the beginning of agentic PPO
(stage 4), and the policy would collapse (CUDA Agent paper, section 4.2 and Fig. 5). If critic.lam is 1, the
critic learns Monte Carlo returns. If critic.lam is lower, the returns that the critic learns are computed
again from its current values before every pass over the data. Returns computed once from an untrained critic
would hardly depend on a reward that comes a hundred tokens later.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from components.agent.trajectory import load_tokens, read_records, trajectory_folders
from components.core.errors import StageFailed, UserError
from components.policy.checkpoint import load_tokenizer, verify_checkpoint
from components.training.advantages import discounted_rewards, explained_variance, row_gae
from components.training.batches import EarnedRows
from components.training.engine import DeepSpeedEngine, MetricSums, evaluate, train_step
from components.training.networks import VALUE_HEAD, Targets, load_critic, value_loss
from components.training.stage import Stage, StageResult, derived_seed
from components.training.training_loop import StepRecord, finish, fit, resume


@dataclass(frozen=True)
class StoredRow:
    """Reference to a stored trajectory, with the facts that value pretraining needs of it.

    The trajectory is the one with the index `index`, from 0, in the files of `folder`. It is an attempt at
    the task `task_id` and earned `reward`. It has `tokens` tokens, of which the policy sampled `own`.
    """

    folder: Path
    index: int
    task_id: str
    reward: float
    tokens: int
    own: int


@dataclass(frozen=True)
class StoredArrays(Sequence[NDArray[Any]]):
    """Sequence with one array for each stored trajectory in `rows`, read from its file when it is used.

    `name` says which array of a trajectory it is: "ids" for the token ids, "action_mask" or "sampler_logprob"
    (`TokenFile` in agent/trajectory.py). Files are not kept open, because a process cannot map as many files
    as there are trajectories, and the arrays need not fit into memory.
    """

    rows: Sequence[StoredRow]
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        row = self.rows[index]
        tokens = load_tokens(row.folder)
        return getattr(tokens, self.name)[tokens.span(row.index)]


def run(stage: Stage) -> StageResult:
    """Make a critic from the checkpoint `stage.actor` and train it on trajectories of earlier stages.

    The trajectories are read from the folders `stage.trajectories`. Those of some tasks are held out, and the
    critic is trained on all others in as many passes as the parameter critic.epochs says. The weights after
    the pass with the highest explained variance on the held-out trajectories are kept. Raises StageFailed if
    this explained variance is below critic.min_explained_variance, and UserError if there are too few
    trajectories or tasks. The explained variance is not compared if it is undefined, because all held-out
    returns are equal, or if the time budget ended the training.
    """
    started, params, settings = time.monotonic(), stage.params, stage.params.critic
    verify_checkpoint(stage.actor, params.device)
    taught, held_out = split_by_task(read_rows(stage.trajectories), settings.held_out_share, seed=params.seed)
    batch, unseen = batch_of(taught), batch_of(held_out)

    tokenizer = load_tokenizer(stage.actor)
    network = load_critic(stage.actor, params)
    gamma = params.agentic.gamma
    network.baseline.fill_(float(discounted_rewards(batch, gamma).mean()))
    critic = DeepSpeedEngine(
        network, params.engine, device=params.device, gradient_clip=params.agentic.gradient_clip
    )
    steps_of_all_passes = settings.epochs * -(-len(taught) // settings.batch)

    def critic_pass(epoch: int, record: StepRecord) -> None:
        sums, norms = MetricSums(), []
        targets = Targets(_returns(critic, batch, gamma, settings.lam))
        order = list(range(len(taught)))
        random.Random(derived_seed(params.seed, "critic", epoch)).shuffle(order)
        for first in range(0, len(order), settings.batch):
            steps = (epoch * len(order) + first) / settings.batch
            learning_rate = settings.learning_rate * max(0.0, 1 - steps / steps_of_all_passes)
            rows = order[first : first + settings.batch]
            norms.append(
                train_step(critic, batch, targets, rows, value_loss, sums, learning_rate=learning_rate)
            )
        record.figures |= sums.means(critic.world, batch.tokens) | {
            "critic_gradient_norm": sum(norms) / len(norms),
            "explained_variance_held_out": _explained(critic, unseen, gamma),
        }

    state = resume(stage, {"critic": critic}, kept_states=settings.epochs)
    end = fit(state, settings.epochs, critic_pass, shown=("value_loss",))

    # Use the weights of the pass with the highest held-out explained variance, because later passes may only
    # memorise a small set of trajectories.
    measured = [
        (value, int(record["step"] or 0))
        for record in state.metrics.records
        if (value := record["explained_variance_held_out"]) is not None
    ]
    if measured and not end.progress:
        best, epoch = max(measured)
        state.load(before=epoch + 2)
        if best < settings.min_explained_variance:
            raise StageFailed(
                f"{stage.name}: the critic's held-out explained variance {best:.3f} is below "
                f"critic.min_explained_variance {settings.min_explained_variance:g}; "
                "sample more trajectories or raise critic.epochs."
            )
    backbone = network.backbone
    assert isinstance(backbone, PreTrainedModel)
    with critic.gathered(network.value_head):
        value_head = network.extra()
    return finish(
        state,
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
        end=end,
        remark=""
        if measured
        else "all held-out rewards are equal, so the explained variance is undefined and was not required",
        extra={VALUE_HEAD: value_head},
    )


def read_rows(folders: Sequence[Path]) -> list[StoredRow]:
    """Return the trajectories below `folders` that have own tokens and on which the judge did not fail.

    Own tokens are those that the policy sampled, and the judge is what measures the kernels of a trajectory.
    Raises UserError if there is no such trajectory, or if the mask or the log-probabilities of a trajectory
    do not fit its tokens.
    """
    rows: list[StoredRow] = []
    failure = ""
    for folder in sorted({place for root in folders for place in trajectory_folders(root)}):
        tokens = load_tokens(folder)
        for index, record in enumerate(read_records(folder, tokens)):
            span = tokens.span(index)
            ids, mask, logprob = tokens.ids[span], tokens.action_mask[span], tokens.sampler_logprob[span]
            fits = len(ids) == len(mask) == len(logprob) and (mask <= 1).all() and (logprob <= 1e-3).all()
            if not fits or (len(mask) and mask[0]):
                raise UserError(
                    f"{folder}: action_mask or sampler_logprob of trajectory {index} does not fit its "
                    "tokens; restore the folder from the run that wrote it."
                )
            final = record["verdicts"][-1]
            if mask.any() and final["status"] != "infrastructure":
                rows.append(
                    StoredRow(
                        folder,
                        index,
                        task_id=record["task_id"],
                        reward=record["reward"],
                        tokens=len(ids),
                        own=int(np.count_nonzero(mask)),
                    )
                )
            else:
                failure = final["reason"]
    if not rows:
        mend = f"the judge failed on all ({failure}), run cuda-agent doctor." if failure else ""
        raise UserError(
            f"{', '.join(map(str, folders)) or 'no folder'}: no trajectory to learn values from; "
            + (mend or "run the stages from warmup on.")
        )
    return rows


def split_by_task(
    rows: Sequence[StoredRow], share: float, *, seed: int
) -> tuple[list[StoredRow], list[StoredRow]]:
    """Return the trajectories to learn from and the held-out trajectories.

    About `share` of the tasks, which `seed` determines, are held out, with all of their trajectories. Each
    part has at least one task. Raises UserError if there are fewer than two tasks.
    """
    tasks = sorted({row.task_id for row in rows}, key=lambda task: derived_seed(seed, "held out", task))
    if len(tasks) < 2:
        raise UserError(
            "critic: trajectories of a single task cannot be split into taught and held-out ones; "
            "give more tasks."
        )
    held_out = set(tasks[: min(len(tasks) - 1, max(1, round(share * len(tasks))))])
    taught = [row for row in rows if row.task_id not in held_out]
    return taught, [row for row in rows if row.task_id in held_out]


def batch_of(rows: Sequence[StoredRow]) -> EarnedRows:
    """Return stored trajectories as a batch whose token ids and masks are read from files on use."""
    return EarnedRows(
        ids=StoredArrays(rows, "ids"),
        action_mask=StoredArrays(rows, "action_mask"),
        lengths=[row.tokens for row in rows],
        offsets=np.cumsum([0, *(row.own for row in rows)], dtype=np.int64),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32),
    )


def _returns(engine: DeepSpeedEngine, batch: EarnedRows, gamma: float, lam: float) -> Tensor:
    """Compute the returns that the critic of `engine` learns in its next pass over `batch`.

    The result is float32 [own tokens], with one return for each token that the policy sampled. They are Monte
    Carlo returns with the discount `gamma` if `lam` is 1, and otherwise those of generalised advantage
    estimation with the critic's current values.
    """
    if lam == 1:
        return discounted_rewards(batch, gamma)
    return row_gae(batch, evaluate(engine, batch)[0], gamma, lam)[1]


def _explained(engine: DeepSpeedEngine, batch: EarnedRows, gamma: float) -> float:
    """Return the share of the variance of the discounted rewards that the critic's values explain.

    There is one value and one discounted reward for each token of `batch` that the policy sampled. The
    discounted reward of a token is the reward of its row, times `gamma` for each sampled token that follows.
    The share is NaN if all discounted rewards are equal.
    """
    return explained_variance(evaluate(engine, batch)[0], discounted_rewards(batch, gamma))
