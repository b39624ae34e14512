"""Prepare weights for a transfer to vLLM's workers, and check that they have arrived.

The process that receives the weights imports this file too (`components.policy.vllm.worker`), so the file
needs only torch.
"""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
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


def named_fingerprint(name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    """Return a number below MODULUS that identifies a name and the values of its tensor, cast to `dtype`."""
    return fingerprint([tensor], dtype) * (2 * zlib.crc32(name.encode()) + 1) % MODULUS


class Sent:
    """The fingerprints of all weights that were sent to vLLM so far, after a cast to its dtype."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.values = self.named = 0

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.values = (self.values + fingerprint([tensor], self.dtype)) % MODULUS
            self.named = (self.named + named_fingerprint(name, tensor, self.dtype)) % MODULUS

    def fault(self, reports: Sequence[Mapping[str, Any]]) -> str:
        """Return a phrase that says how one server's weights differ from those sent, or "" if they do not.

        `reports` has one report of each worker of the server (`components.policy.vllm.worker`). Every worker
        must have received all weights. The parameters of all workers together must also have the values that
        were sent: a parameter that is equal in all workers counts once, and of any other parameter, each
        worker has a part. This is not checked if several workers have copies of the same key and value heads.
        """
        for number, report in enumerate(reports):
            if report["received"] != self.named:
                return f"worker {number} received other weights"
        if reports[0]["key_value_copies"] > 1:
            return ""
        total = 0
        for name in {name for report in reports for name in report["parameters"]}:
            values = [report["parameters"][name] for report in reports if name in report["parameters"]]
            total += values[0] if len(set(values)) == 1 else sum(values)
        return "" if total % MODULUS == self.values else "its parameters have other values"


def update_info(weights: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return the names, dtypes and shapes of weights in the form of vLLM's `update_info`.

    All backends of vLLM's weight transfer need this part.
    """
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
    }


def ipc_handles(copies: Iterable[Sequence[Tensor]]) -> dict[str, str]:
    """Return the memory handles in the `update_info` of vLLM's ipc backend.

    `copies` has the same tensors on each device that a worker uses. The caller must keep them alive until the
    workers have finished.
    """
    shared: list[dict[str, Any]] = []
    for tensors in copies:
        handles = [{device_name(tensor.device): reduce_tensor(tensor)[1]} for tensor in tensors]
        shared = [old | new for old, new in zip(shared, handles, strict=True)] if shared else handles
    return {"ipc_handles_pickled": base64.b64encode(bytes(ForkingPickler.dumps(shared))).decode()}


def device_name(device: torch.device) -> str:
    """Return the key under which vLLM looks up a memory handle: the UUID of a GPU, or "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
