"""Define the core operators and the layout of composed tasks, and read the chain of operators in a source.

A chain is a sequence of core operators, each of which is applied to the result of the one before. The core
operators are the torch operators for which the rule-based kernel writer can write kernels. Each is one line
of `forward` that computes a new `x` from `x`. Its constants are chosen from small sets, and written with a
decimal point, so that the tokenizer of a small policy has one token for each.

A composed task has one operator in each line of `forward`. `components.synthesis.core_composer` writes this
layout, `canonicalize` rewrites other sources into it, and the kernel writer reads it. A source with another
layout has no chain.
"""

import re
from dataclasses import dataclass
from typing import Literal

from components.core.records import TaskDtype
from components.core.task import CASTS, dtype_of

TASK_LAYOUT = """import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{init}
    def forward(self, {arguments}):
{lines}
        return x


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
# Beginning of the class and of get_inputs in this layout, and the same in a task that names workloads.
BEGINNINGS = (
    ("\n\nclass Model", "\nWORKLOADS = {workloads}\n\n\nclass Model"),
    ("def get_inputs()", "def get_inputs(rows, cols)"),
)
# Permitted values of constants, as texts for the source.
BELOW_ONE = ("0.01", "0.05", "0.1", "0.2", "0.25", "0.3", "0.4", "0.5", "0.6", "0.7", "0.75", "0.8")
PALETTE = (*BELOW_ONE, "0.9", "1.1", "1.2", "1.25", "1.5", "1.75", "2.0", "2.5", "3.0", "3.5", "4.0", "5.0")
SLOPES = BELOW_ONE[:10]
LOWS = ("-2.0", "-1.5", "-1.0", "-0.75", "-0.5", "-0.25")
HIGHS = ("0.25", "0.5", "0.75", "1.0", "1.5", "2.0")
# Numbers of rows and columns of the inputs of composed tasks.
ROWS = tuple(2**power for power in range(4, 21))
COLS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
# Permitted values of the threshold of softshrink.
THRESHOLDS = ("0.1", "0.2", "0.25", "0.3", "0.4", "0.5")


@dataclass(frozen=True)
class CoreOperator:
    """A torch operator for which kernels can be written by rules, as a line of a task's forward writes it.

    An operator of the `kind` row computes along the last dimension and keeps the shape, and a reduction
    returns one value for each row. An operator of the kind parameter uses a parameter with one value for each
    column, and one of the kind second_input uses the second input `y` of the task.

    `line` is the right-hand side of `x = …`, in which `{0}` and `{1}` stand for the constants. `constants`
    has the permitted values of each. `init` is the statement in `__init__` that creates the parameters, in
    which `{cols}` is replaced by the number of columns of the input. `cost` are the approximate eager
    nanoseconds for one element on one CPU core, which are used only to choose a size.
    """

    name: str
    kind: Literal["elementwise", "row", "reduction", "parameter", "second_input"]
    line: str
    constants: tuple[tuple[str, ...], ...] = ()
    init: str = ""
    cost: float = 0.12


CORE_OPERATORS: tuple[CoreOperator, ...] = (
    CoreOperator("relu", "elementwise", "F.relu(x)"),
    CoreOperator("leaky_relu", "elementwise", "F.leaky_relu(x, {0})", (SLOPES,), cost=0.15),
    CoreOperator("elu", "elementwise", "F.elu(x)", cost=1.4),
    CoreOperator("gelu", "elementwise", "F.gelu(x)", cost=0.5),
    CoreOperator("silu", "elementwise", "F.silu(x)", cost=0.42),
    CoreOperator("sigmoid", "elementwise", "torch.sigmoid(x)", cost=0.41),
    CoreOperator("tanh", "elementwise", "torch.tanh(x)", cost=3.4),
    CoreOperator("softplus", "elementwise", "F.softplus(x)", cost=2),
    CoreOperator("hardswish", "elementwise", "F.hardswish(x)", cost=0.17),
    CoreOperator("hardsigmoid", "elementwise", "F.hardsigmoid(x)", cost=0.18),
    CoreOperator("clamp", "elementwise", "torch.clamp(x, {0}, {1})", (LOWS, HIGHS)),
    CoreOperator("relu6", "elementwise", "F.relu6(x)", cost=0.13),
    CoreOperator("mish", "elementwise", "F.mish(x)", cost=4),
    CoreOperator("softsign", "elementwise", "F.softsign(x)", cost=0.45),
    CoreOperator("abs", "elementwise", "torch.abs(x)"),
    CoreOperator("square", "elementwise", "torch.square(x)"),
    # The form is sqrt(|x| + 1), because sqrt(|x|) turns a rounding error of 1e-8 near zero into 1e-4.
    CoreOperator("sqrt_abs", "elementwise", "torch.sqrt(torch.abs(x) + 1.0)", cost=0.7),
    CoreOperator("log1p_abs", "elementwise", "torch.log1p(torch.abs(x))", cost=1.1),
    CoreOperator("erf", "elementwise", "torch.erf(x)", cost=1.8),
    CoreOperator("logsigmoid", "elementwise", "F.logsigmoid(x)", cost=1.8),
    CoreOperator("tanhshrink", "elementwise", "F.tanhshrink(x)", cost=3.9),
    CoreOperator("softshrink", "elementwise", "F.softshrink(x, {0})", (THRESHOLDS,), cost=0.13),
    CoreOperator("mul_constant", "elementwise", "x * {0}", (PALETTE,)),
    CoreOperator("add_constant", "elementwise", "x + {0}", (PALETTE,)),
    CoreOperator("softmax", "row", "torch.softmax(x, dim=-1)", cost=0.6),
    CoreOperator("log_softmax", "row", "torch.log_softmax(x, dim=-1)", cost=0.75),
    CoreOperator(
        "layer_norm", "row", "self.layer_norm(x)", init="self.layer_norm = nn.LayerNorm({cols})", cost=0.5
    ),
    CoreOperator(
        "rms_norm", "row", "self.rms_norm(x)", init="self.rms_norm = nn.RMSNorm({cols}, eps=1e-5)", cost=0.5
    ),
    CoreOperator("normalize", "row", "F.normalize(x, dim=-1)", cost=0.3),
    CoreOperator("sum", "reduction", "torch.sum(x, dim=-1, keepdim=True)", cost=0.06),
    CoreOperator("mean", "reduction", "torch.mean(x, dim=-1, keepdim=True)", cost=0.06),
    CoreOperator("amax", "reduction", "torch.amax(x, dim=-1, keepdim=True)", cost=0.06),
    CoreOperator("logsumexp", "reduction", "torch.logsumexp(x, dim=-1, keepdim=True)", cost=1.1),
    CoreOperator(
        "scale",
        "parameter",
        "x * self.scale",
        init="self.scale = nn.Parameter(torch.randn({cols}))",
        cost=0.1,
    ),
    CoreOperator(
        "shift",
        "parameter",
        "x + self.shift",
        init="self.shift = nn.Parameter(torch.randn({cols}))",
        cost=0.1,
    ),
    CoreOperator("add_input", "second_input", "x + y", cost=0.14),
    CoreOperator("mul_input", "second_input", "x * y", cost=0.14),
)
BY_NAME = {operator.name: operator for operator in CORE_OPERATORS}

# Pattern of the constants of operators.
NUMBER = r"(-?\d+(?:\.\d+)?)"
# Pattern of the right-hand side of each operator's line, with a group for each constant.
PATTERNS = {
    operator.name: re.compile(re.sub(r"\\{\d\\}", lambda _: NUMBER, re.escape(operator.line)))
    for operator in CORE_OPERATORS
}
# Pattern of a source in the layout of composed tasks.
SOURCE = re.compile(
    re.escape(TASK_LAYOUT)
    .replace(re.escape(BEGINNINGS[0][0]), r"(?:\nWORKLOADS = .+\n)?\n\nclass\ Model")
    .replace(re.escape(BEGINNINGS[1][0]), r"def\ get_inputs\((?:rows, cols)?\)")
    .replace(r"\{init\}", r"(?P<init>(?:.+\n)*)")
    .replace(r"\{arguments\}", r"(?P<arguments>x|x, y|x, y, z)")
    .replace(r"\{lines\}", r"(?P<lines>(?: {8}x = .+\n)* {8}x = .+)")
    .replace(r"\{inputs\}", r"(?P<inputs>.*)")
)
# Pattern of a line of the constructor that creates a parameter or a norm.
PARAMETER = re.compile(
    r" {8}self\.(?:(scale|shift) = nn\.Parameter\(torch\.randn\(\(?(?:1, )?(?P<cols>\d+),?\)?\)\)"
    r"|(layer_norm) = nn\.LayerNorm\(\d+\)|(rms_norm) = nn\.RMSNorm\(\d+, eps=1e-5\))"
)
# Pattern of the input of a chain, or of several inputs that are equal.
CHAIN_INPUTS = re.compile(
    r"(?:t\.\w+\(\) if .+ for t in \[)?(torch\.randn\(\w+, (\w+)\)(?:\.\w+\(\))?)(?:, \1)*\]?"
)
# Pattern of a source that names a dtype.
NAMES_DTYPE = re.compile(r"\b(half|b?float16|float64|double|dtype)\b")
# Names of the kernel's arguments for the parameters of each module.
MODULE_TENSORS = {"layer_norm": ("weight", "bias"), "rms_norm": ("gain",)}


@dataclass(frozen=True)
class Step:
    """One operator of a chain, which is a sequence of operators that are applied to `x` one after another.

    `name` is the name of the operator in CORE_OPERATORS. `constants` are its constants as texts from the
    source.
    """

    name: str
    constants: tuple[str, ...]


@dataclass(frozen=True)
class OperatorChain:
    """The computation of a composed task, whose forward has one operator in each line.

    `steps` are the operators in the order in which they are applied. `tensors` has the names of the kernel's
    arguments in their order: inputs, parameters in the order of the state dict (in which the parameters of a
    module come before those of its submodules), and the output. All of them have the type `dtype`.
    """

    steps: tuple[Step, ...]
    tensors: tuple[str, ...]
    dtype: TaskDtype = "float32"

    @property
    def by_row(self) -> bool:
        """Return whether an operator needs a whole row, or the position of an element in its row."""
        return any(BY_NAME[step.name].kind in ("row", "reduction", "parameter") for step in self.steps)


def read_chain(code: str) -> OperatorChain | None:
    """Return the chain of a source in the layout of composed tasks (TASK_LAYOUT), or None for another source.

    A chain is the sequence of operators in `forward`, one in each line. The source may be cast to half
    precision by `in_dtype`. A source in which a line of `forward` is not that of a core operator, for which
    kernels can be written by rules, has no chain either. The same is so if an input or a parameter would have
    to be broadcast, or if an operator after a reduction is not elementwise.
    """
    source = SOURCE.fullmatch(code)
    inputs = CHAIN_INPUTS.fullmatch(source["inputs"]) if source else None
    if (
        source is None
        or inputs is None
        or source["inputs"].count("torch.randn(") != source["arguments"].count(",") + 1
    ):
        return None
    steps = [_read_step(line) for line in source["lines"].splitlines()]
    dtype = dtype_of(source["init"])
    init = source["init"].splitlines()[: -1 if dtype in CASTS else None]
    parameters = [PARAMETER.fullmatch(line) for line in init]
    if None in steps or None in parameters or (dtype not in CASTS and NAMES_DTYPE.search(code)):
        return None
    made = [match for match in parameters if match is not None]
    kinds = [BY_NAME[step.name].kind for step in steps if step is not None]
    after = kinds[kinds.index("reduction") + 1 :] if "reduction" in kinds else []
    sizes = {match["cols"] for match in made if match["cols"]}
    if (
        set(after) - {"elementwise"}
        or (inputs[2].isdigit() and sizes - {inputs[2]})
        or (dtype in CASTS and f".{CASTS[dtype]}()" not in source["inputs"])
    ):
        return None
    names = [match[1] or match[3] or match[4] for match in made]
    tensors = [name for name in names if name not in MODULE_TENSORS]
    tensors += [tensor for name in names for tensor in MODULE_TENSORS.get(name, ())]
    return OperatorChain(
        tuple(step for step in steps if step is not None),
        (*source["arguments"].split(", "), *tensors, "out"),
        dtype,
    )


def _read_step(line: str) -> Step | None:
    """Return the operator of a line `x = …` of `forward`, or None if it is not that of a core operator.

    A core operator is one of CORE_OPERATORS. `line` has the indentation of eight spaces.
    """
    expression = line.removeprefix("        x = ")
    matches = ((name, pattern.fullmatch(expression)) for name, pattern in PATTERNS.items())
    return next((Step(name, match.groups()) for name, match in matches if match), None)


def canonical(name: str) -> str:
    """Return the canonical name of an operator, which is equal for all its spellings with a dot.

    For example, it is leakyrelu for nn.LeakyReLU and F.leaky_relu. A name without a dot is returned
    unchanged.
    """
    return name.rpartition(".")[2].replace("_", "").lower() if "." in name else name
