"""Sandboxed processes of one task: a process for each role, or a single one that takes all roles in turn.

A role determines what a runner (a sandboxed process, sandbox/runner_process.py) does, for example make the
reference data or run eager, the task's own module.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import ValidationError

from components.core.errors import TaskError
from components.core.records import Device
from components.judge.task_layout import RunnerMemory, TaskLayout
from components.sandbox.inside.runner_protocol import Role, RoleHeader, ZygoteKind
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import Runner, RunnerError
from components.sandbox.unsuspended_time import unsuspended_seconds

# What torch says where there is no GPU, and the addition to it.
NEEDS_GPU = re.compile("not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver")
NO_GPU = (
    "; the task puts tensors on a GPU, which this judge's device cpu does not have: leave out .cuda() and "
    "device='cuda', because the judge moves the tensors itself, or judge with --device cuda"
)

# What is said of a process that left no text, by the kind of its error.
ENDED = {"timed_out": "its source needs longer than sandbox.run_seconds; make it smaller or raise the limit"}


@contextlib.contextmanager
def task_errors() -> Iterator[None]:
    """Convert errors inside the context that are caused by the task's own source into TaskError.

    These are RunnerError (a sandboxed process fails), and the errors of an invalid description of the task:
    pydantic's ValidationError, ValueError and AttributeError. The attribute `out_of_memory` of the TaskError
    is set if the process ran out of memory.
    """
    try:
        yield
    except RunnerError as error:
        lines = error.text.strip().splitlines()
        last_line = lines[-1] if lines else ENDED.get(error.kind, "without a message")
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
    """Base class of the factories of a task's sandboxed processes, which `factory` starts on `device`.

    `shared` is memory that several processes whose calls are timed use in turns, or None as long as there is
    none.
    """

    device: Device
    factory: RunnerFactory
    shared: RunnerMemory | None = field(default=None, init=False)

    def close(self) -> None:
        """Close the shared memory, if there is any; the processes that use it must have ended before."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None


@dataclass
class ProcessPerRole(TaskProcesses):
    """Factory of a separate sandboxed process for every role of a task, and of the memory of timed processes.

    A role is what a process does, for example `reference`, `eager` or `candidate`. A candidate's memory is
    separate, because it could otherwise change the memory that other processes read. The baselines of a task
    (eager, torch.compile and the no-op) use the memory `shared` in common if device memory is scarce
    (`Placement.shares_buffers`).
    """

    def start(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Start a sandboxed process for the role `header["role"]`, such as `eager`, and return it.

        `descriptors` are the file descriptors that it gets. `seconds` limits the wall time of everything that
        the process does.
        """
        return self.factory.spawn(header, descriptors, seconds=seconds)

    def memory(self, layout: TaskLayout, role: Role) -> RunnerMemory:
        """Return memory for a timed runner of this role: its own, or the memory that the baselines share.

        A timed runner is a sandboxed process whose calls are timed, its role is what it executes, such as
        `eager`, and baselines are all roles but `candidate`. They share memory if
        `layout.placement.shares_buffers` is set.
        """
        if role == "candidate" or not layout.placement.shares_buffers:
            return RunnerMemory.allocate(self.device, layout)
        self.shared = self.shared or RunnerMemory.allocate(self.device, layout)
        return self.shared

    def end(self, runner: Runner | None, memory: RunnerMemory) -> None:
        """End a process whose calls were timed, and close its memory if no other process uses the memory.

        `runner` is None if the process was not started. If the baselines share memory, the GPU memory of the
        process is free when the method returns, and the shared memory stays open.
        """
        if runner is not None:
            runner.close(wait=self.shared is not None)
        if memory is not self.shared:
            memory.close()


@dataclass
class OneProcess(TaskProcesses):
    """Single process, with a single set of buffers, that takes all roles of a task one after another.

    A role is what the process does, for example make the reference data or run eager, the task's own module.
    The process may allocate the share `memory_share` of the GPU's memory. It is forked from a zygote (a
    process with torch loaded) of the kind `zygote`. It is used only for admissions, which check and time a
    task and in which no candidate runs. One process saves most of the time of an admission, because a CUDA
    context does not have to be created for each role.
    """

    zygote: ZygoteKind
    # Share of the GPU's memory that the process may allocate.
    memory_share: float
    runner: Runner | None = None

    def start(self, header: RoleHeader, descriptors: tuple[int, ...] = (), *, seconds: float) -> Runner:
        """Return the process, after starting it in the role `header["role"]` or switching it to this role.

        A role is what the process does, such as `eager`. `descriptors` are the file descriptors that it gets
        for the role, and `seconds` limits the wall time of the role. Raises RunnerError if the process has
        ended.
        """
        if self.runner is None:
            header = header | {"zygote": self.zygote, "share": self.memory_share}
            self.runner = self.factory.spawn(header, descriptors, seconds=seconds)
        else:
            self.runner.deadline = unsuspended_seconds() + seconds
            switch_role(self.runner, header | {"device": self.device}, descriptors)
        return self.runner

    def memory(self, layout: TaskLayout, role: Role) -> RunnerMemory:
        """Return the memory that all roles of the task share, which is allocated at the first call.

        A role is what the task's single process does, such as `eager`. The argument `role` has no effect.
        """
        self.shared = self.shared or RunnerMemory.allocate(self.device, layout)
        return self.shared

    def end(self, runner: Runner | None, memory: RunnerMemory) -> None:
        """Do nothing at the end of a role, because the next role uses the same process and memory.

        A role is what the task's single process does, such as `eager`.
        """


def switch_role(runner: Runner, header: RoleHeader, descriptors: tuple[int, ...]) -> None:
    """Tell a sandboxed process to end its role (what it executes) and to begin the role `header["role"]`.

    `descriptors` are the file descriptors that the new role needs. The function does not wait; the next
    message of the process says whether it has begun. Raises RunnerError if the process has ended.
    """
    runner.send({"op": "leave"})
    runner.send(header, descriptors)
