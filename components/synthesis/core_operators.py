"""The torch operators that tasks are composed from.

Every operator is one line of `forward` that maps `x` to a new `x`. Constants come from a small palette and carry a
decimal point, so that a small policy copies each of them as one token (knowledge: a constant that was split across
tokens cost a third of the correctness).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["elementwise", "row", "reduction", "parameter", "second_input"]

BELOW_ONE = ("0.01", "0.05", "0.1", "0.2", "0.25", "0.3", "0.4", "0.5", "0.6", "0.7", "0.75", "0.8")
PALETTE = (*BELOW_ONE, "0.9", "1.1", "1.2", "1.25", "1.5", "1.75", "2.0", "2.5", "3.0", "3.5", "4.0", "5.0")
SLOPES = BELOW_ONE[:10]
LOWS = ("-2.0", "-1.5", "-1.0", "-0.75", "-0.5", "-0.25")
HIGHS = ("0.25", "0.5", "0.75", "1.0", "1.5", "2.0")
THRESHOLDS = ("0.1", "0.2", "0.25", "0.3", "0.4", "0.5")


@dataclass(frozen=True)
class CoreOperator:
    """One operator: `line` is the right-hand side of `x = …`, with `{0}`, `{1}` for its constants and `{cols}` in `init`."""

    name: str
    kind: Kind
    line: str
    constants: tuple[tuple[str, ...], ...] = ()
    """The palette of each constant."""
    init: str = ""
    """The statement in `__init__` that makes its parameters."""
    cost: float = 0.12
    """Rough eager nanoseconds for one element on one CPU core: only used to choose a size (measured: torch 2.13, one EPYC core)."""


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
    # Not the bare root: near zero it turns a rounding error of 1e-8 into 1e-4, and right kernels were refused for it.
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
BY_NAME = {seed.name: seed for seed in CORE_OPERATORS}


def canonical(name: str) -> str:
    """What a dotted name means, however it is written: nn.LeakyReLU, F.leaky_relu -> leakyrelu. A name of this table stays."""
    return name.rpartition(".")[2].replace("_", "").lower() if "." in name else name


ROWS = tuple(2**power for power in range(4, 21))
COLS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
