"""Trajectories as padded tensors, and the micro-batches that each rank computes.

Rows are padded only on the right. Because attention is causal, tokens do not see the padding after them, so
no attention mask and no position ids are needed.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from components.agent.trajectory import Trajectory


@dataclass(frozen=True)
class Batch:
    """Padded rows of token ids; every tensor is [batch, seq] and is made in host memory."""

    ids: Tensor
    # True on own tokens, the tokens that the policy sampled. It is never True at the first position, because
    # no hidden state precedes that token.
    action_mask: Tensor
    # True on tokens, False on padding.
    valid: Tensor

    def rows(self, index: Sequence[int]) -> Self:
        """Return the rows at the positions `index`, without the columns that are padding in all of them."""
        chosen = torch.tensor(index)
        width = int(self.valid[chosen].sum(1).max())
        fields = {field.name: getattr(self, field.name)[chosen, :width] for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **fields)

    def to(self, device: torch.device) -> Self:
        return dataclasses.replace(
            self, **{field.name: getattr(self, field.name).to(device) for field in dataclasses.fields(self)}
        )

    @property
    def lengths(self) -> list[int]:
        return self.valid.sum(1).tolist()

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all rows that the policy sampled."""
        return int(self.action_mask.sum())


@dataclass(frozen=True)
class Rollout(Batch):
    """Batch of sampled trajectories with the sampler's log-probabilities (nats) and the rewards.

    `rewards` is the trajectory's reward at the last token of each row that the policy sampled, and 0
    elsewhere.
    """

    sampler_logprob: Tensor
    rewards: Tensor


def pad(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    """Return pairs of token ids and action mask as one padded batch.

    The mask is 1 at the tokens that the policy sampled. Raises ValueError if the lengths of a pair differ, if
    no mask entry of a row is 1, or if the first one is 1.
    """
    width = max(len(ids) for ids, _ in rows)
    batch = Batch(
        ids=torch.zeros(len(rows), width, dtype=torch.int64),
        action_mask=torch.zeros(len(rows), width, dtype=torch.bool),
        valid=torch.zeros(len(rows), width, dtype=torch.bool),
    )
    for row, (ids, mask) in enumerate(rows):
        if len(ids) != len(mask) or not any(mask) or mask[0]:
            raise ValueError(
                f"row {row}: {len(ids)} ids, {len(mask)} mask entries, {sum(mask)} own tokens; "
                "the mask must fit and spare the first token"
            )
        batch.ids[row, : len(ids)] = torch.tensor(ids)
        batch.action_mask[row, : len(ids)] = torch.tensor(mask, dtype=torch.bool)
        batch.valid[row, : len(ids)] = True
    return batch


def collate(trajectories: Sequence[Trajectory], rewards: Sequence[float] | None = None) -> Rollout:
    """Return trajectories as one batch; `rewards`, if given, replace the trajectories' own rewards.

    The reward is placed at the last token that the policy sampled, because advantages skip prompt and
    observation tokens and would ignore a reward there.
    """
    earned = [trajectory.reward for trajectory in trajectories] if rewards is None else rewards
    batch = pad([(trajectory.ids, trajectory.action_mask) for trajectory in trajectories])
    sampler_logprob, reward_at = torch.zeros(batch.ids.shape), torch.zeros(batch.ids.shape)
    for row, (trajectory, reward) in enumerate(zip(trajectories, earned, strict=True)):
        sampler_logprob[row, : len(trajectory.ids)] = torch.tensor(trajectory.sampler_logprob)
        last = max(t for t, own in enumerate(trajectory.action_mask) if own)
        reward_at[row, last] = reward
    return Rollout(**vars(batch), sampler_logprob=sampler_logprob, rewards=reward_at)


@dataclass(frozen=True)
class Microbatch:
    """Row numbers of a batch that one forward and backward pass computes."""

    rows: tuple[int, ...]
    # False for a pass whose loss is not used; it keeps the number of passes equal on all ranks.
    counted: bool = True


def plan(
    lengths: Sequence[int], rows: Sequence[int], tokens_per_microbatch: int, rank: int = 0, world: int = 1
) -> list[Microbatch]:
    """Return this rank's micro-batches of `rows`, beginning with the longest rows.

    Each micro-batch has at most `tokens_per_microbatch` tokens, padding included, or a single row. Rows are
    sorted by length and dealt to the ranks in turn, so that all ranks get about equal work. Every rank gets
    the same number of micro-batches, because forward and backward passes are collective under ZeRO 3: a rank
    with fewer of them repeats the shortest row with `counted` False. The result depends only on the
    arguments, so the ranks need not communicate.
    """
    by_length = sorted(rows, key=lambda row: (-lengths[row], row))
    plans = []
    for other in range(world):
        packed: list[list[int]] = []
        for row in by_length[other::world]:
            if packed and (len(packed[-1]) + 1) * lengths[packed[-1][0]] <= tokens_per_microbatch:
                packed[-1].append(row)
            else:
                packed.append([row])
        plans.append(packed)
    own = [Microbatch(tuple(packed)) for packed in plans[rank]]
    missing = max(len(packed) for packed in plans) - len(own)
    return own + [Microbatch((by_length[-1],), counted=False)] * missing
