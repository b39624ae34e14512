"""Timed runners, and the measurement of one round of their calls on cpu and on cuda.

A timed runner is a sandboxed process that executes a candidate or a baseline. A round is a number of
consecutive calls, each with inputs of its own, that are timed together.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

from components.judge.correctness import Mismatch
from components.judge.input_mixing import as_bits
from components.judge.result_memory import LOUD_BYTES, ResultMemory
from components.judge.staged_inputs import StagedInputs
from components.judge.task_reference import TaskReference
from components.sandbox.inside import shared_memory
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.runner_process import Runner, RunnerError
from components.sandbox.unsuspended_time import unsuspended_seconds

# Time limit of a baseline's warm-up, as a multiple of `sandbox.run_seconds`. The limit is long, because
# torch.compile compiles in the warm-up.
BASELINE_LIMITS = 10
# Maximum CPU time of a runner while it is stopped. A thread may still be leaving its core when it is counted
# as stopped.
STOPPED_SECONDS = 0.01
# Number of random byte positions at which the inputs of a timed round on cuda are checked for changes.
SAMPLED_BYTES = 1 << 16
# Bytes that the judge writes to displace inputs from the L2 cache, as a multiple of the cache's size.
COLD_CACHES = 4
# Largest number of seconds for which the judge waits for one call without sleeping.
SPIN_SECONDS = 0.01

# Kind of round: `time` for a measurement, `check` if the runner checks each result's form.
Operation = Literal["check", "time"]


@functools.cache
def _secret_generator(device: torch.device) -> torch.Generator:
    """Return a random number generator with a secret seed, because torch's default one is predictable."""
    return torch.Generator(device).manual_seed(secrets.randbits(63))


class TimedRunner:
    """Sandboxed process whose calls are timed: it runs a candidate or a baseline.

    A candidate is an implementation of a task's module that is judged, and a baseline is eager,
    torch.compile, or the no-op, which computes nothing.
    """

    def __init__(
        self,
        reference: TaskReference,
        header: RoleHeader,
        library: int | None,
        seconds: float,
    ):
        """Start the process for the role `header["role"]`, such as `eager`, and wait until it is ready.

        A role is what the sandboxed process executes. The process gets a copy of the parameters of the task
        of `reference`. `library` is the file descriptor of a candidate's library or of torch.compile's
        archive, and None for the other baselines. `seconds` limits the wall time of the process until a later
        call sets another limit. Raises RunnerError if it fails.
        """
        self.reference = reference
        self.processes = processes = reference.processes
        self.scheduler = reference.scheduler
        self.layout = reference.layout
        self.role = header["role"]
        # Whether the candidate's last round changed its inputs.
        self.inputs_changed = False
        self.output_bytes = [slot.bytes for slot in self.layout.outputs.slots]
        self.result_memory = ResultMemory(self.layout.outputs.slots)
        # Whether torch.compile had an archive from the judge's cache and nothing to add to it.
        self.is_cached = False
        self.runner: Runner | None = None
        with self.scheduler.preparing():
            self.memory = processes.memory(self.layout, self.role)
        buffers = self.memory.buffers
        self.inputs = buffers["inputs"]
        header = {
            **header,
            "layout": self.layout.header(self.layout.runner_sets, buffers),
            "precision": reference.params.precision,
            "init_inputs": self.layout.description.init_inputs,
            "construction_seed": reference.construction_seed,
        }
        descriptors = (
            processes.factory.empty_library if library is None else library,
            *(buffer.fd for buffer in buffers.values()),
        )
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.close)
            with self.scheduler.preparing():
                buffers["parameters"].raw().copy_(reference.parameters.raw())
                self._write_warm_up_inputs(zeros=False)
            self.runner = processes.start(header, descriptors, seconds=seconds)
            with self.scheduler.background_work(self.runner):
                self.runner.receive()
            self.runner.stop()  # between rounds, so that its threads cannot slow down other runners
            cleanup.pop_all()

    def _resume(self, runner: Runner) -> None:
        """Resume `runner` for a series of calls, after checking that it did not compute while it was stopped.

        Raises RunnerError if the CPU time of this sandboxed process has grown by more than `STOPPED_SECONDS`
        since the judge stopped it.
        """
        seconds = runner.cpu_seconds() - runner.stopped_cpu_seconds
        if seconds > STOPPED_SECONDS:
            raise RunnerError("protocol", f"it computed for {seconds:.3f} s while it was stopped")
        runner.resume()

    def work_untimed(self, operation: Literal["warm", "save"], seconds: float) -> None:
        """Have the runner carry out an operation that is not timed, within `seconds` of wall time.

        The runner is the sandboxed process. With `warm` it makes one call, in which torch.compile compiles,
        and ignores the result. With `save` torch.compile writes what it compiled to its archive file. Raises
        RunnerError if the runner fails or takes too long.
        """
        assert self.runner is not None
        self.runner.deadline = unsuspended_seconds() + seconds
        with self.scheduler.background_work(self.runner):
            self.runner.request({"op": operation, "sets": 0})
        self.runner.stop()

    def verify(self, operation: Operation, *, loose: float = 0.0) -> Mismatch | None:
        """Return why an output for a correctness set is wrong, or None if all outputs are right.

        A correctness set is an input set with reference outputs. The outputs are computed in rounds (series
        of calls) of the kind `operation`. With `check` the runner (the sandboxed process) also checks the
        number, shapes, dtypes and device of each call's outputs, and that they do not overlap the inputs;
        with `time` it is called as in a timed round. `loose`, if it is not 0, allows every error up to this
        multiple of the absolute tolerance (`sandbox.absolute_tolerance` times the largest absolute value of
        the reference output) and is for baselines; without it the limits of errors are smaller, as for
        candidates. If the outputs are right but the candidate changed its inputs, the reason is
        `inputs_changed`. Raises RunnerError if the runner fails or a check does, and TaskError if the task's
        own output is too inexact to tell.
        """
        mixes, capacity = self.reference.inputs.correctness_sets(), self.layout.capacity
        staged = StagedInputs(self.reference, capacity)
        for first in range(0, len(mixes), capacity):
            batch = mixes[first : first + capacity]
            _, results = self.round(operation, staged.hold(batch))
            found = self.reference.first_wrong(batch, results, loose=loose, repeats=self.role == "eager")
            if found is not None or self.inputs_changed:
                return found or Mismatch("inputs_changed", "a call changed its inputs")
        return None

    def round(self, operation: Operation, staged: StagedInputs) -> tuple[float, torch.Tensor]:
        """Run one round on the staged inputs, and return the seconds per call and the results as bytes.

        A round is a series of calls, each with inputs of its own, and the runner is the sandboxed process
        that makes them. In a round of the kind `check`, the runner also checks the shapes, dtypes and device
        of each result. The results are read before the runner can change them. Raises RunnerError if the
        runner fails.

        On cpu the judge reads each result out of the runner's memory, and then overwrites it if the runner is
        a candidate's. Results on cuda are overwritten before the next round. What a candidate does not write
        in a call is therefore wrong. The time on cpu is the CPU time of all the runner's threads between two
        moments at which all of them are stopped. The first moment is the end of its previous round, before
        the inputs exist, and the second one is after the last result is read. So the work of every thread is
        included, whenever it is done. An honest runner waits at both moments and uses no CPU time. A call's
        inputs do not exist before the previous call has been answered, because otherwise one pass over the
        weights could answer all calls (tests/exploits/batch).

        On cuda the time is the judge's wall time from before the inputs exist until the results are copied.
        The clock does not stop in between, so a runner cannot compute untimed. After the calls, and before
        the runner delivers its results, the judge overwrites the inputs and the output buffer. Results that
        were computed directly into that buffer are then lost, and work that was deferred has lost its inputs.
        One untimed launch before the round wakes the device. See docs/design/judge-protocol.md.

        With sandbox.input_delivery=call, and if the task is small enough (`TaskLayout.by_call`), the judge on
        cuda does not use the device while its clock runs. The judge writes the inputs of each call to host
        memory after it has read the outputs of the call before from host memory, and the runner copies the
        inputs to the device and the outputs from it.
        """
        assert self.runner is not None
        calls = len(staged.mixes)
        if self.layout.by_call:
            measure = self._call_round
        else:
            measure = self._device_round if "outputs" in self.memory.buffers else self._host_round
        # A baseline is used for many candidates, so its time is limited by the round, not by its life.
        with (
            contextlib.nullcontext()
            if self.role == "candidate"
            else self.scheduler.charged(self.runner, self.reference.params.sandbox.run_seconds)
        ):
            seconds = measure(self.runner, operation, calls, staged.inputs)
        if self.layout.placement.shares_buffers:
            self.runner.resume()
            self.runner.request({"op": "release"})
            self.runner.stop()
        return seconds / calls, self.memory.results[: self.layout.outputs.stride * calls]

    def _host_round(self, runner: Runner, operation: Operation, calls: int, staged: torch.Tensor) -> float:
        # The judge does not choose the cores. If judge and runner shared one core, equally fast code would
        # be measured as up to 12 % faster, depending on how the pages of both share that core's cache
        # (tests/bench/judge_validity.py).
        inputs = self.inputs.raw()[: staged.numel()]
        targets, sources = (
            [part.numpy() for part in torch.split(memory, self.layout.inputs.stride)]
            for memory in (inputs, staged)
        )
        is_candidate = self.role == "candidate"
        inspected_call = secrets.randbelow(calls)
        stride, slots = self.layout.outputs.stride, self.layout.outputs.slots
        self.result_memory.begin_round()
        garbage = [replacing.ctypes.data for replacing in self.result_memory.garbage]
        start = runner.stopped_cpu_seconds  # so that no CPU time between two rounds is left out
        self._resume(runner)
        np.copyto(targets[0], sources[0])  # a copy by torch would wake other threads
        runner.send({"op": operation, "sets": calls})
        for index in range(calls):
            addresses = runner.receive_addresses(len(slots))
            into = [self.memory.results.data_ptr() + index * stride + slot.offset for slot in slots]
            # What is done to catch candidates is done to baselines too, without an effect, because code is
            # slower after a longer wait. An output of a baseline may be a view of its inputs.
            if not is_candidate:
                runner.read_memory(addresses, into, self.output_bytes)
            with shared_memory.corrupted_pages(torch.from_numpy(targets[index])):
                if is_candidate:
                    runner.read_memory(addresses, into, self.output_bytes)
            if index == inspected_call:
                private = [*map(runner.is_private_memory, addresses, self.output_bytes)]
                is_written = [
                    runner.is_written(*result, self.result_memory.total_bytes)
                    for result in self.result_memory.large(addresses)
                ]
                if is_candidate and not all(private):
                    raise RunnerError("wrong", "output_is_mapped")
                if is_candidate and not all(is_written):
                    raise RunnerError("wrong", "output_not_written")
            # A baseline's own bytes are written back, so that its cache lines move as the candidate's do.
            runner.write_memory(addresses, garbage if is_candidate else into, self.output_bytes)
            self.result_memory.add(addresses, is_timed=operation == "time")
            if index + 1 < calls:
                np.copyto(targets[index + 1], sources[index + 1])
            runner.acknowledge()
        runner.receive()
        runner.stop()
        seconds = runner.stopped_cpu_seconds - start
        self.inputs_changed = self._inputs_differ(inputs, staged)
        return seconds

    def _device_round(self, runner: Runner, operation: Operation, calls: int, staged: torch.Tensor) -> float:
        outputs = self.memory.buffers["outputs"]
        self._wake(runner, operation)
        inputs = self.inputs.raw()[: staged.numel()]
        generator = _secret_generator(inputs.device)
        places = torch.randint(inputs.numel(), (SAMPLED_BYTES,), device=inputs.device, generator=generator)
        sample = staged[places]
        torch.cuda.synchronize()
        start = time.perf_counter()
        inputs.copy_(staged)
        if self.reference.params.sandbox.input_cache == "cold":
            cache_bytes = torch.cuda.get_device_properties(inputs.device).L2_cache_size
            torch.zeros(COLD_CACHES * cache_bytes, dtype=torch.uint8, device=inputs.device)
        torch.cuda.synchronize()
        runner.send({"op": operation, "sets": calls})
        runner.receive(b"C")
        # In a timed round the comparison is part of the time of every runner, including the no-op.
        # A sample is enough there, since a candidate that works in place changes all of its inputs.
        sample_after = inputs[places]
        differ = operation == "check" and self._inputs_differ(inputs, staged)
        inputs.fill_(0xFF)  # all but the scratch set
        outputs.raw().fill_(secrets.choice(LOUD_BYTES))
        torch.cuda.synchronize()
        runner.acknowledge()
        runner.receive()
        results = self.memory.results
        results.copy_(outputs.raw()[: results.numel()])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        runner.stop()
        runner.set_cores(self.scheduler.other_cores)
        sample_differs = self.role == "candidate" and not torch.equal(sample, sample_after)
        self.inputs_changed = differ or sample_differs
        return seconds

    def _wake(self, runner: Runner, operation: Operation) -> None:
        """Resume `runner` on the CPU core of timed rounds, and before a timed round wake the GPU.

        `runner` is the sandboxed process, and a round is a series of calls, which is timed if `operation` is
        `time`. The GPU is woken by a call of the runner that is not timed and whose inputs are not those of
        the round. Raises RunnerError if the runner fails or has computed while it was stopped.
        """
        runner.set_cores(self.scheduler.timed_cores)
        self._resume(runner)
        if operation == "time":  # without inputs, so that nothing can be computed untimed
            if self.layout.placement.shares_buffers:
                self._write_warm_up_inputs(zeros=True)
                torch.cuda.synchronize()
            runner.request({"op": "warm", "sets": 0})

    def _call_round(self, runner: Runner, operation: Operation, calls: int, staged: torch.Tensor) -> float:
        buffers, stride = self.memory.buffers, self.layout.outputs.stride
        next_inputs, last_outputs = (
            buffers["next_inputs"].raw().numpy(),
            buffers["last_outputs"].raw().numpy(),
        )
        sources = [part.numpy() for part in torch.split(staged.cpu(), self.layout.inputs.stride)]
        results = torch.zeros(stride * calls, dtype=torch.uint8)
        targets = [part.numpy() for part in torch.split(results, stride)]
        self._wake(runner, operation)
        torch.cuda.synchronize()
        start = time.perf_counter()
        np.copyto(next_inputs, sources[0])
        runner.send({"op": operation, "sets": calls})
        for index in range(calls):
            runner.spin(SPIN_SECONDS)
            runner.receive(b"C")
            np.copyto(targets[index], last_outputs)
            if index + 1 < calls:
                np.copyto(next_inputs, sources[index + 1])
            runner.acknowledge()
        runner.receive()
        seconds = time.perf_counter() - start
        runner.stop()
        runner.set_cores(self.scheduler.other_cores)
        self.memory.results[: stride * calls].copy_(results)
        # The runner copies the tensors of a call, and not the bytes between them.
        rows = [memory[: staged.numel()].view(calls, -1) for memory in (self.inputs.raw(), staged)]
        self.inputs_changed = self.role == "candidate" and any(
            not torch.equal(*(memory[:, slot.offset : slot.offset + slot.bytes] for memory in rows))
            for slot in self.layout.inputs.slots
        )
        return seconds

    def _write_warm_up_inputs(self, *, zeros: bool) -> None:
        """Write inputs for a warm-up call into the last input set of the runner's memory.

        The inputs are valid but need not be secret: they are those of the first correctness set (an input set
        with reference outputs), except that floating-point inputs are zeros if `zeros` is set.
        """
        original = self.reference.inputs.original(0)
        for index, tensor in enumerate(self.layout.inputs.tensors(self.inputs, self.layout.runner_sets - 1)):
            if zeros and tensor.is_floating_point():
                tensor.zero_()
            else:
                self.reference.inputs.write(original, index, tensor.view(-1))

    def _inputs_differ(self, inputs: torch.Tensor, staged: torch.Tensor) -> bool:
        """Return whether the candidate changed its inputs, which is always False for a baseline.

        `inputs` is the memory of the sandboxed process, and `staged` has the bytes that the judge copied to
        it. A change is not allowed, because working in place would save memory traffic that eager cannot
        avoid.
        """
        return self.role == "candidate" and not torch.equal(as_bits(inputs), as_bits(staged))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Extend the deadline of the process by the time in the context, in which it waits for other work."""
        began = unsuspended_seconds()
        yield
        assert self.runner is not None
        self.runner.deadline += unsuspended_seconds() - began

    def close(self) -> None:
        with self.scheduler.preparing():  # freeing device memory blocks the whole device
            self.processes.end(self.runner, self.memory)
