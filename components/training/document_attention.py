"""Attention over rows that are packed one after the other in a sequence, registered with transformers.

Each row attends to itself only. Packing by `position_ids` alone is exact with transformers' variable-length
flash attention, but not with its other implementations under Ulysses sequence parallelism, which drop the
mask: rows would see each other without an error.

In 16-bit precision on a GPU, one kernel computes all rows: torch's flash attention over sequences of variable
length. Otherwise the rows are computed one after the other.
"""

import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

# Names of the implementation for `attn_implementation`: for models that support torch's scaled dot product
# attention, and for others, such as gpt-oss, whose attention sinks it does not compute.
SDPA = "documents"
EAGER = "documents_eager"

# Names of the arguments of `varlen_attn`, which differ between releases of torch.
VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)


def _without_padding(mask: Any) -> Any:
    """Return a variant of `mask`, a function of transformers that makes a mask, for packed rows.

    If the variant gets an `attention_mask`, as when a policy is sampled, it returns the mask that `mask`
    makes. Otherwise it returns None, because packed rows have no padding.
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
    document_offsets: Tensor | None = None,
    longest_document: int = 0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each of several packed rows with torch's kernels.

    The rows are token sequences that stand one after the other in one sequence. Queries are [1, heads,
    tokens, head_dim], and keys and values [1, key-value heads, tokens, head_dim]. `documents` [rows + 1] has
    the index at which each row begins, and as its last entry the number of tokens; if it is None, all tokens
    are one row. `document_offsets` is the same as int32 on the device, and `longest_document` is the number
    of tokens of the longest row. If `sliding_window` is given, a token attends only to itself and to the
    `sliding_window` - 1 tokens before it. Returns the output [1, tokens, heads, head_dim] and None instead of
    attention weights. If `attention_mask` is given or there are fewer queries than keys, as when a policy is
    sampled, the attention of transformers is computed unchanged.
    """
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0], None
    scale = kwargs.get("scaling")
    is_plain = not kwargs.get("dropout") and kwargs.get("softcap") is kwargs.get("position_bias") is None
    if document_offsets is not None and is_plain and has_varlen(query, value, scale, sliding_window):
        return (
            attend_varlen(query, key, value, document_offsets, longest_document, scale, sliding_window),
            None,
        )

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
    document_offsets: Tensor | None = None,
    longest_document: int = 0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each of several packed rows with the model's own eager attention.

    The rows are token sequences that stand one after the other in one sequence. `module` is an attention
    layer, whose source file defines the eager attention. Queries are [1, heads, tokens, head_dim], and keys
    and values [1, key-value heads, tokens, head_dim]. `documents` [rows + 1] has the index at which each row
    begins, and as its last entry the number of tokens; if it is None, all tokens are one row. If
    `sliding_window` is given, a token attends only to itself and to the `sliding_window` - 1 tokens before
    it. Each row needs a mask, whose size is quadratic in the row's length. Returns the output [1, tokens,
    heads, head_dim] and None. If `attention_mask` is given or there are fewer queries than keys, as when a
    policy is sampled, the eager attention is computed unchanged.
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


def has_varlen(query: Tensor, value: Tensor, scale: float | None, window: int | None) -> bool:
    """Return whether torch's flash attention over rows of different lengths can compute the attention.

    It can only on a GPU in 16-bit precision, and if head_dim, equal for `query` and `value`, is a multiple of
    8 of at most 256. `query` and `value` are [1, heads, tokens, head_dim]. Scores are multiplied by `scale`,
    or by 1 / sqrt(head_dim) if it is None, and `window` is the length of the sliding window, None without
    one; another scale or a window also needs a release of torch that supports it.
    """
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and head_dim == value.shape[-1] <= 256
        and head_dim % 8 == 0
        and (scale in (None, head_dim**-0.5) or "scale" in VARLEN_ARGUMENTS)
        and (window is None or "window_size" in VARLEN_ARGUMENTS)
    )


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute causal attention within each of several packed rows with one kernel for all rows.

    The rows are token sequences that stand one after the other in one sequence. Queries are [1, heads,
    tokens, head_dim], keys and values [1, key-value heads, tokens, head_dim], and the output is [1, tokens,
    heads, head_dim]. `offsets`, int32 [rows + 1] on the device, has the index at which each row begins, and
    as its last entry the number of tokens. A row has at most `longest` tokens. Scores are multiplied by
    `scale`, or by 1 / sqrt(head_dim) if it is None. If `window` is given, a token attends only to itself and
    to the `window` - 1 tokens before it.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": True,
        "window_size": (-1 if window is None else window - 1, 0),
        "is_causal": True,
    }
    if "enable_gqa" not in VARLEN_ARGUMENTS:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # [tokens, heads, head_dim]
    supported = {name: option for name, option in options.items() if name in VARLEN_ARGUMENTS}
    output = varlen_attn(query, key, value, offsets, offsets, longest, longest, **supported)
    assert isinstance(output, Tensor)  # and not a pair, since no other outputs are asked for
    return output[None]


def _by_row(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: tuple[int, ...] | None,
) -> Tensor:
    """Apply `attend` to queries, keys and values of each packed row, and concatenate the outputs.

    The rows are token sequences that stand one after the other in one sequence. Queries, keys and values are
    [1, heads, tokens, head_dim], and outputs [1, tokens, heads, head_dim]. `documents` [rows + 1] has the
    index at which each row begins, and as its last entry the number of tokens; if it is None, the whole
    sequence is one row.
    """
    if documents is None or len(documents) == 2:
        return attend(query, key, value)  # not concatenated, which would copy it
    rows = (slice(first, last) for first, last in itertools.pairwise(documents))
    return torch.cat([attend(query[:, :, row], key[:, :, row], value[:, :, row]) for row in rows], dim=1)


def _causal(query: Tensor, window: int | None) -> Tensor:
    """Return the causal mask of one row as bool [1, 1, tokens, tokens], True where a query attends to a key.

    `query` is [1, heads, tokens, head_dim]. If `window` is given, a token attends only to itself and to the
    `window` - 1 tokens before it.
    """
    places = torch.arange(query.shape[2], device=query.device)
    distance = places[:, None] - places[None, :]
    allowed = distance >= 0
    return (allowed & (distance < window) if window is not None else allowed)[None, None]


for _name, _attention, _mask in ((SDPA, _sdpa, sdpa_mask), (EAGER, _eager, eager_mask)):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _without_padding(_mask))
