"""Sampling with vLLM, in this process or on a server: token ids in, token ids and log-probabilities out.

`Vllm` is what both offer; `VllmSampler` is the one `Sampler` over it, and moves new weights into it by vLLM's own
weight transfer. Every push is checked: the workers' fingerprint must be that of the weights that were sent.
Names of calls, routes and fields are those of vLLM 0.24.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from components.core.config import Policy
from components.core.errors import UserError
from components.policy.sampler import Completion
from components.policy.weights import fingerprint, handles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXTENSION = "components.policy.vllm_worker.Fingerprint"


@dataclass(frozen=True)
class Request:
    """One sequence to complete; temperature 0 is greedy, and the completion ends with `stop` or after `max_tokens`."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop: int


class Vllm(Protocol):
    """A running vLLM. Log-probabilities are those after temperature (`logprobs_mode` processed_logprobs)."""

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order."""
        ...

    def init_weight_transfer_engine(self) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self) -> None: ...

    def collective_rpc(self, method: str, arguments: dict[str, str]) -> list[Any]:
        """Call a method of every worker; their results."""
        ...

    def reset_prefix_cache(self) -> None: ...

    def sleep(self) -> None:
        """Give back the memory of weights and cache."""
        ...

    def wake_up(self) -> None: ...


class VllmSampler:
    """See `components.policy.transformers_sampler.Sampler`. Not even equal arguments give equal bits here: batches change rounding."""

    def __init__(self, vllm: Vllm, tokenizer: PreTrainedTokenizerBase, settings: Policy, *, version: str):
        self.vllm = vllm
        self.version = version
        self.settings = settings
        self.end_of_turn = int(tokenizer.eos_token_id)
        self.push_seconds = 0.0
        self.asleep = False
        if settings.weight_transfer == "ipc":
            vllm.init_weight_transfer_engine()

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[Completion]:
        """See `Sampler`. The context window cuts the token limit; a prompt that fills it gets an empty completion."""
        requests = {
            index: Request(
                tuple(prompt), limit, temperature, (seed * 1_000_003 + index) % 2**63, self.end_of_turn
            )
            for index, prompt in enumerate(prompts)
            if (limit := min(max_new_tokens, self.settings.context - len(prompt))) > 0
        }
        found = dict(zip(requests, self.vllm.complete(list(requests.values())), strict=True))
        return [found.get(index, Completion((), (), "length")) for index in range(len(prompts))]

    def push(
        self, weights: Sequence[tuple[str, Tensor]], *, version: str, folder: Path | None = None
    ) -> None:
        """Replace the sampler's weights, in checkpoint names and shapes, and see that it has them.

        `folder` holds the same weights as a checkpoint, for the transfer by disk.
        """
        started = time.monotonic()
        self.wake_up()
        before = self._fingerprints()
        if self.settings.weight_transfer == "disk":
            assert folder is not None, "a transfer by disk needs the folder"
            self.vllm.collective_rpc("reload_weights", {"weights_path": str(folder.resolve())})
        else:
            dtype = getattr(torch, before[0]["dtype"])
            # Kept until the end: a handle does not keep the memory that it names.
            sent = [(name, tensor.detach().to(dtype).contiguous()) for name, tensor in weights]
            self.vllm.start_weight_update()
            self.vllm.update_weights(handles(sent))
            self.vllm.finish_weight_update()
            if any(tensor.is_cuda for _, tensor in sent):
                # Memory that another process has let go of stays ours until it is collected.
                torch.cuda.ipc_collect()
        # What was computed with the old weights must not continue under the new ones.
        self.vllm.reset_prefix_cache()
        self._check(before, [tensor for _, tensor in weights])
        self.version = version
        self.push_seconds = time.monotonic() - started

    def _fingerprints(self) -> list[dict[str, Any]]:
        return self.vllm.collective_rpc("weight_fingerprint", {})

    def _check(self, before: list[dict[str, Any]], weights: Sequence[Tensor]) -> None:
        """A single worker holds exactly what was sent. Of several each holds a part: each must at least agree to have changed."""
        after = self._fingerprints()
        expected = fingerprint(weights, getattr(torch, after[0]["dtype"]))
        whole = len(after) == 1
        arrived = (
            after[0]["fingerprint"] == expected
            if whole
            else all(new != old for new, old in zip(after, before, strict=True))
        )
        if not arrived:
            raise UserError(
                f"policy.backend: vLLM does not hold the weights that were sent to it ({'fingerprint differs' if whole else 'a worker kept its old ones'}); "
                "restart it with the model that is trained, and run the same command again."
            )

    def sleep(self) -> None:
        """Give the GPU's memory to the trainer until the next push, where the parameters say so."""
        if self.settings.sleep and not self.asleep:
            self.vllm.sleep()
            self.asleep = True

    def wake_up(self) -> None:
        if self.asleep:
            self.vllm.wake_up()
            self.asleep = False
