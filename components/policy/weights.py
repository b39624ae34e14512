"""This module prepares weights for a transfer to vLLM's process and computes a fingerprint of weights.

The process that receives the weights imports this file too (`components.policy.vllm_worker`), so the file
needs only torch.
"""

import base64
from collections.abc import Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

# Number of elements of a tensor that are converted at the same time.
CHUNK_ELEMENTS = 2**24
# Fingerprints are below this number.
MODULUS = 2**62


def fingerprint(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    """Return a number that identifies the values of all elements after a cast to `dtype`.

    It is the sum of the bit patterns of the elements as float32, modulo 2^62. It does not depend on the order
    of the tensors, on their concatenation or on padding with zeros. So it is also correct if vLLM stores the
    query, key and value projections as one matrix. The fingerprint of two groups of tensors is the sum of
    their fingerprints, modulo 2^62.
    """
    total = 0
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(CHUNK_ELEMENTS):
            total += int(part.to(dtype).float().view(torch.int32).sum(dtype=torch.int64))
    return total % MODULUS


def ipc_update_info(weights: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return the `update_info` of vLLM's ipc backend: names, dtypes, shapes and memory handles.

    The caller must keep the tensors alive until the receiver has finished. Tensors on a GPU can only be
    received by a process that uses the same GPU.
    """
    shared = [{_device(tensor): reduce_tensor(tensor)[1]} for _, tensor in weights]
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
        "ipc_handles_pickled": base64.b64encode(bytes(ForkingPickler.dumps(shared))).decode(),
    }


def _device(tensor: Tensor) -> str:
    """Return the key under which vLLM looks up the memory handle of a tensor.

    It is the UUID of the tensor's GPU, or "cpu".
    """
    return str(torch.cuda.get_device_properties(tensor.device).uuid) if tensor.is_cuda else "cpu"
