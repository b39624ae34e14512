"""The JSON messages from the judge to its runners, as typed records.

Inside the sandbox they are plain dictionaries.

A role begins with a RoleHeader. `describe` answers once; the others say `R` when ready and then take orders
`{"op": …}`: `parameters` and `fill` (`reference`), or `warm`, `time` and `check` (measured roles), each
answered by `D`, until `leave`. Imports nothing of the project.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Required, TypedDict

Role = Literal["describe", "reference", "candidate", "eager", "compile", "noop"]
"""What a runner does.

Describe the task, make inputs and expected outputs, or be measured as a candidate or a baseline.
"""
ZygoteKind = Literal["plain", "compile", "probe"]
"""What a zygote has loaded before it forks: torch, torch and Inductor, or neither (preflight.py)."""
RegionName = Literal["parameters", "inputs", "outputs", "expected"]


class Region(TypedDict):
    """Tensors in one shared buffer; the slots repeat every `stride` bytes, once for each input set."""

    slots: list[
        tuple[int, list[int], str]
    ]  # byte offset, shape and dtype name of each tensor of one input set
    stride: int
    bytes: NotRequired[int]  # size of the buffer; absent where only shapes are told and no buffer is sent


class MemoryLayout(TypedDict, total=False):
    """Where a runner finds its tensors, and what else a call needs."""

    sets: Required[int]  # number of input sets that the buffers hold
    scalars: Required[list[list[Any] | None]]  # for each argument of a call `[value]`, or None for a tensor
    names: Required[list[str]]  # state-dict names of the tensors in `parameters`
    parameters: Required[Region]
    inputs: Region
    outputs: Region
    expected: Region


class RoleHeader(TypedDict, total=False):
    """The first message of a role. Buffers come with it as descriptors, in the order of RegionName."""

    role: Required[Role]
    device: str
    precision: str  # `strict-fp32` or `tf32`
    code: str  # the task's source; every role but `candidate`
    files: dict[str, str]  # a candidate's Python sources by workspace path
    suffix: str  # of a candidate's library, whose descriptor comes before the buffers
    init_inputs: list[Any]  # arguments of the model's constructor
    layout: MemoryLayout
    compile_mode: str  # `mode` of torch.compile
    cache: str  # folder name for Inductor's results, one for all `compile` runners of a task
    zygote: ZygoteKind  # which zygote forks the runner, where the role does not decide
    share: float  # largest part of a GPU's memory that a `describe` runner may allocate


class Confinement(TypedDict):
    """Limits of one runner, which the zygote applies before any untrusted code is loaded."""

    limits: dict[str, int]  # values by the name of their resource, such as RLIMIT_AS
    temporary_bytes: int  # capacity of the runner's private /workspace
    seccomp: str  # system-call filter as hexadecimal BPF; empty for none
    folder: str  # working folder where there is no isolation
    device: str
