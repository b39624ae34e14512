"""The layout of composed tasks, and a parser that returns the chain of operators of a source in this layout.

A composed task has one operator in each line of `forward`. `components.synthesis.compose` writes this layout,
`canonicalize` rewrites other sources into it, and the kernel writer reads it. A source with another layout
has no chain.
"""

import re
from dataclasses import dataclass

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
# Right-hand side of the assignment `x = …` of each operator. {0} and {1} are replaced by the operator's
# constants.
OPERATOR_LINES = {
    "relu": "F.relu(x)",
    "leaky_relu": "F.leaky_relu(x, {0})",
    "elu": "F.elu(x)",
    "gelu": "F.gelu(x)",
    "silu": "F.silu(x)",
    "sigmoid": "torch.sigmoid(x)",
    "tanh": "torch.tanh(x)",
    "softplus": "F.softplus(x)",
    "hardswish": "F.hardswish(x)",
    "hardsigmoid": "F.hardsigmoid(x)",
    "clamp": "torch.clamp(x, {0}, {1})",
    "relu6": "F.relu6(x)",
    "mish": "F.mish(x)",
    "softsign": "F.softsign(x)",
    "abs": "torch.abs(x)",
    "square": "torch.square(x)",
    "sqrt_abs": "torch.sqrt(torch.abs(x) + 1.0)",
    "log1p_abs": "torch.log1p(torch.abs(x))",
    "erf": "torch.erf(x)",
    "logsigmoid": "F.logsigmoid(x)",
    "tanhshrink": "F.tanhshrink(x)",
    "softshrink": "F.softshrink(x, {0})",
    "mul_constant": "x * {0}",
    "add_constant": "x + {0}",
    "softmax": "torch.softmax(x, dim=-1)",
    "log_softmax": "torch.log_softmax(x, dim=-1)",
    "layer_norm": "self.layer_norm(x)",
    "rms_norm": "self.rms_norm(x)",
    "normalize": "F.normalize(x, dim=-1)",
    "sum": "torch.sum(x, dim=-1, keepdim=True)",
    "mean": "torch.mean(x, dim=-1, keepdim=True)",
    "amax": "torch.amax(x, dim=-1, keepdim=True)",
    "logsumexp": "torch.logsumexp(x, dim=-1, keepdim=True)",
    "scale": "x * self.scale",
    "shift": "x + self.shift",
    "add_input": "x + y",
    "mul_input": "x * y",
}

# Pattern of the constants of operators.
NUMBER = r"(-?\d+(?:\.\d+)?)"
# Pattern of the right-hand side of each operator's line, with a group for each constant.
PATTERNS = {
    name: re.compile(re.sub(r"\\{\d\\}", lambda _: NUMBER, re.escape(line)))
    for name, line in OPERATOR_LINES.items()
}
# Pattern of a source in the layout of composed tasks.
SOURCE = re.compile(
    re.escape(TASK_LAYOUT)
    .replace(r"\{init\}", r"(?P<init>(?:.+\n)*)")
    .replace(r"\{arguments\}", r"(?P<arguments>x|x, y)")
    .replace(r"\{lines\}", r"(?P<lines>(?:.+\n)*.+)")
    .replace(r"\{inputs\}", r".*")
)
# Pattern of a line of the constructor that creates a parameter or a norm.
PARAMETER = re.compile(
    r" {8}self\.(?:(scale|shift) = nn\.Parameter\(.*\)"
    r"|(layer_norm) = nn\.LayerNorm\(\d+\)|(rms_norm) = nn\.RMSNorm\(\d+, eps=1e-5\))"
)
# Names of the kernel's arguments for the parameters of each module.
MODULE_TENSORS = {"layer_norm": ("weight", "bias"), "rms_norm": ("gain",)}

# Operators whose result for a row depends on the row as a whole.
ROW_OPERATORS = frozenset("softmax log_softmax layer_norm rms_norm normalize sum mean amax logsumexp".split())
# Elementwise operators with a parameter that has one value for each column.
PER_COLUMN = frozenset({"scale", "shift"})


@dataclass(frozen=True)
class Step:
    """One operator of a chain. The constants are texts from the source."""

    name: str
    constants: tuple[str, ...]


@dataclass(frozen=True)
class OperatorChain:
    """The computation of a composed task: its operators and its tensors.

    `tensors` has the names of the kernel's arguments in their order: inputs, parameters in the order of the
    state dict (in which the parameters of a module come before those of its submodules), and the output.
    """

    steps: tuple[Step, ...]
    tensors: tuple[str, ...]

    @property
    def by_row(self) -> bool:
        """Return whether an operator needs the position of an element in its row."""
        positional = ROW_OPERATORS | PER_COLUMN
        return any(step.name in positional for step in self.steps)


def read_chain(code: str) -> OperatorChain | None:
    """Return the chain of a source in the layout of composed tasks, or None for another source."""
    source = SOURCE.fullmatch(code)
    if source is None:
        return None
    steps = [_read_step(line) for line in source["lines"].splitlines()]
    parameters = [PARAMETER.fullmatch(line) for line in source["init"].splitlines()]
    if None in steps or None in parameters:
        return None
    names = [match[match.lastindex or 0] for match in parameters if match is not None]
    tensors = [name for name in names if name in PER_COLUMN]
    tensors += [tensor for name in names for tensor in MODULE_TENSORS.get(name, ())]
    return OperatorChain(
        tuple(step for step in steps if step is not None),
        (*source["arguments"].split(", "), *tensors, "out"),
    )


def _read_step(line: str) -> Step | None:
    """Return the operator of a line `x = …` of `forward`, or None if it is not one of OPERATOR_LINES."""
    expression = line.removeprefix("        x = ")
    for name, pattern in PATTERNS.items():
        if match := pattern.fullmatch(expression):
            return Step(name, match.groups())
    return None
