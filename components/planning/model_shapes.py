"""Shapes of causal language models, as transformers builds them from a `config.json` without weights."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.config import check_policy_source, is_gguf, load_arguments
from components.core.errors import UserError
from components.core.params import Adapter, Params

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a causal language model that its memory depends on.

    `name` names the model in messages. `embedding_parameters` is the number of parameters of embeddings and
    output head, which are one matrix if they are tied. `hidden` is the width of the hidden states.
    `feed_forward` is the inner width of a dense feed-forward layer, and `expert_width` that of one expert;
    each is 0 if there is none. A token uses `experts_per_token` experts. `is_eager` says that transformers
    has only eager attention for the model, whose memory grows with the square of the length.
    `has_query_key_norms` says that the attention normalises the queries and keys of each head. `linears` has
    the sum of inputs and outputs of each linear layer that can have an adapter (policy/adapter.py), by its
    dotted name: in a mixture of experts, only those of the attention.
    """

    name: str
    parameters: int
    embedding_parameters: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    expert_width: int
    experts_per_token: int
    is_eager: bool
    has_query_key_norms: bool
    linears: dict[str, int]

    @property
    def layer_parameters(self) -> float:
        """Return the mean number of parameters of a layer, without embeddings and output head."""
        return (self.parameters - self.embedding_parameters) / self.layers

    def adapter_parameters(self, adapter: Adapter) -> int:
        """Return the number of parameters of LoRA adapters (arXiv 2106.09685, section 4.1) of this model.

        `adapter` has their rank and the layers that get one; the result is 0 if the rank is 0. Raises
        UserError if one of `adapter.targets` is no linear layer that can have an adapter.
        """
        if not adapter.rank:
            return 0
        return adapter.rank * sum(
            self.linears[layer] for layer in adapted_layers(list(self.linears), adapter, self.name)
        )


def adapted_layers(layers: Sequence[str], adapter: Adapter, model: str) -> list[str]:
    """Return those of `layers` that get an adapter: the ones in `adapter.targets`, or all if that is empty.

    `layers` are the dotted names of the linear layers that can have one. A target is such a name, or the end
    of such names after a dot, as in "q_proj". Raises UserError, which names the `model`, if a target matches
    none of the layers.
    """
    chosen = {
        target: [layer for layer in layers if f".{layer}".endswith(f".{target}")]
        for target in adapter.targets
    }
    if unknown := [target for target, found in chosen.items() if not found]:
        known = sorted({layer.rpartition(".")[2] for layer in layers})
        raise UserError(
            f"policy.adapter.targets: {model} has no linear layer {unknown[0]} that can have an adapter; "
            f"give some of {', '.join(known)}, or [] for all."
        )
    return sorted({layer for found in chosen.values() for layer in found}) or list(layers)


def policy_shapes(params: Params) -> ModelShapes:
    """Return the shapes of the policy that a run with `params` trains; only its configuration is read.

    If policy.source is `champion`, which is the promoted policy of the registry, they are those of
    policy.base, with which a run starts while there is no champion. Raises UserError if there is no such
    policy, or if transformers does not know its model.
    """
    from transformers import AutoConfig, Qwen3Config

    check_policy_source(params)
    policy = params.policy
    source = policy.base if policy.source == "champion" else policy.source
    if source == "scratch":
        # As the cold start makes it (bootstrap/cold_start.py).
        return shapes_of(
            Qwen3Config(
                hidden_size=policy.hidden,
                intermediate_size=policy.feed_forward,
                num_hidden_layers=policy.layers,
                num_attention_heads=policy.heads,
                num_key_value_heads=policy.kv_heads,
                head_dim=policy.head_dim,
                vocab_size=policy.vocabulary,
                tie_word_embeddings=True,
            ),
            "the policy from scratch",
        )
    try:
        return shapes_of(AutoConfig.from_pretrained(**load_arguments(Path(source))), source)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise UserError(
            f"{source if is_gguf(source) else f'{source}/config.json'}: transformers cannot make this model "
            f"({' '.join(str(error).split())}); give a Hugging Face causal language model."
        ) from error


def shapes_of(config: PretrainedConfig, name: str) -> ModelShapes:
    """Return the shapes of the model that transformers makes from `config`; `name` names it in messages.

    The model is made on torch's meta device, so its weights take no memory.
    """
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    modules = dict(model.named_modules())
    gates = [module for key, module in modules.items() if key.endswith("gate_proj")]
    head = model.get_output_embeddings()
    has_experts = any(key.endswith("experts") for key in modules)
    embeddings = {id(part.weight): part.weight for part in (model.get_input_embeddings(), head)}
    return ModelShapes(
        name=name,
        parameters=model.num_parameters(),
        embedding_parameters=sum(weight.numel() for weight in embeddings.values()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        feed_forward=max((gate.out_features for gate in gates if isinstance(gate, nn.Linear)), default=0),
        expert_width=getattr(text, "moe_intermediate_size", text.intermediate_size) if has_experts else 0,
        experts_per_token=text.num_experts_per_tok if has_experts else 0,
        is_eager=not model._supports_sdpa,
        has_query_key_norms=any(key.endswith("q_norm") for key in modules),
        linears={
            key: module.in_features + module.out_features
            for key, module in modules.items()
            if isinstance(module, nn.Linear) and module is not head and not (has_experts and ".mlp." in key)
        },
    )
