"""Rows of tokens of different lengths, and the packed micro-batches that the ranks compute.

Nothing is padded. A row is a pair of arrays (token ids and action mask), which may be read from a file when
they are used. A micro-batch is one sequence of rows, one after the other, in which attention does not cross
from one row to another (`document_attention`). Values that belong to own tokens, the tokens that the policy
sampled, are stored as one flat tensor [own tokens] over all rows of a batch, a *stream*.
"""

import dataclasses
import heapq
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.agent.trajectory import Trajectory

# Streams of at least this many bytes are kept in a temporary file that is mapped into memory.
MAPPED_BYTES = 2**28


@dataclass(frozen=True)
class Batch:
    """Rows of token ids; row r is `ids[r]` with `action_mask[r]`, both [tokens of the row].

    The mask is 1 on own tokens, the tokens that the policy sampled. It is 0 at the first token of a row,
    because no hidden state precedes that token. Row r has `lengths[r]` tokens. Of the own tokens of the whole
    batch, it has those with the indices `offsets[r]` to `offsets[r + 1]` - 1; `offsets` is [rows + 1].
    """

    ids: Sequence[NDArray[np.int32]]
    action_mask: Sequence[NDArray[np.uint8]]
    lengths: Sequence[int]
    offsets: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the policy sampled in all rows of the batch."""
        return int(self.offsets[-1])

    def own_tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens that the policy sampled in the rows with the indices `rows`."""
        chosen = np.asarray(rows, dtype=np.int64)
        return int((self.offsets[chosen + 1] - self.offsets[chosen]).sum())


@dataclass(frozen=True)
class EarnedRows(Batch):
    """Batch of rows of tokens with the reward of each row, float32 [rows].

    The reward is earned at the last token that the policy sampled in the row.
    """

    rewards: Tensor


@dataclass(frozen=True)
class Rollout(EarnedRows):
    """Batch of sampled trajectories, one a row, with the log-probabilities (nats) that the sampler computed.

    `sampler_logprob` [own tokens] has the log-probability of each token that the policy sampled, in the order
    of the rows.
    """

    sampler_logprob: Tensor


@dataclass(frozen=True)
class Streams:
    """Values that a loss needs for the own tokens of a batch, which are those that the policy sampled.

    Each field of a subclass is a tensor [own tokens] in host memory. An object of this class itself has no
    values; it is for losses that need none.
    """

    def at(self, own: Tensor, device: torch.device) -> Self:
        """Return an object of the same class with the values of n own tokens only, each [n], on `device`.

        `own` [n] has the indices of these tokens among all own tokens of the batch.
        """
        return dataclasses.replace(
            self,
            **{
                field.name: _on_device(getattr(self, field.name)[own], device)
                for field in dataclasses.fields(self)
            },
        )


@dataclass(frozen=True)
class Packed:
    """Tokens of one forward pass on this rank: the rows of a micro-batch one after the other.

    With sequence parallelism the ranks of a group have consecutive slices of the sequence, of equal lengths.
    `ids` and `positions`, the position of each token in its row, are [1, tokens of the slice]. `documents`
    [rows + 1] has the index in the whole sequence at which each row begins, and as its last entry the length
    of the sequence; a row of padding counts as a row. `document_offsets` is the same as an int32 tensor on
    the device.

    The other fields are about n own tokens (tokens that the policy sampled), those whose preceding token is
    in this slice. `targets` [n] are their ids, and `before` [n] the indices in the slice of the preceding
    tokens. `own` [n], in host memory, has the index of each of them if all own tokens of the batch are
    numbered in the order of the rows.
    """

    ids: Tensor
    positions: Tensor
    documents: tuple[int, ...]
    document_offsets: Tensor
    before: Tensor
    targets: Tensor
    own: Tensor

    @property
    def longest_document(self) -> int:
        """Return the number of tokens of the longest row, including a row of padding."""
        return max(last - first for first, last in itertools.pairwise(self.documents))


def _on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor that is in host memory as a tensor on `device`.

    On a GPU it is a copy, and the host does not wait until the GPU has it. On a cpu it is `tensor` itself.
    """
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def stream(count: int) -> Tensor:
    """Return a float32 tensor of `count` zeros in host memory.

    A tensor of at least `MAPPED_BYTES` bytes is mapped into memory from a temporary file.
    """
    if 4 * count < MAPPED_BYTES:
        return torch.zeros(count)
    with tempfile.TemporaryFile() as file:
        return torch.from_numpy(np.memmap(file, dtype=np.float32, mode="w+", shape=(count,)))


def make_batch(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    """Return a batch of the given rows, each of which is a pair of token ids and action mask.

    The mask is 1 on the tokens that the policy sampled, and both parts of a pair are [tokens of the row].
    Arrays of int32 (ids) and uint8 (mask) are not copied. Raises ValueError if the lengths of a pair differ,
    if the mask of a row has no 1, or if its first entry is 1.
    """
    ids = [np.asarray(row, dtype=np.int32) for row, _ in rows]
    masks = [np.asarray(mask, dtype=np.uint8) for _, mask in rows]
    for number, (row, mask) in enumerate(zip(ids, masks, strict=True)):
        if len(row) != len(mask) or not mask.any() or mask[0]:
            raise ValueError(
                f"row {number}: {len(row)} ids, {len(mask)} mask entries, {int(mask.sum())} own tokens; "
                "the mask must fit and spare the first token"
            )
    offsets = np.cumsum([0, *(int(np.count_nonzero(mask)) for mask in masks)], dtype=np.int64)
    return Batch(ids, masks, [len(row) for row in ids], offsets)


def collate(trajectories: Sequence[Trajectory]) -> Rollout:
    """Return trajectories as one batch, with their rewards and the sampler's log-probabilities.

    The judge, which measures the kernels of a trajectory, must not have failed on any of them, because such a
    trajectory has no reward (AssertionError). Raises ValueError if there is no trajectory, or if the policy
    sampled no token of one of them.
    """
    batch = make_batch([(trajectory.ids, trajectory.action_mask) for trajectory in trajectories])
    logprobs = [
        np.asarray(trajectory.sampler_logprob, dtype=np.float32)[mask.astype(bool)]
        for trajectory, mask in zip(trajectories, batch.action_mask, strict=True)
    ]
    return Rollout(
        **vars(batch),
        sampler_logprob=torch.from_numpy(np.concatenate(logprobs)),
        rewards=torch.tensor([trajectory.earned for trajectory in trajectories], dtype=torch.float32),
    )


def pack(
    batch: Batch,
    rows: Sequence[int],
    part: int = 0,
    parts: int = 1,
    device: torch.device | str = "cpu",
) -> Packed:
    """Concatenate the rows with the indices `rows`, and return one of `parts` equal slices on `device`.

    `part` is the index of the slice, from 0. Before the sequence is cut, it is extended to a multiple of
    `parts` tokens with a row of padding, whose ids are 0.
    """
    lengths = [batch.lengths[row] for row in rows]
    if spare := -sum(lengths) % parts:
        lengths.append(spare)
    documents = tuple(itertools.accumulate(lengths, initial=0))
    width = documents[-1] // parts
    begin, end = part * width, (part + 1) * width
    ids = np.zeros(documents[-1], dtype=np.int64)
    mask = np.zeros(documents[-1], dtype=bool)
    positions = np.zeros(documents[-1], dtype=np.int64)
    for row, first, last in zip(rows, documents, documents[1:], strict=False):
        ids[first:last], mask[first:last] = batch.ids[row], batch.action_mask[row]
    for first, last in itertools.pairwise(documents):
        positions[first:last] = np.arange(last - first)
    before = np.flatnonzero(mask) - 1
    own = np.concatenate([np.arange(batch.offsets[row], batch.offsets[row + 1]) for row in rows])
    is_here = (before >= begin) & (before < end)
    return Packed(
        ids=_on_device(torch.from_numpy(ids[begin:end])[None], device),
        positions=_on_device(torch.from_numpy(positions[begin:end])[None], device),
        documents=documents,
        document_offsets=_on_device(torch.tensor(documents, dtype=torch.int32), device),
        before=_on_device(torch.from_numpy(before[is_here] - begin), device),
        targets=_on_device(torch.from_numpy(ids[before[is_here] + 1]), device),
        own=torch.from_numpy(own[is_here]),
    )


@dataclass(frozen=True)
class Microbatch:
    """Rows of a batch, by index, that are computed in one forward and backward pass.

    If `counted` is False, the loss of the pass is not used. Such a pass is made only so that all ranks make
    the same number of passes.
    """

    rows: tuple[int, ...]
    counted: bool = True


def plan(
    lengths: Sequence[int], rows: Sequence[int], tokens_per_microbatch: int, group: int = 0, groups: int = 1
) -> list[Microbatch]:
    """Return the micro-batches of one group of ranks, beginning with the longest rows.

    The ranks of a group share each forward pass (sequence parallelism); without it a group is one rank.
    `lengths` has the number of tokens of each row of the batch, `rows` are the indices of the rows to
    compute, and `group` is the index of the group among `groups` groups.

    Each micro-batch has at most `tokens_per_microbatch` tokens, unless it is a single longer row. Rows are
    sorted by length and dealt to the groups in turn, so that all groups get about equal work. Every group
    gets the same number of micro-batches, because forward and backward passes are collective under ZeRO 3: a
    group with fewer micro-batches than another repeats the shortest of `rows` with `counted` False. The
    result depends only on the arguments, so the ranks need not communicate.
    """
    by_length = sorted(rows, key=lambda row: (-lengths[row], row))
    plans = []
    for other in range(groups):
        packed: list[list[int]] = []
        used: list[tuple[int, int]] = []  # a heap of each micro-batch's tokens and number, the emptiest first
        for row in by_length[other::groups]:
            tokens, number = used[0] if used else (tokens_per_microbatch, 0)
            if tokens + lengths[row] <= tokens_per_microbatch:
                packed[number].append(row)
                heapq.heapreplace(used, (tokens + lengths[row], number))
            else:
                heapq.heappush(used, (lengths[row], len(packed)))
                packed.append([row])
        plans.append(packed)
    own = [Microbatch(tuple(packed)) for packed in plans[group]]
    missing = max(len(packed) for packed in plans) - len(own)
    return own + [Microbatch((by_length[-1],), counted=False)] * missing
