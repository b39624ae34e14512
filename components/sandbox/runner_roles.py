"""The roles that a runner can take, and the loop that executes the judge's orders.

This file runs only inside the sandbox; the judge never imports it. The roles `candidate`, `eager`, `compile`
and `noop` are measured with the same loop. The roles `describe` and `reference` are implemented in
reference.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reference
import result_channel
import shared_memory
import torch
from compile_artefacts import CompileArtefacts
from op_blocker import ForbiddenOperator, prepare_operator_block
from runner_support import SharedTensors, define_module, eval_mode, flatten_outputs

if TYPE_CHECKING:
    from components.sandbox.runner_protocol import RoleHeader

# Modes of torch.compile that use CUDA graphs.
GRAPH_MODES = ("reduce-overhead", "max-autotune")
# Maximum length of an order of the judge, in bytes.
ORDER_BYTES = 1 << 14
# Type of zygote.receive, which reads one message and the descriptors sent with it.
Receive = Callable[[socket.socket], tuple[Any, list[int]]]
# Type of a loaded model: takes the arguments of one call and returns the outputs.
Call = Callable[..., Any]
# Type of a function that returns the tensors of an output, or raises WrongForm if their form is wrong.
Check = Callable[[Any], list[torch.Tensor]]


class WrongForm(Exception):
    """Error raised if a candidate's output does not have the form of the reference output.

    Its text becomes the reason of the verdict.
    """


def serve(connection: socket.socket, header: RoleHeader, descriptors: list[int], receive: Receive) -> None:
    """Take the roles that the judge names, one after another, until the judge closes the connection.

    `header` is the message that names the first role, and `descriptors` came with it. `receive` reads the
    next header with its descriptors.
    """
    while header:
        if "role" in header:
            torch.backends.cuda.matmul.allow_tf32 = header["precision"] == "tf32"
            torch.backends.cudnn.allow_tf32 = header["precision"] == "tf32"
            play_role(connection, header, descriptors)
            for descriptor in descriptors:
                with contextlib.suppress(OSError):  # closed already if it belonged to a buffer
                    os.close(descriptor)
            gc.collect()
            torch.cuda.empty_cache()
        header, descriptors = receive(connection)


def play_role(connection: socket.socket, header: RoleHeader, descriptors: list[int]) -> None:
    """Take the role that the header names, until the judge ends it."""
    if header["role"] == "describe":
        if "share" in header and header["device"] == "cuda":
            torch.cuda.set_per_process_memory_fraction(header["share"])
        connection.send(b"R" + json.dumps(reference.describe(header["code"], header["device"])).encode())
    elif header["role"] == "reference":
        with contextlib.closing(SharedTensors(header, descriptors)) as shared:
            make_references(connection, reference.ReferenceModel(header, shared), shared)
    else:
        with contextlib.closing(SharedTensors(header, descriptors[1:])) as shared:
            try:
                measure(connection, header, shared, descriptors[0])
            except WrongForm as error:
                connection.send(b"W" + str(error).encode())
            except ForbiddenOperator as error:
                connection.send(b"F" + str(error).encode())


def orders(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the judge's orders for one role, until the order `leave` or the end of the connection."""
    while data := os.read(connection.fileno(), ORDER_BYTES):
        order = parse_order(data)
        if order["op"] == "leave":
            return
        yield order


@functools.lru_cache(8)
def parse_order(order: bytes) -> dict[str, Any]:
    """Return an order parsed from JSON; equal orders are parsed only once.

    Parsing time is part of a measurement. Without the cache, a candidate whose native code answers the judge
    directly could save this time.
    """
    parsed: dict[str, Any] = json.loads(order)
    return parsed


def make_references(
    connection: socket.socket, model: reference.ReferenceModel, shared: SharedTensors
) -> None:
    """Write the parameters, input sets and outputs that the judge orders to shared memory."""
    connection.send(b"R")
    for order in orders(connection):
        if order["op"] == "parameters":
            model.write_parameters(order["seed"])
        elif order["op"] == "exact":
            model.write_exact()
        else:
            model.fill(order)
        if shared.device == "cuda":
            torch.cuda.synchronize()
        connection.send(b"D")


def measure(connection: socket.socket, header: RoleHeader, shared: SharedTensors, library: int) -> None:
    """Load the candidate, baseline or no-op, and make the calls that the judge orders.

    Each order makes one call for each of its input sets. `library` is the descriptor of a candidate's
    compiled library, or of the archive of the role `compile` (compile_artefacts.py).
    """
    refuse_compute, artefacts = None, None
    if header["role"] == "candidate":
        refuse_compute = prepare_operator_block(shared.device)
        call = load_candidate(header, shared, library)
    elif header["role"] == "noop":
        outputs = itertools.cycle(shared.noop_outputs())

        def call(*_: Any) -> Any:
            return next(outputs)

    else:
        if header["role"] == "compile":
            artefacts = CompileArtefacts(library)
        call = load_baseline(header, shared)
    arguments = [tuple(shared.arguments(i)) for i in range(shared.layout["sets"])]
    inputs = [tensor for i in range(len(arguments)) for tensor in shared.tensors("inputs", i)]
    expected = shared.zero_outputs(share_elements=True)
    forbidden = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in inputs]

    def check(output: Any) -> list[torch.Tensor]:
        return check_outputs(output, expected, forbidden)

    delivery = make_delivery(connection, header, shared)
    gc.collect()
    gc.freeze()
    gc.disable()
    if refuse_compute is not None:
        refuse_compute()
    with torch.no_grad():
        connection.send(b"R")
        for order in orders(connection):
            if order["op"] == "release":
                torch.cuda.empty_cache()
            elif order["op"] == "warm":
                call(*arguments[-1])
            elif order["op"] == "save" and artefacts is not None:
                artefacts.save(library)
            elif order["op"] == "time":
                delivery.calls(call, arguments[: order["sets"]])
            else:
                delivery.checked_calls(call, arguments[: order["sets"]], check)
            if shared.device == "cuda":
                torch.cuda.synchronize()
            connection.send(b"D")
    # Do not unfreeze: a garbage collection that visits torch's objects would copy every memory page that is
    # shared with the zygote.
    gc.enable()


def load_candidate(header: RoleHeader, shared: SharedTensors, library: int) -> Call:
    """Write the candidate's files to the working folder and return its module with the judge's parameters.

    `library` is the descriptor of the compiled library, which is empty if the candidate has none.
    """
    if size := os.fstat(library).st_size:
        Path(f"cuda_extension{header['suffix']}").write_bytes(os.pread(library, size, 0))
    sys.path.insert(0, os.getcwd())
    for name, text in header["files"].items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    module: torch.nn.Module = importlib.import_module("model_new").ModelNew(*header["init_inputs"])
    shared.load_parameters(module)
    call: Call = eval_mode(module, shared.device)
    return call


def load_baseline(header: RoleHeader, shared: SharedTensors) -> Call:
    """Return the task's own model with the judge's parameters, compiled if the role is `compile`."""
    module = define_module("model", header["code"]).Model(*header["init_inputs"])
    shared.load_parameters(module)
    module = eval_mode(module, shared.device)
    return torch.compile(module, mode=header["compile_mode"]) if header["role"] == "compile" else module


def check_outputs(
    output: Any, expected: list[torch.Tensor], forbidden: list[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return the tensors of `output`.

    Raises WrongForm unless they have the form of `expected` and lie in no `forbidden` address range.
    """
    leaves: list[torch.Tensor] = flatten_outputs(output)
    if len(leaves) != len(expected):
        raise WrongForm("wrong_number_of_outputs")
    for leaf, form in zip(leaves, expected, strict=True):
        if type(leaf) is not torch.Tensor:
            raise WrongForm("not_a_plain_tensor")
        if leaf.shape != form.shape:
            raise WrongForm(f"wrong_shape:{list(leaf.shape)}_instead_of_{list(form.shape)}")
        if leaf.dtype != form.dtype:
            raise WrongForm(f"wrong_dtype:{leaf.dtype}_instead_of_{form.dtype}")
        if leaf.device.type != form.device.type:
            raise WrongForm(f"wrong_device:{leaf.device}")
        start = leaf.untyped_storage().data_ptr()
        if any(start < high and low < start + leaf.untyped_storage().nbytes() for low, high in forbidden):
            raise WrongForm("output_aliases_input")
    return leaves


def make_delivery(
    connection: socket.socket, header: RoleHeader, shared: SharedTensors
) -> HostDelivery | DeviceDelivery | CallDelivery:
    """Return the object that makes the calls of this role and delivers their results to the judge."""
    if shared.device == "cuda":
        is_candidate = header["role"] == "candidate"
        if "next_inputs" in shared.buffers:
            return CallDelivery(connection, shared, inspects=is_candidate)
        is_graph = header.get("compile_mode") in GRAPH_MODES
        return DeviceDelivery(connection, shared, reuses_memory=is_graph, inspects=is_candidate)
    descriptor = connection.fileno()
    if header["role"] == "noop":
        return NoopDelivery(descriptor, shared.zero_outputs())
    return HostDelivery(descriptor)


def address_message(outputs: list[torch.Tensor]) -> bytes:
    """Return the message with the memory addresses of a call's outputs."""
    return struct.pack(f"c{len(outputs)}Q", b"O", *(output.data_ptr() for output in outputs))


class HostDelivery:
    """Object that makes the calls of a role on cpu, and lets the judge read each result before the next call.

    The judge reads the result from this process's memory, at addresses that this object sends.
    The code between two calls is part of every measurement. It is native code (result_channel.cpp), because
    a candidate could otherwise save microseconds by sending the messages from its own native code
    (tests/exploits/native_protocol).
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        """Make one call for each tuple of arguments and deliver its result."""
        result_channel.calls(self.descriptor, call, arguments, torch.Tensor, self.deliver)

    def checked_calls(self, call: Call, arguments: list[tuple[Any, ...]], check: Check) -> None:
        """Make one call for each tuple of arguments, check the form of its result, and deliver it.

        This is for rounds whose time is not used, because the check takes time.
        """
        for values in arguments:
            result = call(*values)
            check(result)
            self.deliver(result)

    def deliver(self, result: Any) -> None:
        """Send the judge the addresses of a result, and wait until the judge has read it."""
        leaves = [leaf.contiguous() for leaf in flatten_outputs(result)]
        result_channel.send_and_wait(self.descriptor, address_message(leaves), 1)


class NoopDelivery(HostDelivery):
    """Object that reports results to the judge on cpu without computing any, for the role `noop`.

    It exchanges the messages that every runner must exchange. It does not run the Python interpreter between
    the messages. The no-op's time is subtracted from every measurement, so including the interpreter would
    give a candidate that avoids it the advantage twice.
    """

    def __init__(self, descriptor: int, outputs: list[torch.Tensor]):
        super().__init__(descriptor)
        self.outputs = outputs  # kept alive: the judge reads their memory
        self.message = address_message(outputs)

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        """Report the same zero outputs once for each tuple of arguments; `call` is not called.

        Each message has the addresses of these outputs, and is answered when the judge has read them. The
        method replaces `HostDelivery.calls`, which makes the calls.
        """
        result_channel.send_and_wait(self.descriptor, self.message, len(arguments))


def check_memory(leaves: list[torch.Tensor]) -> None:
    """Raise WrongForm if an output on cuda is not in memory of cudaMalloc.

    Pages of other memory can be mapped at several addresses, so that a result that repeats itself is written
    once (tests/exploits_cuda/mapped_twice).
    """
    if not all(map(shared_memory.is_cuda_malloc, leaves)):
        raise WrongForm("output_is_mapped")


def random_call(arguments: list[tuple[Any, ...]]) -> int:
    """Return the index of a random call of a round."""
    return secrets.randbelow(max(1, len(arguments)))


def report_computed(connection: socket.socket) -> None:
    """Tell the judge that results are computed, and wait until it allows the runner to continue."""
    connection.send(b"C")
    if not connection.recv(1):
        os._exit(0)


class DeviceDelivery:
    """Object that makes the calls of a round on cuda, and then copies all results to shared memory.

    The copy starts when the judge allows it. Before that, the judge overwrites the shared memory, so results
    that a candidate wrote there directly are lost. The measured time includes the copy.
    """

    def __init__(
        self, connection: socket.socket, shared: SharedTensors, *, reuses_memory: bool, inspects: bool
    ):
        self.connection = connection
        # Whether one call of each round is inspected by `check_memory`.
        self.inspects = inspects
        self.targets = [shared.tensors("outputs", i) for i in range(shared.layout["calls"])]
        # Whether a call overwrites the result of the previous call, as a CUDA graph does. If so, every result
        # is cloned before the next call.
        self.reuses_memory = reuses_memory

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        """Make one call for each tuple of arguments, and deliver all results together."""
        results: list[list[torch.Tensor]] = []
        inspected = random_call(arguments)
        for index, values in enumerate(arguments):
            leaves = flatten_outputs(call(*values))
            if index == inspected and self.inspects:
                check_memory(leaves)
            results.append([leaf.clone() for leaf in leaves] if self.reuses_memory else leaves)
        self.deliver(results)

    def checked_calls(self, call: Call, arguments: list[tuple[Any, ...]], check: Check) -> None:
        """Make one call for each tuple of arguments, check the form of each result, and deliver all together.

        This is for rounds whose time is not used. If two results have the same address, `calls` clones every
        result from then on.
        """
        copies: list[list[torch.Tensor]] = []
        # Keep all results alive, so that the allocator cannot reuse their memory. If an address occurs twice,
        # the candidate itself reuses memory.
        results: list[list[torch.Tensor]] = []
        addresses: set[int] = set()
        for values in arguments:
            results.append(check(call(*values)))
            latest = {leaf.data_ptr() for leaf in results[-1]}
            self.reuses_memory = self.reuses_memory or not addresses.isdisjoint(latest)
            addresses |= latest
            copies.append([leaf.clone() for leaf in results[-1]])
        self.deliver(copies)

    def deliver(self, results: list[list[torch.Tensor]]) -> None:
        """Wait until the judge allows the copy, and copy the results of all calls to shared memory."""
        torch.cuda.synchronize()
        report_computed(self.connection)
        pairs = [
            pair
            for leaves, targets in zip(results, self.targets, strict=False)
            for pair in zip(targets, leaves, strict=True)
        ]
        # One operation for all copies, because separate copies would need one kernel launch each.
        torch._foreach_copy_([target for target, _ in pairs], [leaf for _, leaf in pairs])


class CallDelivery:
    """Object that makes the calls of a round on cuda, each after the judge has taken the last call's outputs.

    The judge writes the inputs of a call to host memory only then, so that no two calls of a round can be
    computed together (tests/exploits_cuda/batch). Inputs and outputs are copied between host memory and the
    device by this process, because work of the judge on the device would cost a change of process each time.
    """

    def __init__(self, connection: socket.socket, shared: SharedTensors, *, inspects: bool):
        self.connection = connection
        # Whether one call of each round is inspected by `check_memory`.
        self.inspects = inspects
        shared.pin("next_inputs")
        shared.pin("last_outputs")
        self.next_inputs = shared.tensors("next_inputs")
        self.last_outputs = shared.tensors("last_outputs")
        self.inputs = [shared.tensors("inputs", i) for i in range(shared.layout["calls"])]

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        """Make one call for each tuple of arguments, and deliver each result before the next call."""
        inspected = random_call(arguments)
        for index, values in enumerate(arguments):
            self.receive(index)
            leaves = flatten_outputs(call(*values))
            if index == inspected and self.inspects:
                check_memory(leaves)
            self.deliver(leaves)

    def checked_calls(self, call: Call, arguments: list[tuple[Any, ...]], check: Check) -> None:
        """Make one call for each tuple of arguments, check the form of its result, and deliver it.

        This is for rounds whose time is not used.
        """
        for index, values in enumerate(arguments):
            self.receive(index)
            self.deliver(check(call(*values)))

    def receive(self, index: int) -> None:
        """Copy the inputs that the judge has written to the device, as the arguments of call `index`."""
        for target, source in zip(self.inputs[index], self.next_inputs, strict=True):
            target.copy_(source, non_blocking=True)

    def deliver(self, leaves: list[torch.Tensor]) -> None:
        """Copy the result of a call to host memory, and wait until the judge has taken it."""
        for target, leaf in zip(self.last_outputs, leaves, strict=True):
            target.copy_(leaf, non_blocking=True)
        torch.cuda.synchronize()
        report_computed(self.connection)
