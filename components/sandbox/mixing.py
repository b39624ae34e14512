"""What the inputs of a timed call are mixed from, and which inputs keep their form."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Mix(NamedTuple):
    """The inputs of one call, made of sets `first` and `second` of the bank: each tensor of either is turned, flat, by so
    many elements, and then (1 - weight) * first + weight * second; what is no real number is only turned.

    So every call has inputs that no call had before, although the task's source made only a few sets. An answer kept from
    an earlier call is wrong, and no element tells how this one was mixed: with turning alone a sum over everything would
    stay the same, and with scaling alone it would be known from one element. What comes out is then made one of `family`.
    """

    first: int
    second: int
    first_turns: tuple[int, ...]
    second_turns: tuple[int, ...]
    weight: float
    family: str = "given"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view in which NaN equals itself, of as few elements as may be: comparing bytes one by one took nine times as long."""
    flat = tensor.view(-1)
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0 else torch.uint8)


def structured(sets: list[list[torch.Tensor]]) -> bool:
    """Whether inputs have a form that turning them would destroy: zeros in fixed places, symmetry, sorted rows, rows of one sum.

    `sets` are inputs made from different seeds. A kernel may rely on such a form (a triangular or symmetric matrix).
    """
    for tensors in zip(*sets, strict=True):
        first, second = (t.double() for t in tensors[:2])
        if ((first == 0) & (second == 0)).double().mean() > 0.01 and not (first == 0).all():
            return True
        if first.dim() >= 2 and first.shape[-1] == first.shape[-2] and torch.equal(first, first.transpose(-1, -2)):
            return True
        if first.dim() >= 1 and first.shape[-1] > 2 and first.numel() > first.shape[-1]:
            if bool((first.diff(dim=-1) >= 0).all()):
                return True
            sums = first.sum(-1)
            if bool((sums - sums.flatten()[0]).abs().max() <= 1e-4 * first.abs().sum(-1).max()):
                return True
    return False
