"""A sampler that uses vLLM servers and can replace their weights.

The log-probabilities are those of the distribution after temperature (the servers' option `--logprobs-mode`
is processed_logprobs). New weights are sent with vLLM's weight transfer, or loaded by the servers from disk.
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
from components.policy.vllm.server import Request, server_addresses
from components.policy.vllm.weights import FleetWeights, Sent, ipc_handles, update_info
from components.policy.vllm.worker import device_name


class VllmSampler:
    """A sampler that sends prompts to a fleet of vLLM servers and can replace their weights.

    Equal arguments may give different results, because rounding depends on how vLLM forms batches.
    """

    def __init__(self, fleet: Fleet, stop: tuple[int, ...], settings: Policy, *, version: str):
        """Sample from `fleet`, where a turn ends after any of the tokens `stop`.

        `version` is the name of the weights that the servers have.
        """
        self.fleet = fleet
        self.weights = FleetWeights(fleet)
        self.version = version
        self.settings = settings
        self.stop = stop
        self.push_seconds = 0.0
        self.asleep = False

    def capacity(self) -> int:
        """Return how many sequences the servers can hold together, by the figures that they report."""
        return self.fleet.capacity()

    async def complete(
        self, prompt: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int, session: str
    ) -> Completion:
        """Sample one completion of `prompt`, as specified by `Sampler.complete`."""
        limit = min(max_new_tokens, self.settings.context - len(prompt))
        if limit <= 0:
            return Completion((), (), "length", self.version)
        request = Request(tuple(prompt), limit, temperature, seed, self.stop)
        return await self.fleet.complete(request, session)

    def figures(self) -> dict[str, float]:
        """Return the figures of the servers' health and load (`Fleet.figures`)."""
        return self.fleet.figures()

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
    """Return a sampler of the servers `policy.servers` with the weights that they have.

    `version` is the name of these weights. Only the generation config is read from the checkpoint `folder`.
    """
    settings = params.policy
    fleet = Fleet(server_addresses(settings.servers), context=settings.context, version=version)
    stop = stop_ids(tokenizer, load_generation_config(folder))
    return VllmSampler(fleet, stop, settings, version=version)
