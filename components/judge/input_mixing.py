"""This module determines the inputs of calls from the input sets that the task's source has made.

A task is a PyTorch module that is to be made faster, and an input set has the inputs of one call. Calls that
are compared with reference outputs get a correctness set, which is an input set with reference outputs,
unchanged. Each timed call gets inputs that no earlier call had (`InputMix`): a mixture of two sets without
reference outputs, or inputs that the task's source draws for this call.
"""

import functools
import itertools
import random
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch

from components.judge.input_structure import BLOCK_NUMEL, KEPT_BY, input_structures
from components.sandbox.inside.input_distributions import INPUT_DISTRIBUTIONS, PERIOD

# Largest size in bytes of an input that is stored twice in a row, so that a rotated copy of it is a view.
MAX_DOUBLED_BYTES = 1 << 28
# Number of words of 8 bytes that are multiplied at a time to compute a fingerprint.
FINGERPRINT_WORDS = 1 << 20


class InputMix(NamedTuple):
    """Description of the inputs of one call of a task's module.

    If `seed` is not None, the task's source draws the inputs under this seed. Otherwise they are a mixture of
    the sets with the indices `first` and `second` in `InputBank.sets`: each tensor of either set is flattened
    and rotated by an offset of its own (`first_shifts` and `second_shifts`, in elements), and the call gets
    `(1 - weight) * first + weight * second`. If `first` equals `second`, the call gets the rotated tensors of
    this set. In all cases the inputs at the positions `InputBank.changed[distribution]` are then changed by
    the function `INPUT_DISTRIBUTIONS[distribution]`.

    A mixture is inputs that no earlier call had, although the task's source made only a few sets. An answer
    that a candidate (an implementation that is judged) kept from an earlier call is therefore wrong. Rotation
    alone would not be enough, because it does not change a sum over all elements. Blending alone would not be
    enough, because `weight` could be computed from a single element, and the answer to a linear task from the
    answers to the sets.
    """

    first: int = 0
    second: int = 0
    first_shifts: tuple[int, ...] = ()
    second_shifts: tuple[int, ...] = ()
    weight: float = 0.0
    distribution: str = "given"
    seed: int | None = None


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return `FINGERPRINT_WORDS` secret random int64 factors for fingerprints, the same at each call."""
    generator = torch.Generator(device).manual_seed(secrets.randbits(63))
    limit = 2**63 - 1
    return torch.randint(-limit, limit, (FINGERPRINT_WORDS,), generator=generator, device=device)


def fingerprint(memory: torch.Tensor, most_words: int | None = None) -> int:
    """Return a number of 64 bits that differs for different bytes, except with negligible probability.

    `memory` is a tensor of bytes, whose size is a multiple of 8. If `most_words` is given, at most so many
    words of 8 bytes, evenly spaced in `memory`, determine the result. The result also depends on random
    factors, so that it can be compared only within this process.
    """
    words = memory.view(torch.int64)
    if most_words is not None:
        words = words[:: -(-len(words) // most_words)]
    factors, result = _factors(memory.device), 0
    for block in words.split(FINGERPRINT_WORDS):
        result = (result * 0x9E3779B97F4A7C15 + int((block * factors[: len(block)]).sum())) % 2**64
    return result


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat integer view of a tensor's bits, in which NaN equals NaN with the same bits.

    The dtype is int64, which is faster to compare, if the size in bytes and the address are multiples of 8.
    Otherwise it is uint8.
    """
    flat = tensor.view(-1)
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0 else torch.uint8)


class InputBank:
    """Input sets of a task: the correctness sets, followed by the sets that timed inputs are mixed from.

    An input set has the inputs of one call, and a correctness set also has reference outputs. `sets[i][j]` is
    input `j` of set `i`. `distributions` has the input distribution of each correctness set, that is, the
    name of the change that was made to it (`INPUT_DISTRIBUTIONS`), with `given` for none.
    `timed_distributions` has the names of the input distributions of timed calls. The sets may be in host
    memory although `device`, for which inputs are mixed, is a GPU. `may_double` is whether small inputs may
    be stored twice in a row, which makes mixing faster.
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
        structures = input_structures(sets[len(distributions) :], device)
        # Whether the task's source draws the inputs of each timed call, because mixing would repeat values or
        # destroy a structure.
        self.draws = any(structures)
        # For each input distribution, the positions of the inputs whose structures it keeps.
        self.changed = {
            name: [
                i
                for i, found in enumerate(structures)
                if sets[0][i].is_floating_point() and all(name in KEPT_BY[structure] for structure in found)
            ]
            for name in INPUT_DISTRIBUTIONS
        }
        self.may_double = may_double
        # Flattened inputs by set and position, small ones twice in a row.
        self.flattened: dict[tuple[int, int], torch.Tensor] = {}

    def close(self) -> None:
        """Drop all views of the shared memory that holds the inputs, so that it can be unmapped."""
        self.flattened.clear()
        self.sets.clear()

    def original(self, index: int) -> InputMix:
        """Return the description of the inputs of a call that gets input set `index`, unchanged."""
        unshifted = (0,) * len(self.sets[index])
        return InputMix(index, index, unshifted, unshifted)

    def correctness_sets(self) -> list[InputMix]:
        """Return descriptions of the inputs of calls that get the correctness sets, unchanged and in order.

        A correctness set is an input set (the inputs of one call) with reference outputs.
        """
        return [self.original(i) for i in range(len(self.distributions))]

    def repeated(self, calls: int) -> list[InputMix]:
        """Return descriptions of the inputs of `calls` calls that are timed without a candidate.

        The calls get the input sets without reference outputs in turn, unchanged, so that inputs may repeat.
        A candidate, which could keep an answer, must not get such inputs.
        """
        bases = range(len(self.distributions), len(self.sets))
        return [self.original(i) for i in itertools.islice(itertools.cycle(bases), calls)]

    def fresh(self, calls: int, number: int | None = None) -> list[InputMix]:
        """Return descriptions of the inputs of the `calls` calls of timed round `number`, drawn at random.

        A round is a series of timed calls. One of them, at a random position, gets changed inputs if any
        change can be used (`usable`): an input distribution other than `given` (no change) that depends on
        `number`, also if no correctness set (input set with reference outputs) has it. A candidate that
        handles all distributions only during verification, which it can recognise by counting its calls, is
        wrong in that call. If the round has a single call, this call has the distribution `given` in some
        rounds. If `number` is None, all calls get inputs of the distribution `given`.
        """
        generator = random.Random(secrets.token_bytes(32))  # faster than a system call for each number
        mixes = [self._fresh(generator) for _ in range(calls)]
        # If a round has a single call, at least every sixth round is of the distribution `given`.
        names = [*self.usable(), *(["given"] if calls == 1 else [])]
        if number is not None and names:
            other = generator.randrange(calls)
            mixes[other] = mixes[other]._replace(distribution=names[number % len(names)])
        return mixes

    def usable(self) -> list[str]:
        """Return the names of the input distributions other than `given` that can be used for timed calls.

        An input distribution is a change of the inputs, with `given` for none. The result has the entries of
        `timed_distributions` that change at least one input.
        """
        return [name for name in self.timed_distributions if self.changed[name]]

    def _fresh(self, generator: random.Random) -> InputMix:
        if self.draws:
            return InputMix(seed=secrets.randbits(62))
        bases = range(len(self.distributions), len(self.sets))
        first, second = generator.sample(bases, 2)
        shifts = [tuple(generator.randrange(max(1, t.numel())) for t in self.sets[-1]) for _ in range(2)]
        return InputMix(first, second, shifts[0], shifts[1], generator.uniform(0.25, 0.75))

    def write(self, mix: InputMix, index: int, out: torch.Tensor) -> None:
        """Write input `index` of the call that `mix` describes into the flat tensor `out`.

        `mix` has no seed. The input is mixed from two input sets, or is a rotated input of one, and is then
        changed as `mix.distribution` says, if this distribution changes this input.
        """
        first, second = mix.first_shifts[index], mix.second_shifts[index]
        blended = mix.first != mix.second
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
        if mix.distribution != "given" and index in self.changed[mix.distribution]:
            change = INPUT_DISTRIBUTIONS[mix.distribution]
            for piece in out.split(max(1, BLOCK_NUMEL // PERIOD) * PERIOD):
                piece.copy_(change(piece))

    def _is_doubled(self, base: int, flat: torch.Tensor) -> bool:
        """Return whether an input with the size of `flat`, of the input set `base`, is stored twice in a row.

        A rotated copy of such an input is a view. Inputs are stored twice only if timed inputs are mixed from
        them, if they have at most `MAX_DOUBLED_BYTES`, and if `may_double` is set.
        """
        is_timed = base >= len(self.distributions)
        return self.may_double and is_timed and not self.draws and flat.nbytes <= MAX_DOUBLED_BYTES

    def _rotated(self, base: int, index: int, shift: int, start: int, end: int) -> torch.Tensor:
        """Return elements `start` to `end` of input `index` of input set `base`, flattened and rotated.

        The rotated input begins with the element at `shift`. Unless the input is stored twice in a row
        (`_is_doubled`), the elements must lie in one piece in the input that is not rotated.
        """
        if (base, index) not in self.flattened:
            flat = self.sets[base][index].view(-1)
            self.flattened[base, index] = torch.cat([flat, flat]) if self._is_doubled(base, flat) else flat
        held = self.flattened[base, index]
        first = shift + start
        if first >= held.numel():
            first -= held.numel()
        return held[first : first + end - start]
