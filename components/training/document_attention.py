"""Attention over rows that are packed one after the other in a sequence, registered with transformers.

Each row attends to itself only. Packing by `position_ids` alone is exact with transformers' variable-length
flash attention, but not with its other implementations under Ulysses sequence parallelism, which drop the
mask: rows would see each other without an error.
"""

import itertools
import sys
from collections.abc import Callable
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
    """Return a variant of the mask function `mask` that makes a mask only if there is padding.

    There is padding if an `attention_mask` is given, as when a policy is sampled. Otherwise the variant
    returns None.
    """

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
    """Compute causal attention within each row with torch's scaled dot product attention.

    Queries are [1, heads, tokens, head_dim], and keys and values [1, key-value heads, tokens, head_dim].
    `documents` are the bounds of the rows in the sequence; without them it is one row. Returns the output
    [1, tokens, heads, head_dim] and None instead of attention weights. If a mask is given or there are fewer
    queries than keys, as when a policy is sampled, the attention of transformers is computed unchanged.
    """
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return whole

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Only a row that is longer than the window needs a mask, whose size is quadratic.
        is_windowed = sliding_window is not None and query.shape[2] > sliding_window
        mask = _causal(query, sliding_window) if is_windowed else None
        options = kwargs | {"is_causal": not is_windowed}
        output: Tensor = sdpa_attention_forward(module, query, key, value, mask, **options)[0]
        return output

    return _by_row(attend, query, key, value, documents), None


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
    """Compute causal attention within each row with the eager attention of the model's own module.

    Arguments and results have the same forms as those of `_sdpa`. Each row needs a mask, whose size is
    quadratic in the row's length.
    """
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return eager(module, query, key, value, attention_mask, **kwargs)[0], None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        is_allowed = _causal(query, sliding_window)
        mask = torch.zeros(is_allowed.shape, dtype=query.dtype, device=query.device)
        mask.masked_fill_(~is_allowed, torch.finfo(query.dtype).min)
        output: Tensor = eager(module, query, key, value, mask, **kwargs)[0]
        return output

    return _by_row(attend, query, key, value, documents), None


def _by_row(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: tuple[int, ...] | None,
) -> Tensor:
    """Apply `attend` to queries, keys and values of each row, and return the outputs one after the other.

    `documents` are the bounds of the rows; if it is None, the whole sequence is one row.
    """
    if documents is None or len(documents) == 2:
        return attend(query, key, value)  # not concatenated, which would copy it
    rows = (slice(first, last) for first, last in itertools.pairwise(documents))
    return torch.cat([attend(query[:, :, row], key[:, :, row], value[:, :, row]) for row in rows], dim=1)


def _causal(query: Tensor, window: int | None) -> Tensor:
    """Return the causal mask of one row as [1, 1, queries, keys], True where a query attends to a key.

    If `window` is given, a token attends only to itself and to the `window` - 1 tokens before it.
    """
    places = torch.arange(query.shape[2], device=query.device)
    distance = places[:, None] - places[None, :]
    allowed = distance >= 0
    return (allowed & (distance < window) if window is not None else allowed)[None, None]


for _name, _attention, _mask in ((SDPA, _sdpa, sdpa_mask), (EAGER, _eager, eager_mask)):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _without_padding(_mask))
