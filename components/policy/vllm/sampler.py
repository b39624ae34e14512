"""A sampler that uses vLLM in this process or on servers.

`LocalVllm` and `FleetWeights` have the same methods for replacing weights, and the log-probabilities of both
backends are those of the distribution after temperature (`logprobs_mode` is processed_logprobs).
`VllmSampler` samples from one of them, sends new weights to it with vLLM's weight transfer, and then checks
that every worker has received what was sent and that the workers together hold it.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from components.core.errors import UserError
from components.core.params import Params, Policy
from components.policy.checkpoint import load_generation_config
from components.policy.sampler import Completion, stop_ids
from components.policy.vllm.fleet import Fleet
from components.policy.vllm.protocol import Request
from components.policy.vllm.server import server_addresses
from components.policy.vllm.weights import FleetWeights
from components.policy.vllm_local import LocalVllm
from components.policy.weights import Sent, device_name, ipc_handles, update_info


class VllmSampler:
    """A sampler that sends prompts to vLLM and can replace the weights with which vLLM samples.

    Equal arguments may give different results, because rounding depends on how vLLM forms batches.
    """

    def __init__(self, vllm: LocalVllm | Fleet, stop: tuple[int, ...], settings: Policy, *, version: str):
        """Sample from `vllm`, where a turn ends after any of the tokens `stop`.

        `version` is the name of the weights that vLLM has.
        """
        self.vllm = vllm
        self.weights = FleetWeights(vllm) if isinstance(vllm, Fleet) else vllm
        self.version = version
        self.settings = settings
        self.stop = stop
        self.push_seconds = 0.0
        self.asleep = False

    def capacity(self) -> int:
        """Return how many sequences vLLM should sample at the same time.

        For servers, the number follows from the figures that they report. For a vLLM of this process, it is
        constant.
        """
        return self.vllm.capacity()

    async def complete(
        self, prompt: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int, session: str
    ) -> Completion:
        """Sample one completion of `prompt`, as specified by `Sampler.complete`."""
        limit = min(max_new_tokens, self.settings.context - len(prompt))
        if limit <= 0:
            return Completion((), (), "length", self.version)
        request = Request(tuple(prompt), limit, temperature, seed, self.stop)
        return await self.vllm.complete(request, session)

    def figures(self) -> dict[str, float]:
        """Return the figures of the servers (`Fleet.figures`); for a vLLM of this process there are none."""
        return self.vllm.figures() if isinstance(self.vllm, Fleet) else {}

    def push(
        self, buckets: Iterable[Mapping[str, Tensor]], *, version: str, folder: Path | None = None
    ) -> None:
        """Replace the weights of vLLM, and check that all of its workers have the new ones.

        `buckets` are those of `components.policy.weight_stream`, which are consumed completely. If the
        weights are transferred by disk, `folder` is a checkpoint with the same weights. Running completions
        are treated as `policy.push_pause` says. Raises UserError if a worker does not have the new weights.
        """
        started = time.monotonic()
        self.wake_up()
        is_ipc = self.settings.weight_transfer == "ipc"
        try:
            workers = self.weights.begin(self.settings.push_pause)
            sent = Sent(getattr(torch, workers[0]["dtype"]))
            devices = sorted({worker["device"] for worker in workers})
            if is_ipc:
                self.weights.start({})
            for bucket in buckets:
                weights = [
                    (name, value.detach().to(sent.dtype).contiguous()) for name, value in bucket.items()
                ]
                sent.add(weights)
                if is_ipc:
                    self._send(weights, devices)
            if is_ipc:
                self.weights.finish(version)
            else:
                assert folder is not None, "a transfer by disk needs the folder"
                self.weights.reload(str(folder.resolve()), version)
            self.weights.end(version, sent.fault)
        finally:
            self.weights.resume()
        self.version = version
        self.push_seconds = time.monotonic() - started

    def _send(self, weights: Sequence[tuple[str, Tensor]], devices: Sequence[str]) -> None:
        """Send one bucket of weights to all workers, which read it from the memory of their own device.

        `devices` are the devices of the workers, by `device_name`. Raises UserError if this process cannot
        use one of them.
        """
        own = weights[0][1].device
        seen = {device_name(own): own} | (
            {device_name(device): device for device in map(_cuda, range(torch.cuda.device_count()))}
            if own.type == "cuda"
            else {}
        )
        if missing := [name for name in devices if name not in seen]:
            raise UserError(
                f"policy.weight_transfer: a vLLM worker is on the device {missing[0]}, which this process "
                "does not see; set CUDA_VISIBLE_DEVICES to the GPUs of all workers too, or choose disk."
            )
        copies = [[value.to(seen[name]) for _, value in weights] for name in devices]
        self.weights.update(lambda: update_info(weights) | ipc_handles(copies))
        if own.type == "cuda":
            # This frees the memory of tensors that vLLM's processes have released.
            torch.cuda.ipc_collect()

    def sleep(self) -> None:
        """Release vLLM's GPU memory until the next `wake_up` or `push`, if `policy.sleep` is set."""
        if self.settings.sleep and not self.asleep:
            self.weights.sleep()
            self.asleep = True

    def wake_up(self) -> None:
        if self.asleep:
            self.weights.wake_up()
            self.asleep = False


def _cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


def open_vllm_sampler(
    params: Params, folder: Path, tokenizer: PreTrainedTokenizerBase, *, version: str
) -> VllmSampler:
    """Return a sampler that uses vLLM, whose weights get the name `version`.

    If `policy.backend` is `vllm-server`, it uses the servers `policy.servers` with the weights that they
    have, and only the generation config is read from `folder`. Otherwise it loads the model in `folder` into
    a vLLM of this process.
    """
    settings = params.policy
    vllm: Fleet | LocalVllm = (
        Fleet(server_addresses(settings.servers), context=settings.context, version=version)
        if settings.backend == "vllm-server"
        else LocalVllm(folder, settings, dtype=params.engine.dtype, seed=params.seed, version=version)
    )
    stop = stop_ids(tokenizer, load_generation_config(folder))
    return VllmSampler(vllm, stop, settings, version=version)
