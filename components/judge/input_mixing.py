"""The inputs of the calls that are judged: those that the task's source made, and what is mixed from them for timed calls."""

from __future__ import annotations

import itertools
import random
import secrets
from typing import NamedTuple

import torch

from components.sandbox.input_distributions import INPUT_DISTRIBUTIONS

DOUBLED_BYTES = 1 << 28
"""Largest input that is held twice, so that a turned one is a view."""


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
        if (
            first.dim() >= 2
            and first.shape[-1] == first.shape[-2]
            and torch.equal(first, first.transpose(-1, -2))
        ):
            return True
        if first.dim() >= 1 and first.shape[-1] > 2 and first.numel() > first.shape[-1]:
            if bool((first.diff(dim=-1) >= 0).all()):
                return True
            sums = first.sum(-1)
            if bool((sums - sums.flatten()[0]).abs().max() <= 1e-4 * first.abs().sum(-1).max()):
                return True
    return False


class Sets:
    """The bank's sets of inputs, `bank[set][input]`: one of each of `families` for correctness, then at least two that timed calls are mixed from."""

    def __init__(self, bank: list[list[torch.Tensor]], families: list[str]):
        self.bank = bank
        self.families = families
        self.turned = not structured(bank[-2:])
        self.blends = [t.is_floating_point() and not torch.equal(t, t.round()) for t in bank[-2]]
        self.doubled: dict[tuple[int, int], torch.Tensor] = {}

    def close(self) -> None:
        """Before the bank's memory is given back."""
        self.doubled.clear()
        self.bank.clear()

    def plain(self, index: int) -> Mix:
        """Set `index` as the task's source made it."""
        still = (0,) * len(self.bank[index])
        return Mix(index, index, still, still, 0.0)

    def verified(self) -> list[Mix]:
        """Those whose right outputs are known."""
        return [self.plain(i) for i in range(len(self.families))]

    def fresh(self, count: int, number: int = 0) -> list[Mix]:
        """Inputs for the `count` calls of timed round `number` that no round had before, of the family that the task gives but for one call of
        each round: who counts its calls, to be right on the other families only while it is verified, meets them here."""
        sizes = [t.numel() if self.turned else 1 for t in self.bank[-1]]
        bases = range(len(self.families), len(self.bank))
        chance = random.Random(
            secrets.token_bytes(32)
        )  # three times as fast as asking the system for each number
        sets = []
        for _ in range(count):
            first, second = chance.sample(bases, 2)
            turns = [tuple(chance.randrange(max(1, size)) for size in sizes) for _ in range(2)]
            sets.append(Mix(first, second, turns[0], turns[1], chance.uniform(0.25, 0.75)))
        other = chance.randrange(count)
        sets[other] = sets[other]._replace(family=self.families[number % len(self.families)])
        return sets

    def write(self, mix: Mix, index: int, out: torch.Tensor) -> None:
        """Write input `index` of a call into the flat tensor `out`."""
        first, second = mix.first_turns[index], mix.second_turns[index]
        blended = self.blends[index] and mix.first != mix.second
        # Turned inputs are views of two copies side by side; a large one has a single copy, and is written in up to three pieces.
        count = out.numel()
        edges = (
            {0, count}
            if count * out.element_size() <= DOUBLED_BYTES
            else {0, count, count - first, *([count - second] if blended else [])}
        )
        for start, end in itertools.pairwise(sorted(edges)):
            piece, one = out[start:end], self._turned(mix.first, index, first, start, end)
            if blended:
                torch.lerp(one, self._turned(mix.second, index, second, start, end), mix.weight, out=piece)
            else:
                piece.copy_(one)
        if mix.family != "given" and out.is_floating_point():
            out.copy_(INPUT_DISTRIBUTIONS[mix.family](out))

    def _turned(self, base: int, index: int, turn: int, start: int, end: int) -> torch.Tensor:
        """Elements `start` to `end` of one flat input of the bank, turned by `turn` elements."""
        if (base, index) not in self.doubled:
            flat = self.bank[base][index].view(-1)
            double = base >= len(self.families) and self.turned and flat.nbytes <= DOUBLED_BYTES
            self.doubled[base, index] = torch.cat([flat, flat]) if double else flat
        held = self.doubled[base, index]
        first = turn + start
        if first >= held.numel():
            first -= held.numel()
        return held[first : first + end - start]
