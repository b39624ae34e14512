"""Reading the chain of operators out of a task's source, without running it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

NUMBER = r"(-?\d+(?:\.\d+)?)"
PATTERNS = {
    name: re.compile(pattern.replace("#", NUMBER))
    for name, pattern in {
        "relu": r"F\.relu\(x\)",
        "leaky_relu": r"F\.leaky_relu\(x, #\)",
        "elu": r"F\.elu\(x\)",
        "gelu": r"F\.gelu\(x\)",
        "silu": r"F\.silu\(x\)",
        "sigmoid": r"torch\.sigmoid\(x\)",
        "tanh": r"torch\.tanh\(x\)",
        "softplus": r"F\.softplus\(x\)",
        "hardswish": r"F\.hardswish\(x\)",
        "hardsigmoid": r"F\.hardsigmoid\(x\)",
        "clamp": r"torch\.clamp\(x, #, #\)",
        "relu6": r"F\.relu6\(x\)",
        "mish": r"F\.mish\(x\)",
        "softsign": r"F\.softsign\(x\)",
        "abs": r"torch\.abs\(x\)",
        "square": r"torch\.square\(x\)",
        "sqrt_abs": r"torch\.sqrt\(torch\.abs\(x\) \+ 1\.0\)",
        "log1p_abs": r"torch\.log1p\(torch\.abs\(x\)\)",
        "erf": r"torch\.erf\(x\)",
        "logsigmoid": r"F\.logsigmoid\(x\)",
        "tanhshrink": r"F\.tanhshrink\(x\)",
        "softshrink": r"F\.softshrink\(x, #\)",
        "mul_constant": r"x \* #",
        "add_constant": r"x \+ #",
        "softmax": r"torch\.softmax\(x, dim=-1\)",
        "log_softmax": r"torch\.log_softmax\(x, dim=-1\)",
        "layer_norm": r"self\.layer_norm\(x\)",
        "rms_norm": r"self\.rms_norm\(x\)",
        "normalize": r"F\.normalize\(x, dim=-1\)",
        "sum": r"torch\.sum\(x, dim=-1, keepdim=True\)",
        "mean": r"torch\.mean\(x, dim=-1, keepdim=True\)",
        "amax": r"torch\.amax\(x, dim=-1, keepdim=True\)",
        "logsumexp": r"torch\.logsumexp\(x, dim=-1, keepdim=True\)",
        "scale": r"x \* self\.scale",
        "shift": r"x \+ self\.shift",
        "add_input": r"x \+ y",
        "mul_input": r"x \* y",
    }.items()
}
"""Right-hand side of `x = …` as `ast.unparse` writes it, by operator."""

COMPOSED = """import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{init}
    def forward(self, {arguments}):
{lines}        return x


def get_inputs():
    {inputs}


def get_init_inputs():
    return []
"""
"""The layout of a composed task."""

REDUCTIONS = frozenset({"sum", "mean", "amax", "logsumexp"})
ROW_OPERATORS = frozenset({"softmax", "log_softmax", "layer_norm", "rms_norm", "normalize"}) | REDUCTIONS
PER_COLUMN = frozenset({"scale", "shift"})


@dataclass(frozen=True)
class Step:
    """One operator and its constants as written."""

    name: str
    constants: tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """What a task computes. `tensors` names the kernel's arguments in the order of the binding: inputs, parameters in
    state-dict order (a module's own parameters come before its children's), output."""

    steps: tuple[Step, ...]
    tensors: tuple[str, ...]

    @property
    def reduced(self) -> bool:
        return any(step.name in REDUCTIONS for step in self.steps)

    @property
    def by_row(self) -> bool:
        """Whether the kernel needs to know where a row begins."""
        return any(step.name in ROW_OPERATORS or step.name in PER_COLUMN for step in self.steps)


def read_chain(code: str) -> Chain | None:
    """The chain of a composed source; None for anything else."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return None
    model = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"), None
    )
    methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)} if model else {}
    if not {"__init__", "forward"} <= methods.keys():
        return None
    steps = []
    for statement in methods["forward"].body[:-1]:
        target, _, value = ast.unparse(statement).partition(" = ")
        found = next(
            ((name, match) for name, pattern in PATTERNS.items() if (match := pattern.fullmatch(value))), None
        )
        if target != "x" or found is None:
            return None
        steps.append(Step(found[0], found[1].groups()))
    if not steps or ast.unparse(methods["forward"].body[-1]) != "return x":
        return None
    own, children = [], []
    for statement in methods["__init__"].body[1:]:
        name, _, value = ast.unparse(statement).removeprefix("self.").partition(" = ")
        if value.startswith("nn.Parameter(") and name in PER_COLUMN:
            own.append(name)
        elif name == "layer_norm" and re.fullmatch(r"nn\.LayerNorm\(\d+\)", value):
            children += ["weight", "bias"]
        elif name == "rms_norm" and re.fullmatch(r"nn\.RMSNorm\(\d+, eps=1e-05\)", value):
            children.append("gain")
        else:
            return None
    inputs = [argument.arg for argument in methods["forward"].args.args[1:]]
    if inputs not in (["x"], ["x", "y"]):
        return None
    return Chain(tuple(steps), (*inputs, *own, *children, "out"))
