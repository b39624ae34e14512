"""What the judge holds for one task: its parameters, secret inputs, expected outputs, and its baselines kept warm.

Inputs and expected outputs come from an oracle, a sandboxed runner of the task's own source that is dead before any
candidate could see them. They are shared by the candidates of one task, each of which is a fresh process that has seen none.
"""

from __future__ import annotations

import json
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.config import Params
from components.sandbox import buffers
from components.sandbox.correctness import Expected
from components.sandbox.nursery import InfrastructureError, Nursery, Runner, RunnerError

FAMILIES = ("given", "scaled", "shifted", "flipped", "integers", "wide")
MAX_SETS = 32
MAX_BANK_BYTES = {"cpu": 2 << 30, "cuda": 8 << 30}

Dtype = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"]
Shape = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 40)]], Field(max_length=16)]
Form = tuple[Shape, Dtype]


class Description(BaseModel):
    """What a task's source says of itself; checked, since the source is untrusted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    init_inputs: list[Any] = Field(max_length=64)
    inputs: list[Form | None] = Field(max_length=64)
    scalars: list[list[Any] | None] = Field(max_length=64)
    outputs: list[Form] = Field(min_length=1, max_length=64)
    state: list[tuple[str, Shape, Dtype]] = Field(max_length=4096)
    parameters: list[str] = Field(max_length=4096)
    seconds: float = Field(ge=0, lt=1e6)


class TaskFault(Exception):
    """The task's own source fails: it is refused at admission, and no candidate is blamed for it."""


@dataclass(frozen=True)
class Part:
    """Slots of one set, its stride in bytes, and the bytes of `sets` of them."""

    slots: list[buffers.Slot]
    stride: int
    bytes: int

    @staticmethod
    def of(forms: list[Form], sets: int) -> Part:
        slots, stride = buffers.layout([(tuple(shape), dtype) for shape, dtype in forms])
        return Part(slots, stride, stride * sets)

    def json(self) -> dict[str, Any]:
        return {"slots": [[s.offset, list(s.shape), s.dtype] for s in self.slots], "stride": self.stride, "bytes": self.bytes}

    def tensors(self, buffer: Any, index: int) -> list[torch.Tensor]:
        return [buffer.tensor(buffers.Slot(index * self.stride + s.offset, s.shape, s.dtype)) for s in self.slots]


class Arm:
    """One measured runner with shared memory of its own."""

    def __init__(self, bench: Bench, header: dict[str, Any], library: int | None, seconds: float):
        self.bench = bench
        device = bench.params.device
        self.inputs = buffers.make(device, bench.inputs.stride * (bench.slots + 1))
        self.outputs = buffers.make(device, bench.outputs.stride * bench.slots)
        self.parameters = buffers.make(device, bench.parameters_part.bytes)  # its own, or one candidate could write what others load
        layout: dict[str, Any] = {
            "sets": bench.slots + 1,
            "scalars": bench.description.scalars,
            "names": [name for name, _, _ in bench.description.state],
            "parameters": bench.parameters_part.json(),
            "inputs": Part(bench.inputs.slots, bench.inputs.stride, self.inputs.size).json(),
            "outputs": Part(bench.outputs.slots, bench.outputs.stride, self.outputs.size).json(),
        }
        layout["outputs"]["bytes"] = self.outputs.size
        header = header | {"layout": layout, "precision": bench.params.precision, "init_inputs": bench.description.init_inputs}
        descriptors = (library if library is not None else bench.nursery.empty, self.parameters.fd, self.inputs.fd, self.outputs.fd)
        self.runner: Runner | None = None
        try:
            self.parameters.raw().copy_(bench.parameters.raw())
            self.write(range(bench.slots + 1), bench.scratch)
            self.runner = bench.nursery.spawn(header, descriptors, seconds=seconds)
            self.runner.receive()
            self._freeze()
        except BaseException:
            self.close()
            raise

    def _freeze(self) -> None:
        """Between its rounds an arm stands still, or its threads could slow the others down (cuda: a stopped host thread would not stop its kernels)."""
        if self.runner is not None and self.bench.params.device == "cpu":
            self.runner.signal(signal.SIGSTOP)

    def write(self, into: range, sets: list[int]) -> None:
        """Copy input sets of the bank into this arm's memory."""
        stride = self.bench.inputs.stride
        source, target = self.bench.bank_inputs.raw(), self.inputs.raw()
        for slot, index in zip(into, sets, strict=False):
            target[slot * stride : (slot + 1) * stride].copy_(source[index * stride : (index + 1) * stride])

    def round(self, operation: str, sets: list[int]) -> tuple[float, torch.Tensor]:
        """One round over `sets`: seconds per call, and what the output buffer held when the runner said done.

        On cpu the figure is all CPU time of the runner's threads from before the inputs exist until after the outputs
        are taken away, so that no thread works outside of it; an honest runner sleeps at both ends and pays nothing.
        On cuda it is the judge's wall time between go and done, after one untimed launch that wakes the device.
        """
        assert self.runner is not None
        cuda = self.bench.params.device == "cuda"
        start = self.runner.cpu_seconds()
        self.runner.signal(signal.SIGCONT)
        self.write(range(len(sets)), sets)
        self.outputs.raw().fill_(0xFF)
        if cuda:
            torch.cuda.synchronize()
            if operation == "time":
                self.runner.ask({"op": "warm", "sets": 0})
                start = time.perf_counter()
        self.runner.ask({"op": operation, "sets": len(sets)})
        end = time.perf_counter()
        taken = self.outputs.raw()[: self.bench.outputs.stride * len(sets)].clone()
        self._freeze()
        if not cuda:
            end = self.runner.cpu_seconds()
        else:
            torch.cuda.synchronize()
        return (end - start) / len(sets), taken

    def inputs_changed(self, sets: list[int]) -> bool:
        stride = self.bench.inputs.stride
        return any(
            not torch.equal(self.inputs.raw()[i * stride : (i + 1) * stride], self.bench.bank_inputs.raw()[s * stride : (s + 1) * stride])
            for i, s in enumerate(sets)
        )

    def grant(self, seconds: float) -> None:
        """More time, for what it waited through no doing of its own."""
        if self.runner is not None:
            self.runner.deadline += seconds

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
        for buffer in (self.inputs, self.outputs, self.parameters):
            buffer.close()


class Bench:
    """One task, ready to judge candidates; made once and kept warm."""

    def __init__(self, params: Params, nursery: Nursery, code: str, timed_rounds: int | None = None):
        self.params = params
        self.nursery = nursery
        self.code = code
        # Two timed phases (against eager, then against compile) of fresh sets for a candidate, and one warm-up round.
        self.phases = timed_rounds if timed_rounds is not None else 2 * params.sandbox.rounds + 1
        self.users = 0
        self.lock = threading.RLock()
        self.arms: dict[str, Arm] = {}
        self.prepared: dict[int, list[Expected]] = {}
        self.closers: list[Any] = []
        sandbox = params.sandbox
        try:
            oracle = nursery.spawn({"role": "describe", "code": code, "precision": params.precision}, seconds=sandbox.run_seconds)
        except InfrastructureError:
            self.close()
            raise
        except RunnerError as error:
            self.close()
            raise TaskFault(error.text) from error
        try:
            self.description = Description.model_validate(json.loads(oracle.receive()))
            self._lay_out()
            self._fill(oracle)
        except RunnerError as error:
            self.close()
            raise TaskFault(f"{error.kind}: {error.text.strip().splitlines()[-1] if error.text.strip() else ''}"[:300]) from error
        except (ValidationError, ValueError, AttributeError) as error:
            self.close()
            raise TaskFault(f"description: {error}"[:300]) from error
        finally:
            oracle.close()

    def _lay_out(self) -> None:
        sandbox, description = self.params.sandbox, self.description
        per_round = max(sandbox.sets_per_round, min(MAX_SETS, -(-int(sandbox.round_seconds * 1e9) // max(1, int(description.seconds * 1e9)))))
        self.inputs = Part.of([form for form in description.inputs if form is not None], 1)
        self.outputs = Part.of(description.outputs, 1)
        wide = [(shape, "float64" if dtype.startswith(("float", "bfloat")) else dtype) for shape, dtype in description.outputs]
        self.expected = Part.of(wide, 1)
        self.parameters_part = Part.of([(shape, dtype) for _, shape, dtype in description.state], 1)
        one = self.inputs.stride + self.outputs.stride + self.expected.stride
        affordable = (MAX_BANK_BYTES[self.params.device] // one - sandbox.correctness_sets) // self.phases
        if affordable < 1:
            raise ValueError(f"{one} bytes for one set of inputs and outputs are too many to measure")
        self.per_round = min(per_round, affordable)
        self.slots = max(self.per_round, sandbox.correctness_sets)
        self.families = [FAMILIES[i % len(FAMILIES)] for i in range(sandbox.correctness_sets)]
        self.total = sandbox.correctness_sets + self.phases * self.per_round
        self.scratch = [i % self.total for i in range(self.slots + 1)]
        device = self.params.device
        self.parameters = self._keep(buffers.make(device, self.parameters_part.bytes))
        self.bank_inputs = self._keep(buffers.make(device, self.inputs.stride * self.total))
        self.bank_single = self._keep(buffers.make(device, self.outputs.stride * self.total))
        self.bank_expected = self._keep(buffers.make(device, self.expected.stride * self.total))

    def _keep(self, buffer: Any) -> Any:
        self.closers.append(buffer)
        return buffer

    def _connect(self, oracle: Runner, bank: dict[str, tuple[Part, Any]], sets: int) -> None:
        """Hand the oracle its memory: `bank` names inputs, outputs and expected with their layout and buffer."""
        layout: dict[str, Any] = {
            "sets": sets,
            "scalars": self.description.scalars,
            "names": [name for name, _, _ in self.description.state],
            "parameters": self.parameters_part.json() | {"bytes": self.parameters.size},
        }
        for name, (part, buffer) in bank.items():
            layout[name] = part.json() | {"bytes": buffer.size}
        header = {
            "role": "oracle",
            "code": self.code,
            "precision": self.params.precision,
            "device": self.params.device,
            "init_inputs": self.description.init_inputs,
            "layout": layout,
        }
        oracle.send(header, (self.parameters.fd, *(buffer.fd for _, buffer in bank.values())))
        oracle.receive()

    def _fill(self, oracle: Runner) -> None:
        """Secret seeds; correctness sets of every family first, then timed sets as the task gives them."""
        self.parameter_seed = secrets.randbits(62) & ~1
        self.seeds = [secrets.randbits(62) & ~1 for _ in range(self.total)]
        # The sets of the second phase, against compile, are made when a candidate first gets there: few tasks see one.
        first = self.params.sandbox.correctness_sets + min(self.phases, self.params.sandbox.rounds + 1) * self.per_round
        self._fill_sets(oracle, range(first))

    def _fill_sets(self, oracle: Runner, sets: range) -> None:
        bank = {"inputs": (self.inputs, self.bank_inputs), "outputs": (self.outputs, self.bank_single), "expected": (self.expected, self.bank_expected)}
        self._connect(oracle, bank, self.total)
        oracle.ask({"op": "parameters", "seed": self.parameter_seed})
        for index in sets:
            family = self.families[index] if index < len(self.families) else "given"
            oracle.ask({"op": "fill", "set": index, "seed": self.seeds[index], "family": family, "parameters": self.parameter_seed})
        self.filled = sets.stop

    def _fill_rest(self) -> None:
        oracle = self.nursery.spawn({"role": "describe", "code": self.code, "precision": self.params.precision}, seconds=self.params.sandbox.run_seconds)
        try:
            oracle.receive()
            self._fill_sets(oracle, range(self.filled, self.total))
        except RunnerError as error:
            raise TaskFault(f"{error.kind}: {error.text[-200:]}") from error
        finally:
            oracle.close()

    def probe(self, orders: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
        """Float32 outputs of the reference for each order, made by an oracle of its own; for admission."""
        device, count = self.params.device, len(orders)
        parts = {"inputs": self.inputs, "outputs": self.outputs, "expected": self.expected}
        bank = {name: (part, buffers.make(device, part.stride * count)) for name, part in parts.items()}
        oracle = self.nursery.spawn({"role": "describe", "code": self.code, "precision": self.params.precision}, seconds=self.params.sandbox.run_seconds)
        try:
            oracle.receive()
            self._connect(oracle, bank, count)
            for order in orders:
                oracle.ask(order)
            return [[t.clone() for t in self.outputs.tensors(bank["outputs"][1], i)] for i in range(count)]
        except RunnerError as error:
            raise TaskFault(f"{error.kind}: {error.text[-200:]}") from error
        finally:
            oracle.close()
            for _, buffer in bank.values():
                buffer.close()

    def correctness_sets(self) -> list[int]:
        return list(range(self.params.sandbox.correctness_sets))

    def timed_sets(self, number: int) -> list[int]:
        """The sets of timed round `number`; round 0 is the warm-up."""
        first = self.params.sandbox.correctness_sets + number * self.per_round
        with self.lock:
            if first + self.per_round > self.filled:
                self._fill_rest()
        return list(range(first, first + self.per_round))

    def wrong(self, sets: list[int], taken: torch.Tensor) -> str | None:
        """Why the outputs in `taken` are wrong for `sets`, or None; the reason names the input family."""
        for i, index in enumerate(sets):
            family = self.families[index] if index < len(self.families) else "given"
            for slot, expected in zip(self.outputs.slots, self.expected_outputs(index), strict=True):
                start = i * self.outputs.stride + slot.offset
                got = taken[start : start + slot.bytes].view(expected.single.dtype).view(slot.shape)
                reason = expected.fault(got)
                if reason is not None:
                    return f"{reason}:{family}"
        return None

    def expected_outputs(self, index: int) -> list[Expected]:
        """The outputs that are right for one set, prepared at their first use."""
        if index not in self.prepared:
            pairs = zip(self.outputs.tensors(self.bank_single, index), self.expected.tensors(self.bank_expected, index), strict=True)
            self.prepared[index] = [Expected(single, wide, self.params.sandbox) for single, wide in pairs]
        return self.prepared[index]

    def arm(self, role: str) -> Arm:
        """A warm baseline: eager, compile or noop."""
        with self.lock:
            return self._arm(role)

    def _arm(self, role: str) -> Arm:
        if role not in self.arms:
            header = {"role": role, "code": self.code, "compile_mode": "default"}
            try:
                # The compile baseline lives long: its clock is the bench's, not one candidate's.
                self.arms[role] = Arm(self, header, None, seconds=24 * 3600)
                if role != "noop":
                    sets = self.correctness_sets()
                    _, taken = self.arms[role].round("time", sets)
                    reason = self.wrong(sets, taken)
                    if reason is not None:
                        self.drop(role)
                        raise TaskFault(f"{role}: {reason}")
            except RunnerError as error:
                self.drop(role)
                raise TaskFault(f"{role}: {error.kind} {error.text[-200:]}") from error
        return self.arms[role]

    def drop(self, role: str) -> None:
        """Forget a baseline that died; the next use starts it anew."""
        if role in self.arms:
            self.arms.pop(role).close()

    def close(self) -> None:
        for arm in self.arms.values():
            arm.close()
        self.arms.clear()
        self.prepared.clear()
        for buffer in self.closers:
            buffer.close()
        self.closers.clear()
