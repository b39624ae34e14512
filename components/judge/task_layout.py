"""This module computes a task's memory layout, and its numbers of calls and input sets.

They follow from the shapes, dtypes and duration that a runner of the task's source reports (`Description`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from components.core.params import Device, Sandbox
from components.core.records import FrozenModel
from components.judge.input_mixing import MAX_DOUBLED_BYTES
from components.sandbox import shared_memory
from components.sandbox.input_distributions import INPUT_DISTRIBUTIONS
from components.sandbox.runner_protocol import MemoryLayout, Region, RegionName
from components.sandbox.shared_memory import Buffer, Slot

# Largest number of calls in one round, by device.
MAX_CALLS = {"cpu": 32, "cuda": 256}
# Largest size in bytes of the inputs and outputs of one round, by device, unless one call has more.
MAX_ROUND_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
# Largest share of a GPU's memory that the inputs and outputs of one call may take. The share is small,
# because about 15 copies of the inputs and outputs of a call exist at once.
MAX_CALL_SHARE = 1 / 16
# Largest size in bytes of all correctness sets, which are the input sets with reference outputs. A large task
# has fewer correctness sets, but at least `Sizing.min_correctness_sets`.
MAX_REFERENCE_BYTES = 24 << 30
# Bytes of device memory that CUDA uses for each process.
CONTEXT_BYTES = 600 << 20

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
# Dtypes of the float64 outputs, by the dtype of the task's own output; others are the same.
EXACT_DTYPES: dict[Dtype, Dtype] = {
    "float32": "float64",
    "float16": "float64",
    "bfloat16": "float64",
    "complex64": "complex128",
}
Shape = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 40)]], Field(max_length=16)]
TensorSpec = tuple[Shape, Dtype]


class Description(FrozenModel):
    """Description of a task that its own source sends from a runner; validated, as the source is untrusted.

    `inputs` and `scalars` both have one entry for each argument of a call. A tensor has its shape and dtype
    in `inputs` and None in `scalars`. Any other value has None in `inputs` and `[value]` in `scalars`.
    `state` has the names, shapes and dtypes of the module's state dict, and `parameters` has the names in it
    that are parameters. `seconds` is the time of the fastest call. `peak_bytes` is the GPU memory that the
    calls reserved, or 0 on cpu.
    """

    init_inputs: list[Any] = Field(max_length=64)
    inputs: list[TensorSpec | None] = Field(max_length=64)
    scalars: list[list[Any] | None] = Field(max_length=64)
    outputs: list[TensorSpec] = Field(min_length=1, max_length=64)
    state: list[tuple[str, Shape, Dtype]] = Field(max_length=4096)
    parameters: list[str] = Field(max_length=4096)
    seconds: float = Field(ge=0, lt=1e6)
    peak_bytes: int = Field(ge=0)


@dataclass(frozen=True)
class TensorLayout:
    """Positions of the tensors of one set in a buffer that holds several sets one after another.

    `slots` has the positions in the first set, and `stride` is the distance in bytes from one set to the
    next.
    """

    slots: list[Slot]
    stride: int

    @staticmethod
    def of(specs: list[TensorSpec]) -> TensorLayout:
        return TensorLayout(*shared_memory.pack_slots([(tuple(shape), dtype) for shape, dtype in specs]))

    def region(self, buffer: Buffer | None) -> Region:
        """Return the layout in the form that a runner receives.

        The form includes the size of `buffer` if `buffer` is not None.
        """
        slots = [(slot.offset, list(slot.shape), slot.dtype) for slot in self.slots]
        region: Region = {"slots": slots, "stride": self.stride}
        if buffer is not None:
            region["bytes"] = buffer.size
        return region

    def tensors(self, buffer: Buffer, index: int) -> list[torch.Tensor]:
        """Return views of the tensors of set `index` in `buffer`."""
        return [
            buffer.tensor(Slot(index * self.stride + slot.offset, slot.shape, slot.dtype))
            for slot in self.slots
        ]

    def views(self, memory: torch.Tensor, index: int) -> list[torch.Tensor]:
        """Return flat views of the tensors of set `index` in `memory`, a tensor of bytes."""
        start = index * self.stride
        return [
            memory[start + slot.offset : start + slot.offset + slot.bytes].view(getattr(torch, slot.dtype))
            for slot in self.slots
        ]


@dataclass(frozen=True)
class Sizing:
    """Options for how much of a task is prepared and timed; the defaults are used for judging candidates."""

    # Number of calls and bytes in a round, as a share of the usual number.
    round_share: float = 1.0
    min_correctness_sets: int = 1
    # Largest number of input sets that timed inputs are mixed from; at least two sets are made.
    timed_sets: int = 6
    # Whether to keep prepared reference outputs, instead of preparing them again at each use.
    keep_references: bool = True


@dataclass(frozen=True)
class TaskLayout:
    """Layout of a task's tensors in memory, and the numbers of its calls and input sets."""

    description: Description
    sizing: Sizing
    inputs: TensorLayout
    outputs: TensorLayout
    # Layout of the outputs with float64 in place of every floating-point type.
    expected: TensorLayout
    parameters: TensorLayout
    # Number of calls in one timed round.
    calls: int
    # Number of sets of inputs and outputs that fit into a timed runner's memory. The memory has one more set
    # of inputs, the scratch set, which is used for warm-up calls.
    capacity: int
    # Input distribution of each correctness set.
    distributions: list[str]
    # Number of all input sets: the correctness sets, then the sets that timed inputs are mixed from.
    input_sets: int

    @staticmethod
    def of(
        description: Description, sandbox: Sandbox, device: Device, device_bytes: int, sizing: Sizing
    ) -> TaskLayout:
        """Return the layout of the task that `description` describes.

        `device_bytes` is the size of the GPU's memory, or 0 on cpu. Raises ValueError if the inputs and
        outputs of one call are too large to be measured.
        """
        inputs = TensorLayout.of([spec for spec in description.inputs if spec is not None])
        outputs = TensorLayout.of(description.outputs)
        expected = TensorLayout.of(
            [(shape, EXACT_DTYPES.get(dtype, dtype)) for shape, dtype in description.outputs]
        )
        call_bytes = inputs.stride + outputs.stride
        if call_bytes > (device_bytes * MAX_CALL_SHARE or MAX_ROUND_BYTES["cpu"]):
            raise ValueError(f"{call_bytes} bytes for one set of inputs and outputs are too many to measure")
        lasting = -(-int(sandbox.round_seconds * 1e9) // max(1, int(description.seconds * 1e9)))
        calls = max(sandbox.sets_per_round, min(MAX_CALLS[device], lasting))
        calls = max(2, int(sizing.round_share * calls))
        fitting = max(1, int(sizing.round_share * MAX_ROUND_BYTES[device]) // call_bytes)
        correctness_sets = max(
            sizing.min_correctness_sets,
            min(sandbox.correctness_sets, MAX_REFERENCE_BYTES // (call_bytes + 2 * expected.stride)),
        )
        return TaskLayout(
            description=description,
            sizing=sizing,
            inputs=inputs,
            outputs=outputs,
            expected=expected,
            parameters=TensorLayout.of([(shape, dtype) for _, shape, dtype in description.state]),
            calls=min(calls, fitting),
            capacity=min(max(calls, correctness_sets), fitting),
            distributions=list(itertools.islice(itertools.cycle(INPUT_DISTRIBUTIONS), correctness_sets)),
            input_sets=correctness_sets
            + max(2, min(sizing.timed_sets, MAX_ROUND_BYTES[device] // inputs.stride)),
        )

    @property
    def bank_bytes(self) -> int:
        """Estimated bytes of all input sets, outputs and parameters, and of the data derived from them."""
        count = len(self.distributions)
        doubled = 2 * (self.input_sets - count) if self.inputs.stride <= MAX_DOUBLED_BYTES else 0
        references = count if self.sizing.keep_references else 3  # one set, and memory for preparing it
        return (
            self.inputs.stride * (self.input_sets + doubled)
            + (self.outputs.stride + self.expected.stride) * count
            + self.expected.stride * references
            + 8 * self.parameters.stride
        )

    @property
    def staged_bytes(self) -> int:
        """Largest size in bytes of the inputs of one round."""
        return self.inputs.stride * self.capacity

    @property
    def timed_runner_bytes(self) -> int:
        """Estimated bytes of one timed runner: process, shared memory, results in the judge's memory."""
        held = self.inputs.stride + 3 * self.outputs.stride * self.capacity
        return CONTEXT_BYTES + self.staged_bytes + held + self.description.peak_bytes

    def reference_runner_bytes(self, limit: int) -> int:
        """Return the estimated bytes of the runner that makes the reference data.

        The runner computes in float64 too, so the estimate is three times the peak of the task's own calls.
        It is at most `limit`, the number of bytes that the runner may allocate, plus `CONTEXT_BYTES`.
        """
        return CONTEXT_BYTES + min(3 * self.description.peak_bytes, limit)

    def exact_runner_bytes(self, limit: int) -> int:
        """Return the estimated bytes of an `ExactRunner`, its memory and the comparison of its outputs."""
        memory = self.parameters.stride + self.inputs.stride + 6 * self.expected.stride
        return self.reference_runner_bytes(limit) + memory

    def header(self, sets: int, buffers: dict[RegionName, Buffer]) -> MemoryLayout:
        """Return the description of the shared memory, in the form that a runner receives.

        The memory holds `sets` sets of inputs; `buffers` are its buffers by name. On cpu a timed runner has
        no buffer for outputs, but their layout is always part of the description.
        """
        header: MemoryLayout = {
            "sets": sets,
            "scalars": self.description.scalars,
            "names": [name for name, _, _ in self.description.state],
            "parameters": self.parameters.region(buffers.get("parameters")),
            "inputs": self.inputs.region(buffers.get("inputs")),
            "outputs": self.outputs.region(buffers.get("outputs")),
        }
        if "expected" in buffers:
            header["expected"] = self.expected.region(buffers["expected"])
        return header
