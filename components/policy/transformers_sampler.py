"""A sampler that runs a policy with transformers in this process, so vLLM is not needed.

A thread samples one token for all running sequences at a time. A sequence joins when there is a free row in
the batch and leaves when it ends, so no sequence waits for another one to end.

A sequence's tokens and log-probabilities do not depend on the sequences that share its forward passes, nor on
the time at which it joins, to the last bit. A prompt is evaluated alone. A forward pass of running sequences
has a fixed number of rows (on cpu a power of two), of which unused ones are empty. The keys and values of
each row are stored apart from those of other rows, in a cache whose width is a multiple of `WIDTH_STEP`. That
this suffices was measured (docs/measurements/training.md). Mixtures of experts are the exception: the tokens
that share an expert share a matrix product of varying size.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from components.core.errors import UserError
from components.policy.sampler import Completion, stop_ids

# Least number of rows of a forward pass; products with fewer rows are summed in another order on cpu.
LEAST_ROWS = 8
# The width of the rows is a multiple of this number of tokens. The sums over a row's tokens are then the
# same, to the last bit, at every width (docs/measurements/training.md).
WIDTH_STEP = 64
# Names that transformers gives to layers without and with a sliding window.
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(eq=False)
class _Sequence:
    """The state of one sequence while it is sampled.

    `ids` are the tokens so far, of which the first `prompt` are the prompt. `uniforms` has a random number in
    [0, 1) for each token that may be sampled, so its length is the limit of their number. `future` gets the
    result; the caller may cancel it while the sequence is waiting or sampled. `logprobs` (nats) and
    `versions` (names of the weights) are those of the tokens that were sampled so far.
    """

    ids: list[int]
    prompt: int
    uniforms: list[float]
    temperature: float
    future: Future[Completion] = field(default_factory=Future)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)


class TransformersSampler:
    """A sampler of a transformers model in this process.

    A caller that changes the weights of `model` while sequences are sampled must do so between `pause` and
    `resume`, and must also set `version`. The class has its own sampling loop, because the overhead of
    transformers' `generate` is larger than the arithmetic of a small model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch: int,
        device: str,
        version: str,
    ):
        """Sample from `model`, which is on `device`, at most `batch` sequences at a time.

        `version` is the name of the weights. Raises UserError if a layer of the model has another state than
        keys and values, such as a state space layer has.
        """
        self.model = model
        self.version = version
        self.batch = batch
        self.device = torch.device(device)
        self.context = int(model.config.max_position_embeddings)
        self.stop = stop_ids(tokenizer, model.generation_config)
        RowCache(model.config)  # Raises UserError here, and not in the sampler's thread.
        self.weights = threading.Lock()
        self.lock = threading.Lock()
        self.waiting: deque[_Sequence] = deque()
        self.is_running = False

    def capacity(self) -> int:
        return self.batch

    async def complete(
        self, prompt: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int, session: str
    ) -> Completion:
        """Sample one completion of the token ids `prompt`, of at most `max_new_tokens` tokens.

        It ends after a token that ends a turn, or at the end of the context window, and is empty if the
        prompt fills the window. At temperature 0, each token is the most probable one, and the
        log-probabilities are those at temperature 1. Equal arguments and weights give equal results, unless
        the model is a mixture of experts. `session` is not used.
        """
        limit = min(max_new_tokens, self.context - len(prompt))
        if limit <= 0:
            return Completion((), (), "length", ())
        noise = torch.Generator().manual_seed(seed)
        sequence = _Sequence(
            list(prompt),
            len(prompt),
            torch.rand(limit, generator=noise, dtype=torch.float64).tolist(),
            temperature,
        )
        with self.lock:
            self.waiting.append(sequence)
            if not self.is_running:
                self.is_running = True
                threading.Thread(target=self._run, name="sampler", daemon=True).start()
        return await asyncio.wrap_future(sequence.future)

    def pause(self) -> None:
        """Wait until the running forward pass ends; no other one begins until `resume` is called."""
        self.weights.acquire()

    def resume(self) -> None:
        self.weights.release()

    @torch.no_grad()
    def _run(self) -> None:
        """Sample the waiting sequences until none is left; this is the work of the sampler's thread.

        At most `batch` sequences run at a time. If a forward pass fails, the running sequences end with its
        error.
        """
        running: list[_Sequence] = []
        cache = RowCache(self.model.config)
        while True:
            with self.lock:
                joining = [
                    self.waiting.popleft() for _ in range(min(len(self.waiting), self.batch - len(running)))
                ]
                joining = [sequence for sequence in joining if not sequence.future.cancelled()]
                if not running and not joining:
                    self.is_running = False
                    return
            try:
                with self.weights:
                    if self.model.training:
                        self.model.eval()
                    for sequence in joining:
                        self._evaluate_prompt(sequence, cache, len(running))
                        running.append(sequence)
                    ends = self._step(running, cache)
                # The last row takes the place of one that ends, so the rows in use are always the first ones.
                for row in sorted(ends, reverse=True):
                    if row < len(running) - 1:
                        cache.move(len(running) - 1, row)
                    ended, running[row] = running[row], running[-1]
                    running.pop()
                    with contextlib.suppress(InvalidStateError):  # The caller has cancelled it.
                        ended.future.set_result(
                            Completion(
                                tuple(ended.ids[ended.prompt :]),
                                tuple(ended.logprobs),
                                ends[row],
                                tuple(ended.versions),
                            )
                        )
            except Exception as error:
                for sequence in {*running, *joining}:
                    with contextlib.suppress(InvalidStateError):
                        sequence.future.set_exception(error)
                running = []

    def _rows(self, running: int) -> int:
        """Return the number of rows of a forward pass in which `running` sequences take part.

        On a GPU, a matrix product with another number of rows may be summed in another order, so the result
        is always `self.batch`, the largest number of sequences. On cpu it is a power of two of at least
        LEAST_ROWS, because all of those give the same sums.
        """
        if self.device.type != "cpu":
            return self.batch
        return max(LEAST_ROWS, 1 << (running - 1).bit_length())

    def _evaluate_prompt(self, sequence: _Sequence, cache: RowCache, row: int) -> None:
        """Write the keys and values of all prompt tokens but the last one to row `row` of the cache.

        The last token is evaluated together with the running sequences (`_step`).
        """
        if len(sequence.ids) == 1:
            return
        ids = torch.tensor([sequence.ids[:-1]], device=self.device)
        prefix = DynamicCache()
        self.model(input_ids=ids, past_key_values=prefix, use_cache=True, logits_to_keep=1)
        cache.insert(row, prefix, rows=self._rows(row + 1))

    def _step(self, running: Sequence[_Sequence], cache: RowCache) -> dict[int, str]:
        """Sample one token for each sequence, and return why sequences ended, by their index in `running`.

        The reason is "stop" or "length", or "" for a sequence that was cancelled. Sequences that go on are
        not in the result.
        """
        empty = self._rows(len(running)) - len(running)
        ids = torch.tensor([one.ids[-1] for one in running] + [0] * empty, device=self.device)
        positions = torch.tensor([len(one.ids) - 1 for one in running] + [0] * empty, device=self.device)
        output = self.model(
            input_ids=ids[:, None],
            attention_mask=cache.step(positions, self.model.dtype),
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        numbers = torch.tensor(
            [(one.uniforms[len(one.logprobs)], one.temperature) for one in running] + [(0.0, 1.0)] * empty,
            dtype=torch.float64,
            device=self.device,
        )
        tokens, logprobs = draw(output.logits[:, -1], numbers[:, 0], numbers[:, 1])
        ends = {}
        for row, (one, token, logprob) in enumerate(
            zip(running, tokens.tolist(), logprobs.tolist(), strict=False)
        ):
            one.ids.append(token)
            one.logprobs.append(logprob)
            one.versions.append(self.version)
            is_full = len(one.logprobs) == len(one.uniforms)
            reason = "stop" if token in self.stop else "length" if is_full else ""
            if reason or one.future.cancelled():
                ends[row] = reason
        return ends


def draw(logits: Tensor, uniforms: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token for each row, and return the tokens and their log-probabilities.

    `logits` has the shape [batch, vocabulary], and all other tensors have the shape [batch]. `uniforms` has a
    random number in [0, 1) for each row, at which the cumulative distribution is inverted. The
    log-probabilities are in nats, under the distribution after temperature. The computation is in float64,
    because in float32 the cumulative sum would lose rare tokens. In a row of temperature 0, the most probable
    token is returned, with its log-probability at temperature 1.
    """
    scale = torch.where(temperatures == 0, 1.0, temperatures).double()
    logprobs = torch.log_softmax(logits.double() / scale[:, None], dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1)
    # The random number is scaled by the last cumulative sum, which is not exactly 1 because of rounding.
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    tokens = torch.where(temperatures == 0, logprobs.argmax(dim=-1), drawn.clamp(max=logits.shape[-1] - 1))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


class _RowLayer(DynamicLayer):
    """The keys and values of one layer of a model, each of shape [rows, heads, tokens, head_dim].

    A row holds one sequence. Memory is allocated for more rows and tokens than a forward pass uses. The rows
    in use are the first ones; they are those of the present forward pass, including rows without a sequence
    that only fill its batch up. `width` is the number of tokens of each row that the pass uses, and
    `positions` [rows in use] has the positions of their next tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key_rows, self.value_rows = torch.zeros(0), torch.zeros(0)
        self.positions = torch.zeros(0, dtype=torch.long)
        self.width = 0

    def reserve(self, keys: Tensor, values: Tensor, rows: int, width: int) -> None:
        """Allocate memory for at least `rows` rows of `width` tokens, and keep the stored keys and values.

        A row holds one sequence. `keys` and `values` [rows, heads, tokens, head_dim] are not stored; they
        determine the number of heads, head_dim, dtype and device.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.key_rows, self.value_rows = (
                states.new_zeros(0, states.shape[1], 0, states.shape[3]) for states in (keys, values)
            )
        more_rows, allocated = max(0, rows - len(self.key_rows)), self.key_rows.shape[2]
        grown = -(-max(width, 2 * allocated) // WIDTH_STEP) * WIDTH_STEP
        more = grown - allocated if allocated < width else 0
        if more or more_rows:
            # Zeros, because a masked value that is not a number would still reach the result.
            padding = (0, 0, 0, more, 0, 0, 0, more_rows)
            self.key_rows = functional.pad(self.key_rows, padding)
            self.value_rows = functional.pad(self.value_rows, padding)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one token of each row in use, and return those of all their tokens.

        A row holds one sequence, and the rows in use are those of the present forward pass. The arguments
        have the shape [rows in use, heads, 1, head_dim], and the results [rows in use, heads, width,
        head_dim], where `width` is the number of tokens of the longest row, rounded up. The token of each row
        in use is written to its position in `self.positions`.
        """
        self.reserve(key_states, value_states, len(key_states), self.width)
        used = torch.arange(len(key_states), device=key_states.device)
        self.key_rows[used, :, self.positions] = key_states[:, :, 0]
        self.value_rows[used, :, self.positions] = value_states[:, :, 0]
        return self.key_rows[: len(used), :, : self.width], self.value_rows[: len(used), :, : self.width]

    def get_seq_length(self) -> int:
        return self.width


class RowCache(DynamicCache):
    """A key-value cache whose rows are independent sequences of different lengths.

    The tokens of each row are at the positions 0 to length - 1, so the place of a token does not depend on
    other rows. All rows have the same width, the number of tokens of the longest row, rounded up to a
    multiple of WIDTH_STEP.
    """

    def __init__(self, config: PretrainedConfig):
        """Create an empty cache for a model with the configuration `config`.

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
        self.row_layers = [_RowLayer() for _ in self.layers]
        self.layers = list(self.row_layers)

    def insert(self, row: int, prefix: DynamicCache, *, rows: int) -> None:
        """Copy the keys and values of `prefix`, which holds one sequence, to the row with the index `row`.

        Memory for at least `rows` rows is allocated first. In each layer of `prefix`, the keys and the values
        have the shape [1, heads, tokens, head_dim].
        """
        for layer, computed in zip(self.row_layers, prefix.layers, strict=True):
            assert isinstance(computed, DynamicLayer)
            keys, values = computed.keys, computed.values
            assert keys is not None and values is not None
            layer.reserve(keys, values, rows, keys.shape[2])
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
        a sliding window, the result is a dictionary of masks with the keys FULL ("full_attention") and
        SLIDING ("sliding_attention").
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
