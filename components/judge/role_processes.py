"""Processes and shared memory for the roles of a task, either separate for each role or shared by all roles.

A role determines what a runner does, for example make the reference data or run eager.
"""

import contextlib
import time
from dataclasses import dataclass
from typing import Self

import torch

from components.core.records import Device
from components.judge.task_layout import TaskLayout
from components.sandbox.inside import shared_memory
from components.sandbox.inside.runner_protocol import RegionName, Role, RoleHeader, ZygoteKind
from components.sandbox.inside.shared_memory import Buffer
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import Runner


@dataclass
class RunnerMemory:
    """Memory of one timed runner, or of several that take turns.

    `buffers` has the shared buffers by name: parameters, inputs, and on cuda outputs. If the runner gets its
    inputs call by call (`TaskLayout.by_call`), there are also buffers for the inputs of the next call and for
    the outputs of the last call. `results` is the judge's copy of the outputs of a round, as bytes.
    """

    buffers: dict[RegionName, Buffer]
    results: torch.Tensor

    @classmethod
    def allocate(cls, device: Device, layout: TaskLayout) -> Self:
        """Allocate buffers for the task's parameters, the inputs of a round, and on cuda the round's outputs.

        If an allocation fails, its error is raised after the buffers that were already made are closed.
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


@dataclass
class ProcessPerRole:
    """Factory of a separate process for every role, and of the memory of timed runners.

    A candidate's memory is separate, because it could otherwise change the memory that other runners read.
    The baselines of a task use the memory `shared` in common if device memory is scarce
    (`Placement.shares_buffers`).
    """

    device: Device
    factory: RunnerFactory
    shared: RunnerMemory | None = None

    def start(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Start a process for the role that `header` names.

        `descriptors` are the file descriptors that it gets. `seconds` limits the wall time of everything that
        the process does.
        """
        return self.factory.spawn(header, descriptors, seconds=seconds)

    def memory(self, layout: TaskLayout, role: Role) -> RunnerMemory:
        """Return memory for a timed runner of this role: its own, or the memory that the baselines share."""
        if role == "candidate" or not layout.placement.shares_buffers:
            return RunnerMemory.allocate(self.device, layout)
        self.shared = self.shared or RunnerMemory.allocate(self.device, layout)
        return self.shared

    def end(self, runner: Runner | None, memory: RunnerMemory) -> None:
        """End a timed runner's process, and close its memory if no other runner uses it.

        If the baselines share memory, the GPU memory of the process is free when the method returns.
        """
        if runner is not None:
            runner.close(wait=self.shared is not None)
        if memory is not self.shared:
            memory.close()

    def close(self) -> None:
        """Close the memory that baselines share, after their runners have ended."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None


@dataclass
class OneProcess:
    """Single process, with a single set of buffers, that takes all roles of a task one after another.

    It is used only for admissions, in which no candidate runs. One process saves most of the time of an
    admission, because a CUDA context does not have to be created for each role.
    """

    device: Device
    factory: RunnerFactory
    zygote: ZygoteKind
    # Share of the GPU's memory that the process may allocate.
    memory_share: float
    runner: Runner | None = None
    shared: RunnerMemory | None = None

    def start(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Start the process, or switch it to the role that `header` names.

        `seconds` limits the wall time of the role.
        """
        if self.runner is None:
            header = header | {"zygote": self.zygote, "share": self.memory_share}
            self.runner = self.factory.spawn(header, descriptors, seconds=seconds)
        else:
            self.runner.deadline = time.monotonic() + seconds
            switch_role(self.runner, header | {"device": self.device}, descriptors)
        return self.runner

    def memory(self, layout: TaskLayout, role: Role) -> RunnerMemory:
        """Return the memory that all roles of the task share, which is allocated at the first call."""
        self.shared = self.shared or RunnerMemory.allocate(self.device, layout)
        return self.shared

    def end(self, runner: Runner | None, memory: RunnerMemory) -> None:
        """Do nothing at the end of a role, because the next role uses the same process and memory."""

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()
            self.shared = None


def switch_role(runner: Runner, header: RoleHeader, descriptors: tuple[int, ...]) -> None:
    """Have a runner leave its role and take the role that `header` names, with new file descriptors."""
    runner.send({"op": "leave"})
    runner.send(header, descriptors)
