"""The memory in which a runner leaves the results of its calls on cpu, and what overwrites it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import numpy as np

from components.sandbox.inside.shared_memory import PAGE_BYTES, Slot

# Smallest size in bytes of all results of a call together for which the addresses of those of a page or more
# are recorded, and the number of calls with results at new addresses that is never suspicious; an allocator
# gives a kernel up to eleven while its heap grows.
LARGE_RESULT_BYTES, FEW_ADDRESSES = 1 << 16, 16
# Share of the calls, or of the bytes of their results, that may lie at new addresses in any case.
NEW_SHARE = 1 / 16
# Bytes with which a candidate's results are overwritten. Repeated, each gives another number, which is very
# large or NaN in floating-point types. A task's outputs may have one of them as a constant, but not all.
LOUD_BYTES = (0x7B, 0x7C, 0x7D, 0x7E, 0x7F, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF)
# Values with which results of type bool are overwritten, and the number of elements after which they repeat.
# If all elements had the same value, the candidate, which can read it, would not have to write this value.
BOOLEANS, BOOLEANS_PERIOD = (0, 1), 65537


class ResultMemory:
    """The addresses of the results of one runner's calls, and the bytes that replace these results.

    A runner is the sandboxed process that is called, and the results of a call are its output tensors. The
    judge overwrites memory with an earlier result, so that all of a result there must be written in its call,
    which does not hold for memory that had none. A call of which a part of the bytes is new counts as this
    part of a call.
    """

    def __init__(self, slots: Sequence[Slot]):
        """Record the results of calls whose outputs have the sizes and dtypes of `slots`."""
        self.slots = slots
        self.total_bytes = sum(slot.bytes for slot in slots)
        # Bytes that replace a candidate's results, for each output.
        self.garbage = [np.empty(slot.bytes, np.uint8) for slot in slots]
        self.overwritten: set[int] = set()
        # Number of timed calls with large results, and how many of them had results where no earlier one had
        # been: in all rounds and in the last one.
        self.results, self.new_results, self.new_in_round = 0, 0.0, 0.0
        is_large = self.total_bytes >= LARGE_RESULT_BYTES
        self.least_bytes = PAGE_BYTES if is_large else math.inf

    def begin_round(self) -> None:
        """Choose other bytes to replace the results of the next round (a series of calls)."""
        self.new_in_round = 0.0
        for slot, garbage in zip(self.slots, self.garbage, strict=True):
            if slot.dtype == "bool":
                _fill_with_booleans(garbage)
            else:
                garbage.fill(secrets.choice(LOUD_BYTES))

    def large(self, addresses: Sequence[int]) -> list[tuple[int, int]]:
        """Return address and size in bytes of each result at `addresses` that is recorded.

        These are results of a page or more, if all results of a call together have `LARGE_RESULT_BYTES`.
        """
        results = zip(addresses, self.slots, strict=True)
        return [(address, slot.bytes) for address, slot in results if slot.bytes >= self.least_bytes]

    def add(self, addresses: Sequence[int], *, is_timed: bool) -> None:
        """Record a call whose results at `addresses` are overwritten."""
        if is_timed and (large := self.large(addresses)):
            new_bytes = sum(size for address, size in large if address not in self.overwritten)
            self.results += 1
            self.new_results += new_bytes / self.total_bytes
            self.new_in_round += new_bytes / self.total_bytes
        self.overwritten.update(addresses)

    @property
    def is_prepared(self) -> bool:
        """Whether results of many timed calls lay in memory that had no earlier result, as if prepared.

        A kernel that allocates its results gets the same memory again and again. Up to `FEW_ADDRESSES` calls
        with results in other memory and the share `NEW_SHARE` are not suspicious.
        """
        return self.new_results > FEW_ADDRESSES + NEW_SHARE * self.results

    def may_be_prepared(self, calls: int) -> bool:
        """Return whether the time of the last round of `calls` timed calls may be too short.

        This is so if more than the share `NEW_SHARE` of its results lay in memory that had no earlier result,
        where a part of them can have been written before the clock ran.
        """
        return self.new_in_round > NEW_SHARE * calls


def _fill_with_booleans(memory: np.ndarray) -> None:
    """Fill `memory` (uint8) with secret random values of `BOOLEANS`, which repeat after `BOOLEANS_PERIOD`."""
    generator = np.random.default_rng(secrets.randbits(128))
    values = generator.choice(np.array(BOOLEANS, np.uint8), BOOLEANS_PERIOD)
    whole = memory.size - memory.size % BOOLEANS_PERIOD
    memory[:whole].reshape(-1, BOOLEANS_PERIOD)[:] = values
    memory[whole:] = values[: memory.size - whole]
