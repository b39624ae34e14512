"""The two trained networks: the actor returns log-probabilities and entropies, the critic returns values.

Both compute outputs only for own tokens, the tokens that the policy sampled. The output for a token is
computed from the hidden state of the token before it, so before it is emitted.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from components.core import stage_params
from components.core.errors import UserError
from components.core.params import Params
from components.policy.adapter import add_adapter
from components.policy.checkpoint import explain_load_errors
from components.training import document_attention
from components.training.batches import Packed, Streams
from components.training.deepspeed_config import sharded_loading
from components.training.engine import DTYPES
from components.training.losses import value_loss_sum
from components.training.output_head import TokenScores

VALUE_HEAD = "value_head.safetensors"


def hidden_states(model: nn.Module, packed: Packed) -> Tensor:
    """Return the hidden states [n, hidden] of `model` at the positions before the n own tokens of `packed`.

    They are those after the last layer and its norm. Own tokens are those that the policy sampled (action
    mask 1). `model` predicts each of them from the state at the position before it.
    """
    states: Tensor = model(
        input_ids=packed.ids,
        position_ids=packed.positions,
        documents=packed.documents,
        document_offsets=packed.document_offsets,
        longest_document=packed.longest_document,
        use_cache=False,
    ).last_hidden_state  # [1, tokens, hidden]
    return states[0, packed.before]


class Actor(nn.Module):
    """Causal language model that returns a log-probability and an entropy (nats) for each own token.

    Own tokens are those of the packed rows that the policy sampled. The entropy is that of the distribution
    from which the token was sampled. `temperature` is the sampling temperature, which divides the logits.
    """

    def __init__(self, policy: PreTrainedModel, temperature: float):
        super().__init__()
        head = policy.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        self.policy = policy
        self.scores = TokenScores(head, temperature)

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies (nats) of the n sampled tokens of `packed`, both [n]."""
        # Score own tokens only, because most tokens of a rollout are prompt and observations.
        scores: tuple[Tensor, Tensor] = self.scores(
            hidden_states(self.policy.base_model, packed), packed.targets
        )
        return scores


class ValueHead(nn.Linear):
    """Linear layer that maps hidden states [..., hidden] to one value each, [..., 1], in float32."""

    def forward(self, states: Tensor) -> Tensor:
        return functional.linear(states.float(), self.weight.float(), self.bias.float())


class Critic(nn.Module):
    """Language model backbone with a value head; it computes the value of the state before each own token.

    Own tokens are those that the policy sampled. `hidden` is the backbone's hidden size. The tensor
    `baseline` is a constant that is added to every value: the mean return of the trajectories of value
    pretraining, or the mean reward of the first step of PPO if PPO does not start with a pretrained critic.
    The value head starts at zero and one update changes its output by about learning rate * width, so without
    the baseline tens of updates would be needed to learn the mean return.
    """

    def __init__(self, backbone: nn.Module, hidden: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.backbone = backbone
        # DeepSpeed's ZeRO 3 refuses parameters of different precisions.
        self.value_head = ValueHead(hidden, 1, dtype=dtype)
        for parameter in self.value_head.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("baseline", torch.zeros(()))
        self.baseline: Tensor

    def forward(self, packed: Packed) -> tuple[Tensor]:
        """Return a tuple of one tensor [n]: the values before the n tokens that the policy sampled."""
        values = self.value_head(hidden_states(self.backbone, packed))  # [n, 1]
        return (values.squeeze(-1) + self.baseline.float(),)

    def extra(self) -> dict[str, Tensor]:
        """Return the value head's weight and bias and the baseline, for the file `value_head.safetensors`.

        The keys are `weight`, `bias` and `baseline`, a constant that is added to every value. The tensors are
        float32 copies on the cpu.
        """
        tensors = {"weight": self.value_head.weight, "bias": self.value_head.bias, "baseline": self.baseline}
        return {name: tensor.detach().float().cpu().contiguous().clone() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Targets(Streams):
    """Returns that a critic learns, in units of the reward, one for each token that the policy sampled."""

    returns: Tensor


def value_loss(network: nn.Module, packed: Packed, own: Targets) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the critic `network`, and the same value as the metric value_loss.

    It is half the squared error of the critic's values against the returns in `own`, summed over the tokens
    of `packed` that the policy sampled.
    """
    (values,) = network(packed)
    total, _ = value_loss_sum(
        values, values.detach(), own.returns, torch.ones_like(values, dtype=torch.bool), clip=None
    )
    return total, {"value_loss": total}


def load_policy(folder: Path, params: Params) -> PreTrainedModel:
    """Load the causal language model in `folder` for training.

    It gets a LoRA adapter if policy.adapter.rank is above 0. Every rank must call this with the same
    arguments; under ZeRO 3 the weights are divided among the ranks. Raises UserError if the model cannot be
    loaded.
    """
    return _load(AutoModelForCausalLM, folder, params)


def load_critic(folder: Path, params: Params) -> Critic:
    """Load a critic whose backbone is the model in `folder`, which may be a policy.

    The value head is read from the file `value_head.safetensors`, which value pretraining writes, and starts
    at zero if there is no such file. The backbone gets a LoRA adapter if policy.adapter.rank is above 0.
    Every rank must call this with the same arguments; under ZeRO 3 the weights are divided among the ranks.
    Raises UserError if the model cannot be loaded.
    """
    backbone = _load(AutoModel, folder, params)
    critic = Critic(backbone, backbone.config.get_text_config().hidden_size, DTYPES[params.engine.dtype])
    if (folder / VALUE_HEAD).is_file():
        tensors = load_file(folder / VALUE_HEAD)
        critic.value_head.load_state_dict({"weight": tensors["weight"], "bias": tensors["bias"]})
        critic.baseline.copy_(tensors["baseline"])
    return critic


def check_critic(folder: Path) -> None:
    """Raise UserError if the checkpoint `folder` is no critic of value pretraining: it has no value head."""
    if not (folder / VALUE_HEAD).is_file():
        raise UserError(
            f"{folder}: {VALUE_HEAD} is missing, so this is no critic; give the checkpoint of stage 3."
        )


def _load(factory: Any, folder: Path, params: Params) -> PreTrainedModel:
    settings = params.engine
    with sharded_loading(settings, params.device), explain_load_errors(folder, "model"):
        model: PreTrainedModel = factory.from_pretrained(
            folder, dtype=DTYPES[settings.dtype], attn_implementation=document_attention.SDPA
        )
    if not model._supports_sdpa:
        if settings.sequence_parallel > 1:
            raise UserError(
                f"{folder}: the attention of {type(model).__name__} has no scaled dot product form, which "
                "sequence parallelism needs; set engine.sequence_parallel to 1."
            )
        model.set_attn_implementation(document_attention.EAGER)
    add_adapter(model, params.policy.adapter)
    if settings.mlp_tokens:
        tile_mlps(model, settings)
    return model


def tile_mlps(model: PreTrainedModel, settings: stage_params.Engine) -> None:
    """Let the dense feed-forward layers of `model` compute at most `settings.mlp_tokens` tokens at a time.

    Their intermediate states, several times as wide as the hidden states, then exist for this many tokens
    only (Arctic long sequence training, arXiv 2506.13996). Under ZeRO 3 a layer must be a leaf module, whose
    parameters are gathered once for all of its parts, because the ranks may have different numbers of parts.
    """
    tiled = [
        module
        for module in model.modules()
        if all(isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "down_proj"))
    ]
    for module in tiled:
        module.forward = functools.partial(_tiled, module, type(module).forward, settings.mlp_tokens)
    if settings.zero_stage == 3 and tiled:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list({type(module) for module in tiled}))


def _tiled(module: nn.Module, forward: Any, tokens: int, states: Tensor) -> Tensor:
    """Apply `forward` of `module` to parts of `states` [..., seq, hidden]; the result has the same shape.

    Each part has at most `tokens` of the seq positions. Intermediate states are not kept for the backward
    pass.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    if torch.is_grad_enabled() and not states.requires_grad:
        # TiledMLP computes no gradients of the weights if the states have none.
        states = states.detach().requires_grad_()
    output: Tensor = TiledMLP.apply(
        forward, module, states, math.ceil(states.shape[-2] / tokens), list(module.parameters())
    )
    return output
