"""This module computes a task's memory layout, its number of calls in a round, and its number of input sets.

A round is a series of timed calls, and an input set has the inputs of one call. The results follow from the
shapes, dtypes and duration of a call that a runner (a sandboxed process) of the task's source reports
(`Description`).
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import Self

import torch

from components.core.params import Sandbox
from components.core.records import Device
from components.judge.task_description import EXACT_DTYPES, Description, TensorSpec
from components.sandbox.inside import shared_memory
from components.sandbox.inside.input_distributions import INPUT_DISTRIBUTIONS
from components.sandbox.inside.runner_protocol import MemoryLayout, Region, RegionName
from components.sandbox.inside.shared_memory import Buffer, Slot

# Largest number of calls in one round, by device.
MAX_CALLS = {"cpu": 32, "cuda": 256}
# Largest size in bytes of the inputs and outputs of one round, by device, unless one call has more.
MAX_ROUND_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
# Share of MAX_ROUND_BYTES that a round may have if the task's baselines share buffers (`Placement`).
SHARING_ROUND_SHARE = 0.125
# Largest size in bytes of the inputs and outputs of a call on cuda whose inputs are given call by call. They
# are copied through host memory, so more bytes would take longer than the calls of most tasks.
MAX_DELIVERED_BYTES = 1 << 20
# About how long it takes to give a runner the inputs of such a call and to take its outputs, in seconds.
DELIVERY_SECONDS = 5e-5
# Largest size in bytes of all correctness sets, which are the input sets with reference outputs. A large task
# has fewer correctness sets, but at least `Sizing.min_correctness_sets`.
MAX_REFERENCE_BYTES = 24 << 30


def input_distributions(sandbox: Sandbox) -> list[str]:
    """Return the names of the changes of the inputs under each of which a candidate must be correct.

    A candidate is an implementation of a task's module that is judged, and `sandbox` are the parameters of
    that section. With sandbox.tolerance=kernelbench the result is `["given"]`, the task's own inputs, for
    which KernelBench's tolerances are made. Otherwise it has every key of `INPUT_DISTRIBUTIONS`, such as
    `given` and `scaled`.
    """
    return ["given"] if sandbox.tolerance == "kernelbench" else list(INPUT_DISTRIBUTIONS)


@dataclass(frozen=True)
class TensorLayout:
    """Positions of the tensors of one set in a buffer that holds several sets one after another.

    A set has the inputs or the outputs of one call, or the parameters of the task. `slots` has the byte
    offset, shape and dtype of each tensor in the first set, and `stride` is the distance in bytes from one
    set to the next.
    """

    slots: list[Slot]
    stride: int

    @staticmethod
    def of(specs: list[TensorSpec]) -> TensorLayout:
        return TensorLayout(*shared_memory.pack_slots([(tuple(shape), dtype) for shape, dtype in specs]))

    def region(self, buffer: Buffer | None) -> Region:
        """Return the layout as a dictionary for the message that gives a runner, a sandboxed process, a role.

        The entries are `slots`, with the byte offset, shape and dtype name of each tensor, and `stride`, the
        distance in bytes from one set of tensors to the next. If `buffer` is not None, its size in bytes is
        added under `bytes`, and its device under `device`.
        """
        slots = [(slot.offset, list(slot.shape), slot.dtype) for slot in self.slots]
        region: Region = {"slots": slots, "stride": self.stride}
        if buffer is not None:
            region |= {"bytes": buffer.size, "device": buffer.device}
        return region

    def tensors(self, buffer: Buffer, index: int) -> list[torch.Tensor]:
        """Return a view of each tensor of set `index` in `buffer`, in the tensor's own shape.

        A set has the inputs or the outputs of one call, or the parameters of the task.
        """
        return [
            buffer.tensor(Slot(index * self.stride + slot.offset, slot.shape, slot.dtype))
            for slot in self.slots
        ]

    def views(self, memory: torch.Tensor, index: int) -> list[torch.Tensor]:
        """Return a flat view of each tensor of set `index` in `memory`, a tensor of bytes.

        A set has the inputs or the outputs of one call, or the parameters of the task.
        """
        start = index * self.stride
        return [
            memory[start + slot.offset : start + slot.offset + slot.bytes].view(getattr(torch, slot.dtype))
            for slot in self.slots
        ]


@dataclass(frozen=True)
class Sizing:
    """Options for how much of a task is prepared and timed; the defaults are used for judging candidates.

    `round_share` scales the number of calls and bytes of a round (a series of timed calls). There are at
    least `min_correctness_sets` input sets with reference outputs. Timed inputs are mixed from at most
    `timed_sets` input sets, and from at least two. If `keep_references` is set, reference outputs are kept in
    the form in which they are compared. If `one_process` is set, a single sandboxed process does all work of
    the task.
    """

    # Number of calls and bytes in a round, as a share of the usual number.
    round_share: float = 1.0
    # Smallest number of correctness sets, also if they are larger than MAX_REFERENCE_BYTES.
    min_correctness_sets: int = 1
    # Largest number of input sets that timed inputs are mixed from; at least two sets are made.
    timed_sets: int = 6
    # Whether to keep prepared reference outputs, instead of preparing them again at each use.
    keep_references: bool = True
    # Whether one process takes all roles, as in an admission.
    one_process: bool = False


@dataclass(frozen=True)
class Placement:
    """Where a task's data are: the choice between speed and device memory.

    If `shares_buffers` is set, the baselines of a task (eager, torch.compile and the no-op) have one buffer
    of inputs and one of outputs in common, no buffer has an additional input set for warm-up calls, buffers
    of parameters are in host memory, and every timed runner (a sandboxed process whose calls are timed)
    returns its free memory to the device after its timed calls. The candidate, which is compared with the
    baselines, has buffers of its own, because it could otherwise change what eager computes.
    `references_on_host` and `inputs_on_host` say whether the reference outputs and the input sets are in host
    memory instead of the device's.
    """

    shares_buffers: bool = False
    # Whether the reference outputs, or the input sets, are in host memory instead of the device's.
    references_on_host: bool = False
    inputs_on_host: bool = False


# All placements, from the fastest to the one that needs the least device memory.
PLACEMENTS = (
    Placement(),
    Placement(shares_buffers=True),
    Placement(shares_buffers=True, references_on_host=True),
    Placement(shares_buffers=True, references_on_host=True, inputs_on_host=True),
)


@dataclass(frozen=True)
class TaskLayout:
    """Layout of a task's tensors in memory, and the numbers of its calls and input sets.

    `description` has the shapes and dtypes of the task, and `sizing` and `placement` say how much of the task
    is prepared and where its data are. An input set has the inputs of one call. `input_sets` is the number of
    all of them: first the correctness sets, whose outputs are compared with reference outputs and whose input
    distributions (changes of the inputs, such as `scaled`) are `distributions`, then the sets that timed
    inputs are mixed from. `expected` is the layout of the outputs with float64 in place of every
    floating-point type. `calls` is the number of calls that are timed together in one round. `capacity` is
    the number of sets of inputs and outputs that the memory of a timed runner (a process whose calls are
    timed) holds. Unless buffers are shared, this memory has one more set of inputs, the scratch set, for
    warm-up calls. `by_call` says whether a timed runner on cuda gets the inputs of a call only after the
    outputs of the call before.
    """

    description: Description
    sizing: Sizing
    placement: Placement
    device: Device
    inputs: TensorLayout
    outputs: TensorLayout
    expected: TensorLayout
    parameters: TensorLayout
    calls: int
    capacity: int
    distributions: list[str]
    by_call: bool
    input_sets: int

    @staticmethod
    def of(
        description: Description,
        sandbox: Sandbox,
        device: Device,
        sizing: Sizing,
        placement: Placement = PLACEMENTS[0],
        most_sets: int | None = None,
        most_calls: int | None = None,
    ) -> TaskLayout:
        """Return the layout of the task that `description` describes, for judging its candidates.

        `sandbox` are the parameters of that section. `sizing` and `placement` say how much of the task is
        prepared and where its data are. `most_sets`, by default the parameter `sandbox.correctness_sets`,
        limits the number of correctness sets, which are input sets with reference outputs. There are fewer if
        they are larger than `MAX_REFERENCE_BYTES`, but always at least `sizing.min_correctness_sets`.
        `most_calls`, by default `MAX_CALLS`, limits the calls of a round (a series of timed calls); if it is
        smaller than `sandbox.sets_per_round`, that many are made.
        """
        inputs = TensorLayout.of([spec for spec in description.inputs if spec is not None])
        outputs = TensorLayout.of(description.outputs)
        expected = TensorLayout.of(
            [(shape, EXACT_DTYPES.get(dtype, dtype)) for shape, dtype in description.outputs]
        )
        call_bytes = inputs.stride + outputs.stride
        by_call = (
            sandbox.input_delivery == "call"
            and device == "cuda"
            and not placement.shares_buffers
            and call_bytes <= MAX_DELIVERED_BYTES
        )
        seconds = description.seconds + DELIVERY_SECONDS * by_call
        lasting = -(-int(sandbox.round_seconds * 1e9) // max(1, int(seconds * 1e9)))
        calls = max(sandbox.sets_per_round, min(most_calls or MAX_CALLS[device], lasting))
        calls = max(min(2, sandbox.sets_per_round), int(sizing.round_share * calls))
        share = sizing.round_share * (SHARING_ROUND_SHARE if placement.shares_buffers else 1.0)
        fitting = max(1, int(share * MAX_ROUND_BYTES[device]) // call_bytes)
        correctness_sets = max(
            sizing.min_correctness_sets,
            min(
                sandbox.correctness_sets,
                MAX_REFERENCE_BYTES // (call_bytes + 2 * expected.stride),
                sandbox.correctness_sets if most_sets is None else most_sets,
            ),
        )
        timed_sets = min(sizing.timed_sets, MAX_ROUND_BYTES[device] // inputs.stride)
        return TaskLayout(
            description=description,
            sizing=sizing,
            placement=placement,
            device=device,
            inputs=inputs,
            outputs=outputs,
            expected=expected,
            parameters=TensorLayout.of([(shape, dtype) for _, shape, dtype in description.state]),
            calls=min(calls, fitting),
            capacity=min(max(calls, correctness_sets), fitting),
            by_call=by_call,
            distributions=list(
                itertools.islice(itertools.cycle(input_distributions(sandbox)), correctness_sets)
            ),
            input_sets=correctness_sets + max(2, timed_sets),
        )

    @property
    def call_bytes(self) -> int:
        """Bytes that the inputs and the outputs of one call take in memory, padding included."""
        return self.inputs.stride + self.outputs.stride

    @property
    def runner_sets(self) -> int:
        """Number of input sets (inputs of one call each) in the memory of a timed runner.

        A timed runner is a sandboxed process whose calls are timed. The last set also serves for warm-up
        calls if the baselines of the task share buffers, and is for these calls alone otherwise.
        """
        return self.capacity + (not self.placement.shares_buffers)

    @property
    def keeps_references(self) -> bool:
        """Whether reference outputs are kept in the form in which outputs are compared with them.

        Otherwise they are prepared for the comparison (`correctness.ReferenceOutput`) at each use.
        """
        return self.sizing.keep_references and not self.placement.shares_buffers

    def memory_of(self, region: RegionName) -> Device:
        """Return the device of the judge's own buffer of a region: `cpu` if the buffer is in host memory.

        A region is one kind of a task's tensors: `parameters`, `inputs`, `outputs` or `expected` (float64
        outputs).
        """
        on_host: dict[RegionName, bool] = {
            "parameters": self.placement.shares_buffers,
            "inputs": self.placement.inputs_on_host,
            "outputs": self.placement.references_on_host,
            "expected": self.placement.references_on_host,
        }
        return "cpu" if on_host[region] else self.device

    def header(self, sets: int, buffers: dict[RegionName, Buffer]) -> MemoryLayout:
        """Return the description of the shared memory for the message that gives a runner its role.

        A runner is a sandboxed process, and its role is what it executes, such as eager. The memory holds
        `sets` sets of inputs; `buffers` are its buffers by name, such as `inputs`. On cpu a runner whose
        calls are timed has no buffer for outputs, but their layout is always part of the description.
        """
        header: MemoryLayout = {
            "sets": sets,
            "calls": self.capacity,
            "scalars": self.description.scalars,
            "names": [name for name, _, _ in self.description.state],
            "parameters": self.parameters.region(buffers.get("parameters")),
            "inputs": self.inputs.region(buffers.get("inputs")),
            "outputs": self.outputs.region(buffers.get("outputs")),
        }
        if "expected" in buffers:
            header["expected"] = self.expected.region(buffers["expected"])
        if "next_inputs" in buffers:
            header["next_inputs"] = self.inputs.region(buffers["next_inputs"])
            header["last_outputs"] = self.outputs.region(buffers["last_outputs"])
        return header


@dataclass
class RunnerMemory:
    """Memory of one timed runner (a sandboxed process whose calls are timed), or of several in turns.

    `buffers` has the shared buffers by name: parameters, inputs, and on cuda outputs. If the runner gets the
    inputs call by call (`TaskLayout.by_call`), there are also buffers for the inputs of the next call and for
    the outputs of the last call. `results` is the judge's copy, as bytes, of the outputs of a round (a series
    of timed calls).
    """

    buffers: dict[RegionName, Buffer]
    results: torch.Tensor

    @classmethod
    def allocate(cls, device: Device, layout: TaskLayout) -> Self:
        """Allocate buffers for a task's parameters, the inputs of a round, and on cuda the round's outputs.

        A round is a series of timed calls. The judge's copy of the outputs is allocated too, and buffers for
        the inputs and outputs of a single call if `layout.by_call` is set. If an allocation fails, its error
        is raised after the buffers that were already made are closed.
        """
        sizes: dict[RegionName, int] = {
            "parameters": layout.parameters.stride,
            "inputs": layout.inputs.stride * layout.runner_sets,
        }
        result_bytes = layout.outputs.stride * layout.capacity
        if device == "cuda":
            sizes["outputs"] = result_bytes
        if layout.by_call:
            sizes |= {"next_inputs": layout.inputs.stride, "last_outputs": layout.outputs.stride}
        buffers: dict[RegionName, Buffer] = {}
        with contextlib.ExitStack() as allocated:
            for name, size in sizes.items():
                on_host = name in ("next_inputs", "last_outputs")
                on = layout.memory_of(name) if name == "parameters" else "cpu" if on_host else device
                buffers[name] = shared_memory.make_buffer(on, size)
                allocated.callback(buffers[name].close)
            results = torch.empty(result_bytes, dtype=torch.uint8, device=device)
            allocated.pop_all()
        return cls(buffers, results)

    def close(self) -> None:
        self.results = torch.empty(0, dtype=torch.uint8)
        for buffer in self.buffers.values():
            buffer.close()
