"""A sampler that uses vLLM in this process or on a server.

`LocalVllm` and `VllmServer` have the same methods, and their log-probabilities are those of the distribution
after temperature (`logprobs_mode` is processed_logprobs). `VllmSampler` samples from one of them, sends new
weights to it with vLLM's weight transfer, and then checks with a fingerprint that the workers have the new
weights. The names of calls, routes and fields are those of vLLM 0.24.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from components.core.errors import UserError
from components.core.params import Params, Policy
from components.policy.sampler import Completion
from components.policy.vllm_local import LocalVllm
from components.policy.vllm_server import Request, VllmServer
from components.policy.weights import fingerprint, ipc_update_info


class VllmSampler:
    """A sampler that sends prompts to vLLM and can replace the weights with which vLLM samples.

    Equal arguments may give different results, because rounding depends on how vLLM forms batches.
    """

    def __init__(
        self,
        vllm: LocalVllm | VllmServer,
        tokenizer: PreTrainedTokenizerBase,
        settings: Policy,
        *,
        version: str,
    ):
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
        """Sample one completion for each prompt, as specified by `Sampler.generate`."""
        requests = {
            index: Request(
                tuple(prompt), limit, temperature, (seed * 1_000_003 + index) % 2**63, self.end_of_turn
            )
            for index, prompt in enumerate(prompts)
            if (limit := min(max_new_tokens, self.settings.context - len(prompt))) > 0
        }
        completions = dict(zip(requests, self.vllm.complete(list(requests.values())), strict=True))
        return [completions.get(index, Completion((), (), "length")) for index in range(len(prompts))]

    def push(
        self, weights: Sequence[tuple[str, Tensor]], *, version: str, folder: Path | None = None
    ) -> None:
        """Replace the weights of vLLM, and check that its workers have the new ones.

        The names and shapes in `weights` are those of a checkpoint. If the weights are transferred by disk,
        `folder` is a checkpoint with the same weights. Raises UserError if a worker does not have the new
        weights.
        """
        started = time.monotonic()
        self.wake_up()
        before = self.vllm.collective_rpc("weight_fingerprint", {})
        if self.settings.weight_transfer == "disk":
            assert folder is not None, "a transfer by disk needs the folder"
            self.vllm.collective_rpc("reload_weights", {"weights_path": str(folder.resolve())})
        else:
            dtype = getattr(torch, before[0]["dtype"])
            # `sent` keeps the tensors alive until the end of the update, because a handle does not.
            sent = [(name, tensor.detach().to(dtype).contiguous()) for name, tensor in weights]
            self.vllm.update_weights(ipc_update_info(sent))
            if any(tensor.is_cuda for _, tensor in sent):
                # This frees the memory of tensors that vLLM's process has released.
                torch.cuda.ipc_collect()
        # The cached keys and values were computed with the old weights.
        self.vllm.reset_prefix_cache()
        self._check(before, [tensor for _, tensor in weights])
        self.version = version
        self.push_seconds = time.monotonic() - started

    def _check(self, before: list[dict[str, Any]], weights: Sequence[Tensor]) -> None:
        """Raise UserError unless the workers have the weights.

        If there is one worker, its fingerprint must be equal to that of `weights`. If there are several, each
        of which has a part of the weights, the fingerprint of every worker must differ from that in `before`,
        the fingerprints of the workers before the weights were sent.
        """
        after = self.vllm.collective_rpc("weight_fingerprint", {})
        expected = fingerprint(weights, getattr(torch, after[0]["dtype"]))
        is_single = len(after) == 1
        arrived = (
            after[0]["fingerprint"] == expected
            if is_single
            else all(new != old for new, old in zip(after, before, strict=True))
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
    return VllmSampler(vllm, tokenizer, settings, version=version)
