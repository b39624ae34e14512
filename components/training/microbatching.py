"""Functions that train and evaluate networks in micro-batches, which are divided among the ranks."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from components.training.batches import Batch, Microbatch, Packed, Streams, pack, plan, stream, to_device
from components.training.engine import DeepSpeedEngine, NotFinite
from components.training.ranks import World

Values = TypeVar("Values", bound=Streams)


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


# Function that takes a network, packed tokens and the values of its own tokens, and returns loss and metrics,
# each summed over own tokens.
Loss = Callable[[nn.Module, Packed, Values], tuple[Tensor, dict[str, Tensor]]]


def train_step(
    engine: DeepSpeedEngine,
    batch: Batch,
    values: Values,
    index: Sequence[int],
    loss: Loss[Values],
    sums: MetricSums,
    *,
    learning_rate: float,
) -> float:
    """Take one optimizer step on the rows of `batch` with the indices `index`; return the gradient norm.

    Every rank calls this with the same arguments. `values` are the streams over the own tokens of `batch`
    that `loss` needs. The loss is divided by the number of own tokens in all of these rows. The metrics that
    `loss` returns are added to `sums`.
    """
    world, tokens = engine.world, batch.own_tokens(index)

    def share(network: nn.Module, microbatch: Microbatch) -> Tensor:
        packed = to_device(pack(batch, microbatch.rows, world.part, world.sequence_parallel), world.device)
        total, parts = loss(network, packed, values.at(packed.own, world.device))
        sums.add(parts if microbatch.counted else {name: torch.zeros(()) for name in parts})
        return total / tokens

    limit = engine.settings.tokens_per_microbatch
    microbatches = plan(batch.lengths, index, limit, world.group, world.groups)
    return engine.step(microbatches, share, learning_rate=learning_rate)


def evaluate(
    forward: Callable[[Packed], tuple[Tensor, ...]], world: World, batch: Batch, tokens_per_microbatch: int
) -> tuple[Tensor, ...]:
    """Return the outputs of `forward` on the whole batch, each [own tokens].

    Every rank computes some of the micro-batches, and every rank gets the complete outputs.
    """
    results: list[Tensor] = []
    rows = range(len(batch.ids))
    for microbatch in plan(batch.lengths, rows, tokens_per_microbatch, world.group, world.groups):
        packed = pack(batch, microbatch.rows, world.part, world.sequence_parallel)
        for position, output in enumerate(forward(to_device(packed, world.device))):
            if position == len(results):
                results.append(stream(batch.tokens))
            if microbatch.counted:
                results[position][packed.own] = output.float().cpu()
    return tuple(world.sum(result) for result in results)
