"""The optimizer Muon, computed in float32.

It uses the same formulas, constants and state as torch.optim.Muon (Jordan, "Muon: an optimizer for hidden
layers", 2024), without weight decay. torch's version is not used, because it orthogonalises in bfloat16,
which is many times slower than float32 on a CPU without bfloat16 instructions.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

# Coefficients of the polynomial of an iteration, and number of iterations.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95
EPSILON = 1e-7


def orthogonal(matrix: Tensor) -> Tensor:
    """Return `matrix` with its singular values replaced by values of about 1 (0.7 to 1.2).

    The result is computed with five quintic Newton-Schulz iterations.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Optimizer for matrices whose steps are the orthogonalised Nesterov momentum times a learning rate.

    The learning rate is larger for matrices with more rows than columns.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float):
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the matrices with their gradients. `closure` must be None."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - MOMENTUM)
                rows, columns = parameter.shape
                rate = group["lr"] * math.sqrt(max(1, rows / columns))
                parameter.add_(orthogonal(parameter.grad.lerp(momentum, MOMENTUM)), alpha=-rate)
