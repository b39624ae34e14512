"""Objects that make the calls of a role and deliver the results to the judge.

A role is what this process executes, such as `eager`. There is one class for each way of delivering results.
This file runs only inside the sandbox; the judge never imports it.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import result_channel
import shared_memory
import torch
from runner_support import SharedTensors, flatten_outputs

if TYPE_CHECKING:
    from components.sandbox.inside.runner_protocol import RoleHeader

# Modes of torch.compile that use CUDA graphs.
GRAPH_MODES = ("reduce-overhead", "max-autotune")
# Largest number of seconds for which a process waits for the judge between two calls without sleeping.
SPIN_SECONDS = 0.01
# Type of a loaded model: takes the arguments of one call and returns the outputs.
Call = Callable[..., Any]
# Type of a function that returns the tensors of an output, or raises WrongForm if their form is wrong.
Check = Callable[[Any], list[torch.Tensor]]


class WrongForm(Exception):
    """Error raised if the tensors of a candidate's output differ from those of the reference output in form.

    A candidate is an implementation of a PyTorch module, to be judged, and the reference output is that of
    the module itself. The form is the number, shapes, dtypes and device of the tensors, and where their
    memory lies. The error's text, such as `wrong_number_of_outputs`, becomes the reason of the verdict.
    """


def make_delivery(
    connection: socket.socket, header: RoleHeader, shared: SharedTensors
) -> HostDelivery | DeviceDelivery | CallDelivery:
    """Return the object that makes the calls of this process's role and delivers their results to the judge.

    `header` is the message that gives the role (what this process executes), `shared` the memory shared with
    the judge, and `connection` the socket to the judge. On cpu the result is a HostDelivery, or a
    NoopDelivery for the role `noop`. On cuda it is a CallDelivery if the process gets its inputs call by
    call, and a DeviceDelivery otherwise.
    """
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
    """Return the message with the memory addresses of a call's outputs.

    It is the letter `O`, seven bytes of padding, and eight bytes for each address.
    """
    return struct.pack(f"c{len(outputs)}Q", b"O", *(output.data_ptr() for output in outputs))


class HostDelivery:
    """Object that makes the calls of a role on cpu, and lets the judge read each result before the next call.

    A role is what this process executes, such as `eager`. The judge reads the result from this process's
    memory, at addresses that this object sends over the socket `descriptor`.

    The code between two calls is part of every measurement. This code is native code (result_channel.cpp),
    because a candidate (an implementation of a PyTorch module, to be judged) could otherwise save
    microseconds by sending the messages from its own native code (tests/exploits/native_protocol).
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        """Make one call of the module `call` for each tuple of arguments, and hand each result to the judge.

        The addresses of the result's tensors are sent, and the judge reads them before the next call.
        """
        result_channel.calls(self.descriptor, call, arguments, torch.Tensor, self.deliver)

    def checked_calls(self, call: Call, arguments: list[tuple[Any, ...]], check: Check) -> None:
        """Make one call of `call` for each tuple of arguments, check its result, and deliver the result.

        `check` raises WrongForm unless the result has the number, shapes, dtypes and device of tensors that
        the output of the original PyTorch module has, and does not overlap the inputs. This method is for
        series of calls whose time is not used, because the check takes time.
        """
        for values in arguments:
            result = call(*values)
            check(result)
            self.deliver(result)

    def forget_results(self) -> None:
        """Do nothing, because on cpu the judge itself overwrites each result that it has read."""

    def deliver(self, result: Any) -> None:
        """Send the judge the addresses of a result, and wait until the judge has read it."""
        leaves = [leaf.contiguous() for leaf in flatten_outputs(result)]
        result_channel.send_and_wait(self.descriptor, address_message(leaves), 1)


class NoopDelivery(HostDelivery):
    """Object that reports results to the judge on cpu without computing any, for the role `noop`.

    This process exchanges the messages that every measured process must exchange, without running the Python
    interpreter between them. The time of this process is subtracted from every measurement, so including the
    interpreter would give a candidate (an implementation of a PyTorch module, to be judged) that avoids it
    the advantage twice. `outputs` are the tensors that are reported for every call.
    """

    def __init__(self, descriptor: int, outputs: list[torch.Tensor]):
        super().__init__(descriptor)
        self.outputs = outputs  # kept alive: the judge reads their memory
        self.message = address_message(outputs)

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        """Report the same zero outputs once for each tuple of arguments; `call` is not called.

        Each message has the addresses of these outputs. The next one is sent when the judge has read them.
        The method replaces `HostDelivery.calls`, which makes the calls.
        """
        result_channel.send_and_wait(self.descriptor, self.message, len(arguments))


def check_memory(leaves: list[torch.Tensor]) -> None:
    """Raise WrongForm if one of the output tensors `leaves` is not in memory that cudaMalloc has allocated.

    Pages of other memory can be mapped at several addresses. A candidate (an implementation of a PyTorch
    module, to be judged) could then write a result that repeats itself only once
    (tests/exploits_cuda/mapped_twice).
    """
    if not all(map(shared_memory.is_cuda_malloc, leaves)):
        raise WrongForm("output_is_mapped")


def overwrite(results: list[torch.Tensor]) -> None:
    """Overwrite results that were delivered to the judge, and empty the list.

    A candidate (an implementation of a PyTorch module, to be judged) must therefore write every later result
    in full, even if it uses the same memory again. Elements become random numbers, which in floating-point
    types are very large, infinite or NaN, and cannot be predicted. A tensor whose elements share memory is
    left as it is, since it cannot be written.
    """
    for result in results:
        with contextlib.suppress(RuntimeError):
            if result.is_floating_point() or result.is_complex():
                largest = torch.finfo(result.dtype).max
                result.fill_(secrets.choice((math.nan, math.inf, largest, -largest, largest / 3)))
            else:
                result.fill_(secrets.randbelow(2) if result.dtype == torch.bool else secrets.randbelow(128))
    torch.cuda.synchronize()
    results.clear()


def random_call(arguments: list[tuple[Any, ...]]) -> int:
    """Return a random index of `arguments`, which has one item for each call of a round, or 0 if it is empty.

    A round is a series of calls that are timed together. The index cannot be predicted.
    """
    return secrets.randbelow(max(1, len(arguments)))


def report_computed(connection: socket.socket, spin_seconds: float = 0.0) -> None:
    """Tell the judge that results are computed, and wait until it allows the process to continue.

    The process does not sleep in the first `spin_seconds`, because it would be woken late. If the judge
    closes the connection instead, the process ends.
    """
    connection.send(b"C")
    poll, until = select.poll(), time.monotonic() + spin_seconds
    poll.register(connection, select.POLLIN)
    while not poll.poll(0) and time.monotonic() < until:
        pass
    if not connection.recv(1):
        os._exit(0)


class DeviceDelivery:
    """Object that makes the calls of a round on cuda, and then copies all results to shared memory.

    A round is a series of calls that are timed together; the measured time includes the copy. The copy starts
    when the judge allows it. Before that, the judge overwrites the shared memory, so results that a candidate
    (an implementation of a PyTorch module, to be judged) wrote there directly are lost. If `inspects` is set,
    as for a candidate, `check_memory` checks the results of one random call, and all results are overwritten
    after their round. If `reuses_memory` is set, each result is cloned before the next call, which may
    overwrite it.
    """

    def __init__(
        self, connection: socket.socket, shared: SharedTensors, *, reuses_memory: bool, inspects: bool
    ):
        self.connection = connection
        # Whether one call of each round is inspected by `check_memory`, and results are overwritten after it.
        self.inspects = inspects
        self.targets = [shared.tensors("outputs", i) for i in range(shared.layout["calls"])]
        # Whether a call overwrites the result of the previous call, as a CUDA graph does. If so, every result
        # is cloned before the next call.
        self.reuses_memory = reuses_memory
        # A candidate's results of the last round.
        self.results: list[torch.Tensor] = []

    def calls(self, call: Call, arguments: list[tuple[Any, ...]]) -> None:
        """Make one call of `call` for each tuple of arguments, and deliver all results together.

        Raises WrongForm if results are inspected and those of a call, which is chosen at random, are not in
        memory of torch's own allocator (`check_memory`).
        """
        results: list[list[torch.Tensor]] = []
        inspected = random_call(arguments)
        for index, values in enumerate(arguments):
            leaves = flatten_outputs(call(*values))
            if index == inspected and self.inspects:
                check_memory(leaves)
            if self.inspects:
                self.results += leaves
            results.append([leaf.clone() for leaf in leaves] if self.reuses_memory else leaves)
        self.deliver(results)

    def forget_results(self) -> None:
        """Overwrite the results of the last round (series of calls), which are kept only for a candidate."""
        overwrite(self.results)

    def checked_calls(self, call: Call, arguments: list[tuple[Any, ...]], check: Check) -> None:
        """Make one call of `call` for each tuple of arguments, check the results, and deliver all together.

        `check` returns the tensors of a result, or raises WrongForm unless they have the number, shapes,
        dtypes and device that the output of the original PyTorch module has, and do not overlap the inputs.
        If two results have the same address, the method `calls` clones every result from then on. This method
        is for rounds (series of calls) whose time is not used.
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
            if self.inspects:
                self.results += results[-1]
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

    A round is a series of calls that are timed together. The judge writes the inputs of a call to host memory
    only after it has taken the outputs of the call before, so that no two calls of a round can be computed
    together (tests/exploits_cuda/batch). If `inspects` is set, as for a candidate (an implementation of a
    PyTorch module, to be judged), `check_memory` checks the results of one random call, and all results are
    overwritten after their round. Inputs and outputs are copied between host memory and the device by this
    process, because work of the judge on the device would cost a change of process each time.
    """

    def __init__(self, connection: socket.socket, shared: SharedTensors, *, inspects: bool):
        self.connection = connection
        # Whether one call of each round is inspected by `check_memory`, and results are overwritten after it.
        self.inspects = inspects
        # A candidate's results of the last round.
        self.results: list[torch.Tensor] = []
        shared.pin("next_inputs")
        shared.pin("last_outputs")
        self.next_inputs = shared.tensors("next_inputs")
        self.last_outputs = shared.tensors("last_outputs")
        self.inputs = [shared.tensors("inputs", i) for i in range(shared.layout["calls"])]

    def calls(self, call: Call, arguments: list[tuple[Any, ...]], check: Check = flatten_outputs) -> None:
        """Make one call for each tuple of arguments, and deliver each result before the next call.

        `check` returns the tensors of a result. In rounds (series of calls) whose time is not used, it also
        raises WrongForm if the tensors differ from those of the original PyTorch module's output in number,
        shape, dtype or device, or overlap the inputs.
        """
        inspected = random_call(arguments)
        for index, values in enumerate(arguments):
            self.receive(index)
            leaves = check(call(*values))
            if index == inspected and self.inspects:
                check_memory(leaves)
            self.deliver(leaves)
            if self.inspects:
                self.results += leaves

    checked_calls = calls

    def forget_results(self) -> None:
        """Overwrite the results of the last round (series of calls), which are kept only for a candidate."""
        overwrite(self.results)

    def receive(self, index: int) -> None:
        """Copy the inputs of the next call, which the judge has written to host memory, to the device.

        They are copied to the tensors that are the arguments of call `index`.
        """
        for target, source in zip(self.inputs[index], self.next_inputs, strict=True):
            target.copy_(source, non_blocking=True)

    def deliver(self, leaves: list[torch.Tensor]) -> None:
        """Copy the result of a call to host memory, and wait until the judge has taken it."""
        for target, leaf in zip(self.last_outputs, leaves, strict=True):
            target.copy_(leaf, non_blocking=True)
        torch.cuda.synchronize()
        report_computed(self.connection, SPIN_SECONDS)
