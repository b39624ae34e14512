"""The distributions of inputs that a candidate must be right on.

Imported on both sides of the sandbox; imports nothing of the project.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def wide_range(x: torch.Tensor) -> torch.Tensor:
    """Scale by factors from 1e-3 to 1e1, one for each place modulo 61: the same whenever it is applied."""
    factors = torch.logspace(-3, 1, 61, device=x.device)[torch.arange(x.numel(), device=x.device) % 61]
    return x * factors.to(x.dtype).view(x.shape)


INPUT_DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "given": lambda x: x,
    "scaled": lambda x: x * 3,
    "shifted": lambda x: x + 1,
    "flipped": lambda x: -x,
    "integers": lambda x: torch.round(x * 2),
    "wide": wide_range,
}
"""How each distribution changes a floating-point input that the task made."""
