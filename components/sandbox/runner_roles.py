"""The roles of a runner. This file runs inside the sandbox only; the judge never imports it.

`candidate`, `eager`, `compile` and `noop` are measured by the same loop; `describe` and `reference` are in
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
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reference
import result_channel
import torch
from op_blocker import ForbiddenOperator, prepare_operator_block
from runner_support import SharedTensors, define_module, eval_mode, flatten_outputs

if TYPE_CHECKING:
    from components.sandbox.runner_protocol import RoleHeader

ORDER_BYTES = 1 << 14
"""Longest order of the judge."""
Receive = Callable[[socket.socket], tuple[Any, list[int]]]
"""Reads one message and its descriptors (zygote.receive)."""
Call = Callable[..., Any]
"""A model: takes the arguments of one call, returns its outputs."""
Check = Callable[[Any], list[torch.Tensor]]
"""Returns the tensors of an output; raises WrongForm."""


class WrongForm(Exception):
    """The candidate's output has not the form of the reference's; the text is the verdict's reason."""


def serve(connection: socket.socket, header: RoleHeader, descriptors: list[int], receive: Receive) -> None:
    """Play the role of each header in turn, until the judge closes the connection."""
    while header:
        if "role" in header:
            torch.backends.cuda.matmul.allow_tf32 = header["precision"] == "tf32"
            torch.backends.cudnn.allow_tf32 = header["precision"] == "tf32"
            play_role(connection, header, descriptors)
            for descriptor in descriptors:
                with contextlib.suppress(OSError):  # a buffer has closed its own
                    os.close(descriptor)
            gc.collect()
            torch.cuda.empty_cache()
        header, descriptors = receive(connection)


def play_role(connection: socket.socket, header: RoleHeader, descriptors: list[int]) -> None:
    """Play one role until the judge ends it."""
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
    """Yield the judge's orders of one role; no descriptors come with them."""
    while data := os.read(connection.fileno(), ORDER_BYTES):
        order = parse_order(data)
        if order["op"] == "leave":
            return
        yield order


@functools.lru_cache(8)
def parse_order(order: bytes) -> dict[str, Any]:
    """Parse JSON, cached.

    Parsing is time that a candidate's native code, speaking to the judge by itself, would save.
    """
    parsed: dict[str, Any] = json.loads(order)
    return parsed


def make_references(
    connection: socket.socket, model: reference.ReferenceModel, shared: SharedTensors
) -> None:
    """Write the parameters and input sets that the judge orders."""
    connection.send(b"R")
    for order in orders(connection):
        if order["op"] == "parameters":
            model.write_parameters(order["seed"])
        else:
            model.fill(order)
        if shared.device == "cuda":
            torch.cuda.synchronize()
        connection.send(b"D")


def measure(connection: socket.socket, header: RoleHeader, shared: SharedTensors, library: int) -> None:
    """Load a candidate or a baseline, and make the calls that the judge orders: one for each input set."""
    refuse_compute = None
    if header["role"] == "candidate":
        refuse_compute = prepare_operator_block(shared.device)
        call = load_candidate(header, shared, library)
    elif header["role"] == "noop":
        outputs = itertools.cycle(shared.zero_outputs(shared.layout["sets"] - 1))

        def call(*_: Any) -> Any:
            return next(outputs)

    else:
        call = load_baseline(header, shared)
    arguments = [tuple(shared.arguments(i)) for i in range(shared.layout["sets"])]
    inputs = [tensor for i in range(len(arguments)) for tensor in shared.tensors("inputs", i)]
    expected = shared.zero_outputs(1)[0]
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
            if order["op"] == "warm":
                call(*arguments[-1])
            elif order["op"] == "time":
                delivery.calls(call, arguments[: order["sets"]])
            else:
                delivery.checked_calls(call, arguments[: order["sets"]], check)
            if shared.device == "cuda":
                torch.cuda.synchronize()
            connection.send(b"D")
    # without unfreezing: a collection that visits all of torch copies every page shared with the zygote
    gc.enable()


def load_candidate(header: RoleHeader, shared: SharedTensors, library: int) -> Call:
    """Write the candidate's files to the working folder, and make its module with the judge's parameters."""
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
    """Make the task's own model with the judge's parameters, compiled where the role says so."""
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
) -> HostDelivery | DeviceDelivery:
    """Return how this role hands its results to the judge."""
    if shared.device == "cuda":
        is_graph = header.get("compile_mode", "default") != "default"
        return DeviceDelivery(connection, shared, reuses_memory=is_graph)
    descriptor = connection.fileno()
    if header["role"] == "noop":
        return NoopDelivery(descriptor, shared.zero_outputs(1)[0])
    return HostDelivery(descriptor)


def address_message(outputs: list[torch.Tensor]) -> bytes:
    """Return the message that tells the judge where a call's outputs lie."""
    return struct.pack(f"c{len(outputs)}Q", b"O", *(output.data_ptr() for output in outputs))


class HostDelivery:
    """Delivery on cpu.

    The judge reads every result out of this process's memory itself, before the next call.

    What runs between two calls is part of every measurement. It is native code (result_channel.cpp): a
    candidate could otherwise save microseconds by speaking to the judge from native code of its own
    (tests/exploits/native_protocol).
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        """Make one call for each set of arguments and deliver its result."""
        result_channel.calls(self.descriptor, call, arguments, torch.Tensor, self.deliver)

    def checked_calls(self, call: Call, arguments: list[tuple[Any, ...]], check: Check) -> None:
        """Make the same calls, untimed, and check the form of every result."""
        for values in arguments:
            result = call(*values)
            check(result)
            self.deliver(result)

    def deliver(self, result: Any) -> None:
        """Tell the judge where a result lies, and wait until it has read it."""
        leaves = [leaf.contiguous() for leaf in flatten_outputs(result)]
        result_channel.send_and_wait(self.descriptor, address_message(leaves), 1)


class NoopDelivery(HostDelivery):
    """Delivery of the no-op on cpu: the messages alone, which cost any runner their time.

    The interpreter's share is not part of it: subtracting that would reward a candidate that avoids the
    interpreter twice.
    """

    def __init__(self, descriptor: int, outputs: list[torch.Tensor]):
        super().__init__(descriptor)
        self.outputs = outputs  # kept alive: the judge reads their memory
        self.message = address_message(outputs)

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        result_channel.send_and_wait(self.descriptor, self.message, len(arguments))


class DeviceDelivery:
    """Delivery on cuda: the results of a round are held, and copied to the judge's memory when it says so.

    The judge wipes that memory after the last call, so that nothing computed straight into it survives. Its
    clock runs meanwhile.
    """

    def __init__(self, connection: socket.socket, shared: SharedTensors, *, reuses_memory: bool):
        self.connection = connection
        count = shared.layout["sets"] - 1  # the last set of inputs is scratch
        self.targets = [shared.tensors("outputs", i) for i in range(count)]
        self.reuses_memory = reuses_memory
        """Whether a call overwrites the result of the one before, as a CUDA graph does.

        Results must be copied to be held.
        """

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        """Make one call for each set of arguments, and deliver all results."""
        results = [
            [leaf.clone() if self.reuses_memory else leaf for leaf in flatten_outputs(call(*values))]
            for values in arguments
        ]
        self.deliver(results)

    def checked_calls(self, call: Call, arguments: list[tuple[Any, ...]], check: Check) -> None:
        """Make the same calls, untimed, and check the form of every result."""
        copies: list[list[torch.Tensor]] = []
        # Results stay alive, so that an address that comes again is the candidate's doing and not the
        # allocator's.
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
        """Wait for the judge's word, and copy the results of all calls to its memory."""
        torch.cuda.synchronize()
        self.connection.send(b"C")
        if not self.connection.recv(1):
            os._exit(0)
        pairs = [
            pair
            for leaves, targets in zip(results, self.targets, strict=False)
            for pair in zip(targets, leaves, strict=True)
        ]
        # One by one the copies would cost as many launches as the calls.
        torch._foreach_copy_([target for target, _ in pairs], [leaf for _, leaf in pairs])
