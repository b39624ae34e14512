"""The parts that a runner can play. This file runs inside the sandbox only; the judge never imports it.

`candidate`, `eager`, `compile` and `noop` are measured by the same loop; `oracle` makes inputs and expected outputs from
the task's own source, which is as untrusted as the candidate's.
"""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
import json
import math
import os
import socket
import struct
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import buffers
import torch
from torch.utils._python_dispatch import TorchDispatchMode

Receive = Callable[[socket.socket], tuple[dict, list[int]]]

ALLOCATION_AND_VIEWS = frozenset(
    """empty empty_strided empty_like new_empty new_empty_strided zeros zeros_like new_zeros view _unsafe_view reshape alias detach
    as_strided slice select unsqueeze squeeze expand permute transpose t contiguous clone split unbind narrow lift_fresh
    _reshape_alias is_pinned""".split()
)


class Forbidden(Exception):
    """The candidate asked torch for a computation that SKILL.md forbids."""


class RefuseCompute(TorchDispatchMode):
    """A tripwire during verification: only allocation and views may be dispatched."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ALLOCATION_AND_VIEWS:
            raise Forbidden(f"torch_compute:{func}")
        return func(*args, **(kwargs or {}))


class Fault(Exception):
    """The candidate's output has not the form of the reference's; the text is the verdict's reason."""


def module_of(name: str, code: str) -> types.ModuleType:
    """The module that `code` defines, findable by name, since dataclasses and torch.compile look it up."""
    module = types.ModuleType(name)
    module.__file__ = f"{os.getcwd()}/{name}.py"
    Path(module.__file__).write_text(code)
    sys.modules[name] = module
    exec(compile(code, module.__file__, "exec"), module.__dict__)
    return module


def flat(value: Any) -> list[Any]:
    """Tensors of an output: a tensor, or a tuple or list of outputs."""
    if type(value) in (tuple, list):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


class Shared:
    """The shared memory of one arm: parameters, and `sets` of inputs and outputs, each set at its own stride."""

    def __init__(self, header: dict, descriptors: list[int]):
        self.device = header["device"]
        self.layout = header["layout"]
        names = [name for name in ("parameters", "inputs", "outputs", "expected") if "bytes" in self.layout.get(name, {})]
        self.buffers = {name: buffers.make(self.device, self.layout[name]["bytes"], descriptor) for name, descriptor in zip(names, descriptors, strict=True)}

    def tensors(self, name: str, index: int = 0) -> list[torch.Tensor]:
        part = self.layout[name]
        base = index * part["stride"]
        return [self.buffers[name].tensor(buffers.Slot(base + offset, tuple(shape), dtype)) for offset, shape, dtype in part["slots"]]

    def outputs(self, sets: int) -> list[list[torch.Tensor]]:
        """Zeros in the form of the outputs of each of `sets` calls, in memory that is not shared."""
        form = [(tuple(shape), getattr(torch, dtype)) for _, shape, dtype in self.layout["outputs"]["slots"]]
        return [[torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in form] for _ in range(sets)]

    def arguments(self, index: int) -> list[Any]:
        """Arguments of one call: tensors out of the shared memory, other values from the layout."""
        tensors = iter(self.tensors("inputs", index))
        return [next(tensors) if scalar is None else scalar[0] for scalar in self.layout["scalars"]]

    def load(self, module: torch.nn.Module) -> None:
        """Give `module` the judge's parameters by name; its own copy, so that it may not change theirs."""
        state = {name: tensor.clone() for name, tensor in zip(self.layout["names"], self.tensors("parameters"), strict=True)}
        module.load_state_dict(state, strict=True)


def settings(precision: str) -> None:
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def quiet(module: torch.nn.Module, device: str) -> torch.nn.Module:
    return module.to(device).eval().requires_grad_(False)


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
    return quiet(module, shared.device)


def make_reference(header: dict, shared: Shared) -> Callable:
    module = module_of("model", header["code"]).Model(*header["init_inputs"])
    shared.load(module)
    module = quiet(module, shared.device)
    if header["role"] != "compile":
        return module
    return torch.compile(module, mode=header["compile_mode"])


def check_form(output: Any, expected: list[torch.Tensor], forbidden: list[tuple[int, int]]) -> list[torch.Tensor]:
    leaves = flat(output)
    if len(leaves) != len(expected):
        raise Fault("wrong_number_of_outputs")
    for leaf, reference in zip(leaves, expected, strict=True):
        if type(leaf) is not torch.Tensor:
            raise Fault("not_a_plain_tensor")
        if leaf.shape != reference.shape:
            raise Fault(f"wrong_shape:{list(leaf.shape)}_instead_of_{list(reference.shape)}")
        if leaf.dtype != reference.dtype:
            raise Fault(f"wrong_dtype:{leaf.dtype}_instead_of_{reference.dtype}")
        if leaf.device.type != reference.device.type:
            raise Fault(f"wrong_device:{leaf.device}")
        start = leaf.untyped_storage().data_ptr()
        if any(start < high and low < start + leaf.untyped_storage().nbytes() for low, high in forbidden):
            raise Fault("output_aliases_input")
    return leaves


class HostDelivery:
    """On cpu the judge reads every result out of this process's memory itself, before the next call (baselines.Arm.round)."""

    def __init__(self, connection: socket.socket, shared: Shared):
        self.connection = connection

    def calls(self, call: Callable, arguments: list[list[Any]]) -> None:
        for values in arguments:
            self.hand_over(call(*values))

    def hand_over(self, result: Any) -> None:
        leaves = [leaf.contiguous() for leaf in ([result] if type(result) is torch.Tensor else flat(result))]
        self.connection.send(struct.pack(f"c{len(leaves)}Q", b"O", *(leaf.data_ptr() for leaf in leaves)))
        if not self.connection.recv(1):
            os._exit(0)


class NoopDelivery(HostDelivery):
    """What a round costs any runner, even one that speaks to the judge without the interpreter: the messages alone.

    Subtracting the interpreter's share too would pay whoever avoids it twice (tests/exploits/native_protocol).
    """

    def __init__(self, connection: socket.socket, shared: Shared):
        super().__init__(connection, shared)
        self.outputs = shared.outputs(1)[0]
        self.message = struct.pack(f"c{len(self.outputs)}Q", b"O", *(output.data_ptr() for output in self.outputs))

    def calls(self, call: Callable, arguments: list[list[Any]]) -> None:
        for _ in arguments:
            self.connection.send(self.message)
            if not self.connection.recv(1):
                os._exit(0)


class DeviceDelivery:
    """On cuda all results of a round are held, and copied to the judge's memory when it says so: it wiped that memory after
    the last call, so that nothing computed straight into it survives. Its clock runs on meanwhile."""

    def __init__(self, connection: socket.socket, shared: Shared, graphs: bool):
        self.connection = connection
        self.slots = [shared.tensors("outputs", i) for i in range(shared.layout["sets"] - 1)]  # the last set of inputs is scratch
        self.reused = graphs
        """Whether the arm returns memory that its next call overwrites, as a CUDA graph does: who keeps its results must copy them."""

    def calls(self, call: Callable, arguments: list[list[Any]]) -> None:
        results = [[leaf.clone() if self.reused else leaf for leaf in flat(call(*values))] for values in arguments]
        self.hand_over_all(results)

    def hand_over_all(self, results: list[list[torch.Tensor]]) -> None:
        torch.cuda.synchronize()
        self.connection.send(b"C")
        if not self.connection.recv(1):
            os._exit(0)
        for leaves, slots in zip(results, self.slots, strict=False):
            for leaf, slot in zip(leaves, slots, strict=True):
                slot.copy_(leaf)


def measured(connection: socket.socket, header: dict, shared: Shared, call: Callable, receive: Receive) -> None:
    """The loop that every measured arm runs: wait for go, call once per set, hand each result to the judge, say done."""
    cuda = shared.device == "cuda"
    arguments = [shared.arguments(i) for i in range(header["layout"]["sets"])]
    inputs = [t for i in range(len(arguments)) for t in shared.tensors("inputs", i)]
    forbidden = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in inputs]
    form = shared.outputs(1)[0]
    delivery: HostDelivery | DeviceDelivery
    if cuda:
        delivery = DeviceDelivery(connection, shared, graphs=header.get("compile_mode", "default") != "default")
    else:
        delivery = (NoopDelivery if header["role"] == "noop" else HostDelivery)(connection, shared)
    gc.collect()
    gc.freeze()
    gc.disable()
    with torch.no_grad():
        connection.send(b"R")
        while True:
            order, _ = receive(connection)
            if not order:
                return
            now = arguments[: order["sets"]]
            if order["op"] == "warm":
                call(*arguments[-1])
            elif order["op"] == "time":
                delivery.calls(call, now)
            else:
                checked(header["role"], call, now, delivery, form, forbidden)
            if cuda:
                torch.cuda.synchronize()
            connection.send(b"D")


def checked(role: str, call: Callable, arguments: list[list[Any]], delivery: HostDelivery | DeviceDelivery, form: list, forbidden: list) -> None:
    """An untimed round: the same calls under the dispatch mode that refuses compute, every result's form looked at."""
    results: list[list[torch.Tensor]] = []
    held: list[list[torch.Tensor]] = []
    places: set[int] = set()
    for values in arguments:
        with RefuseCompute() if role == "candidate" else torch.no_grad():
            result = call(*values)
        leaves = check_form(result, form, forbidden)
        if isinstance(delivery, HostDelivery):
            delivery.hand_over(result)
        else:
            held.append(leaves)  # alive, so that an address that comes again is the candidate's doing, not the allocator's
            delivery.reused = delivery.reused or not places.isdisjoint(leaf.data_ptr() for leaf in leaves)
            places.update(leaf.data_ptr() for leaf in leaves)
            results.append([leaf.clone() for leaf in leaves])
    if isinstance(delivery, DeviceDelivery):
        delivery.hand_over_all(results)


def describe(code: str, device: str) -> dict:
    """What the judge must know to lay out memory: shapes, dtypes, names; numbers and short strings only."""
    module = module_of("model", code)
    torch.manual_seed(0)
    init_inputs = module.get_init_inputs()
    json.dumps(init_inputs)
    model = quiet(module.Model(*init_inputs), device)
    inputs = list(module.get_inputs())
    moved = [v.to(device) if isinstance(v, torch.Tensor) else v for v in inputs]
    with torch.no_grad():
        outputs = flat(model(*moved))
        seconds, end = math.inf, time.perf_counter() + 0.02
        while seconds == math.inf or time.perf_counter() < end:
            start = time.perf_counter()
            outputs = flat(model(*moved))
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = min(seconds, time.perf_counter() - start)
    form = lambda t: [list(t.shape), str(t.dtype).removeprefix("torch.")]  # noqa: E731
    return {
        "init_inputs": init_inputs,
        "inputs": [form(v) if isinstance(v, torch.Tensor) else None for v in inputs],
        "scalars": [None if isinstance(v, torch.Tensor) else [v] for v in inputs],
        "outputs": [form(t) for t in outputs],
        "state": [[name, *form(t)] for name, t in model.state_dict().items()],
        "parameters": [name for name, _ in model.named_parameters()],
        "seconds": seconds,  # a hint for how many calls fill a round; no result rests on it
    }


FAMILIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "given": lambda x: x,
    "scaled": lambda x: x * 3,
    "shifted": lambda x: x + 1,
    "flipped": lambda x: -x,
    "integers": lambda x: torch.round(x * 2),
    "wide": lambda x: x * torch.pow(10, torch.rand_like(x) * 4 - 3),
}


class Oracle:
    """Inputs, parameters and expected outputs of a task, made by its own source under the judge's secret seeds."""

    def __init__(self, header: dict, shared: Shared):
        self.shared = shared
        self.module = sys.modules.get("model") or module_of("model", header["code"])
        torch.manual_seed(0)
        self.model = quiet(self.module.Model(*header["init_inputs"]), shared.device)
        self.default = {k: v.clone() for k, v in self.model.state_dict().items()}

    def parameters(self, seed: int, only: str | None = None) -> dict[str, torch.Tensor]:
        """Random parameters: no scale is 1 and no bias is 0, so that a candidate that ignores them is wrong."""
        generator = torch.Generator().manual_seed(seed)
        state = {}
        for name, value in self.default.items():
            if not value.is_floating_point() or (only is not None and name != only):
                state[name] = value
                continue
            noise = torch.randn(value.shape, generator=generator).to(value)
            factor = (torch.rand(value.shape, generator=generator) + 0.5).to(value)
            positive = name.endswith("running_var")
            state[name] = factor if positive else value * factor + (0.1 * noise if value.dim() < 2 else 0)
        return state

    def inputs(self, seed: int, family: str) -> list[Any]:
        torch.manual_seed(seed)
        values = list(self.module.get_inputs())
        moved = [v.to(self.shared.device) if isinstance(v, torch.Tensor) else v for v in values]
        return [FAMILIES[family](v).contiguous() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in moved]

    def exactly(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The outputs in float64, where the task's source allows it."""
        wide = copy.deepcopy(self.model).double()
        try:
            return flat(wide(*[v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in inputs]))
        except RuntimeError:  # the source fixes float32 somewhere: its own result is the reference then
            return flat(self.model(*inputs))

    def fill(self, order: dict) -> None:
        """Fill one set: inputs, float32 outputs, and where the order says `exact` float64 ones. The variations serve admission (DESIGN §5)."""
        state = self.parameters(order["parameters"]) if order["parameters"] is not None else self.default
        if order.get("other_parameter"):
            state = state | {order["other_parameter"]: self.parameters(order["parameters"] ^ 1, order["other_parameter"])[order["other_parameter"]]}
        inputs = self.inputs(order["seed"], order["family"])
        if order.get("other_input") is not None:
            inputs[order["other_input"]] = self.inputs(order["seed"] ^ 1, order["family"])[order["other_input"]]
        index = order["set"]
        self.model.load_state_dict(state)
        slots = iter(self.shared.tensors("inputs", index))
        kept = [next(slots).copy_(v) if isinstance(v, torch.Tensor) else v for v in inputs]
        with torch.no_grad():
            found = {"outputs": flat(self.model(*inputs))} if order["outputs"] else {}  # which may change them in place
            if order["exact"]:
                found["expected"] = self.exactly([v.clone() if isinstance(v, torch.Tensor) else v for v in kept])
        for name, values in found.items():
            for value, slot in zip(values, self.shared.tensors(name, index), strict=True):
                slot.copy_(value)

    def write_parameters(self, seed: int) -> None:
        for value, slot in zip(self.parameters(seed).values(), self.shared.tensors("parameters"), strict=True):
            slot.copy_(value)


def serve(connection: socket.socket, header: dict, descriptors: list[int], receive: Receive) -> None:
    """Play the role that the judge's header names until the judge closes the connection."""
    settings(header["precision"])
    if header["role"] == "describe":
        connection.send(b"R" + json.dumps(describe(header["code"], header["device"])).encode())
        header, descriptors = receive(connection)
        if not header:
            return
    if header["role"] == "oracle":
        shared = Shared(header, descriptors)
        oracle = Oracle(header, shared)
        connection.send(b"R")
        while True:
            order, _ = receive(connection)
            if not order:
                return
            if order["op"] == "parameters":
                oracle.write_parameters(order["seed"])
            else:
                oracle.fill(order)
            if shared.device == "cuda":
                torch.cuda.synchronize()
            connection.send(b"D")
    library, rest = descriptors[:1], descriptors[1:]
    shared = Shared(header, rest)
    try:
        if header["role"] == "candidate":
            call = make_candidate(header, shared, library)
        elif header["role"] == "noop":
            fixed = itertools.cycle(shared.outputs(shared.layout["sets"] - 1))

            def call(*_: Any) -> Any:
                return next(fixed)

        else:
            call = make_reference(header, shared)
        measured(connection, header, shared, call, receive)
    except Fault as error:
        connection.send(b"W" + str(error).encode())
    except Forbidden as error:
        connection.send(b"F" + str(error).encode())
