"""Passes of an engine over the rows of a batch: one optimizer step, and an evaluation without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from components.training.batches import Batch, Microbatch, plan
from components.training.engine import Engine, NotFinite, World

Rows = TypeVar("Rows", bound=Batch)


class MetricSums:
    """Metrics summed over own tokens, and over the micro-batches and ranks that they come from."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            self.values[name] = self.values.get(name, torch.zeros(())) + value.detach().float().cpu()

    def means(self, world: World, tokens: int) -> dict[str, float]:
        """Per own token of all ranks; collective, so every rank must have added the same names. Raises NotFinite."""
        total = world.sum(torch.stack(list(self.values.values())))
        for name, value in zip(self.values, total, strict=True):
            if not torch.isfinite(value):
                raise NotFinite(f"{name} is not a number")
        return {name: float(value) / tokens for name, value in zip(self.values, total, strict=True)}


Loss = Callable[[nn.Module, Rows], tuple[Tensor, dict[str, Tensor]]]
"""The loss summed over own tokens, and metrics likewise, of some rows."""


def train_step(
    engine: Engine,
    batch: Rows,
    index: Sequence[int],
    loss: Loss[Rows],
    sums: MetricSums,
    *,
    budget: int,
    learning_rate: float,
) -> float:
    """One optimizer step on those rows, normalised by their own tokens on all ranks; returns the gradient norm."""
    world, tokens = engine.world, int(batch.action_mask[list(index)].sum())

    def share(network: nn.Module, microbatch: Microbatch) -> Tensor:
        total, parts = loss(network, batch.rows(microbatch.rows).to(world.device))
        sums.add(parts if microbatch.counted else {name: torch.zeros(()) for name in parts})
        return total / tokens

    return engine.step(
        plan(batch.lengths, index, budget, world.rank, world.size), share, learning_rate=learning_rate
    )


def evaluate(
    forward: Callable[[Tensor, Tensor], tuple[Tensor, ...]], world: World, batch: Batch, budget: int
) -> tuple[Tensor, ...]:
    """[batch, seq] outputs of a network for a whole batch, on every rank; the ranks share the work."""
    results: list[Tensor] = []
    for microbatch in plan(batch.lengths, range(len(batch.ids)), budget, world.rank, world.size):
        rows = batch.rows(microbatch.rows).to(world.device)
        for position, output in enumerate(forward(rows.ids, rows.action_mask)):
            if position == len(results):
                results.append(torch.zeros(batch.ids.shape))
            if microbatch.counted:
                results[position][list(microbatch.rows), : output.shape[1]] = output.float().cpu()
    return tuple(world.sum(result) for result in results)
