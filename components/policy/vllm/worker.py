"""An extension of vLLM's workers that reports which weights they received and which they hold.

It is loaded with `--worker-extension-cls components.policy.vllm.worker.Fingerprint`. This file is imported in
vLLM's Python environment and needs only torch. The trainer computes the fingerprints of what it sends with
the same functions.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

# Number of elements of a tensor that are converted at the same time.
CHUNK_ELEMENTS = 2**24
# Fingerprints are below this number.
MODULUS = 2**62


class Fingerprint:
    """A base class that gives each vLLM worker methods that identify its weights.

    vLLM adds this class to the bases of its worker class. `weights.FleetWeights` calls `expect_weights`
    before it sends weights, and `weight_report` to check that all of them have arrived.
    """

    def expect_weights(self: Any) -> dict[str, str]:
        """Observe the weights that this worker loads from now on; return its dtype and its device.

        The result has the keys `dtype`, such as bfloat16, which is that of the largest parameter, and
        `device`, the UUID of a GPU or "cpu". Every transfer of vLLM, and loading from disk, gives the
        complete tensors to the method `load_weights` of the model, where they are observed.
        """
        model = self.get_model()
        dtype = max(model.parameters(), key=lambda parameter: parameter.numel()).dtype
        self.received_weights = 0
        if "load_weights" not in vars(model):
            load = model.load_weights

            def observed(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
                for name, tensor in weights:
                    added = named_fingerprint(name, tensor, dtype)
                    self.received_weights = (self.received_weights + added) % MODULUS
                    yield name, tensor

            model.load_weights = lambda weights, *args, **kwargs: load(observed(weights), *args, **kwargs)
        device = next(model.parameters()).device
        return {"dtype": str(dtype).removeprefix("torch."), "device": device_name(device)}

    def weight_report(self: Any) -> dict[str, Any]:
        """Return fingerprints of the received weights and of each parameter of this worker.

        `received` is the fingerprint of all weights since `expect_weights` was called, or None if it was not.
        `parameters` has the fingerprint of each parameter by its name. `key_value_copies` is the number of
        tensor parallel workers that hold the same key and value heads.
        """
        parameters = dict(self.get_model().named_parameters())
        dtype = max(parameters.values(), key=Tensor.numel).dtype
        heads = self.model_config.get_total_num_kv_heads()
        with torch.no_grad():
            found = {name: fingerprint([parameter], dtype) for name, parameter in parameters.items()}
        return {
            "received": vars(self).get("received_weights"),
            "parameters": found,
            "key_value_copies": -(-self.parallel_config.tensor_parallel_size // heads),
        }


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


def device_name(device: torch.device) -> str:
    """Return the key under which vLLM looks up a memory handle: the UUID of a GPU, or "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
