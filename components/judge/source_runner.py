"""Runner of a task's own source that works between timed rounds: it draws inputs and computes in float64.

A task is a PyTorch module that is to be made faster, a runner is a sandboxed process
(sandbox/runner_process.py), and a round is a series of timed calls.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from components.core.errors import InfrastructureError, TaskError
from components.core.params import JudgeParams
from components.judge.device_scheduler import DeviceScheduler
from components.judge.role_processes import OneProcess, ProcessPerRole
from components.judge.task_layout import TaskLayout
from components.sandbox.inside import shared_memory
from components.sandbox.inside.runner_protocol import RegionName, RoleHeader
from components.sandbox.inside.shared_memory import Buffer
from components.sandbox.runner_process import Runner, RunnerError

# End of a sentence about work of the task's own source that held the device for too long.
TOO_LONG = "longer in the timed rounds of one candidate than sandbox.run_seconds; make the task smaller."


@dataclass(frozen=True)
class TaskData:
    """Source, memory layout and buffers of one task, which is a PyTorch module that is to be made faster.

    `params` are the judge's settings, `scheduler` gives access to the device, `processes` starts the task's
    sandboxed processes, `code` is the source, and `layout` has the places of the tensors in the buffers.
    `construction_seed` is the random seed under which these processes construct the module, or None if the
    parameters that its constructor makes are overwritten. `parameters` is the buffer of the module's
    parameters, and `inputs` that of all input sets, each of which has the inputs of one call.
    """

    params: JudgeParams
    scheduler: DeviceScheduler
    processes: ProcessPerRole | OneProcess
    code: str
    layout: TaskLayout
    construction_seed: int | None
    parameters: Buffer
    inputs: Buffer

    def header(self, sets: int, buffers: dict[RegionName, Buffer]) -> RoleHeader:
        """Return the message that gives a runner the role `reference`, in which it makes inputs and outputs.

        A runner is a sandboxed process. `buffers` are its shared buffers by name, such as `inputs`, with
        space for `sets` input sets (the inputs of one call each).
        """
        return {
            "role": "reference",
            "code": self.code,
            "precision": self.params.precision,
            "device": self.params.device,
            "init_inputs": self.layout.description.init_inputs,
            "layout": self.layout.header(sets, buffers),
            "construction_seed": self.construction_seed,
        }


class SourceRunner:
    """Sandboxed process that runs a task's own source, to draw inputs of timed calls or compute in float64.

    The process is started at the first use, and suspended (SIGSTOP) whenever it does not work. Its memory has
    the inputs of one call. If `computes` is set, it can compute float64 outputs, and its memory also has a
    copy of the parameters and space for these outputs. No other sandboxed process can access this memory. If
    the task's baselines share buffers (`Placement.shares_buffers`) and `computes` is not set, the process has
    no memory of its own, and writes to the last input set in `data`, which no timed call needs if inputs are
    drawn. The methods may be called only while no process of a candidate computes.
    """

    def __init__(self, data: TaskData, *, computes: bool):
        self.data = data
        self.computes = computes
        self.runner: Runner | None = None
        # Buffers of this runner alone.
        self.buffers: dict[RegionName, Buffer] = {}

    def inputs(self) -> list[torch.Tensor]:
        """Return writable flat views, one for each input tensor, of the memory for the inputs of one call.

        They have the inputs of the last `draw`, and a caller may write other inputs into them before
        `float64_outputs`. The memory is the runner's own, or the last input set of `data` if it has none. The
        runner, a sandboxed process, is started first if it does not run. Raises TaskError if its start takes
        too long, and InfrastructureError if it fails.
        """
        with self._working():
            buffer = self.buffers.get("inputs", self.data.inputs)
            return self.data.layout.inputs.views(buffer.raw(), self._set)

    def draw(self, seed: int, distribution: str, changed: list[int]) -> list[torch.Tensor]:
        """Return flat views of inputs that the task's `get_inputs` draws under the random seed `seed`.

        The inputs at the positions `changed`, counted among those that are tensors, are then changed as
        `distribution` says, such as `scaled`, or `given` for no change
        (sandbox/inside/input_distributions.py). The next use of this object overwrites the result. Raises
        TaskError if `get_inputs` fails or takes too long, and InfrastructureError if the sandboxed process
        fails otherwise.
        """
        order = {
            "op": "fill",
            "set": self._set,
            "seed": seed,
            "distribution": distribution,
            "changed": changed,
            "parameters": None,
            "outputs": False,
            "exact": False,
            "optional": True,
        }
        if failure := self._request(order):
            raise TaskError(f"get_inputs() fails under another seed: {failure.decode(errors='replace')}")
        return self.inputs()

    def float64_outputs(self) -> list[torch.Tensor]:
        """Return the float64 outputs of the task's module for the inputs that `inputs` returns.

        There is one tensor for each output, in its shape. The next call of this method overwrites the result.
        The method may be called only if the object was made with `computes`. Raises TaskError if the task's
        source takes too long, and InfrastructureError if the sandboxed process fails in another way.
        """
        self._request({"op": "exact"})
        return self.data.layout.expected.tensors(self.buffers["expected"], 0)

    @property
    def _uses_last_set(self) -> bool:
        return self.data.layout.placement.shares_buffers and not self.computes

    @property
    def _set(self) -> int:
        return self.data.layout.input_sets - 1 if self._uses_last_set else 0

    def _request(self, order: dict[str, Any]) -> bytes:
        """Have the runner (the sandboxed process) carry out an order, and return its answer.

        An order is a message such as `{"op": "exact"}`, which has the runner compute float64 outputs. The
        answer is empty, or the text of an error of the task's source. Raises TaskError if the runner takes
        too long, and InfrastructureError if it fails otherwise.
        """
        with self._working() as runner:
            if self.data.params.device == "cuda":
                torch.cuda.synchronize()
            scheduler, seconds = self.data.scheduler, self.data.params.sandbox.run_seconds
            with scheduler.charged(runner, seconds), scheduler.background_work(runner):
                answer = runner.request(order)
            runner.stop()
            return answer

    @contextlib.contextmanager
    def _working(self) -> Iterator[Runner]:
        """Yield the runner, a sandboxed process, with exclusive access to the device until the context ends.

        The runner is started first if it does not run. If it fails inside the context, it is ended, and the
        next use starts another one. Raises TaskError if it exceeds its time, and InfrastructureError if it
        fails otherwise.
        """
        try:
            with self.data.scheduler.measuring():
                yield self._started()
        except (RunnerError, InfrastructureError, torch.OutOfMemoryError) as error:
            self.close()
            if isinstance(error, RunnerError) and error.kind == "timed_out":
                raise TaskError("get_inputs() or the float64 outputs took " + TOO_LONG) from error
            raise InfrastructureError(f"runner of the task's source: {error}") from error

    def _started(self) -> Runner:
        if self.runner is not None:
            return self.runner
        data, layout = self.data, self.data.layout
        # In the order in which the runner expects the descriptors.
        names: tuple[RegionName, ...] = () if self._uses_last_set else ("inputs",)
        for name in ("parameters", *names, "expected") if self.computes else names:
            device = layout.device if name == "inputs" else layout.memory_of(name)
            self.buffers[name] = shared_memory.make_buffer(device, getattr(layout, name).stride)
        if self.computes:
            self.buffers["parameters"].raw().copy_(data.parameters.raw())
        buffers: dict[RegionName, Buffer] = {"inputs": data.inputs} if self._uses_last_set else self.buffers
        header = data.header(self._set + 1, buffers)
        descriptors = tuple(buffer.fd for buffer in buffers.values())
        seconds = data.params.sandbox.run_seconds
        self.runner = data.processes.start(header, descriptors, seconds=seconds)
        with data.scheduler.charged(self.runner, seconds):
            self.runner.receive()
        self.runner.stop()
        return self.runner

    def close(self) -> None:
        """End the runner (the sandboxed process) if it runs, and free its memory."""
        with self.data.scheduler.preparing():  # freeing device memory blocks the whole device
            if self.runner is not None:
                self.runner.close(wait=self.data.layout.placement.shares_buffers)
                self.runner = None
            for buffer in self.buffers.values():
                buffer.close()
            self.buffers.clear()
