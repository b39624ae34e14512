"""One measured runner, and how a round of its calls is timed and its results are taken."""

from __future__ import annotations

import contextlib
import functools
import secrets
import signal
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from pydantic import Field

from components.core.config import Params
from components.judge.device_scheduler import DeviceScheduler
from components.judge.input_mixing import Mix, Sets, bits
from components.sandbox import shared_memory
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import Runner, RunnerError
from components.sandbox.runner_protocol import MemoryLayout, Region, RoleHeader

BASELINE_LIMITS = 10
"""How many times a candidate's limit one round of a baseline may last: the first one compiles."""
SAMPLED_BYTES = 1 << 16
"""Bytes of a timed round's inputs, at random places, that are compared on cuda with what they were."""

Dtype = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
]
Shape = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 40)]], Field(max_length=16)]
Form = tuple[Shape, Dtype]


@dataclass(frozen=True)
class Part:
    """Slots of one set, its stride in bytes, and the bytes of `sets` of them."""

    slots: list[shared_memory.Slot]
    stride: int
    bytes: int

    @staticmethod
    def of(forms: list[Form], sets: int) -> Part:
        slots, stride = shared_memory.pack_slots([(tuple(shape), dtype) for shape, dtype in forms])
        return Part(slots, stride, stride * sets)

    def json(self) -> Region:
        return {
            "slots": [(s.offset, list(s.shape), s.dtype) for s in self.slots],
            "stride": self.stride,
            "bytes": self.bytes,
        }

    def tensors(self, buffer: Any, index: int) -> list[torch.Tensor]:
        return [
            buffer.tensor(shared_memory.Slot(index * self.stride + s.offset, s.shape, s.dtype))
            for s in self.slots
        ]


@functools.cache
def _chance(device: torch.device) -> torch.Generator:
    """torch's own generator starts from the same seed in every process: what it draws could be foretold."""
    return torch.Generator(device).manual_seed(secrets.randbits(63))


class StagedInputs:
    """The inputs of one round in memory that no runner sees: mixed once there, and given to every arm by one copy.

    On cuda the clock runs while an arm gets its inputs, and mixing takes a launch for each input of each call, as many as a small
    kernel itself.
    """

    def __init__(self, bench: Task, room: int):
        self.bench = bench
        self.memory = torch.zeros(
            bench.inputs.stride * room, dtype=torch.uint8, device=bench.params.device
        )  # between tensors too
        self.sets: list[Mix] = []
        self.places = [[self._place(number, slot) for slot in bench.inputs.slots] for number in range(room)]

    def _place(self, number: int, slot: shared_memory.Slot) -> torch.Tensor:
        start = number * self.bench.inputs.stride + slot.offset
        return self.memory[start : start + slot.bytes].view(getattr(torch, slot.dtype))

    def hold(self, sets: list[Mix]) -> StagedInputs:
        """Have the inputs of `sets`, the first of the room that there is."""
        self.sets = sets
        for mix, places in zip(sets, self.places, strict=False):
            for index, place in enumerate(places):
                self.bench.sets.write(mix, index, place)
        return self

    @property
    def inputs(self) -> torch.Tensor:
        """The bytes of what is held."""
        return self.memory[: self.bench.inputs.stride * len(self.sets)]


class Task(Protocol):
    """What an arm needs of the bench that it belongs to."""

    params: Params
    runner_factory: RunnerFactory
    scheduler: DeviceScheduler
    description: Any
    inputs: Part
    outputs: Part
    parameters_part: Part
    parameters: Any
    sets: Sets
    slots: int
    total: int

    def start(self, header: RoleHeader, descriptors: tuple[int, ...], *, seconds: float) -> Runner: ...
    def memory(self) -> tuple[Any, Any, Any]: ...
    def end(self, runner: Runner | None, memory: tuple[Any, Any, Any]) -> None: ...


class TimedRunner:
    """One measured runner with shared memory of its own."""

    def __init__(self, bench: Task, header: RoleHeader, library: int | None, seconds: float):
        self.bench = bench
        self.role = header["role"]
        self.changed = False
        """Whether the candidate's last round changed its inputs."""
        self.sizes = [slot.bytes for slot in bench.outputs.slots]
        device = bench.params.device
        with bench.scheduler.preparing():
            self.taken = torch.empty(bench.outputs.stride * bench.slots, dtype=torch.uint8, device=device)
            self.inputs, self.outputs, self.parameters = bench.memory()
        layout: MemoryLayout = {
            "sets": bench.slots + 1,
            "scalars": bench.description.scalars,
            "names": [name for name, _, _ in bench.description.state],
            "parameters": bench.parameters_part.json(),
            "inputs": Part(bench.inputs.slots, bench.inputs.stride, self.inputs.size).json(),
            "outputs": {"slots": bench.outputs.json()["slots"], "stride": bench.outputs.stride},
        }
        descriptors: tuple[int, ...] = (
            library if library is not None else bench.runner_factory.empty_library,
            self.parameters.fd,
            self.inputs.fd,
        )
        if self.outputs is not None:
            layout["outputs"]["bytes"] = self.outputs.size
            descriptors = (*descriptors, self.outputs.fd)
        header = header | {
            "layout": layout,
            "precision": bench.params.precision,
            "init_inputs": bench.description.init_inputs,
        }
        self.runner: Runner | None = None
        try:
            with bench.scheduler.preparing():
                self.parameters.raw().copy_(bench.parameters.raw())
                for index, scratch in enumerate(bench.inputs.tensors(self.inputs, bench.slots)):
                    bench.sets.write(bench.sets.plain(0), index, scratch.view(-1))
            self.runner = bench.start(header, descriptors, seconds=seconds)
            with bench.scheduler.background_work(self.runner):
                self.runner.receive()
            self._freeze()
        except BaseException:
            self.close()
            raise

    def _freeze(self) -> None:
        """Between its rounds an arm stands still, or its threads could slow the others down (on cuda: launch kernels that do)."""
        if self.runner is not None:
            self.runner.signal(signal.SIGSTOP)

    def warm(self, seconds: float) -> None:
        """One untimed call that nobody looks at: in it the compile baseline compiles."""
        assert self.runner is not None
        self.runner.deadline = time.monotonic() + seconds
        with self.bench.scheduler.background_work(self.runner):
            self.runner.request({"op": "warm", "sets": 0})
        self._freeze()

    def round(self, operation: str, staged: StagedInputs) -> tuple[float, torch.Tensor]:
        """One round over the staged sets: seconds per call, and the results, read before the runner could do anything more to them.

        On cpu the judge reads each result out of the runner's memory, and the figure is all CPU time of the runner's
        threads from before the inputs exist until after the last result is read, so that no thread works outside of it;
        an honest runner sleeps at both ends and pays nothing. A call's inputs exist when the call before it has answered, or one
        pass over the weights would answer all of them (tests/exploits/batch). On cuda it is the judge's wall time from before the inputs
        exist until the results are copied away, without a pause in which a runner could compute unseen. Between, the inputs and
        the output buffer are wiped: what was computed straight into that buffer is lost, and what was put off has lost its
        inputs. One untimed launch wakes the device before.
        """
        assert self.runner is not None
        if (
            self.role != "candidate"
        ):  # a baseline lives for many candidates; what is limited is each of its rounds
            self.runner.deadline = time.monotonic() + BASELINE_LIMITS * self.bench.params.sandbox.run_seconds
        measure = self._host_round if self.outputs is None else self._device_round
        count = len(staged.sets)
        seconds = measure(self.runner, operation, count, staged.inputs)
        return seconds / count, self.taken[: self.bench.outputs.stride * count]

    def _host_round(self, runner: Runner, operation: str, count: int, staged: torch.Tensor) -> float:
        # The system chooses the cores. With judge and runner on one, a call took a quarter less, and equal code read up to 12 % faster than
        # itself: how the pages of the two share that core's cache is each runner's luck (tests/bench/judge_validity.py, Intel Xeon).
        inputs = self.inputs.raw()[: staged.numel()]
        given, sources = (
            [part.numpy() for part in memory.split(self.bench.inputs.stride)] for memory in (inputs, staged)
        )
        looked_at = secrets.randbelow(count) if self.role == "candidate" else None
        start = runner.cpu_seconds()
        runner.signal(signal.SIGCONT)
        np.copyto(given[0], sources[0])  # torch would wake threads on other cores for it
        runner.send({"op": operation, "sets": count})
        for index in range(count):
            addresses = runner.receive_addresses(len(self.bench.outputs.slots))
            places = [
                self.taken.data_ptr() + index * self.bench.outputs.stride + slot.offset
                for slot in self.bench.outputs.slots
            ]
            with (
                shared_memory.corrupted_pages(torch.from_numpy(given[index]))
                if self.role == "candidate"
                else contextlib.nullcontext()
            ):
                runner.read_memory(addresses, places, self.sizes)
            if index == looked_at and not all(map(runner.is_private_memory, addresses, self.sizes)):
                raise RunnerError("wrong", "output_is_mapped")
            if index + 1 < count:
                np.copyto(given[index + 1], sources[index + 1])
            runner.acknowledge()
        runner.receive()
        self._freeze()
        seconds = runner.cpu_seconds() - start
        self.changed = self._inputs_differ(inputs, staged)
        return seconds

    def _device_round(self, runner: Runner, operation: str, count: int, staged: torch.Tensor) -> float:
        assert self.outputs is not None
        runner.set_cores(self.bench.scheduler.timed_cores)
        runner.signal(signal.SIGCONT)
        if operation == "time":
            runner.request(
                {"op": "warm", "sets": 0}
            )  # before the inputs are there, or it could compute with them
        inputs = self.inputs.raw()[: staged.numel()]
        places = torch.randint(
            inputs.numel(), (SAMPLED_BYTES,), device=inputs.device, generator=_chance(inputs.device)
        )
        given = staged[places]
        torch.cuda.synchronize()
        start = time.perf_counter()
        inputs.copy_(staged)
        torch.cuda.synchronize()
        runner.send({"op": operation, "sets": count})
        runner.receive(b"C")
        # Who works in place on its inputs changes all of them. In timed rounds looking costs time on this clock: a sample
        # is enough there, which every arm pays for, the no-op too.
        kept = inputs[places]
        differ = operation == "check" and self._inputs_differ(inputs, staged)
        inputs.fill_(0xFF)  # the scratch set stays
        self.outputs.raw().fill_(0xFF)
        torch.cuda.synchronize()
        runner.acknowledge()
        runner.receive()
        self.taken.copy_(self.outputs.raw()[: self.taken.numel()])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self._freeze()
        runner.set_cores(self.bench.scheduler.other_cores)
        self.changed = differ or (self.role == "candidate" and not torch.equal(given, kept))
        return seconds

    def _inputs_differ(self, held: torch.Tensor, given: torch.Tensor) -> bool:
        """Whether a candidate changed its inputs: working in place saves memory traffic that eager pays."""
        return self.role == "candidate" and not torch.equal(bits(held), bits(given))

    def grant(self, seconds: float) -> None:
        """More time, for what it waited through no doing of its own."""
        if self.runner is not None:
            self.runner.deadline += seconds

    def close(self) -> None:
        self.bench.end(self.runner, (self.inputs, self.outputs, self.parameters))
