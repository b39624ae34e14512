"""One optimizer step, and one evaluation without gradients, over a batch in micro-batches on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from components.training.batches import Batch, Microbatch, plan
from components.training.engine import DeepSpeedEngine, NotFinite, World

Rows = TypeVar("Rows", bound=Batch)


class MetricSums:
    """Metrics summed over own tokens, micro-batches and ranks."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            self.values[name] = self.values.get(name, torch.zeros(())) + value.detach().float().cpu()

    def means(self, world: World, tokens: int) -> dict[str, float]:
        """Return the sums over all ranks divided by `tokens`; raise NotFinite for one that is not a number.

        Collective: every rank must have added the same names.
        """
        total = world.sum(torch.stack(list(self.values.values())))
        for name, value in zip(self.values, total, strict=True):
            if not torch.isfinite(value):
                raise NotFinite(f"{name} is not a number")
        return {name: float(value) / tokens for name, value in zip(self.values, total, strict=True)}


Loss = Callable[[nn.Module, Rows], tuple[Tensor, dict[str, Tensor]]]
"""Function of a network and some rows that returns the loss and metrics, each summed over own tokens."""


def train_step(
    engine: DeepSpeedEngine,
    batch: Rows,
    index: Sequence[int],
    loss: Loss[Rows],
    sums: MetricSums,
    *,
    learning_rate: float,
) -> float:
    """Take one optimizer step on the rows of that index and return the gradient norm.

    The loss is divided by the own tokens of these rows, all ranks' together; its metrics are added to `sums`.
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
    """Return the outputs of a network, each [batch, seq], on every rank; the ranks share the work."""
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
