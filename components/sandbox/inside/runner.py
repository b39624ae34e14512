"""The main function of a runner: the roles that it can take, and the loop that executes the judge's orders.

A runner is a sandboxed process, and a role is what it executes (runner_protocol.py). This file runs only
inside the sandbox; the judge never imports it. zygote.py imports it before the first fork, so that all
runners share one import of torch. The roles `candidate`, `eager`, `compile` and `noop` are measured with the
same loop (`measure`). The roles `describe` and `reference` are implemented in reference.py, and the role
`record` in inline_extension.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import json
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import inductor
import inline_extension
import reference
import torch
import triton_cache
from delivery import Call, Check, WrongForm, make_delivery
from loading import call_with_own_inputs, construct_candidate, load_baseline, own_inputs
from operator_modes import (
    ConstructorMode,
    ForbiddenOperator,
    UnknownResult,
    block_operators,
    compute_names,
    compute_operators,
    layout_operators,
)
from runner_support import SharedTensors, construct, define_module, eval_mode, flatten_outputs, restored

if TYPE_CHECKING:
    from components.sandbox.inside.runner_protocol import RoleHeader

# Maximum length of an order of the judge, in bytes.
ORDER_BYTES = 1 << 14
# Maximum number of characters of a traceback that are sent to the judge.
MAX_TRACEBACK = 6000
# Type of zygote.receive, which reads one message and the descriptors sent with it.
Receive = Callable[[socket.socket], tuple[Any, list[int]]]


def main(
    receive: Receive,
    connection: socket.socket,
    message: RoleHeader,
    descriptors: list[int],
) -> None:
    """Serve the judge's messages until the judge closes the connection, then end the process.

    `message` is the first message, which gives this process its role (`RoleHeader`), and `descriptors` are
    the file descriptors that came with it; `receive` reads further messages from `connection`. An error is
    sent to the judge as a message, with the letter `M` if memory is lacking, `B` if Triton cannot compile a
    kernel or the GPU lacks what it needs, and `E` otherwise, and ends the process. The function never
    returns.
    """
    code = 1
    try:
        torch.set_num_threads(1)
        serve(connection, message, descriptors, receive)
        code = 0
    except MemoryError:
        connection.send(b"Mout of memory")
    except (SystemExit, KeyboardInterrupt) as error:
        connection.send(b"Eexit " + repr(error).encode()[:200])
    except BaseException as error:  # untrusted code may raise any exception
        letter = b"B" if type(error).__module__.startswith("triton.") else b"E"
        if reference.is_out_of_memory(error):
            letter = b"M"
        text = "".join(traceback.format_exception(error, limit=-6))[-MAX_TRACEBACK:]
        try:
            connection.send(letter + text.encode(errors="replace"))
        except OSError:
            code = 2
    os._exit(code)


def warm_up(kind: str, device: str, warm_folder: str = "") -> None:
    """Do the slow first-use work of torch once, before runners are forked, so that no runner repeats it.

    With `kind` "compile", torch.compile is prepared too, and with "triton" Triton is. Preparing torch.compile
    on cpu writes the precompiled headers of Inductor, its compiler, to `warm_folder`. This folder is not used
    on cuda or with another kind.
    """
    torch.set_num_threads(1)
    compute_operators(device)
    layout_operators(device)
    linear = eval_mode(torch.nn.Linear(1, 1), "cpu")
    linear.load_state_dict(torch.nn.Linear(1, 1).state_dict())
    if kind == "compile" and device == "cpu":
        inductor.warm_up_inductor(warm_folder)
    elif kind == "compile":
        inductor.import_inductor()
    elif kind == "triton":
        triton_cache.warm_up_triton()


def serve(connection: socket.socket, header: RoleHeader, descriptors: list[int], receive: Receive) -> None:
    """Act in the roles that the judge names, one after another, until the judge closes the connection.

    A role says what this process executes, such as `candidate`, `eager` or `describe`. `header` is the
    message that names the first role, and `descriptors` came with it. `receive` reads the next header with
    its descriptors. If a candidate (an implementation of a PyTorch module, to be judged) breaks a rule, the
    judge is told and decides how to go on; any other error is raised.
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
    """Do the work of the role `header["role"]`, such as `candidate`, and return when the role ends.

    `descriptors` came with the header; RoleHeader (runner_protocol.py) says what they are for each role. If a
    candidate (an implementation of a PyTorch module, to be judged) breaks a rule, the role ends, and the
    judge gets the reason after the letter `W` (form of the output), `F` (forbidden operator) or `U` (result
    of an operator that was not recorded). Any other error is raised.
    """
    if header["role"] == "describe":
        if "share" in header and header["device"] == "cuda":
            torch.cuda.set_per_process_memory_fraction(header["share"])
        connection.send(b"R" + json.dumps(reference.describe(header["code"], header["device"])).encode())
    elif header["role"] == "record":
        found = inline_extension.record(header["files"], [*map(restored, header["init_inputs"])])
        connection.send(b"R" + json.dumps(found).encode())
    elif header["role"] == "construct":
        record_constructor(header, *descriptors)
        connection.send(b"R")
    elif header["role"] == "compile_triton":
        compile_triton(connection, header, *descriptors)
    elif header["role"] == "compile_only":
        compile_only(header, *descriptors)
        connection.send(b"R")
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
            except UnknownResult as error:
                connection.send(b"U" + str(error).encode())


@functools.lru_cache(8)
def parse_order(order: bytes) -> dict[str, Any]:
    """Return an order of the judge parsed from JSON; equal orders are parsed only once.

    Parsing time is part of a measurement. Without the cache, native code of a candidate (an implementation of
    a PyTorch module, to be judged) could save this time by answering the judge directly.
    """
    parsed: dict[str, Any] = json.loads(order)
    return parsed


def orders(
    descriptor: int,
    read: Callable[[int, int], bytes] = os.read,
    parse: Callable[[bytes], dict[str, Any]] = parse_order,
) -> Iterator[dict[str, Any]]:
    """Yield the judge's orders for one role, such as `{"op": "warm"}`, as they arrive on a socket.

    A role is what this process executes, and an order is a message that says what to do next. `descriptor` is
    that of the socket. The iteration ends at the order `leave`, which is not yielded, or when the judge
    closes the connection. The functions `read` and `parse` are arguments so that a candidate (an
    implementation of a PyTorch module, to be judged) cannot replace them by assigning to their names.
    """
    while data := read(descriptor, ORDER_BYTES):
        order = parse(data)
        if order["op"] == "leave":
            return
        yield order


def make_references(
    connection: socket.socket, model: reference.ReferenceModel, shared: SharedTensors
) -> None:
    """Execute the judge's orders in the role `reference`, until the judge ends the role.

    An order is a message that says what to do next. The process first sends `R`. Each order writes
    parameters, an input set (the tensors of one call) or outputs to shared memory, and is answered with `D`.
    If an order to fill an input set is `optional` and the source of the task (the PyTorch module that is to
    be made faster) fails, the error's text follows the letter, unless memory is lacking. Any other error is
    raised.
    """
    connection.send(b"R")
    for order in orders(connection.fileno()):
        failure = ""
        if order["op"] == "parameters":
            model.write_parameters(order["seed"])
        elif order["op"] == "exact":
            model.write_exact()
        else:
            try:
                model.fill(order)
            except Exception as error:
                if not order["optional"] or reference.is_out_of_memory(error):
                    raise
                failure = f"{type(error).__name__}: {error}"[:200]
        if shared.device == "cuda":
            torch.cuda.synchronize()
        connection.send(b"D" + failure.encode(errors="replace"))


def measure(connection: socket.socket, header: RoleHeader, shared: SharedTensors, library: int) -> None:
    """Load a candidate, a baseline or the no-op, and execute the judge's orders until the role ends.

    The no-op computes nothing. `header` is the message that names the role and has what it needs, and
    `shared` the memory with parameters, inputs and outputs. The orders `time` and `check` make one call for
    each of their input sets, and `warm` makes one call. `library` is the descriptor of a file. For a
    candidate the file has its compiled library, which an archive of kernels of Triton (triton_cache.py) and
    recorded results of its constructor (operator_modes.py) may follow. For the role `compile` it is an
    archive (inductor.py), and otherwise it is empty.
    Raises WrongForm, ForbiddenOperator or UnknownResult if the candidate breaks a rule, and any other error
    of the loaded code.
    """
    # What checks the form of outputs is complete before the candidate, which could replace it, is loaded.
    arguments = [tuple(shared.arguments(i)) for i in range(shared.layout["sets"])]
    inputs = [tensor for i in range(len(arguments)) for tensor in shared.tensors("inputs", i)]
    forbidden = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in inputs]
    check = output_check(shared.zero_outputs(share_elements=True), forbidden)
    delivery = make_delivery(connection, header, shared)
    checked_calls, received = delivery.checked_calls, orders(connection.fileno())
    refuse_construction, artefacts = None, None
    if header["role"] == "candidate":
        content = io.BytesIO(os.pread(library, os.fstat(library).st_size, 0))
        libraries, archive = content.read(header["library_bytes"]), content.read(header["triton_bytes"])
        if archive:
            triton_cache.load(archive)
        mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if header["rules"] == "kernel-only":
            recorded = content.read()
            # A candidate may have changed the bytes, so only tensors and plain values are accepted.
            results = torch.load(io.BytesIO(recorded), weights_only=True) if recorded else []
            mode = ConstructorMode(compute_names(shared.device), results)
            refuse_construction = block_operators(shared.device)
        with mode:
            module = construct_candidate(header, libraries)
        if header["construction_seed"] is None:
            shared.load_parameters(module)
        call = eval_mode(module, shared.device)
    elif header["role"] == "noop":
        outputs = itertools.cycle(shared.noop_outputs())

        def call(*_: Any) -> Any:
            return next(outputs)

    else:
        if header["role"] == "compile":
            artefacts = inductor.CompileArtefacts(library)
        call = load_baseline(header, shared)
    gc.collect()
    gc.freeze()
    gc.disable()
    if refuse_construction is not None:
        refuse_construction()
    with torch.no_grad():
        connection.send(b"R")
        for order in received:
            delivery.forget_results()
            if order["op"] == "release":
                torch.cuda.empty_cache()
            elif order["op"] == "warm":
                call(*arguments[-1])
            elif order["op"] == "save" and artefacts is not None:
                artefacts.save(library)
            elif order["op"] == "time":
                delivery.calls(call, arguments[: order["sets"]])
            else:
                checked_calls(call, arguments[: order["sets"]], check)
            if shared.device == "cuda":
                torch.cuda.synchronize()
            connection.send(b"D")
    # Do not unfreeze: a garbage collection that visits torch's objects would copy every memory page that is
    # shared with the zygote.
    gc.enable()


def record_constructor(header: RoleHeader, library: int, results: int) -> None:
    """Construct a candidate in this process, where torch may compute, and record what torch computes.

    A candidate is an implementation of a PyTorch module, to be judged. `library` is the descriptor of a file
    with its compiled library, and `results` that of the file to which the results of torch's compute
    operators are written (operator_modes.py). `header` names the device and has the candidate's sources.
    Any error of the candidate's code is raised.
    """
    mode = ConstructorMode(compute_names(header["device"]), None)
    with mode:
        construct_candidate(header, os.pread(library, header["library_bytes"], 0))
    with os.fdopen(os.dup(results), "wb") as file:
        torch.save(mode.results, file)


def compile_triton(connection: socket.socket, header: RoleHeader, library: int, archive: int) -> None:
    """Call the candidate once with inputs of the task's `get_inputs`, and write Triton's cache to a file.

    `library` is the descriptor of the candidate's library and `archive` that of the empty file. `header` has
    the sources of the task and of the candidate. The timed calls get other inputs and parameters. The judge
    gets R when the candidate is constructed, and D when the file is written. Any error is raised.
    """
    call = call_with_own_inputs(header, os.pread(library, header["library_bytes"], 0))
    connection.send(b"R")
    with torch.no_grad():
        call()
    if header["device"] == "cuda":
        torch.cuda.synchronize()
    triton_cache.save(archive)
    connection.send(b"D")


def compile_only(header: RoleHeader, archive: int) -> None:
    """Call the task's module under torch.compile, and write what that leaves to the empty file `archive`.

    The module is that of the task, a PyTorch module that is to be made faster. It has the parameters that its
    constructor makes, and its inputs are those of the task's `get_inputs`. `header` has the task's source and
    the mode of torch.compile. Any error is raised.
    """
    artefacts = inductor.CompileArtefacts(archive)
    task = define_module("model", header["code"])
    module = eval_mode(construct(task.Model, header), header["device"])
    arguments = own_inputs(task, header["device"])
    call: Call = torch.compile(module, mode=header["compile_mode"])
    with torch.no_grad():
        call(*arguments)
    artefacts.save(archive)


def output_check(expected: list[torch.Tensor], forbidden: list[tuple[int, int]]) -> Check:
    """Return the function that checks the form of a call's output.

    The function returns the tensors of an output, which may be nested in tuples and lists, in order. It
    raises WrongForm, with a text such as `wrong_number_of_outputs`, unless all are plain tensors, their
    number, shapes, dtypes and device are those of `expected`, and their memory overlaps none of the address
    ranges `forbidden`. A range is the first address, and the address after the last.

    All that the function uses is looked up here, before a candidate (an implementation of a PyTorch module,
    to be judged) is loaded. So the candidate cannot change the check by assigning to names of modules or to
    attributes of torch's classes; native code could still write to the memory of the function.
    """
    flatten, count, pairs, type_of, error = flatten_outputs, len, zip, type, WrongForm
    plain, base = torch.Tensor, torch._C.TensorBase
    storage: Any = torch._C.StorageBase
    # The attributes of the base class, since a candidate could replace those of torch.Tensor.
    shape_of, dtype_of, device_of = (getattr(base, name).__get__ for name in ("shape", "dtype", "device"))
    storage_of, address_of, bytes_of = base.untyped_storage, storage.data_ptr, storage.nbytes
    forms = [(shape_of(tensor), dtype_of(tensor), device_of(tensor).type) for tensor in expected]

    def check(output: Any) -> list[torch.Tensor]:
        leaves: list[torch.Tensor] = flatten(output)
        if count(leaves) != count(forms):
            raise error("wrong_number_of_outputs")
        for leaf, (shape, dtype, device) in pairs(leaves, forms, strict=True):
            if type_of(leaf) is not plain:
                raise error("not_a_plain_tensor")
            if shape_of(leaf) != shape:
                raise error(f"wrong_shape:{[*shape_of(leaf)]}_instead_of_{[*shape]}")
            if dtype_of(leaf) != dtype:
                raise error(f"wrong_dtype:{dtype_of(leaf)}_instead_of_{dtype}")
            if device_of(leaf).type != device:
                raise error(f"wrong_device:{device_of(leaf)}")
            memory: Any = storage_of(leaf)
            start, size = address_of(memory), bytes_of(memory)
            for low, high in forbidden:
                if start < high and low < start + size:
                    raise error("output_aliases_input")
        return leaves

    return check
