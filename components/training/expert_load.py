"""Measurement of how evenly a mixture of experts uses its experts, made while the actor is evaluated.

A router that sends most tokens to a few experts wastes the others, and a policy update can cause it: nothing
in the PPO loss keeps the load even.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from components.training.metrics import Figures
from components.training.ranks import World


class ExpertLoad:
    """Counter of the tokens that the routers of a model send to each expert, within `counting`.

    A router is a module of transformers with the attributes `top_k` and `num_experts` whose last output is
    the numbers of the chosen experts [tokens, top_k], as in Qwen3-MoE and gpt-oss.
    """

    def __init__(self, model: nn.Module):
        self.is_counting = False
        self.counts: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if "router" in type(module).__name__.lower() and hasattr(module, "num_experts"):
                self.counts[name] = torch.zeros(int(module.num_experts))
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def count(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if self.is_counting:
                chosen = outputs[-1].flatten()
                self.counts[name] += torch.bincount(chosen, minlength=len(self.counts[name])).cpu()

        return count

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Return a context in which the tokens that each expert gets are counted; counts begin at zero."""
        for counts in self.counts.values():
            counts.zero_()
        self.is_counting = True
        try:
            yield
        finally:
            self.is_counting = False

    def figures(self, world: World) -> Figures:
        """Return metrics of the last `counting` on all ranks; every rank must call this.

        `expert_load` is the load of the busiest expert of a layer divided by the mean load, averaged over the
        layers; it is 1 if the load is even. `experts_unused` is the share of experts to which no token was
        sent. The result is empty for a model without experts.
        """
        if not self.counts:
            return {}
        loads = [world.sum(counts.clone()) for counts in self.counts.values()]
        return {
            "expert_load": sum(float(load.max() / load.mean()) for load in loads) / len(loads),
            "experts_unused": float(torch.cat(loads).eq(0).float().mean()),
        }
