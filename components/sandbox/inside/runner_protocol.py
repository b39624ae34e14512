"""The types of the JSON messages that the judge sends to its runners, which are sandboxed processes.

A role begins with a RoleHeader. A runner in the role `describe`, `record`, `construct` or `compile_only`
answers once, with the letter R and the result as JSON if there is one, and one in the role `compile_triton`
with R for the constructor and D for the call. In every other role it sends R when it is ready, then executes
orders, JSON objects such as {"op": "warm"}, until the order `leave`, and sends the letter D after each. In
the role `reference` the orders are `parameters` (draw the model's parameters), `fill` (make the inputs and,
if asked, the outputs of a call) and `exact` (compute outputs in float64). In the roles that are measured,
they are `warm` (make a call that is not timed), `time` (make the calls of a round, which the judge times),
`check` (make calls and check the form of their outputs) and `release` (return free memory to the device). The
role `compile` also has `save` (archive what torch.compile made). This file imports nothing of the project.
"""

from typing import Any, Literal, NotRequired, Required, TypedDict

# Roles of a runner. `describe` describes the task, `record` finds the extensions that a candidate's file
# requests, `construct` records what torch computes in a candidate's constructor (operator_modes.py),
# `compile_triton` compiles a candidate's kernels of Triton (triton_cache.py), `compile_only` compiles the
# task's module by torch.compile and archives the result (inductor.py), and `reference` makes inputs and
# expected outputs. The other roles are measured: a candidate, the baselines `eager` and `compile`, and
# the no-op.
Role = Literal[
    "describe",
    "record",
    "construct",
    "compile_triton",
    "compile_only",
    "reference",
    "candidate",
    "eager",
    "compile",
    "noop",
]
# Kinds of zygotes by what they load before a fork. `plain` loads torch, `compile` loads torch and Inductor,
# `triton` loads torch and Triton, and `probe` (preflight.py) loads none of them.
ZygoteKind = Literal["plain", "compile", "triton", "probe"]
# Names of the regions of the shared memory. `expected` has float64 outputs. `next_inputs` and `last_outputs`
# are in host memory, and have the inputs of the next call and the outputs of the last call.
RegionName = Literal["parameters", "inputs", "outputs", "expected", "next_inputs", "last_outputs"]


class Region(TypedDict):
    """The places of tensors in one shared buffer, repeated for each input set (the tensors of one call).

    `slots` has the byte offset, the shape and the dtype's name of each tensor of the first input set. The
    tensors of every further input set begin `stride` bytes later. `bytes` and `device` (`cpu` or `cuda`) are
    size and place of the buffer; they are missing if the region only states shapes.
    """

    slots: list[tuple[int, list[int], str]]  # byte offset, shape, dtype name of each tensor of an input set
    stride: int
    # Size and device (`cpu` or `cuda`) of the buffer; absent if the region only states shapes.
    bytes: NotRequired[int]
    device: NotRequired[str]


class MemoryLayout(TypedDict, total=False):
    """The places of a runner's tensors in shared memory, and the other values that a call needs.

    A runner is a sandboxed process. The regions `inputs` and `outputs` have the tensors of several calls, and
    `expected` has float64 outputs. `next_inputs` and `last_outputs` are in host memory, and have the inputs
    of the next call and the outputs of the last call. `sets` is the number of input sets (the tensors of one
    call each) in the buffers, and `calls` the largest number of calls that are timed together.
    """

    sets: Required[int]  # number of input sets that the buffers hold
    calls: Required[int]  # largest number of calls in a round
    scalars: Required[list[list[Any] | None]]  # for each argument of a call `[value]`, or None for a tensor
    names: Required[list[str]]  # state-dict names of the tensors in `parameters`, in their order
    parameters: Required[Region]
    inputs: Region
    outputs: Region
    expected: Region
    # Present if a runner on cuda gets the inputs call by call (sandbox.input_delivery).
    next_inputs: Region
    last_outputs: Region


class RoleHeader(TypedDict, total=False):
    """The message with which the judge gives a runner its role and all that the role needs.

    The descriptors of the role's buffers are sent with it, in the order of RegionName. A measured role gets
    one more before them: a candidate's library, the archive of `compile` (inductor.py), or an empty file. The
    roles `construct` and `compile_triton` get the library and a file for the results, and no buffers, and the
    role `compile_only` only such a file.
    """

    role: Required[Role]
    device: str
    precision: str  # `strict-fp32` or `tf32`
    code: str  # the task's source; a candidate that is measured does not get it
    files: dict[str, str]  # a candidate's Python sources by workspace path
    library_bytes: int  # size of the library in the first file
    # Size of the archive of triton_cache.py that follows the library. Recorded results of operator_modes.py
    # may follow the archive.
    triton_bytes: int
    suffix: str  # file suffix of a candidate's library
    init_inputs: list[Any]  # arguments of the model's constructor
    # Seed of torch before the constructor, or None unless candidates get their weights by it.
    construction_seed: int | None
    extensions: list[Any] | None  # built extensions of a candidate of one file (inline_extension.py)
    rules: str  # `kernel-only`, with which a candidate may not compute with torch, or `any`
    layout: MemoryLayout
    compile_mode: str  # `mode` of torch.compile
    zygote: ZygoteKind  # kind of the zygote that forks the runner, if the role does not determine it
    share: float  # maximum share of the GPU's memory that a `describe` runner may allocate


class Confinement(TypedDict):
    """Limits of one sandboxed process, which are applied before any untrusted code is loaded.

    `limits` has resource limits by name, such as RLIMIT_AS, and `temporary_bytes` is the capacity of the
    private /workspace. `seccomp` is the system-call filter as hexadecimal BPF, or empty for none. `folder` is
    the working folder of a process that is not isolated. `own_limits` is whether limits per user shall count
    nothing of other runners.
    """

    limits: dict[str, int]  # resource limits by name, such as RLIMIT_AS
    temporary_bytes: int  # capacity of the runner's private /workspace
    seccomp: str  # system-call filter as hexadecimal BPF; empty if no filter is to be applied
    folder: str  # working folder of a runner that is not isolated
    own_limits: bool  # whether limits per user count nothing of other runners
