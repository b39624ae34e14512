"""Sandboxed processes of one task: a process for each role, or a single one that takes all roles in turn.

A role determines what a runner (sandbox/runner_process.py) does, for example make the reference data or run
eager.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import ValidationError

from components.core.errors import TaskError
from components.core.records import Device
from components.judge.task_layout import RunnerMemory, TaskLayout
from components.sandbox.inside.runner_protocol import Role, RoleHeader, ZygoteKind
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import Runner, RunnerError

# What torch says where there is no GPU, and the addition to it.
NEEDS_GPU = re.compile("not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver")
NO_GPU = (
    "; the task puts tensors on a GPU, which this judge's device cpu does not have: leave out .cuda() and "
    "device='cuda', because the judge moves the tensors itself, or judge with --device cuda"
)


@contextlib.contextmanager
def task_errors() -> Iterator[None]:
    """Convert errors inside the context that are caused by the task's own source into TaskError.

    These are RunnerError (a sandboxed process fails), and the errors of an invalid description of the task:
    pydantic's ValidationError, ValueError and AttributeError.
    """
    try:
        yield
    except RunnerError as error:
        last_line = "".join(error.text.strip().splitlines()[-1:])
        text = f"{error.kind}: {last_line}"[:300] + (NO_GPU if NEEDS_GPU.search(last_line) else "")
        raise TaskError(text, out_of_memory=error.kind == "out_of_memory") from error
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise TaskError(f"description: {place}: {fault['msg']}"[:300]) from error
    except (ValueError, AttributeError) as error:
        raise TaskError(f"description: {error}"[:300]) from error


@dataclass
class TaskProcesses:
    """Base class of the factories of a task's processes, which `factory` starts.

    `shared` is memory that several timed runners use in turns, or None as long as there is none.
    """

    device: Device
    factory: RunnerFactory
    shared: RunnerMemory | None = field(default=None, init=False)

    def close(self) -> None:
        """Close the shared memory, after the runners that use it have ended."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None


@dataclass
class ProcessPerRole(TaskProcesses):
    """Factory of a separate process for every role of a task, and of the memory of timed runners.

    A role is what a process does, for example `reference`, `eager` or `candidate`. A candidate's memory is
    separate, because it could otherwise change the memory that other runners read. The baselines of a task
    use the memory `shared` in common if device memory is scarce (`Placement.shares_buffers`).
    """

    def start(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Start a process for the role `header["role"]`, and return it.

        `descriptors` are the file descriptors that it gets. `seconds` limits the wall time of everything that
        the process does.
        """
        return self.factory.spawn(header, descriptors, seconds=seconds)

    def memory(self, layout: TaskLayout, role: Role) -> RunnerMemory:
        """Return memory for a timed runner of this role: its own, or the memory that the baselines share.

        A timed runner is a sandboxed process whose calls are timed. A candidate always gets memory of its
        own.
        """
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


@dataclass
class OneProcess(TaskProcesses):
    """Single process, with a single set of buffers, that takes all roles of a task one after another.

    It is started from a zygote of the kind `zygote`. It is used only for admissions, which check and
    time a task and in which no candidate runs. One process saves most of the time of an admission, because a
    CUDA context does not have to be created for each role.
    """

    zygote: ZygoteKind
    # Share of the GPU's memory that the process may allocate.
    memory_share: float
    runner: Runner | None = None

    def start(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Return the process, after starting it in the role `header["role"]` or switching it to this role.

        `descriptors` are the file descriptors that it gets. `seconds` limits the wall time of the role.
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


def switch_role(runner: Runner, header: RoleHeader, descriptors: tuple[int, ...]) -> None:
    """Tell a runner to end its role (what it executes) and to begin `header["role"]`, with new descriptors.

    The function does not wait. Whether the runner has begun, its next message says. Raises RunnerError if the
    runner has ended.
    """
    runner.send({"op": "leave"})
    runner.send(header, descriptors)
