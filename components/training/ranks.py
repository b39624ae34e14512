"""The ranks of a training stage, which are its processes, and how a process joins them.

A single process needs no launcher such as torchrun. With several ranks, every rank runs the same stage and
computes its part of each step.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import HashStore

from components.core import records, stage_params
from components.core.errors import UserError

# Elements of a tensor that are summed over the ranks at once.
SUMMED_ELEMENTS = 2**24


@dataclass(frozen=True)
class World:
    """Rank of this process, number of ranks, and the device that this rank computes on.

    `sequence_parallel` consecutive ranks are a group that shares the tokens of each forward pass.
    """

    rank: int
    size: int
    device: torch.device
    sequence_parallel: int = 1

    @property
    def group(self) -> int:
        return self.rank // self.sequence_parallel

    @property
    def groups(self) -> int:
        return self.size // self.sequence_parallel

    @property
    def part(self) -> int:
        """Return the index, within its group, of the slice of each sequence that this rank computes."""
        return self.rank % self.sequence_parallel

    def sum(self, tensor: Tensor) -> Tensor:
        """Add the tensors of the other ranks to `tensor`, in place, and return it; every rank must call this.

        The sum is exact for elements that are 0 on all ranks but one.
        """
        if self.size > 1:
            for part in tensor.view(-1).split(SUMMED_ELEMENTS):
                moved = part.to(self.device)
                distributed.all_reduce(moved)
                part.copy_(moved)
        return tensor

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank; every rank must call this."""
        return bool(self.sum(torch.tensor(float(condition))) > 0)

    def barrier(self) -> None:
        distributed.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


def join_world(device: records.Device, settings: stage_params.Engine) -> World:
    """Join the launcher's process group, or make one of only this process if there is no launcher.

    There is a launcher if the environment variable WORLD_SIZE is set, which torchrun and Ray Train set.
    Returns the World of this rank. engine.collective_seconds limits the duration of every collective.
    DeepSpeed's default of 10 minutes is too short, because the other ranks wait in a collective while rank 0
    samples. Raises UserError if the number of ranks is not a multiple of engine.sequence_parallel.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    target = torch.device("cpu" if device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if not distributed.is_initialized():
        # Without a launcher there is one rank, which meets itself in a store in its own memory; with one,
        # environment variables say where the ranks meet.
        single: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1}
        distributed.init_process_group(
            "gloo" if target.type == "cpu" else "nccl",
            timeout=timedelta(seconds=settings.collective_seconds),
            **({} if "WORLD_SIZE" in os.environ else single),
        )
    size, shared = distributed.get_world_size(), settings.sequence_parallel
    if size % shared:
        raise UserError(
            f"engine.sequence_parallel: {size} ranks cannot be divided into groups of {shared}; "
            "start a multiple of it, or lower it."
        )
    return World(distributed.get_rank(), size, target, shared)
