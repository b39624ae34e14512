"""Secret inputs, parameters and reference outputs of one task, made by a runner of the task's own source.

All candidates of the task are judged with the same data. Each candidate runs in a new process, so that it
knows nothing about the data from an earlier judgement.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import ValidationError

from components.core.errors import TaskError
from components.core.params import Params
from components.judge.correctness import ReferenceOutput, first_mismatch
from components.judge.device_scheduler import DeviceScheduler
from components.judge.input_mixing import InputBank, InputMix
from components.judge.role_processes import OneProcess, ProcessPerRole, switch_role
from components.judge.task_layout import Description, Sizing, TaskLayout
from components.sandbox import shared_memory
from components.sandbox.runner_process import Runner, RunnerError
from components.sandbox.runner_protocol import RegionName, RoleHeader
from components.sandbox.shared_memory import Buffer


@contextlib.contextmanager
def task_errors() -> Iterator[None]:
    """Convert errors inside the context that are caused by the task's own source into TaskError."""
    try:
        yield
    except RunnerError as error:
        last_line = "".join(error.text.strip().splitlines()[-1:])
        text = f"{error.kind}: {last_line}"[:300]
        raise TaskError(text, out_of_memory=error.kind == "out_of_memory") from error
    except (ValidationError, ValueError, AttributeError) as error:
        raise TaskError(f"description: {error}"[:300]) from error


class TaskReference:
    """Secret inputs, parameters and reference outputs of one task.

    The attribute `layout` exists after construction. All other data exist after `fill`.
    """

    parameters: Buffer
    parameter_seed: int
    # Seed of each input set.
    seeds: list[int]
    inputs: InputBank

    def __init__(
        self,
        params: Params,
        scheduler: DeviceScheduler,
        code: str,
        processes: ProcessPerRole | OneProcess,
        sizing: Sizing,
    ):
        """Start a runner of the task's source, and compute the layout from the description that it sends.

        Raises TaskError if the source fails or its description is invalid.
        """
        self.params = params
        self.scheduler = scheduler
        self.code = code
        self.runner: Runner | None = None
        # Buffers and the memory reserved for them, which `close` releases in reverse order.
        self.resources = contextlib.ExitStack()
        self._outputs: dict[int, list[ReferenceOutput]] = {}
        self._slack: dict[int, list[tuple[float, float]]] = {}
        header: RoleHeader = {"role": "describe", "code": code, "precision": params.precision}
        with self._closing_on_error(), task_errors():
            self.runner = processes.start(header, seconds=params.sandbox.run_seconds)
            with scheduler.background_work(self.runner):
                reply = self.runner.receive()
            description = Description.model_validate(json.loads(reply))
            self.layout = TaskLayout.of(
                description, params.sandbox, params.device, scheduler.device_bytes, sizing
            )

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.close)
            yield
            cleanup.pop_all()

    def fill(self, memory_bytes: int) -> None:
        """Make parameters, inputs and reference outputs from secret seeds.

        `memory_bytes` of device memory are reserved first. Correctness sets get reference outputs, both at
        the task's precision and in float64. The sets that timed calls are mixed from get no outputs. Raises
        TaskError if the task's source fails.
        """
        layout = self.layout
        correctness_sets = len(layout.distributions)
        with self._closing_on_error(), task_errors():
            self.resources.enter_context(self.scheduler.reserve_memory(memory_bytes))
            with self.scheduler.preparing():
                self.parameters = self._allocate(layout.parameters.stride)
                self.input_buffer = self._allocate(layout.inputs.stride * layout.input_sets)
                self.output_buffer = self._allocate(layout.outputs.stride * correctness_sets)
                self.expected_buffer = self._allocate(layout.expected.stride * correctness_sets)
            self.parameter_seed = secrets.randbits(62) & ~1
            self.seeds = [secrets.randbits(62) & ~1 for _ in range(layout.input_sets)]
            orders = [
                {
                    "op": "fill",
                    "set": index,
                    "seed": seed,
                    "distribution": layout.distributions[index] if index < correctness_sets else "given",
                    "parameters": self.parameter_seed,
                    "outputs": index < correctness_sets,
                    "exact": index < correctness_sets,
                }
                for index, seed in enumerate(self.seeds)
            ]
            self._request(
                {
                    "inputs": self.input_buffer,
                    "outputs": self.output_buffer,
                    "expected": self.expected_buffer,
                },
                [{"op": "parameters", "seed": self.parameter_seed}, *orders],
                layout.input_sets,
            )
            with self.scheduler.preparing():
                sets = [layout.inputs.tensors(self.input_buffer, index) for index in range(layout.input_sets)]
                self.inputs = InputBank(sets, layout.distributions)
                self.resources.callback(self.inputs.close)

    def _allocate(self, size: int) -> Buffer:
        buffer: Buffer = shared_memory.make_buffer(self.params.device, size)
        self.resources.callback(buffer.close)
        return buffer

    def _request(self, buffers: dict[RegionName, Buffer], orders: list[dict[str, Any]], sets: int) -> None:
        """Switch the runner to the role `reference`, and have it carry out `orders` one after another.

        `buffers` is the memory that the runner gets beside the parameters, with space for `sets` input sets.
        """
        assert self.runner is not None
        runner = self.runner
        buffers = {"parameters": self.parameters, **buffers}
        runner.deadline = time.monotonic() + self.params.sandbox.run_seconds
        header: RoleHeader = {
            "role": "reference",
            "code": self.code,
            "precision": self.params.precision,
            "device": self.params.device,
            "init_inputs": self.layout.description.init_inputs,
            "layout": self.layout.header(sets, buffers),
        }
        with self.scheduler.background_work(runner):
            switch_role(runner, header, tuple(buffer.fd for buffer in buffers.values()))
            runner.receive()
            for order in orders:
                runner.request(order)

    def probe(self, changes: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
        """Return the task's outputs for changed versions of the first input set, one list for each change.

        Each entry of `changes` replaces entries of the order with which the set was made, for example so that
        one input comes from another seed. The outputs are at the task's precision. Raises TaskError if the
        task's source fails.
        """
        order = {
            "op": "fill",
            "seed": self.seeds[0],
            "distribution": "given",
            "parameters": self.parameter_seed,
            "outputs": True,
            "exact": False,
        }
        layout, count = self.layout, len(changes)
        with contextlib.ExitStack() as allocated:
            buffers: dict[RegionName, Buffer] = {}
            with self.scheduler.preparing():
                strides: dict[RegionName, int]
                strides = {"inputs": layout.inputs.stride, "outputs": layout.outputs.stride}
                for name, stride in strides.items():
                    buffers[name] = shared_memory.make_buffer(self.params.device, stride * count)
                    allocated.callback(buffers[name].close)
            try:
                self._request(
                    buffers, [order | {"set": i} | change for i, change in enumerate(changes)], count
                )
            except RunnerError as error:
                raise TaskError(f"{error.kind}: {error.text[-200:]}") from error
            with self.scheduler.preparing():
                return [
                    [t.clone() for t in layout.outputs.tensors(buffers["outputs"], i)] for i in range(count)
                ]

    def first_wrong(self, mixes: list[InputMix], memory: torch.Tensor, *, loose: bool = False) -> str | None:
        """Return the reason why an output in `memory` is wrong, or None if all outputs are right.

        `memory` holds the outputs for the correctness sets that `mixes` names, one set after another. The
        reason ends with the name of the input distribution. `loose` is explained at
        `ReferenceOutput.mismatch`.
        """
        for i, mix in enumerate(mixes):
            references = self._references(mix.first)
            outputs = self.layout.outputs.views(memory, i)
            for output, reference in zip(outputs, references, strict=True):
                reason = reference.mismatch(output.view(reference.single.shape), loose=loose)
                if reason is not None:
                    return f"{reason}:{self.layout.distributions[mix.first]}"
        return None

    def first_mismatch(
        self, memory: torch.Tensor, baseline: torch.Tensor, mixes: list[InputMix]
    ) -> str | None:
        """Return the reason why an output in `memory` does not match the one in `baseline`, or None.

        The result is None if all outputs match. `memory` holds the results of a timed round on the inputs of
        `mixes`, and `baseline` holds the results of a round of a baseline on the same inputs. The reason ends
        with the name of the input distribution.
        """
        slacks = []
        for mix in mixes:
            index = self.layout.distributions.index(mix.distribution)
            if index not in self._slack:
                self._references(index)
            slacks.append(self._slack[index])
        for number, slot in enumerate(self.layout.outputs.slots):
            ours, theirs = (
                rows.view(len(mixes), -1)[:, slot.offset : slot.offset + slot.bytes].view(
                    getattr(torch, slot.dtype)
                )
                for rows in (memory, baseline)
            )
            wrong = first_mismatch(ours, theirs, [slack[number] for slack in slacks])
            if wrong is not None:
                return f"{wrong[1]}:{mixes[wrong[0]].distribution}"
        return None

    def _references(self, index: int) -> list[ReferenceOutput]:
        """Return the reference outputs of one correctness set, prepared for comparison.

        If `Sizing.keep_references` is set, they are prepared at the first use and kept. Otherwise they are
        prepared at each use.
        """
        if index in self._outputs:
            return self._outputs[index]
        single, expected = self.correctness_outputs(index)
        sandbox, precision = self.params.sandbox, self.params.precision
        prepared = [
            ReferenceOutput(one, exact, sandbox, precision)
            for one, exact in zip(single, expected, strict=True)
        ]
        self._slack[index] = [reference.slack for reference in prepared]
        if self.layout.sizing.keep_references:
            self._outputs[index] = prepared
        return prepared

    def correctness_outputs(self, index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the reference outputs of one correctness set, at the task's precision and in float64."""
        return (
            self.layout.outputs.tensors(self.output_buffer, index),
            self.layout.expected.tensors(self.expected_buffer, index),
        )

    def end_runner(self) -> None:
        """End the runner of the task's source, after which no more data can be made."""
        if self.runner is not None:
            self.runner.close()
            self.runner = None

    def close(self) -> None:
        with self.scheduler.preparing():  # freeing device memory blocks the whole device
            self.end_runner()
            self._outputs.clear()
            self.resources.close()
            self.scheduler.trim_cache()
