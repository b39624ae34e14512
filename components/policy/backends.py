"""A function that opens the sampling backend which `policy.backend` names.

Evaluation and `cuda-agent optimize` call it for a checkpoint whose weights do not change. Training, which
changes the weights between samples, uses `components.training.rollouts.TrainedPolicy`.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from components.core.params import Params
from components.policy.checkpoint import BUCKET_BYTES, load_model
from components.policy.sampler import Sampler
from components.policy.transformers_sampler import TransformersSampler
from components.policy.vllm.sampler import open_vllm_sampler
from components.policy.weight_stream import weight_buckets


def open_sampler(
    params: Params, folder: Path, tokenizer: PreTrainedTokenizerBase, *, version: str
) -> Sampler:
    """Return a sampler of the model in `folder`. `version` is the name of its weights in trajectories.

    The backend is that of `policy.backend`. If it is `vllm-server`, the weights are sent to the servers.
    """
    settings, dtype = params.policy, params.engine.dtype
    if settings.backend == "transformers":
        model = load_model(folder, dtype=dtype, device=params.device)
        return TransformersSampler(
            model, tokenizer, batch=settings.batch, device=params.device, version=version
        )
    sampler = open_vllm_sampler(params, folder, tokenizer, version=version)
    if settings.backend == "vllm-server":
        device = params.device if settings.weight_transfer == "ipc" else "cpu"
        weights = load_model(folder, dtype=dtype, device=device)
        sampler.push(weight_buckets(weights, BUCKET_BYTES), version=version, folder=folder)
    return sampler
