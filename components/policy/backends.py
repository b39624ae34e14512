"""Functions that open the sampling backend which `policy.backend` names.

Evaluation and `cuda-agent optimize` call `open_sampler` for a checkpoint whose weights do not change.
Training, which changes the weights between samples, uses `components.training.rollouts.TrainedPolicy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from components.core.params import Params
from components.policy.checkpoint import load_model
from components.policy.sampler import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.policy.vllm_sampler import VllmSampler


def open_sampler(
    params: Params, folder: Path, tokenizer: PreTrainedTokenizerBase, *, version: str
) -> Sampler:
    """Return a sampler of the model in `folder`. `version` is the name of its weights in trajectories.

    If the backend is a vLLM server, the weights are sent to it.
    """
    settings, dtype = params.policy, params.engine.dtype
    if settings.backend == "transformers":
        from components.policy.transformers_sampler import TransformersSampler

        model = load_model(folder, dtype=dtype, device=params.device)
        return TransformersSampler(
            model, tokenizer, batch=settings.batch, device=params.device, version=version
        )
    sampler = open_vllm_sampler(params, folder, tokenizer, version=version)
    if settings.backend == "vllm-server":
        device = params.device if settings.weight_transfer == "ipc" else "cpu"
        weights = load_model(folder, dtype=dtype, device=device)
        sampler.push(list(weights.named_parameters()), version=version, folder=folder)
    return sampler


def open_vllm_sampler(
    params: Params, folder: Path, tokenizer: PreTrainedTokenizerBase, *, version: str
) -> VllmSampler:
    """Return a sampler that uses vLLM.

    If the backend is `vllm-server`, it uses the server `policy.server`. Otherwise it loads the model in
    `folder` into a vLLM of this process.
    """
    from components.policy.vllm_local import LocalVllm
    from components.policy.vllm_sampler import VllmSampler
    from components.policy.vllm_server import VllmServer

    settings = params.policy
    vllm = (
        VllmServer(settings.server)
        if settings.backend == "vllm-server"
        else LocalVllm(folder, settings, dtype=params.engine.dtype, seed=params.seed)
    )
    return VllmSampler(vllm, tokenizer, settings, version=version)
