"""This module makes the inputs of calls from the input sets that the task's source has made.

Calls that are compared with reference outputs get a set unchanged. Each timed call gets a new mixture of two
sets (`InputMix`).
"""

import itertools
import math
import random
import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from components.sandbox.inside.input_distributions import INPUT_DISTRIBUTIONS, PERIOD

# Largest size in bytes of an input that is stored twice in a row, so that a rotated copy of it is a view.
MAX_DOUBLED_BYTES = 1 << 28
# Elements of a tensor that are examined or moved to the device at a time.
BLOCK_NUMEL = 1 << 26


class InputMix(NamedTuple):
    """Mixture of the sets `first` and `second` of an `InputBank`, which gives the inputs of one call.

    Each tensor of either set is flattened and rotated by an offset of its own (`first_shifts` and
    `second_shifts`, in elements). The call gets `(1 - weight) * first + weight * second`, changed according
    to the input distribution `distribution`. Tensors of integers are only rotated. If an input has a
    structure that rotation would destroy, such as a triangular matrix (`has_structure`), none is rotated.

    Every call thus has inputs that no earlier call had, although the task's source made only a few sets. An
    answer that a candidate kept from an earlier call is therefore wrong. Rotation alone would not be enough,
    because it does not change a sum over all elements. Blending alone would not be enough, because `weight`
    could be computed from a single element.
    """

    first: int
    second: int
    first_shifts: tuple[int, ...]
    second_shifts: tuple[int, ...]
    weight: float
    distribution: str = "given"


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat integer view of a tensor's bits, in which NaN equals itself.

    The dtype is int64, which is faster to compare, if size and address are multiples of 8. Otherwise it is
    uint8.
    """
    flat = tensor.view(-1)
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0 else torch.uint8)


def _blocks(tensors: Sequence[torch.Tensor], device: str) -> Iterator[list[torch.Tensor]]:
    """Split tensors of one shape into blocks of rows, and yield the blocks of all tensors at the same place.

    A row is the last dimension. A block has at most `BLOCK_NUMEL` elements or one row, and is converted to
    float64 on `device`.
    """
    width = max(1, tensors[0].shape[-1]) if tensors[0].dim() > 1 else 1
    rows = [t.reshape(-1, width).split(max(1, BLOCK_NUMEL // width)) for t in tensors]
    for blocks in zip(*rows, strict=True):
        yield [block.to(device).double() for block in blocks]


def has_structure(sets: list[list[torch.Tensor]], device: str) -> bool:
    """Return whether an input has a structure that rotation destroys and on which a kernel may rely.

    `sets` are two input sets from different seeds. The structures are zeros at fixed positions (as in
    triangular matrices), symmetry, sorted rows, and rows that all have the same sum. The tensors are examined
    on `device` in blocks of rows.
    """
    for first, second in zip(*sets, strict=True):
        if first.numel() == 0:
            continue
        zeros = common = 0
        is_sorted, low, high, most = True, math.inf, -math.inf, 0.0
        for one, other in _blocks((first, second), device):
            zeros += int((one == 0).sum())
            common += int(((one == 0) & (other == 0)).sum())
            is_sorted = is_sorted and bool((one.diff(dim=-1) >= 0).all())
            sums = one.sum(-1)
            low, high = min(low, sums.min().item()), max(high, sums.max().item())
            most = max(most, one.abs().sum(-1).max().item())
        if common > 0.01 * first.numel() and zeros < first.numel():
            return True
        has_rows = first.dim() >= 1 and first.shape[-1] > 2 and first.numel() > first.shape[-1]
        if has_rows and (is_sorted or high - low <= 1e-4 * most):
            return True
        is_matrix = first.dim() >= 2 and first.shape[-1] == first.shape[-2]
        if is_matrix and torch.equal(first[..., 0], first[..., 0, :]) and torch.equal(first, first.mT):
            return True
    return False


class InputBank:
    """Input sets of a task: the correctness sets, followed by the sets that timed inputs are mixed from.

    `sets[i][j]` is input `j` of set `i`. `distributions` has the input distribution of each correctness set,
    and `timed_distributions` has the input distributions of timed calls. The sets may be in host memory
    although `device`, for which inputs are mixed, is a GPU. `may_double` is whether small inputs may be
    stored twice in a row, which makes mixing faster.
    """

    def __init__(
        self,
        sets: list[list[torch.Tensor]],
        distributions: list[str],
        device: str,
        *,
        timed_distributions: Sequence[str] = tuple(INPUT_DISTRIBUTIONS),
        may_double: bool = True,
    ):
        self.sets = sets
        self.distributions = distributions
        # Distributions other than `given`, the hardest first, because a measurement can have few rounds.
        self.timed_distributions = [name for name in reversed(timed_distributions) if name != "given"]
        # Whether inputs are rotated.
        self.rotates = not has_structure(sets[-2:], device)
        # For each input, whether two sets are blended: only floating-point values that are not all integers.
        self.blends = [
            t.is_floating_point()
            and any(not torch.equal(block, block.round()) for (block,) in _blocks([t], device))
            for t in sets[-2]
        ]
        self.may_double = may_double
        # Flattened inputs by set and position, small ones twice in a row.
        self.flattened: dict[tuple[int, int], torch.Tensor] = {}

    def close(self) -> None:
        """Drop all views of the shared memory, so that it can be unmapped."""
        self.flattened.clear()
        self.sets.clear()

    def original(self, index: int) -> InputMix:
        """Return the mixture that gives the inputs of set `index`, unchanged."""
        unshifted = (0,) * len(self.sets[index])
        return InputMix(index, index, unshifted, unshifted, 0.0)

    def correctness_sets(self) -> list[InputMix]:
        """Return the mixtures that give the unchanged inputs of all sets that have reference outputs."""
        return [self.original(i) for i in range(len(self.distributions))]

    def fresh(self, calls: int, number: int | None = None) -> list[InputMix]:
        """Return mixtures for the calls of timed round `number`, which give inputs that no earlier call had.

        One call, at a random position, gets an input distribution that depends on `number`, also if no
        correctness set has it. A candidate that handles all distributions only during verification, which it
        can recognise by counting its calls, is wrong in that call. If `number` is None, all calls get inputs
        of the distribution `given`.
        """
        sizes = [t.numel() if self.rotates else 1 for t in self.sets[-1]]
        bases = range(len(self.distributions), len(self.sets))
        generator = random.Random(secrets.token_bytes(32))  # faster than a system call for each number
        mixes = []
        for _ in range(calls):
            first, second = generator.sample(bases, 2)
            shifts = [tuple(generator.randrange(max(1, size)) for size in sizes) for _ in range(2)]
            mixes.append(InputMix(first, second, shifts[0], shifts[1], generator.uniform(0.25, 0.75)))
        # If a round has a single call, every sixth round is of the distribution `given`.
        names = [*self.timed_distributions, *(["given"] if calls == 1 else [])]
        if number is not None and names:
            other = generator.randrange(calls)
            mixes[other] = mixes[other]._replace(distribution=names[number % len(names)])
        return mixes

    def write(self, mix: InputMix, index: int, out: torch.Tensor) -> None:
        """Write input `index` of the call that `mix` describes into the flat tensor `out`."""
        first, second = mix.first_shifts[index], mix.second_shifts[index]
        blended = self.blends[index] and mix.first != mix.second
        # A small input is stored twice in a row, so that a rotated copy is a view. A large input is stored
        # once, and its rotated copy is written in several pieces.
        count = out.numel()
        edges = {*range(0, count, BLOCK_NUMEL), count}
        if not self._is_doubled(mix.first, out):
            edges |= {count - first, *([count - second] if blended else [])}
        for start, end in itertools.pairwise(sorted(edges)):
            piece = out[start:end]
            one = self._rotated(mix.first, index, first, start, end).to(out.device)
            if blended:
                two = self._rotated(mix.second, index, second, start, end).to(out.device)
                torch.lerp(one, two, mix.weight, out=piece)
            else:
                piece.copy_(one)
        if mix.distribution != "given" and out.is_floating_point():
            change = INPUT_DISTRIBUTIONS[mix.distribution]
            for piece in out.split(max(1, BLOCK_NUMEL // PERIOD) * PERIOD):
                piece.copy_(change(piece))

    def _is_doubled(self, base: int, flat: torch.Tensor) -> bool:
        """Return whether an input of set `base` with the size of `flat` is stored twice in a row."""
        is_timed = base >= len(self.distributions)
        return self.may_double and self.rotates and is_timed and flat.nbytes <= MAX_DOUBLED_BYTES

    def _rotated(self, base: int, index: int, shift: int, start: int, end: int) -> torch.Tensor:
        """Return elements `start` to `end` of an input, flattened and rotated by `shift` elements.

        The input is number `index` of set `base`.
        """
        if (base, index) not in self.flattened:
            flat = self.sets[base][index].view(-1)
            self.flattened[base, index] = torch.cat([flat, flat]) if self._is_doubled(base, flat) else flat
        held = self.flattened[base, index]
        first = shift + start
        if first >= held.numel():
            first -= held.numel()
        return held[first : first + end - start]
