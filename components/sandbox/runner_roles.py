"""The parts that a runner can play. This file runs inside the sandbox only; the judge never imports it.

`candidate`, `eager`, `compile` and `noop` are measured by the same loop; `reference` is in reference.py.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import reference
import result_channel
import torch
from op_blocker import Forbidden, prepare_operator_block
from runner_support import Shared, eval_mode, flat, module_of

Receive = Callable[[socket.socket], tuple[dict, list[int]]]


class Fault(Exception):
    """The candidate's output has not the form of the reference's; the text is the verdict's reason."""


def settings(precision: str) -> None:
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def make_candidate(header: dict, shared: Shared, descriptors: list[int]) -> Callable:
    size = os.fstat(descriptors[0]).st_size
    if size:
        library = Path(f"cuda_extension{header['suffix']}")
        library.write_bytes(os.pread(descriptors[0], size, 0))
    sys.path.insert(0, os.getcwd())
    for name, text in header["files"].items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    module = importlib.import_module("model_new").ModelNew(*header["init_inputs"])
    shared.load(module)
    return eval_mode(module, shared.device)


def make_reference(header: dict, shared: Shared) -> Callable:
    module = module_of("model", header["code"]).Model(*header["init_inputs"])
    shared.load(module)
    module = eval_mode(module, shared.device)
    if header["role"] != "compile":
        return module
    return torch.compile(module, mode=header["compile_mode"])


def check_form(
    output: Any, expected: list[torch.Tensor], forbidden: list[tuple[int, int]]
) -> list[torch.Tensor]:
    leaves = flat(output)
    if len(leaves) != len(expected):
        raise Fault("wrong_number_of_outputs")
    for leaf, form in zip(leaves, expected, strict=True):
        if type(leaf) is not torch.Tensor:
            raise Fault("not_a_plain_tensor")
        if leaf.shape != form.shape:
            raise Fault(f"wrong_shape:{list(leaf.shape)}_instead_of_{list(form.shape)}")
        if leaf.dtype != form.dtype:
            raise Fault(f"wrong_dtype:{leaf.dtype}_instead_of_{form.dtype}")
        if leaf.device.type != form.device.type:
            raise Fault(f"wrong_device:{leaf.device}")
        start = leaf.untyped_storage().data_ptr()
        if any(start < high and low < start + leaf.untyped_storage().nbytes() for low, high in forbidden):
            raise Fault("output_aliases_input")
    return leaves


def said(addresses: Iterable[int]) -> bytes:
    """Where a call's results lie, as the judge is told."""
    together = list(addresses)
    return struct.pack(f"c{len(together)}Q", b"O", *together)


class HostDelivery:
    """On cpu the judge reads every result out of this process's memory itself, before the next call (rounds.Arm.round).

    Every arm pays for what stands between two calls: it is native code (result_channel.cpp), or a candidate would save microseconds by
    speaking to the judge from native code of its own (tests/exploits/native_protocol).
    """

    def __init__(self, connection: socket.socket, shared: Shared):
        self.descriptor = connection.fileno()

    def calls(self, call: Callable, arguments: list[tuple]) -> None:
        result_channel.calls(self.descriptor, call, arguments, torch.Tensor, self.hand_over)

    def hand_over(self, result: Any) -> None:
        leaves = [leaf.contiguous() for leaf in flat(result)]
        result_channel.say(self.descriptor, said(leaf.data_ptr() for leaf in leaves), 1)


class NoopDelivery(HostDelivery):
    """What a round costs any runner, even one that speaks to the judge without the interpreter: the messages alone.

    Subtracting the interpreter's share too would pay whoever avoids it twice (tests/exploits/native_protocol).
    """

    def __init__(self, connection: socket.socket, shared: Shared):
        super().__init__(connection, shared)
        self.outputs = shared.outputs(1)[0]
        self.message = said(output.data_ptr() for output in self.outputs)

    def calls(self, call: Callable, arguments: list[tuple]) -> None:
        result_channel.say(self.descriptor, self.message, len(arguments))


class DeviceDelivery:
    """On cuda all results of a round are held, and copied to the judge's memory when it says so: it wiped that memory after
    the last call, so that nothing computed straight into it survives. Its clock runs on meanwhile."""

    def __init__(self, connection: socket.socket, shared: Shared, graphs: bool):
        self.connection = connection
        self.slots = [
            shared.tensors("outputs", i) for i in range(shared.layout["sets"] - 1)
        ]  # the last set of inputs is scratch
        self.reused = graphs
        """Whether the arm returns memory that its next call overwrites, as a CUDA graph does: who keeps its results must copy them."""

    def calls(self, call: Callable, arguments: list[tuple]) -> None:
        results = [
            [leaf.clone() if self.reused else leaf for leaf in flat(call(*values))] for values in arguments
        ]
        self.hand_over_all(results)

    def hand_over_all(self, results: list[list[torch.Tensor]]) -> None:
        torch.cuda.synchronize()
        self.connection.send(b"C")
        if not self.connection.recv(1):
            os._exit(0)
        pairs = [
            pair
            for leaves, slots in zip(results, self.slots, strict=False)
            for pair in zip(slots, leaves, strict=True)
        ]
        torch._foreach_copy_(
            [slot for slot, _ in pairs], [leaf for _, leaf in pairs]
        )  # one by one they cost as many launches as the calls


def measured(
    connection: socket.socket,
    header: dict,
    shared: Shared,
    call: Callable,
    refuse_compute: Callable[[], None] | None,
) -> None:
    """The loop that every measured arm runs: wait for go, call once per set, hand each result to the judge, say done."""
    cuda = shared.device == "cuda"
    arguments = [tuple(shared.arguments(i)) for i in range(header["layout"]["sets"])]
    inputs = [t for i in range(len(arguments)) for t in shared.tensors("inputs", i)]
    forbidden = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in inputs]
    form = shared.outputs(1)[0]
    delivery: HostDelivery | DeviceDelivery
    if cuda:
        delivery = DeviceDelivery(
            connection, shared, graphs=header.get("compile_mode", "default") != "default"
        )
    else:
        delivery = (NoopDelivery if header["role"] == "noop" else HostDelivery)(connection, shared)
    gc.collect()
    gc.freeze()
    gc.disable()
    if refuse_compute is not None:
        refuse_compute()
    with torch.no_grad():
        connection.send(b"R")
        for order in orders(connection):
            now = arguments[: order["sets"]]
            if order["op"] == "warm":
                call(*arguments[-1])
            elif order["op"] == "time":
                delivery.calls(call, now)
            else:
                checked(call, now, delivery, form, forbidden)
            if cuda:
                torch.cuda.synchronize()
            connection.send(b"D")
    gc.enable()  # and nothing is unfrozen: a collection that looks at all of torch copies every page that this process shares


def checked(
    call: Callable,
    arguments: list[tuple],
    delivery: HostDelivery | DeviceDelivery,
    form: list,
    forbidden: list,
) -> None:
    """An untimed round: the same calls, every result's form looked at."""
    results: list[list[torch.Tensor]] = []
    held: list[list[torch.Tensor]] = []
    places: set[int] = set()
    for values in arguments:
        result = call(*values)
        leaves = check_form(result, form, forbidden)
        if isinstance(delivery, HostDelivery):
            delivery.hand_over(result)
        else:
            held.append(
                leaves
            )  # alive, so that an address that comes again is the candidate's doing, not the allocator's
            delivery.reused = delivery.reused or not places.isdisjoint(leaf.data_ptr() for leaf in leaves)
            places.update(leaf.data_ptr() for leaf in leaves)
            results.append([leaf.clone() for leaf in leaves])
    if isinstance(delivery, DeviceDelivery):
        delivery.hand_over_all(results)


def serve(connection: socket.socket, header: dict, descriptors: list[int], receive: Receive) -> None:
    """Play the role that the judge's header names, and when told to leave it the next one, until the judge closes the connection."""
    while header:
        if header.get("op") != "leave":
            settings(header["precision"])
            play(connection, header, descriptors)
            for descriptor in descriptors:
                with contextlib.suppress(OSError):  # a buffer has closed its own
                    os.close(descriptor)
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        header, descriptors = receive(connection)


def play(connection: socket.socket, header: dict, descriptors: list[int]) -> None:
    role = header["role"]
    if role == "describe":
        if "share" in header and header["device"] == "cuda":
            torch.cuda.set_per_process_memory_fraction(header["share"])
        connection.send(b"R" + json.dumps(reference.describe(header["code"], header["device"])).encode())
        return
    if role == "reference":
        with contextlib.closing(Shared(header, descriptors)) as shared:
            source = reference.Oracle(header, shared)
            connection.send(b"R")
            for order in orders(connection):
                if order["op"] == "parameters":
                    source.write_parameters(order["seed"])
                else:
                    source.fill(order)
                if shared.device == "cuda":
                    torch.cuda.synchronize()
                connection.send(b"D")
        return
    library, rest = descriptors[:1], descriptors[1:]
    with contextlib.closing(Shared(header, rest)) as shared:
        try:
            refuse_compute = prepare_operator_block(shared.device) if role == "candidate" else None
            if role == "candidate":
                call = make_candidate(header, shared, library)
            elif role == "noop":
                fixed = itertools.cycle(shared.outputs(shared.layout["sets"] - 1))

                def call(*_: Any) -> Any:
                    return next(fixed)

            else:
                call = make_reference(header, shared)
            measured(connection, header, shared, call, refuse_compute)
        except Fault as error:
            connection.send(b"W" + str(error).encode())
        except Forbidden as error:
            connection.send(b"F" + str(error).encode())


ORDER_BYTES = 1 << 14


@functools.lru_cache(8)
def parsed(order: bytes) -> dict:
    """A round's order is nearly always the one before: reading it anew costs every arm, and the no-op, what native code would save."""
    return json.loads(order)


def orders(connection: socket.socket) -> Iterator[dict]:
    """The judge's orders in one role; no descriptors come with them."""
    while data := os.read(connection.fileno(), ORDER_BYTES):
        order = parsed(data)
        if order.get("op", "leave") == "leave":
            return
        yield order
