"""Attention over rows that are packed one after the other in a sequence, registered with transformers.

Each row attends to itself only. Packing by `position_ids` alone is exact with transformers' variable-length
flash attention, but not with its other implementations under Ulysses sequence parallelism, which drop the
mask: rows would see each other without an error.
"""

import itertools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

# Names of the implementation for `attn_implementation`: for models that support torch's scaled dot product
# attention, and for others, such as gpt-oss, whose attention sinks it does not compute.
SDPA = "documents"
EAGER = "documents_eager"


def _without_padding(mask: Any) -> Any:
    """Return a function that makes a mask only if there is padding, as when a policy is sampled."""

    def make(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        return None if attention_mask is None else mask(*args, attention_mask=attention_mask, **kwargs)

    return make


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    documents: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output [1, tokens, heads, head_dim]; `documents` are the bounds of the rows.

    Queries are [1, heads, tokens, head_dim], and keys and values [1, key-value heads, tokens, head_dim].
    """
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for first, last in itertools.pairwise(documents or (0, query.shape[2])):
        # Only a row that is longer than the window needs a mask, whose size is quadratic.
        is_windowed = sliding_window is not None and last - first > sliding_window
        mask = _causal(last - first, sliding_window, query) if is_windowed else None
        kwargs["is_causal"] = not is_windowed
        row = slice(first, last)
        output, _ = sdpa_attention_forward(
            module, query[:, :, row], key[:, :, row], value[:, :, row], mask, **kwargs
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    documents: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the same as `_sdpa` with the model's own eager attention and a mask for each row."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return eager(module, query, key, value, attention_mask, **kwargs)[0], None
    outputs = []
    for first, last in itertools.pairwise(documents or (0, query.shape[2])):
        is_allowed = _causal(last - first, sliding_window, query)
        mask = torch.zeros(is_allowed.shape, dtype=query.dtype, device=query.device)
        mask.masked_fill_(~is_allowed, torch.finfo(query.dtype).min)
        row = slice(first, last)
        output, _ = eager(module, query[:, :, row], key[:, :, row], value[:, :, row], mask, **kwargs)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _causal(length: int, window: int | None, like: Tensor) -> Tensor:
    """Return [1, 1, length, length], True where a token attends to another of its row."""
    places = torch.arange(length, device=like.device)
    distance = places[:, None] - places[None, :]
    allowed = distance >= 0
    return (allowed & (distance < window) if window is not None else allowed)[None, None]


for _name, _attention, _mask in ((SDPA, _sdpa, sdpa_mask), (EAGER, _eager, eager_mask)):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _without_padding(_mask))
