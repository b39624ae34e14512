"""An extension of vLLM's workers that reports which weights they received and which they hold.

A worker is the process of vLLM that computes on one GPU. The extension also receives the weights that a
trainer broadcasts. It is loaded with `--worker-extension-cls components.policy.vllm.worker.Fingerprint`. This
file is imported in vLLM's Python environment and needs only torch. The trainer computes the fingerprints of
what it sends, and forms the process group of a broadcast, with the same functions.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

# Public names that torch imports from its C++ module only where it was built with distributed support.
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

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
        """Observe the weights that this worker loads from now on, and return facts about the worker.

        The result has the keys `dtype`, such as bfloat16, which is that of the largest parameter, `device`
        (UUID of a GPU, or "cpu"), `nccl` (`nccl_version`) and `group`, the name of the process group in which
        the worker receives weights, or "". Every transfer of vLLM, and loading from disk, gives the complete
        tensors to the method `load_weights` of the model, where they are observed.
        """
        model = self.get_model()
        dtype = max(model.parameters(), key=lambda parameter: parameter.numel()).dtype
        self.received_weights = self.received_buckets = 0
        if "load_weights" not in vars(model):
            load = model.load_weights

            def observed(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
                for name, tensor in weights:
                    added = named_fingerprint(name, fingerprint(tensor, dtype))
                    self.received_weights = (self.received_weights + added) % MODULUS
                    yield name, tensor

            model.load_weights = lambda weights, *args, **kwargs: load(observed(weights), *args, **kwargs)
        group = vars(self).get("group")
        return {
            "dtype": str(dtype).removeprefix("torch."),
            # Between the start and the end of an update, vLLM has parameters on the meta device.
            "device": device_name(self.device),
            "nccl": nccl_version(self.device),
            "group": group.name if group else "",
        }

    def join_group(
        self: Any, name: str, host: str, port: int, backend: str, first: int, size: int, seconds: float
    ) -> str:
        """Join the process group `name` of `size` ranks, in place of an earlier one, to receive weights.

        The trainer's store, over which the ranks find each other, is at `host` and `port`. `backend` is nccl
        or gloo. The first worker of this server has the rank `first` in the group, and the others have the
        next ones. Joining, and later each broadcast, fails after `seconds`. Returns the text of the error if
        joining fails, and otherwise "".
        """
        if vars(self).get("group"):
            self.group.leave()
        self.group = None
        device = self.device if backend == "nccl" else torch.device("cpu")

        def join() -> None:
            store = TCPStore(host, port, timeout=timedelta(seconds=seconds))
            self.group = BroadcastGroup(name, store, device, first + self.rank, size, seconds)

        return fault_of(join)

    def receive_bucket(
        self: Any, number: int, names: Sequence[str], dtype: str, shapes: Sequence[Sequence[int]]
    ) -> str:
        """Receive the tensors of a bucket from rank 0 of the process group, and load them into the model.

        A push of new weights consists of buckets, which are groups of complete tensors. `number` is the
        bucket's number in the push, from 0; a bucket that was loaded before is received but not loaded again.
        The tensors have the names `names`, the type `dtype`, such as "bfloat16", and the shapes `shapes`.
        Returns the text of the error if the broadcast fails, and otherwise "".
        """
        device = self.group.device
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape in shapes]
        fault = fault_of(lambda: self.group.broadcast(tensors))
        if not fault and number == self.received_buckets:
            with self.loading():
                self.get_model().load_weights(zip(names, tensors, strict=True))
            self.received_buckets += 1
        return fault

    def loading(self: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the context that vLLM itself enters before it calls `load_weights` of a model."""
        from vllm.config import set_current_vllm_config

        stack = contextlib.ExitStack()
        stack.enter_context(set_current_vllm_config(self.vllm_config))
        stack.enter_context(torch.device(self.device))
        return stack

    def weight_report(self: Any) -> dict[str, Any]:
        """Return fingerprints of the received weights and of each parameter of this worker.

        A fingerprint is a number that identifies the values of tensors (`fingerprint`). The result has three
        keys. `received` is the fingerprint of all weights since `expect_weights` was called, or None if it
        was not. `parameters` has the fingerprint of each parameter by its name. `key_value_copies` is the
        number of tensor parallel workers that hold the same key and value heads.
        """
        parameters = dict(self.get_model().named_parameters())
        dtype = max(parameters.values(), key=Tensor.numel).dtype
        heads = self.model_config.get_total_num_kv_heads()
        return {
            "received": vars(self).get("received_weights"),
            "parameters": {name: fingerprint(parameter, dtype) for name, parameter in parameters.items()},
            "key_value_copies": -(-self.parallel_config.tensor_parallel_size // heads),
        }


class BroadcastGroup:
    """A process group, separate from torch's default one, in which rank 0 broadcasts tensors."""

    def __init__(self, name: str, store: Store, device: torch.device, rank: int, size: int, seconds: float):
        """Join the group `name` as `rank` of `size`, and wait until all others have joined.

        `store` is the key-value store of torch over which the ranks find each other. The tensors are on
        `device`; the backend is NCCL on a GPU and gloo otherwise. Raises RuntimeError if a rank has not
        joined after `seconds`, or cannot be connected to.
        """
        self.name, self.device, limit = name, device, timedelta(seconds=seconds)
        store.set(f"joined/{rank}", "")
        # NCCL would wait without a limit for a rank that never joins.
        store.wait([f"joined/{other}" for other in range(size)], limit)
        store = PrefixStore("group", store)
        if device.type == "cuda":
            self.group = _nccl_group(store, rank, size, limit)
        else:
            self.group = ProcessGroupGloo(store, rank, size, limit)
        try:  # NCCL connects the ranks at the first broadcast.
            self.broadcast([torch.zeros(1, device=device)])
        except RuntimeError:
            self.leave()
            raise

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send the tensors if this is rank 0, and otherwise receive them in place.

        Every rank must call this with tensors of the same shapes. Raises RuntimeError on failure.
        """
        for work in [self.group.broadcast([tensor]) for tensor in tensors]:
            work.wait()

    def leave(self) -> None:
        """Release the group; the other ranks cannot use it any more."""
        self.group.abort()


def _nccl_group(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    """Return a process group of NCCL whose `Work.wait` raises RuntimeError after `limit`."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    # The constructor reads this variable. Without it, a thread of torch ends the process after the limit.
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[variable]
        os.environ |= {variable: before} if before is not None else {}


def fault_of(action: Callable[[], None]) -> str:
    """Call `action`, and return the first line of its error if it raises RuntimeError, and otherwise ""."""
    try:
        action()
    except RuntimeError as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return ""


def fingerprint(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return a number that identifies the values of all elements after a cast to `dtype`.

    It is the sum of the bit patterns of the elements as float32, modulo 2^62. It does not depend on the order
    of the elements or on padding with zeros. So the fingerprint of several tensors, joined or not, is the sum
    of their fingerprints, modulo 2^62, and is also correct if vLLM stores the query, key and value
    projections as one matrix.
    """
    parts = tensor.detach().reshape(-1).split(CHUNK_ELEMENTS)
    return (
        sum(int(part.to(dtype).float().view(torch.int32).sum(dtype=torch.int64)) for part in parts) % MODULUS
    )


def named_fingerprint(name: str, values: int) -> int:
    """Return a number below MODULUS that identifies a tensor's name and its values.

    It is `values`, the `fingerprint` of the values, multiplied by an odd number that depends on the name.
    """
    return values * (2 * zlib.crc32(name.encode()) + 1) % MODULUS


def device_name(device: torch.device) -> str:
    """Return the key under which vLLM looks up a memory handle: the UUID of a GPU, or "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def nccl_version(device: torch.device) -> str:
    """Return the version of NCCL that this process uses for tensors on `device`, or "" if it is no GPU."""
    return ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""
