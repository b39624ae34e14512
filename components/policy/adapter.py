"""Low-rank adapters (LoRA, arXiv 2106.09685): small matrices that are trained in place of all parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from components.planning.model_shapes import adapted_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from components.core.params import Adapter

# Names of an expert's matrices and of the router. In a mixture of experts, peft takes a linear layer with
# such a name for the fused experts.
EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def add_adapter(model: PreTrainedModel, settings: Adapter) -> None:
    """Add trainable adapters to linear layers of `model` and freeze all its other parameters.

    Does nothing if `settings.rank` is 0. With another rank, this function must be called before a DeepSpeed
    engine is made for the model. `settings.targets` has the names of the layers, or the ends of their dotted
    names; if it is empty, every linear layer that can have an adapter gets one, which is every linear layer
    but the output head. A new adapter does not change what the model computes. Its values are equal in every
    call, so also on all ranks. peft gives them the dtype of their layer, as DeepSpeed requires; DeepSpeed
    itself keeps the trained values in float32.

    In a mixture of experts, only the linear layers of the attention get an adapter. transformers 5 fuses the
    experts of a layer into two parameters, which are no linear layers, and neither is the router. Raises
    UserError if one of `settings.targets` names no linear layer that can have an adapter.
    """
    if settings.rank == 0:
        return
    from peft import LoraConfig

    name = model.name_or_path or type(model).__name__
    layers = adapted_layers(_linear_layers(model), settings, name)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also change the random state of GPUs.
        torch.default_generator.manual_seed(0)
        model.add_adapter(LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=layers))


@contextlib.contextmanager
def adapter_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which `model` computes without its adapter, as before the adapter was trained.

    The adapter gets no gradients in this context. A model without an adapter is left as it is.
    """
    if not model._hf_peft_config_loaded:
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the dotted names of the linear layers of `model` that can have an adapter.

    The output head is left out. In a mixture of experts, the layers of experts and routers are left out too;
    the last part of their names is in `EXPERT_NAMES`, such as "gate_proj".
    """
    head = model.get_output_embeddings()
    # ZeRO 3 keeps the shape of a parameter that it has sharded in `ds_shape`.
    has_experts = any(
        len(getattr(parameter, "ds_shape", parameter.shape)) == 3 for parameter in model.parameters()
    )
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
        if not (has_experts and name.rpartition(".")[2] in EXPERT_NAMES)
    ]
