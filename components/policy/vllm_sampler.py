"""A sampler that uses vLLM in this process or on a server.

`LocalVllm` and `VllmServer` have the same methods, and their log-probabilities are those of the distribution
after temperature (`logprobs_mode` is processed_logprobs). `VllmSampler` samples from one of them, sends new
weights to it with vLLM's weight transfer, and then checks with a fingerprint that the workers have the new
weights. The names of calls, routes and fields are those of vLLM 0.24.
"""

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from components.core.errors import UserError
from components.core.params import Params, Policy
from components.policy.checkpoint import load_generation_config
from components.policy.sampler import Completion, stop_ids
from components.policy.vllm_local import LocalVllm
from components.policy.vllm_server import MAX_CONNECTIONS, Request, VllmServer
from components.policy.weights import MODULUS, fingerprint, ipc_update_info


class _Sent:
    """The weights that are sent to vLLM, in its dtype, with the fingerprint of all that were sent so far."""

    def __init__(self, buckets: Iterable[Mapping[str, Tensor]], dtype: torch.dtype):
        self.buckets = buckets
        self.dtype = dtype
        self.fingerprint = 0

    def tensors(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the names and tensors of each bucket."""
        for bucket in self.buckets:
            weights = [(name, tensor.detach().to(self.dtype).contiguous()) for name, tensor in bucket.items()]
            added = fingerprint((tensor for _, tensor in weights), self.dtype)
            self.fingerprint = (self.fingerprint + added) % MODULUS
            yield weights

    def updates(self) -> Iterator[dict[str, Any]]:
        """Yield the `update_info` of each bucket, whose tensors live until the next one is requested."""
        for weights in self.tensors():
            yield ipc_update_info(weights)
            if any(tensor.is_cuda for _, tensor in weights):
                # This frees the memory of tensors that vLLM's process has released.
                torch.cuda.ipc_collect()


class VllmSampler:
    """A sampler that sends prompts to vLLM and can replace the weights with which vLLM samples.

    Equal arguments may give different results, because rounding depends on how vLLM forms batches.
    """

    def __init__(
        self,
        vllm: LocalVllm | VllmServer,
        stop: tuple[int, ...],
        settings: Policy,
        *,
        version: str,
    ):
        """Sample from `vllm`, where a turn ends after any of the tokens `stop`."""
        self.vllm = vllm
        self.version = version
        self.settings = settings
        self.stop = stop
        self.push_seconds = 0.0
        self.asleep = False
        self.threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="vllm")
        if settings.weight_transfer == "ipc":
            vllm.init_weight_transfer_engine()

    def capacity(self) -> int:
        return MAX_CONNECTIONS

    async def complete(
        self, prompt: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int, session: str
    ) -> Completion:
        """Sample one completion of `prompt`, as specified by `Sampler.complete`."""
        limit = min(max_new_tokens, self.settings.context - len(prompt))
        if limit <= 0:
            return Completion((), (), "length", self.version)
        request = Request(tuple(prompt), limit, temperature, seed, self.stop)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self.threads, self.vllm.complete, request)
        return dataclasses.replace(found, versions=self.version)

    def push(
        self, buckets: Iterable[Mapping[str, Tensor]], *, version: str, folder: Path | None = None
    ) -> None:
        """Replace the weights of vLLM, and check that its workers have the new ones.

        `buckets` are those of `components.policy.weight_stream`, which are consumed completely. If the
        weights are transferred by disk, `folder` is a checkpoint with the same weights. Raises UserError if a
        worker does not have the new weights.
        """
        started = time.monotonic()
        self.wake_up()
        before = self.vllm.collective_rpc("weight_fingerprint", {})
        sent = _Sent(buckets, getattr(torch, before[0]["dtype"]))
        if self.settings.weight_transfer == "disk":
            assert folder is not None, "a transfer by disk needs the folder"
            self.vllm.collective_rpc("reload_weights", {"weights_path": str(folder.resolve())})
            for _ in sent.tensors():
                pass
        else:
            self.vllm.update_weights(sent.updates())
        # The cached keys and values were computed with the old weights.
        self.vllm.reset_prefix_cache()
        self._check(before, sent.fingerprint)
        self.version = version
        self.push_seconds = time.monotonic() - started

    def _check(self, before: list[dict[str, Any]], expected: int) -> None:
        """Raise UserError unless the workers have the weights whose fingerprint is `expected`.

        If there are several workers, each of which has a part of the weights, the fingerprint of every worker
        must differ from that in `before`, the fingerprints of the workers before the weights were sent.
        """
        after = self.vllm.collective_rpc("weight_fingerprint", {})
        is_single = len(after) == 1
        arrived = (
            after[0]["fingerprint"] == expected
            if is_single
            else all(new["fingerprint"] != old["fingerprint"] for new, old in zip(after, before, strict=True))
        )
        if not arrived:
            raise UserError(
                "policy.backend: vLLM does not hold the weights that were sent to it "
                f"({'fingerprint differs' if is_single else 'a worker kept its old ones'}); "
                "restart it with the model that is trained, and run the same command again."
            )

    def sleep(self) -> None:
        """Release vLLM's GPU memory until the next `wake_up` or `push`, if `policy.sleep` is set."""
        if self.settings.sleep and not self.asleep:
            self.vllm.sleep()
            self.asleep = True

    def wake_up(self) -> None:
        if self.asleep:
            self.vllm.wake_up()
            self.asleep = False


def open_vllm_sampler(
    params: Params, folder: Path, tokenizer: PreTrainedTokenizerBase, *, version: str
) -> VllmSampler:
    """Return a sampler that uses vLLM.

    If the backend is `vllm-server`, it uses the server `policy.server`. Otherwise it loads the model in
    `folder` into a vLLM of this process.
    """
    settings = params.policy
    vllm = (
        VllmServer(settings.server)
        if settings.backend == "vllm-server"
        else LocalVllm(folder, settings, dtype=params.engine.dtype, seed=params.seed)
    )
    stop = stop_ids(tokenizer, load_generation_config(folder))
    return VllmSampler(vllm, stop, settings, version=version)
