"""Processes and shared memory for the roles of a task: one of each for every role, or one for all of them."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from components.core.config import Device
from components.core.files import digest_bytes
from components.judge.task_layout import TaskLayout
from components.sandbox import shared_memory
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import Runner
from components.sandbox.runner_protocol import RegionName, RoleHeader, ZygoteKind
from components.sandbox.shared_memory import Buffer


@dataclass(frozen=True)
class RunnerMemory:
    """Shared memory of one timed runner, by name: parameters, inputs, and on cuda outputs."""

    buffers: dict[RegionName, Buffer]

    @staticmethod
    def allocate(device: Device, layout: TaskLayout) -> RunnerMemory:
        """Allocate room for one round and one scratch set of inputs; closes the first buffers if the device
        is full.
        """
        sizes: dict[RegionName, int] = {
            "parameters": layout.parameters.stride,
            "inputs": layout.inputs.stride * (layout.capacity + 1),
        }
        if device == "cuda":
            sizes["outputs"] = layout.outputs.stride * layout.capacity
        buffers: dict[RegionName, Buffer] = {}
        with contextlib.ExitStack() as allocated:
            for name, size in sizes.items():
                buffers[name] = shared_memory.make_buffer(device, size)
                allocated.callback(buffers[name].close)
            allocated.pop_all()
        return RunnerMemory(buffers)

    def close(self) -> None:
        for buffer in self.buffers.values():
            buffer.close()


class ProcessPerRole:
    """Gives every role a process of its own, and every timed runner memory of its own.

    With shared memory a candidate could write what other runners read.
    """

    def __init__(self, device: Device, factory: RunnerFactory):
        self.device = device
        self.factory = factory

    def start(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Start a process for the role that `header` names, with `seconds` of wall time for all that it does."""
        return self.factory.spawn(header, descriptors, seconds=seconds)

    def memory(self, layout: TaskLayout) -> RunnerMemory:
        return RunnerMemory.allocate(self.device, layout)

    def end(self, runner: Runner | None, memory: RunnerMemory) -> None:
        """End what `start` and `memory` gave to one timed runner."""
        if runner is not None:
            runner.close()
        memory.close()


class OneProcess:
    """Plays all roles of a task one after another in one process, with one set of memory.

    For admissions only, where there is no candidate: making a CUDA context for each role would take most of
    their time.
    """

    def __init__(self, device: Device, factory: RunnerFactory, zygote: ZygoteKind, memory_share: float):
        self.device = device
        self.factory = factory
        self.zygote = zygote
        self.memory_share = memory_share
        """Share of the GPU's memory that the process may allocate."""
        self.runner: Runner | None = None
        self.shared: RunnerMemory | None = None

    def start(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Start the process, or have it leave its role for the one that `header` names; `seconds` of wall
        time.
        """
        if self.runner is None:
            header = header | {"zygote": self.zygote, "share": self.memory_share}
            if self.zygote == "compile":
                header["cache"] = digest_bytes(header["code"].encode())
            self.runner = self.factory.spawn(header, descriptors, seconds=seconds)
        else:
            self.runner.deadline = time.monotonic() + seconds
            switch_role(self.runner, header | {"device": self.device}, descriptors)
        return self.runner

    def memory(self, layout: TaskLayout) -> RunnerMemory:
        self.shared = self.shared or RunnerMemory.allocate(self.device, layout)
        return self.shared

    def end(self, runner: Runner | None, memory: RunnerMemory) -> None:
        """Keep both for the next role; `close` ends them."""

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()
            self.shared = None


def switch_role(runner: Runner, header: RoleHeader, descriptors: tuple[int, ...]) -> None:
    """Have a runner leave its role and play the one that `header` names."""
    runner.send({"op": "leave"})
    runner.send(header, descriptors)
