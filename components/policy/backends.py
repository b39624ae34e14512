"""The sampling backend that the parameters name, for a checkpoint as it is: evaluation and `optimize` sample with it.

Training samples from weights that change: `components.training.weight_sync`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from components.core.config import Params
from components.policy.checkpoint import load_model
from components.policy.sampler import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_sampler(
    params: Params, folder: Path, tokenizer: PreTrainedTokenizerBase, *, version: str
) -> Sampler:
    """A sampler of the model in `folder`; `version` names its weights. A server is given them, whatever it held before."""
    settings, dtype = params.policy, params.engine.dtype
    match settings.backend:
        case "transformers":
            from components.policy.transformers_sampler import TransformersSampler

            model = load_model(folder, dtype=dtype, device=params.device)
            return TransformersSampler(
                model, tokenizer, batch=settings.batch, device=params.device, version=version
            )
        case "vllm":
            from components.policy.vllm_local import LocalVllm
            from components.policy.vllm_sampler import VllmSampler

            return VllmSampler(
                LocalVllm(folder, settings, dtype=dtype, seed=params.seed),
                tokenizer,
                settings,
                version=version,
            )
        case "vllm-server":
            from components.policy.vllm_sampler import VllmSampler
            from components.policy.vllm_server import VllmServer

            sampler = VllmSampler(VllmServer(settings.server), tokenizer, settings, version=version)
            weights = load_model(
                folder, dtype=dtype, device=params.device if settings.weight_transfer == "ipc" else "cpu"
            )
            sampler.push(list(weights.named_parameters()), version=version, folder=folder)
            return sampler
