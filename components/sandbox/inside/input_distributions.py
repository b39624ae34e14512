"""The changes of a task's inputs, called input distributions, under which outputs must be correct.

A task is a PyTorch module that is to be made faster. An example of a change is the multiplication by 3. The
judge and the code inside the sandbox import this file. It imports nothing of the project.
"""

from collections.abc import Callable

import torch

# Number of elements after which the factors of `wide_range` repeat.
PERIOD = 61


def wide_range(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with each element scaled by a factor from 1e-3 to 1e1.

    The factor depends on the position of the element in the flattened tensor modulo `PERIOD`.
    """
    flat, factors = x.reshape(-1), torch.logspace(-3, 1, PERIOD, device=x.device).to(x.dtype)
    out, whole = torch.empty_like(flat), x.numel() // PERIOD * PERIOD
    torch.mul(flat[:whole].view(-1, PERIOD), factors, out=out[:whole].view(-1, PERIOD))
    torch.mul(flat[whole:], factors[: x.numel() - whole], out=out[whole:])
    return out.view(x.shape)


# Functions that change a floating-point input made by the task, by the name of the distribution. They may be
# applied to parts of an input that begin at multiples of `PERIOD` elements.
INPUT_DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "given": lambda x: x,
    "scaled": lambda x: x * 3,
    "shifted": lambda x: x + 1,
    "flipped": lambda x: -x,
    "integers": lambda x: torch.round(x * 2),
    "wide": wide_range,
}
