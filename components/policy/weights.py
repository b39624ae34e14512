"""Weights on their way from a trainer to a sampler in another process, and the fingerprint that shows that they arrived.

Pure torch: the sampler's process imports this too (`components.policy.vllm_worker`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

SLICE = 2**24
"""Elements that are converted at once."""


def fingerprint(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    """Sum of the bit patterns of all elements after a cast to `dtype`, modulo 2^62.

    It depends neither on order nor on how matrices are joined or padded with zeros, so a sampler that keeps query, key
    and value projections in one matrix has the same one; a single element that differs changes it.
    """
    total = 0
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(SLICE):
            total += int(part.to(dtype).float().view(torch.int32).sum(dtype=torch.int64))
    return total % 2**62


def handles(weights: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """The `update_info` of vLLM's ipc backend: names, dtypes, shapes, and where the receiver finds the memory itself.

    The caller keeps the tensors alive until the receiver has finished. On CUDA the receiver must be on the same GPU.
    """
    shared = [{_device(tensor): reduce_tensor(tensor)[1]} for _, tensor in weights]
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
        "packed": False,
        "ipc_handles_pickled": base64.b64encode(bytes(ForkingPickler.dumps(shared))).decode(),
    }


def _device(tensor: Tensor) -> str:
    """By what vLLM finds the handle that is meant for its own GPU."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid) if tensor.is_cuda else "cpu"
