"""A key-value cache whose rows are independent sequences of different lengths.

The tokens of each row are at the positions 0 to length - 1, so the place of a token does not depend on other
rows. All rows have the same width, the number of tokens of the longest row, rounded up to a multiple of
WIDTH_STEP.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from components.core.errors import UserError

# The width of the rows is a multiple of this number of tokens. The sums over a row's tokens are then the
# same, to the last bit, at every width (docs/measurements/training.md).
WIDTH_STEP = 64
# Names that transformers gives to layers without and with a sliding window.
FULL, SLIDING = "full_attention", "sliding_attention"


class _RowLayer(DynamicLayer):
    """The keys and values of one layer of a model, each of shape [rows, heads, width, head_dim].

    The rows in use are those of the sequences in a forward pass; they are the first rows.
    """

    def __init__(self, rows: int):
        super().__init__()
        self.rows = rows
        self.key_rows, self.value_rows = torch.zeros(0), torch.zeros(0)
        # Positions of the next token of the rows in use, [rows in use], and the width that they need.
        self.positions = torch.zeros(0, dtype=torch.long)
        self.width = 0

    def reserve(self, keys: Tensor, values: Tensor, width: int) -> None:
        """Allocate memory for at least `width` tokens in each row, without changing those that it has.

        `keys` and `values` [rows, heads, tokens, head_dim] determine the heads, head_dim, dtype and device.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.key_rows, self.value_rows = (
                states.new_zeros(self.rows, states.shape[1], 0, states.shape[3]) for states in (keys, values)
            )
        allocated = self.key_rows.shape[2]
        if allocated < width:
            more = -(-max(width, 2 * allocated) // WIDTH_STEP) * WIDTH_STEP - allocated
            # Zeros, because a masked value that is not a number would still reach the result.
            self.key_rows = functional.pad(self.key_rows, (0, 0, 0, more))
            self.value_rows = functional.pad(self.value_rows, (0, 0, 0, more))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one token of each row in use, and return those of all their tokens.

        The arguments have the shape [rows in use, heads, 1, head_dim], and the results [rows in use, heads,
        width, head_dim]. The token of each row in use is written to its position in `self.positions`.
        """
        self.reserve(key_states, value_states, self.width)
        used = torch.arange(len(key_states), device=key_states.device)
        self.key_rows[used, :, self.positions] = key_states[:, :, 0]
        self.value_rows[used, :, self.positions] = value_states[:, :, 0]
        return self.key_rows[: len(used), :, : self.width], self.value_rows[: len(used), :, : self.width]

    def get_seq_length(self) -> int:
        return self.width


class RowCache(DynamicCache):
    """The cache of all layers of a model for `rows` sequences."""

    def __init__(self, config: PretrainedConfig, rows: int):
        """Create an empty cache with `rows` rows for a model with the configuration `config`.

        Raises UserError if a layer of the model has another state than keys and values.
        """
        super().__init__(config=config)
        if not {type(layer) for layer in self.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}:
            raise UserError(
                "policy.backend: transformers samples only models whose layers all use attention; "
                "set it to vllm-server for this one."
            )
        self.windows: list[int | None] = [
            layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
            for layer in self.layers
        ]
        self.row_layers = [_RowLayer(rows) for _ in self.layers]
        self.layers = list(self.row_layers)

    def insert(self, row: int, prefix: DynamicCache) -> None:
        """Copy the keys and values of `prefix`, which holds one sequence, to the row `row`.

        In each layer of `prefix` they have the shape [1, heads, tokens, head_dim].
        """
        for layer, computed in zip(self.row_layers, prefix.layers, strict=True):
            assert isinstance(computed, DynamicLayer)
            keys, values = computed.keys, computed.values
            assert keys is not None and values is not None
            layer.reserve(keys, values, keys.shape[2])
            layer.key_rows[row, :, : keys.shape[2]] = keys[0]
            layer.value_rows[row, :, : keys.shape[2]] = values[0]

    def move(self, source: int, target: int) -> None:
        """Copy the row `source` over the row `target`."""
        for layer in self.row_layers:
            for states in (layer.key_rows, layer.value_rows):
                states[target] = states[source]

    def step(self, positions: Tensor, dtype: torch.dtype) -> Any:
        """Prepare a forward pass of one token in each row, and return its attention mask.

        `positions` [rows in use] has the position of each row's new token. The mask is 0 where a token may
        attend and the least number of `dtype` elsewhere, [rows in use, 1, 1, width]. If only some layers have
        a sliding window, the result is a dictionary of two masks with the keys FULL and SLIDING.
        """
        width = -(-(int(positions.max()) + 1) // WIDTH_STEP) * WIDTH_STEP
        for layer in self.row_layers:
            layer.positions, layer.width = positions, width
        distance = positions[:, None] - torch.arange(width, device=positions.device)

        def mask(window: int | None) -> Tensor:
            seen = (distance >= 0) & (distance < (window or width))
            least = torch.finfo(dtype).min
            return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, least)[:, None, None]

        different = set(self.windows)
        if len(different) == 1:
            return mask(different.pop())
        return {FULL if window is None else SLIDING: mask(window) for window in different}
