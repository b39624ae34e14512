"""Secret inputs, parameters and reference outputs of one task, made by a runner of the task's own source.

All candidates of the task are judged with the same data. Each candidate runs in a new process, in which no
data of an earlier judgement are left.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
from pydantic import ValidationError

from components.core.errors import TaskError
from components.core.params import Params
from components.judge.correctness import ReferenceOutput
from components.judge.device_scheduler import DeviceScheduler
from components.judge.input_mixing import InputBank, InputMix
from components.judge.memory_plan import MemoryBudget, memory_need, plan_layout
from components.judge.role_processes import OneProcess, ProcessPerRole, switch_role
from components.judge.task_layout import Description, Sizing, input_distributions
from components.sandbox.inside import shared_memory
from components.sandbox.inside.runner_protocol import RegionName, RoleHeader
from components.sandbox.inside.shared_memory import Buffer
from components.sandbox.runner_process import Runner, RunnerError


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


def too_inexact(reference: ReferenceOutput, distribution: str) -> TaskError:
    """Return the error for a task whose own output differs too much from the float64 output.

    `distribution` is the name of the input distribution for which the outputs differ.
    """
    return TaskError(
        f"its result differs from its float64 result by {reference.errors[0]:.1e} on inputs of the"
        f" distribution {distribution}, where sandbox.absolute_tolerance allows {reference.ceiling:.1e}; make"
        " the task better conditioned or raise the tolerance"
    )


def first_mismatch(
    references: list[ReferenceOutput],
    outputs: list[torch.Tensor],
    distribution: str,
    *,
    multiple: float = 1.0,
    loose: bool = False,
) -> str | None:
    """Return the reason why an output of one call is wrong, or None if all outputs are right.

    `outputs` are the output tensors of the call, each with one dimension, and `references` has the reference
    values of each. The reason ends with `distribution`, the name of the input distribution. The limits of
    errors are multiplied by `multiple`. `loose`, which is meant for baselines, allows errors up to the
    absolute tolerance.

    If the error of the task's own output is above the absolute tolerance, some outputs can be called neither
    right nor wrong, and TaskError is raised for them. These are a baseline's outputs (`loose`) that repeat
    the task's own output, and a candidate's outputs that are wrong by its limits but right by those of
    `loose`. A baseline's output that does not repeat the task's own output is wrong, because the task is not
    deterministic.
    """
    for output, reference in zip(outputs, references, strict=True):
        shaped = output.view(reference.shape)
        reason = reference.mismatch(shaped, multiple=multiple, loose=loose)
        if reference.exceeds_tolerance and loose and not reference.is_repeated_by(shaped):
            return f"max_error:{distribution}"  # the task is not deterministic
        if reference.exceeds_tolerance and (
            loose or (reason is not None and reference.mismatch(shaped, loose=True) is None)
        ):
            raise too_inexact(reference, distribution)
        if reason is not None:
            return f"{reason}:{distribution}"
    return None


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
        memory_share: float = 1.0,
    ):
        """Start a runner of the task's source, and compute the layout from the description that it sends.

        `memory_share` is the share of a GPU's memory that the runner may allocate. Raises TaskError if the
        source fails or its description is invalid, and TaskTooLarge if judging the task takes too much
        memory.
        """
        self.params = params
        self.scheduler = scheduler
        self.code = code
        self.runner: Runner | None = None
        # Buffers and the memory reserved for them, which `close` releases in reverse order.
        self.resources = contextlib.ExitStack()
        self._outputs: dict[int, list[ReferenceOutput]] = {}
        header: RoleHeader = {"role": "describe", "code": code, "precision": params.precision}
        with self._closing_on_error(), task_errors():
            self.runner = processes.start(header, seconds=params.sandbox.run_seconds)
            with scheduler.background_work(self.runner):
                reply = self.runner.receive()
            description = Description.model_validate(json.loads(reply))
            budget = MemoryBudget.of(params, scheduler, memory_share)
            self.layout = plan_layout(description, params, sizing, budget)
        # Estimated bytes of device memory that judging the task takes at once.
        self.bytes = memory_need(self.layout, budget.runner_bytes).device

    @property
    def construction_seed(self) -> int | None:
        """Secret seed under which runners construct the model, or None if sandbox.weights is state_dict."""
        return self.parameter_seed if self.params.sandbox.weights == "seed" else None

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.close)
            yield
            cleanup.pop_all()

    def fill(self, extra_bytes: int = 0) -> None:
        """Make parameters, inputs and reference outputs from secret seeds.

        Device memory of `bytes` plus `extra_bytes` is reserved first. Correctness sets get reference outputs,
        both at the task's precision and in float64. The sets that timed calls are mixed from get no outputs.
        Raises TaskError if the task's source fails.
        """
        layout = self.layout
        correctness_sets = len(layout.distributions)
        with self._closing_on_error(), task_errors():
            self.resources.enter_context(self.scheduler.reserve_memory(self.bytes + extra_bytes))
            with self.scheduler.preparing():
                if layout.placement.shares_buffers:
                    self.scheduler.release_cache()
                self.parameters = self._allocate("parameters", layout.parameters.stride)
                self.input_buffer = self._allocate("inputs", layout.inputs.stride * layout.input_sets)
                self.output_buffer = self._allocate("outputs", layout.outputs.stride * correctness_sets)
                self.expected_buffer = self._allocate("expected", layout.expected.stride * correctness_sets)
            self.parameter_seed = secrets.randbits(62) & ~1
            self.seeds = [secrets.randbits(62) & ~1 for _ in range(layout.input_sets)]
            # With weights by seed, the parameters are those that the constructor makes.
            parameters = None if self.params.sandbox.weights == "seed" else self.parameter_seed
            orders = [
                {
                    "op": "fill",
                    "set": index,
                    "seed": seed,
                    "distribution": layout.distributions[index] if index < correctness_sets else "given",
                    "parameters": parameters,
                    "outputs": index < correctness_sets,
                    "exact": index < correctness_sets,
                }
                for index, seed in enumerate(self.seeds)
            ]
            self._switch_to_reference(
                {
                    "inputs": self.input_buffer,
                    "outputs": self.output_buffer,
                    "expected": self.expected_buffer,
                },
                layout.input_sets,
            )
            self._request([{"op": "parameters", "seed": parameters}, *orders])
            with self.scheduler.preparing():
                sets = [layout.inputs.tensors(self.input_buffer, index) for index in range(layout.input_sets)]
                self.inputs = InputBank(
                    sets,
                    layout.distributions,
                    self.params.device,
                    timed_distributions=input_distributions(self.params.sandbox),
                    may_double=not layout.placement.shares_buffers,
                )
                self.resources.callback(self.inputs.close)
                if layout.placement.shares_buffers:
                    self.scheduler.release_cache()

    def _allocate(self, region: RegionName, size: int) -> Buffer:
        buffer: Buffer = shared_memory.make_buffer(self.layout.memory_of(region), size)
        self.resources.callback(buffer.close)
        return buffer

    def _switch_to_reference(self, buffers: dict[RegionName, Buffer], sets: int) -> None:
        """Switch the runner to the role `reference`.

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
            "construction_seed": self.construction_seed,
        }
        with self.scheduler.background_work(runner):
            switch_role(runner, header, tuple(buffer.fd for buffer in buffers.values()))
            runner.receive()

    def _request(self, orders: list[dict[str, Any]]) -> None:
        """Have the runner, in the role `reference`, carry out `orders` one after another."""
        assert self.runner is not None
        with self.scheduler.background_work(self.runner):
            for order in orders:
                self.runner.request(order)

    def probe(self, changes: list[dict[str, Any]]) -> Generator[list[torch.Tensor]]:
        """Yield the task's outputs for changed versions of the first input set, one list for each change.

        Each item of `changes` has the entries to replace in the order with which the runner makes the set
        (`sandbox.inside.reference.ReferenceModel.fill`), for example so that one input comes from another
        seed. The outputs are at the task's precision, and the next ones overwrite them. Raises TaskError if
        the task's source fails.
        """
        order = {
            "op": "fill",
            "set": 0,
            "seed": self.seeds[0],
            "distribution": "given",
            "parameters": self.parameter_seed,
            "outputs": True,
            "exact": False,
        }
        layout = self.layout
        with contextlib.ExitStack() as allocated:
            buffers: dict[RegionName, Buffer] = {}
            with self.scheduler.preparing():
                strides: dict[RegionName, int]
                strides = {"inputs": layout.inputs.stride, "outputs": layout.outputs.stride}
                for name, stride in strides.items():
                    buffers[name] = shared_memory.make_buffer(layout.memory_of(name), stride)
                    allocated.callback(buffers[name].close)
            with task_errors():
                self._switch_to_reference(buffers, 1)
            for change in changes:
                with task_errors():
                    self._request([order | change])
                yield layout.outputs.tensors(buffers["outputs"], 0)

    def first_wrong(self, mixes: list[InputMix], memory: torch.Tensor, *, loose: bool = False) -> str | None:
        """Return the reason why an output in `memory` is wrong, or None if all outputs are right.

        `memory` holds the outputs for the correctness sets that `mixes` names, one set after another. The
        reason ends with the name of the input distribution. `loose`, which is meant for baselines, allows
        errors up to the absolute tolerance. Raises TaskError if the task's own output is too inexact to tell.
        """
        for i, mix in enumerate(mixes):
            references = self._references(mix.first)
            outputs = self.layout.outputs.views(memory, i)
            distribution = self.layout.distributions[mix.first]
            reason = first_mismatch(references, outputs, distribution, loose=loose)
            if reason is not None:
                return reason
        return None

    def _references(self, index: int) -> list[ReferenceOutput]:
        """Return the reference outputs of one correctness set, prepared for comparison.

        They are kept for later uses if `TaskLayout.keeps_references` is set.
        """
        if index in self._outputs:
            return self._outputs[index]
        single, expected = self.correctness_outputs(index)
        sandbox, precision = self.params.sandbox, self.params.precision
        prepared = [
            ReferenceOutput(
                one,
                exact,
                sandbox,
                precision,
                device=self.params.device,
                keep_parts=self.layout.keeps_references,
            )
            for one, exact in zip(single, expected, strict=True)
        ]
        if self.layout.keeps_references:
            self._outputs[index] = prepared
        return prepared

    def correctness_outputs(self, index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the reference outputs of one correctness set, at the task's precision and in float64."""
        return (
            self.layout.outputs.tensors(self.output_buffer, index),
            self.layout.expected.tensors(self.expected_buffer, index),
        )

    def end_runner(self, *, wait: bool = False) -> None:
        """End the runner of the task's source, after which no more data can be made.

        If `wait` is set, the runner's GPU memory is free when the method returns.
        """
        if self.runner is not None:
            self.runner.close(wait=wait)
            self.runner = None

    def close(self) -> None:
        with self.scheduler.preparing():  # freeing device memory blocks the whole device
            self.end_runner()
            self._outputs.clear()
            self.resources.close()
            self.scheduler.trim_cache()
