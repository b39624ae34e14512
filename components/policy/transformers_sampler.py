"""This module samples from a policy with transformers in this process, so vLLM is not needed."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from components.policy.sampler import Completion, stop_ids


@dataclass
class _Row:
    """The state of one sequence while it is sampled."""

    prompt: list[int]
    # Random numbers in [0, 1), one for each token that may be sampled. The length of this list is therefore
    # the limit of the number of tokens.
    uniforms: list[float]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""

    def append(self, token: int, logprob: float, stop: tuple[int, ...]) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in stop:
            self.finish_reason = "stop"
        elif len(self.ids) == len(self.uniforms):
            self.finish_reason = "length"


class _PreallocatedLayer(DynamicLayer):
    """A layer of a key-value cache that allocates memory for further tokens in advance.

    transformers' `DynamicLayer` instead copies all keys and values for every new token.
    """

    SPARE_TOKENS = 64

    def __init__(self) -> None:
        super().__init__()
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens, and return all keys and all values.

        The arguments have the shape [batch, heads, new, head_dim], and the results [batch, heads, old + new,
        head_dim].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        new = old + key_states.shape[2]
        if self.buffers is None or self.buffers[0].shape[2] < new:
            batch, heads, _, _ = key_states.shape
            keys, values = (
                states.new_empty(batch, heads, new + self.SPARE_TOKENS, states.shape[3])
                for states in (key_states, value_states)
            )
            if self.keys is not None and self.values is not None and old:
                keys[:, :, :old], values[:, :, :old] = self.keys, self.values
            self.buffers = keys, values
        keys, values = self.buffers
        keys[:, :, old:new], values[:, :, old:new] = key_states, value_states
        self.keys, self.values = filled = keys[:, :, :new], values[:, :, :new]
        return filled

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.buffers = None


class TransformersSampler:
    """A sampler of a transformers model in this process.

    A caller that changes the weights of `model` must also set `version`. The class has its own sampling loop,
    because the overhead of transformers' `generate` is larger than the arithmetic of a small model. The
    random numbers of a sequence depend only on the seed and the index of the sequence. So, up to rounding, a
    sequence does not depend on the other sequences of its batch.
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
        self.model = model
        self.version = version
        self.batch = batch
        self.device = torch.device(device)
        self.context = int(model.config.max_position_embeddings)
        self.stop = stop_ids(tokenizer, model.generation_config)
        # The value does not matter, because padding is masked.
        self.padding = self.stop[0]

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[Completion]:
        """Sample one completion for each prompt, as specified by `Sampler.generate`.

        At temperature 0, the log-probabilities are those under the distribution at temperature 1.
        """
        rows = []
        for index, prompt in enumerate(prompts):
            noise = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
            limit = max(0, min(max_new_tokens, self.context - len(prompt)))
            rows.append(
                _Row(
                    prompt,
                    torch.rand(limit, generator=noise, dtype=torch.float64).tolist(),
                    finish_reason="" if limit else "length",
                )
            )
        waiting = sorted((row for row in rows if not row.finish_reason), key=lambda row: len(row.prompt))
        training = self.model.training
        self.model.eval()
        for start in range(0, len(waiting), self.batch):
            self._complete(waiting[start : start + self.batch], temperature)
        self.model.train(training)
        return [Completion(tuple(row.ids), tuple(row.logprobs), row.finish_reason) for row in rows]

    def _complete(self, rows: list[_Row], temperature: float) -> None:
        """Sample all rows as one batch until every row is finished, and write the results into the rows."""
        cache = DynamicCache(config=self.model.config)
        cache.layers = [
            _PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
        ]
        width = max(len(row.prompt) for row in rows)
        ids = torch.tensor(
            [[self.padding] * (width - len(row.prompt)) + row.prompt for row in rows], device=self.device
        )
        mask = torch.tensor(
            [[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in rows], device=self.device
        )
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        while True:
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            uniforms = torch.tensor(
                [row.uniforms[min(len(row.ids), len(row.uniforms) - 1)] for row in rows],
                dtype=torch.float64,
                device=self.device,
            )
            tokens, logprobs = draw(output.logits[:, -1], uniforms, temperature)
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                if not row.finish_reason:
                    row.append(token, logprob, self.stop)
            unfinished = [index for index, row in enumerate(rows) if not row.finish_reason]
            if not unfinished:
                return
            ids, positions = tokens[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            if 2 * len(unfinished) < len(rows):
                # Finished rows are removed only when they are the majority, because a removal copies the
                # whole cache.
                keep = torch.tensor(unfinished, device=self.device)
                cache.batch_select_indices(keep)
                ids, positions, mask = ids[keep], positions[keep], mask[keep]
                rows = [rows[index] for index in unfinished]


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token for each row, and return the tokens and their log-probabilities.

    `logits` has the shape [batch, vocabulary], and `uniforms` has one random number in [0, 1) for each row,
    at which the cumulative distribution is inverted. The computation is in float64, because in float32 the
    cumulative sum would lose rare tokens. At temperature 0, the most probable token is returned.
    """
    logprobs = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logprobs.argmax(dim=-1)
    else:
        cumulative = logprobs.exp().cumsum(dim=-1)
        # The random number is scaled by the last cumulative sum, which is not exactly 1 because of rounding.
        tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[
            :, 0
        ].clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
