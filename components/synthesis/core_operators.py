"""The core operators, which are the torch operators for which the rule-based kernel writer can write kernels.

Each operator is one line of `forward` that computes a new `x` from `x`. Its constants are chosen from small
sets, and written with a decimal point, so that the tokenizer of a small policy has one token for each.
"""

from dataclasses import dataclass
from typing import Literal

from components.bootstrap.chain_parser import OPERATOR_LINES

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
    """A core operator: its name and kind, the permitted values of its constants, and its parameters.

    A row operator computes along the last dimension and keeps the shape, and a reduction returns one value
    for each row. A parameter operator uses a parameter with one value for each column, and a second-input
    operator the second input `y` of the task.
    """

    name: str
    kind: Literal["elementwise", "row", "reduction", "parameter", "second_input"]
    # Permitted values of each constant.
    constants: tuple[tuple[str, ...], ...] = ()
    # Statement in `__init__` that creates the parameters of the operator. `{cols}` is replaced by the number
    # of columns of the input.
    init: str = ""
    # Approximate eager nanoseconds for one element on one CPU core, which are used only to choose a size.
    cost: float = 0.12

    @property
    def line(self) -> str:
        """Return the right-hand side of `x = …`, in which `{0}` and `{1}` stand for the constants."""
        return OPERATOR_LINES[self.name]


CORE_OPERATORS: tuple[CoreOperator, ...] = (
    CoreOperator("relu", "elementwise"),
    CoreOperator("leaky_relu", "elementwise", (SLOPES,), cost=0.15),
    CoreOperator("elu", "elementwise", cost=1.4),
    CoreOperator("gelu", "elementwise", cost=0.5),
    CoreOperator("silu", "elementwise", cost=0.42),
    CoreOperator("sigmoid", "elementwise", cost=0.41),
    CoreOperator("tanh", "elementwise", cost=3.4),
    CoreOperator("softplus", "elementwise", cost=2),
    CoreOperator("hardswish", "elementwise", cost=0.17),
    CoreOperator("hardsigmoid", "elementwise", cost=0.18),
    CoreOperator("clamp", "elementwise", (LOWS, HIGHS)),
    CoreOperator("relu6", "elementwise", cost=0.13),
    CoreOperator("mish", "elementwise", cost=4),
    CoreOperator("softsign", "elementwise", cost=0.45),
    CoreOperator("abs", "elementwise"),
    CoreOperator("square", "elementwise"),
    # The form is sqrt(|x| + 1), because sqrt(|x|) turns a rounding error of 1e-8 near zero into 1e-4.
    CoreOperator("sqrt_abs", "elementwise", cost=0.7),
    CoreOperator("log1p_abs", "elementwise", cost=1.1),
    CoreOperator("erf", "elementwise", cost=1.8),
    CoreOperator("logsigmoid", "elementwise", cost=1.8),
    CoreOperator("tanhshrink", "elementwise", cost=3.9),
    CoreOperator("softshrink", "elementwise", (THRESHOLDS,), cost=0.13),
    CoreOperator("mul_constant", "elementwise", (PALETTE,)),
    CoreOperator("add_constant", "elementwise", (PALETTE,)),
    CoreOperator("softmax", "row", cost=0.6),
    CoreOperator("log_softmax", "row", cost=0.75),
    CoreOperator("layer_norm", "row", init="self.layer_norm = nn.LayerNorm({cols})", cost=0.5),
    CoreOperator("rms_norm", "row", init="self.rms_norm = nn.RMSNorm({cols}, eps=1e-5)", cost=0.5),
    CoreOperator("normalize", "row", cost=0.3),
    CoreOperator("sum", "reduction", cost=0.06),
    CoreOperator("mean", "reduction", cost=0.06),
    CoreOperator("amax", "reduction", cost=0.06),
    CoreOperator("logsumexp", "reduction", cost=1.1),
    CoreOperator(
        "scale",
        "parameter",
        init="self.scale = nn.Parameter(torch.randn({cols}))",
        cost=0.1,
    ),
    CoreOperator(
        "shift",
        "parameter",
        init="self.shift = nn.Parameter(torch.randn({cols}))",
        cost=0.1,
    ),
    CoreOperator("add_input", "second_input", cost=0.14),
    CoreOperator("mul_input", "second_input", cost=0.14),
)
BY_NAME = {seed.name: seed for seed in CORE_OPERATORS}


def canonical(name: str) -> str:
    """Return the canonical name of an operator, which is equal for all its spellings with a dot.

    For example, it is leakyrelu for nn.LeakyReLU and F.leaky_relu. A name without a dot is returned
    unchanged.
    """
    return name.rpartition(".")[2].replace("_", "").lower() if "." in name else name
