"""The two trained networks: the actor returns log-probabilities and entropies, the critic returns values.

Both compute outputs only for own tokens, the tokens that the policy sampled. The output for token t is
computed from the hidden state at position t - 1, before the token is emitted.
"""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, PreTrainedModel

from components.core.errors import UserError
from components.training.token_scores import TokenScores

VALUE_HEAD = "value_head.safetensors"


class Actor(nn.Module):
    """Causal language model that returns log-probability and entropy (nats) of the tokens that it sampled.

    `temperature` is the sampling temperature, which divides the logits.
    """

    def __init__(self, policy: PreTrainedModel, temperature: float):
        super().__init__()
        head = policy.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        self.policy = policy
        self.scores = TokenScores(head, temperature)

    def forward(self, ids: Tensor, action_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, both [batch, seq], 0 where `action_mask` is False."""
        hidden = self.policy.base_model(
            input_ids=ids, use_cache=False
        ).last_hidden_state  # [batch, seq, hidden]
        own = action_mask[:, 1:]
        # Score own tokens only, because most tokens of a rollout are prompt and observations.
        logprob, entropy = self.scores(hidden[:, :-1][own], ids[:, 1:][own])  # [own tokens]
        empty = torch.zeros(ids.shape, device=ids.device)
        return empty.masked_scatter(action_mask, logprob), empty.masked_scatter(action_mask, entropy)


class ValueHead(nn.Linear):
    """Linear layer with one output; it computes in float32, and its weights start at zero."""

    def __init__(self, hidden: int):
        super().__init__(hidden, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        return functional.linear(states.float(), self.weight.float(), self.bias.float())


class Critic(nn.Module):
    """Language model backbone with a value head, which computes V_t from the hidden state at t - 1.

    `baseline` is a constant that is added to every value, the mean return of the first training data. The
    value head starts at zero and one update changes its output by about learning rate * width, so without the
    baseline tens of updates would be needed to learn the mean return.
    """

    def __init__(self, backbone: nn.Module, hidden: int):
        super().__init__()
        self.backbone = backbone
        self.value_head = ValueHead(hidden)
        self.register_buffer("baseline", torch.zeros(()))
        self.baseline: Tensor

    def forward(self, ids: Tensor, action_mask: Tensor) -> tuple[Tensor]:
        """Return a tuple of one tensor: values [batch, seq], 0 where `action_mask` is False."""
        hidden = self.backbone(input_ids=ids, use_cache=False).last_hidden_state
        values = self.value_head(hidden[:, :-1]).squeeze(-1) + self.baseline.float()
        return (torch.where(action_mask, functional.pad(values, (1, 0)), 0.0),)

    def extra(self) -> dict[str, Tensor]:
        """Return the value head's weight and bias and the baseline, for the file `value_head.safetensors`."""
        tensors = {"weight": self.value_head.weight, "bias": self.value_head.bias, "baseline": self.baseline}
        return {name: tensor.detach().float().cpu().contiguous().clone() for name, tensor in tensors.items()}


def critic_from_actor(policy: PreTrainedModel) -> Critic:
    """Return a critic whose backbone is a copy of the backbone of `policy`."""
    return Critic(copy.deepcopy(policy.base_model), policy.config.get_text_config().hidden_size)


def load_critic(folder: Path, dtype: torch.dtype) -> Critic:
    """Load a critic that stage 3 wrote: a Hugging Face backbone and `value_head.safetensors`.

    Raises UserError if `folder` has no such file.
    """
    if not (folder / VALUE_HEAD).is_file():
        raise UserError(
            f"{folder}: {VALUE_HEAD} is missing, so this is no critic; give the checkpoint of stage 3."
        )
    backbone = AutoModel.from_pretrained(folder, dtype=dtype)
    critic = Critic(backbone, backbone.config.get_text_config().hidden_size)
    tensors = load_file(folder / VALUE_HEAD)
    critic.value_head.load_state_dict({"weight": tensors["weight"], "bias": tensors["bias"]})
    critic.baseline.copy_(tensors["baseline"])
    return critic
