"""Secret inputs, parameters and reference outputs of one task, made by a runner of the task's own source.

A runner is a sandboxed process (sandbox/runner_process.py), and a candidate is an implementation of the
task's module that is judged. All candidates of the task are judged with the same inputs, parameters and
reference outputs. Each candidate runs in a new process, in which no data of an earlier judgement are left
(`role_processes.ProcessPerRole`).
"""

import contextlib
import secrets
from collections.abc import Callable, Generator
from typing import Any

import torch

from components.core.errors import TaskTooLarge
from components.core.params import JudgeParams
from components.judge.correctness import Mismatch, ReferenceOutput, first_mismatch
from components.judge.device_scheduler import DeviceScheduler
from components.judge.input_mixing import InputBank, InputMix
from components.judge.input_structure import is_finite
from components.judge.memory_plan import MemoryBudget, memory_need, plan_layout
from components.judge.role_processes import OneProcess, ProcessPerRole, switch_role, task_errors
from components.judge.source_runner import SourceRunner, TaskData
from components.judge.task_description import Description
from components.judge.task_layout import Sizing, input_distributions
from components.sandbox.inside import shared_memory
from components.sandbox.inside.runner_protocol import RegionName, RoleHeader
from components.sandbox.inside.shared_memory import Buffer
from components.sandbox.runner_process import Runner
from components.sandbox.unsuspended_time import unsuspended_seconds


class TaskReference:
    """Secret inputs, parameters and reference outputs of one task.

    `processes` starts the sandboxed processes of the task, each for a role such as `eager` or `candidate`,
    and `layout` has the places of the tensors in the buffers of this object. An input set has the inputs of
    one call. The first input sets are the correctness sets, which have reference outputs; timed inputs are
    mixed from the others.
    """

    def __init__(
        self,
        params: JudgeParams,
        scheduler: DeviceScheduler,
        code: str,
        processes: ProcessPerRole | OneProcess,
        sizing: Sizing,
        *,
        memory_share: float = 1.0,
        describing_bytes: int = 0,
        extra_bytes: int = 0,
        largest_bytes: int | None = None,
        makes_data: bool = True,
        before_data: "Callable[[TaskReference], None] | None" = None,
    ):
        """Start a runner of the task's source, and make the data in the layout that the task requires.

        A runner is a sandboxed process. It first sends a description of the task, from which the layout
        follows. `code` is the task's source, `params` are the judge's settings, and `processes` starts the
        task's runners. `sizing` determines how many calls and input sets there are. If `makes_data` is false,
        only the layout is determined; otherwise `before_data` is called before the memory for the data is
        reserved.

        `memory_share` is the share of a GPU's memory that the runner may allocate. Device memory of
        `describing_bytes` is reserved while the runner describes the task, and of `extra_bytes` beyond the
        estimated need afterwards. Raises TaskError if the source fails or its description is invalid, and
        TaskTooLarge if judging the task takes too much memory, or more than `largest_bytes` of the device.
        """
        self.params = params
        self.scheduler = scheduler
        self.code = code
        self.processes = processes
        self.runner: Runner | None = None
        # Buffers and the memory reserved for them, which `close` releases in reverse order.
        self.resources = contextlib.ExitStack()
        self._outputs: dict[int, list[ReferenceOutput]] = {}
        with contextlib.ExitStack() as cleanup, task_errors():
            cleanup.callback(self.close)
            with scheduler.reserve_memory(describing_bytes):
                description = self._describe()
                budget = MemoryBudget.of(params, scheduler, memory_share)
                self.layout = plan_layout(description, params, sizing, budget)
            # Estimated bytes of device memory that judging the task takes at once.
            self.bytes = memory_need(self.layout, budget.runner_bytes).device
            if largest_bytes is not None and self.bytes > largest_bytes:
                raise TaskTooLarge(f"takes {self.bytes / 2**30:.0f} GiB of the device to judge")
            if makes_data:
                if before_data is not None:
                    before_data(self)
                self._fill(extra_bytes)
            cleanup.pop_all()

    def _describe(self) -> Description:
        """Start a sandboxed process of the task's source, and return the description of the task from it.

        The description has shapes, dtypes and the duration of a call. Raises RunnerError if the process
        fails, and pydantic's ValidationError if the description is invalid.
        """
        params = self.params
        header: RoleHeader = {"role": "describe", "code": self.code, "precision": params.precision}
        self.runner = self.processes.start(header, seconds=params.sandbox.run_seconds)
        with self.scheduler.background_work(self.runner):
            reply = self.runner.receive()
        return Description.model_validate_json(reply)

    @property
    def construction_seed(self) -> int | None:
        """Secret seed under which each process of the task constructs the model.

        It is None if sandbox.weights is state_dict, because the parameters that the constructor makes are
        then replaced by the judge's.
        """
        return self.parameter_seed if self.params.sandbox.weights == "seed" else None

    def _fill(self, extra_bytes: int) -> None:
        """Reserve device memory, and make the parameters, input sets and reference outputs in it.

        `self.bytes` plus `extra_bytes` bytes are reserved. The runner of the task's source, a sandboxed
        process, draws all data under secret random seeds; with sandbox.weights=seed the parameters are those
        of the constructor. An input set has the inputs of one call. The first input sets, the correctness
        sets, get reference outputs at the task's precision and in float64. Each of these sets is changed as
        `layout.distributions` says (such as `scaled`), or left as it is drawn (`given`) if the change would
        destroy a structure of the inputs (`input_structure.py`) or the task fails on the changed inputs. The
        other sets, from which the inputs of timed calls are mixed, are not changed and get no outputs.
        """
        layout, shares_buffers = self.layout, self.layout.placement.shares_buffers
        correctness_sets = len(layout.distributions)
        self.resources.enter_context(self.scheduler.reserve_memory(self.bytes + extra_bytes))
        self.resources.callback(self.processes.close)
        with self.scheduler.preparing():
            if shares_buffers:
                torch.cuda.empty_cache()
            self.parameters = self._allocate("parameters", layout.parameters.stride)
            self.input_buffer = self._allocate("inputs", layout.inputs.stride * layout.input_sets)
            self.output_buffer = self._allocate("outputs", layout.outputs.stride * correctness_sets)
            self.expected_buffer = self._allocate("expected", layout.expected.stride * correctness_sets)
        self.parameter_seed = secrets.randbits(62) & ~1
        self.data = TaskData(
            params=self.params,
            scheduler=self.scheduler,
            processes=self.processes,
            code=self.code,
            layout=layout,
            construction_seed=self.construction_seed,
            parameters=self.parameters,
            inputs=self.input_buffer,
        )
        # Runner that draws the inputs of timed calls.
        self.drawing = SourceRunner(self.data, computes=False)
        self.resources.callback(self.drawing.close)
        # Seed of each input set.
        self.seeds = [secrets.randbits(62) & ~1 for _ in range(layout.input_sets)]
        # With weights by seed, the parameters are those that the constructor makes.
        parameters = None if self.params.sandbox.weights == "seed" else self.parameter_seed
        self._switch_to_reference(
            {"inputs": self.input_buffer, "outputs": self.output_buffer, "expected": self.expected_buffer},
            layout.input_sets,
        )
        # Input distribution of each correctness set.
        self.distributions = ["given"] * correctness_sets
        self._request({"op": "parameters", "seed": parameters})
        given = [i for i, name in enumerate(layout.distributions) if name == "given"]
        for index in [*given, *range(correctness_sets, layout.input_sets)]:
            self._fill_set(index, "given", parameters)
        with self.scheduler.preparing():
            sets = [layout.inputs.tensors(self.input_buffer, index) for index in range(layout.input_sets)]
            self.inputs = InputBank(
                sets,
                self.distributions,
                self.params.device,
                timed_distributions=input_distributions(self.params.sandbox),
                may_double=not shares_buffers,
            )
            self.resources.callback(self.inputs.close)
        if any(dtype.startswith(("int", "uint")) for _, dtype in layout.description.outputs):
            self.inputs.changed["integers"] = []  # rounding makes equal values, whose order is arbitrary
        for index, name in enumerate(layout.distributions):
            if name == "given":
                continue
            if self.inputs.changed[name] and self._fill_set(index, name, parameters):
                self.distributions[index] = name
            else:
                self.inputs.changed[name] = []
                self._fill_set(index, "given", parameters)
        if shares_buffers:
            with self.scheduler.preparing():
                torch.cuda.empty_cache()

    def _fill_set(self, index: int, distribution: str, parameters: int | None) -> bool:
        """Have the task's process make input set `index`, and return whether the change `distribution` works.

        An input set has the inputs of one call. If the set is a correctness set, its reference outputs are
        made too. `parameters` is the seed of the task's parameters, or None if they keep their initial
        values. A change other than `given` (none) does not work if the task's source fails on it, for example
        because a probability is then above 1, or if an output is then not finite although the same output is
        finite on the inputs of set 0. Raises RunnerError if the source fails on inputs that are not changed.
        """
        is_correctness_set = index < len(self.distributions)
        answer = self._request(
            {
                "op": "fill",
                "set": index,
                "seed": self.seeds[index],
                "distribution": distribution,
                "changed": self.inputs.changed[distribution] if distribution != "given" else [],
                "parameters": parameters,
                "outputs": is_correctness_set,
                "exact": is_correctness_set,
                "optional": distribution != "given",
            }
        )
        if distribution == "given":
            return True
        with self.scheduler.preparing():
            outputs, usual = (self.correctness_outputs(i)[0] for i in (index, 0))
            return not answer and all(
                is_finite(one) or not is_finite(other) for one, other in zip(outputs, usual, strict=True)
            )

    def _allocate(self, region: RegionName, size: int) -> Buffer:
        buffer: Buffer = shared_memory.make_buffer(self.layout.memory_of(region), size)
        self.resources.callback(buffer.close)
        return buffer

    def _switch_to_reference(self, buffers: dict[RegionName, Buffer], sets: int) -> None:
        """Switch the runner to the role `reference`, in which it makes inputs and outputs.

        The runner is the sandboxed process of the task's source. `buffers` is the memory that it gets beside
        the parameters, with space for `sets` input sets (the inputs of one call each). Raises RunnerError if
        it fails.
        """
        assert self.runner is not None
        runner = self.runner
        buffers = {"parameters": self.parameters, **buffers}
        runner.deadline = unsuspended_seconds() + self.params.sandbox.run_seconds
        with self.scheduler.background_work(runner):
            switch_role(
                runner, self.data.header(sets, buffers), tuple(buffer.fd for buffer in buffers.values())
            )
            runner.receive()

    def _request(self, order: dict[str, Any]) -> bytes:
        """Have the runner, in the role `reference`, carry out an order, and return its answer.

        The runner is the sandboxed process of the task's source, which makes inputs and outputs in this role.
        An order is a message such as `{"op": "exact"}`. The answer is empty, or the text of an error of the
        task's source. Raises RunnerError if the runner fails.
        """
        assert self.runner is not None
        with self.scheduler.background_work(self.runner):
            return self.runner.request(order)

    def write_inputs(self, mix: InputMix, views: list[torch.Tensor]) -> None:
        """Write the inputs of the call that `mix` describes into `views`, one flat tensor for each input.

        A sandboxed process of the task's source may draw them, so no process of a candidate may compute
        meanwhile. Raises TaskError if the task's `get_inputs` fails or takes too long, and
        InfrastructureError if that process fails otherwise.
        """
        if mix.seed is None:
            for index, view in enumerate(views):
                self.inputs.write(mix, index, view)
            return
        drawn = self.drawing.draw(mix.seed, mix.distribution, self.inputs.changed[mix.distribution])
        for view, tensor in zip(views, drawn, strict=True):
            view.copy_(tensor)

    def probe(self, changes: list[dict[str, Any]]) -> Generator[list[torch.Tensor]]:
        """Yield the task's outputs for changed versions of the first input set, one list for each change.

        The task's process makes the set (the inputs of one call) by an order, the message `fill`
        (`sandbox.inside.reference.ReferenceModel.fill`). Each item of `changes` has the entries that are
        replaced in this order, for example `{"other_input": 0}` so that input 0 comes from another seed. Each
        list has the output tensors of one call at the task's precision. They are views of a buffer that the
        next change overwrites. Raises TaskError if the task's source fails.
        """
        order = {
            "op": "fill",
            "set": 0,
            "seed": self.seeds[0],
            "distribution": "given",
            "parameters": self.parameter_seed,
            "outputs": True,
            "exact": False,
            "optional": False,
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
                    self._request(order | change)
                yield layout.outputs.tensors(buffers["outputs"], 0)

    def first_wrong(
        self,
        mixes: list[InputMix],
        memory: torch.Tensor,
        *,
        loose: float = 0.0,
        repeats: bool = False,
    ) -> Mismatch | None:
        """Return why an output in `memory` is wrong, or None if all outputs are right.

        `memory` is a uint8 tensor with the outputs for the correctness sets (input sets with reference
        outputs) to which the entries `first` of `mixes` refer, one set after another. The reason is a code
        that ends with the name of the input distribution (the change that was made to the inputs), such as
        `max_error:given`, where `given` means none. `loose`, if it is not 0, allows errors up to this
        multiple of the absolute tolerance, and is meant for baselines such as torch.compile. `repeats` says
        that the task's own module has computed the outputs; with KernelBench's tolerances they must then
        equal the reference outputs. Raises TaskError if the task's own output is too inexact to tell.
        """
        for i, mix in enumerate(mixes):
            references = self._references(mix.first)
            outputs = self.layout.outputs.views(memory, i)
            distribution = self.distributions[mix.first]
            found = first_mismatch(references, outputs, distribution, loose=loose, repeats=repeats)
            if found is not None:
                return found
        return None

    def _references(self, index: int) -> list[ReferenceOutput]:
        """Return the reference outputs of correctness set `index`, prepared for comparison.

        A correctness set is an input set with reference outputs. The prepared outputs are kept for later uses
        if `TaskLayout.keeps_references` is set.
        """
        if index in self._outputs:
            return self._outputs[index]
        prepared = self.prepared(*self.correctness_outputs(index))
        if self.layout.keeps_references:
            self._outputs[index] = prepared
        return prepared

    def prepared(self, single: list[torch.Tensor], expected: list[torch.Tensor]) -> list[ReferenceOutput]:
        """Return a `ReferenceOutput`, with which other outputs are compared, for each output of one call.

        `single` and `expected` have the output tensors of the call at the task's precision and in float64, in
        the same order. The tensors of `single` may be flat.
        """
        return [
            ReferenceOutput(
                one.view(exact.shape),
                exact,
                self.params.sandbox,
                self.params.precision,
                device=self.params.device,
                keep_parts=self.layout.keeps_references,
            )
            for one, exact in zip(single, expected, strict=True)
        ]

    def correctness_outputs(self, index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the reference outputs of correctness set `index`, at the task's precision and in float64.

        A correctness set is an input set with reference outputs. Each of the two lists has one tensor for
        each output.
        """
        return (
            self.layout.outputs.tensors(self.output_buffer, index),
            self.layout.expected.tensors(self.expected_buffer, index),
        )

    def end_runner(self, *, wait: bool = False) -> None:
        """End the sandboxed process of the task's source, after which no more data can be made with it.

        If `wait` is set, the GPU memory of the process is free when the method returns.
        """
        if self.runner is not None:
            self.runner.close(wait=wait)
            self.runner = None

    def close(self) -> None:
        """End the process of the task's source, and free the data.

        The memory that the task's other processes share is freed too.
        """
        with self.scheduler.preparing():  # freeing device memory blocks the whole device
            self.end_runner()
            self._outputs.clear()
            self.resources.close()
            self.scheduler.trim_cache()
