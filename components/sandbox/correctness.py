"""Correctness: a candidate's output against the float64 reference, measured by what float32 itself can reach.

The error may be at most a small multiple of the float32 reference's own error (maximum and RMS), and never above the
absolute tolerance; both are relative to the scale of the expected output (DESIGN §5). A fixed 1e-2 or 1e-4 lets zeros
pass where outputs are small, and refuses honest sums where they are large (knowledge: KernelBench #165).
"""

from __future__ import annotations

import math

import torch

from components.config import Sandbox

FLOAT32_FLOOR = 8 * 2.0**-23
"""A few units in the last place of the largest output: no order of summation may be punished for less."""


class Expected:
    """One expected output, prepared once so that a comparison costs three passes in float32.

    The float64 value is kept as a float32 and the float32 of what is left: a result close to it is subtracted without
    rounding, and of a result far from it nothing more has to be known.
    """

    def __init__(self, single: torch.Tensor, expected: torch.Tensor, sandbox: Sandbox):
        """`single` is the float32 reference's own output, `expected` the same in float64, of equal shape."""
        self.single = single
        self.mask: torch.Tensor | None = None
        if not single.dtype.is_floating_point:
            return
        both = torch.isfinite(single) & torch.isfinite(expected)
        if not both.all():
            self.mask, single, expected = both, single[both], expected[both]
        expected = expected.double()
        self.dtype = torch.float64 if single.dtype == torch.float64 else torch.float32
        self.high = expected.to(self.dtype)
        self.low = (expected - self.high.double()).to(self.dtype)
        self.count = expected.numel()
        if self.count == 0:
            return
        scale = expected.abs().max().item()
        own = (single.double() - expected).abs_()
        ceiling = sandbox.absolute_tolerance * scale
        self.max_allowed = min(max(sandbox.error_multiple * own.max().item(), FLOAT32_FLOOR * scale), ceiling)
        self.rms_allowed = min(max(sandbox.error_multiple * own.square().mean().sqrt().item(), FLOAT32_FLOOR / 4 * scale), ceiling)

    def fault(self, got: torch.Tensor) -> str | None:
        """Why `got`, of the shape and dtype of `single`, is wrong; None when it is right. Integers must be equal."""
        if not self.single.dtype.is_floating_point:
            return None if torch.equal(got, self.single) else "wrong_values"
        if self.mask is not None:
            if not torch.equal(torch.isfinite(got), torch.isfinite(self.single)):
                return "finite_mask"
            got = got[self.mask]
        if self.count == 0:
            return None
        error = torch.sub(got.to(self.dtype), self.high).sub_(self.low).flatten()
        largest = torch.linalg.vector_norm(error, torch.inf).item()
        if not largest <= self.max_allowed:  # written so that NaN is wrong
            return "max_error" if math.isfinite(largest) else "finite_mask"
        root_mean_square = torch.linalg.vector_norm(error).item() / math.sqrt(self.count)
        return None if root_mean_square <= self.rms_allowed else "rms_error"


def compare(got: torch.Tensor, single: torch.Tensor, expected: torch.Tensor, sandbox: Sandbox) -> str | None:
    """Why `got` is wrong, or None; `Expected` in one call."""
    return Expected(single, expected, sandbox).fault(got)
