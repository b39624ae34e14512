"""The families of inputs that a candidate must be right on. Imported on both sides of the sandbox; imports nothing of the project."""

from __future__ import annotations

from collections.abc import Callable

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """Four decades within every 61 neighbours: a form of its own at each place, and the same whenever it is asked for."""
    decades = torch.logspace(-3, 1, 61, device=x.device)[torch.arange(x.numel(), device=x.device) % 61]
    return x * decades.to(x.dtype).view(x.shape)


INPUT_DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "given": lambda x: x,
    "scaled": lambda x: x * 3,
    "shifted": lambda x: x + 1,
    "flipped": lambda x: -x,
    "integers": lambda x: torch.round(x * 2),
    "wide": wide,
}
