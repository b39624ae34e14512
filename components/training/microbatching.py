"""Functions that train and evaluate networks in micro-batches, which are divided among the ranks."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from components.training.batches import Batch, Microbatch, plan
from components.training.engine import DeepSpeedEngine, NotFinite, World

Rows = TypeVar("Rows", bound=Batch)


class MetricSums:
    """Sums of metrics over the tokens that the policy sampled.

    `add` adds the sums of one micro-batch of this rank, and `means` combines the sums of all ranks.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            self.values[name] = self.values.get(name, torch.zeros(())) + value.detach().float().cpu()

    def means(self, world: World, tokens: int) -> dict[str, float]:
        """Return each metric's sum over all ranks, divided by `tokens`, the number of tokens in the sums.

        Raises NotFinite if a sum is NaN or infinite. Every rank must call this, after adding the same names.
        """
        total = world.sum(torch.stack(list(self.values.values())))
        for name, value in zip(self.values, total, strict=True):
            if not torch.isfinite(value):
                raise NotFinite(f"{name} is not a number")
        return {name: float(value) / tokens for name, value in zip(self.values, total, strict=True)}


# Function that takes a network and rows and returns loss and metrics, each summed over own tokens.
Loss = Callable[[nn.Module, Rows], tuple[Tensor, dict[str, Tensor]]]


def train_step(
    engine: DeepSpeedEngine,
    batch: Rows,
    index: Sequence[int],
    loss: Loss[Rows],
    sums: MetricSums,
    *,
    learning_rate: float,
) -> float:
    """Take one optimizer step on the rows of `batch` at the positions `index`; return the gradient norm.

    Every rank calls this with the same arguments. The loss is divided by the number of tokens in all of these
    rows that the policy sampled. The metrics that `loss` returns are added to `sums`.
    """
    world, tokens = engine.world, int(batch.action_mask[list(index)].sum())
    limit = engine.settings.tokens_per_microbatch

    def share(network: nn.Module, microbatch: Microbatch) -> Tensor:
        total, parts = loss(network, batch.rows(microbatch.rows).to(world.device))
        sums.add(parts if microbatch.counted else {name: torch.zeros(()) for name in parts})
        return total / tokens

    microbatches = plan(batch.lengths, index, limit, world.rank, world.size)
    return engine.step(microbatches, share, learning_rate=learning_rate)


def evaluate(
    forward: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    world: World,
    batch: Batch,
    tokens_per_microbatch: int,
) -> tuple[Tensor, ...]:
    """Return the outputs of `forward` on the whole batch, each [batch, seq].

    Every rank computes some of the micro-batches, and every rank gets the complete outputs.
    """
    results: list[Tensor] = []
    rows_of_all = range(len(batch.ids))
    for microbatch in plan(batch.lengths, rows_of_all, tokens_per_microbatch, world.rank, world.size):
        rows = batch.rows(microbatch.rows).to(world.device)
        for position, output in enumerate(forward(rows.ids, rows.action_mask)):
            if position == len(results):
                results.append(torch.zeros(batch.ids.shape))
            if microbatch.counted:
                results[position][list(microbatch.rows), : output.shape[1]] = output.float().cpu()
    return tuple(world.sum(result) for result in results)
