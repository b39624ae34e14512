"""Correctness: a candidate's output against the float64 reference, measured by what float32 itself can reach.

The error may be at most a small multiple of the float32 reference's own error (maximum and RMS), and never above the
absolute tolerance; both are relative to the scale of the expected output (DESIGN §5). A fixed 1e-2 or 1e-4 lets zeros
pass where outputs are small, and refuses honest sums where they are large (knowledge: KernelBench #165).
"""

from __future__ import annotations

import math

import torch

from components.config import Params, Precision, Sandbox

FLOAT32_FLOOR = 8 * 2.0**-23
"""A few units in the last place of the largest output: no order of summation may be punished for less."""


class Expected:
    """One expected output, prepared once so that a comparison costs three passes in float32.

    The float64 value is kept as a float32 and the float32 of what is left: a result close to it is subtracted without
    rounding, and of a result far from it nothing more has to be known.
    """

    def __init__(self, single: torch.Tensor, expected: torch.Tensor, sandbox: Sandbox, precision: Precision):
        """`single` is the reference's own output at `precision`, `expected` the same in float64, of equal shape."""
        self.single = single
        self.mask: torch.Tensor | None = None
        self.slack = (0.0, 0.0)
        """What another result may differ from a float32 reference, maximum and RMS, relative to the scale: for `Near`."""
        if not single.dtype.is_floating_point:
            return
        both = torch.isfinite(single) & torch.isfinite(expected)
        if not both.all():
            self.mask, single, expected = both, single[both], expected[both]
        expected = expected.double()
        self.dtype = torch.float64 if single.dtype == torch.float64 else torch.float32
        self.high = expected.to(self.dtype)
        self.low = (expected - self.high.double()).to(self.dtype)
        if expected.numel() == 0:
            self.max_allowed = self.rms_allowed = self.ceiling = 0.0
            return
        scale = expected.abs().max().item()
        own = (single.double() - expected).abs_()
        self.ceiling = (sandbox.tf32_tolerance if precision == "tf32" else sandbox.absolute_tolerance) * scale
        own_max, own_rms = own.max().item(), own.square().mean().sqrt().item()
        self.max_allowed = min(max(sandbox.error_multiple * own_max, FLOAT32_FLOOR * scale), self.ceiling)
        self.rms_allowed = min(max(sandbox.error_multiple * own_rms, FLOAT32_FLOOR / 4 * scale), self.ceiling)
        if scale > 0:
            self.slack = ((self.max_allowed + own_max) / scale, (self.rms_allowed + own_rms) / scale)

    def fault(self, got: torch.Tensor, *, loose: bool = False) -> str | None:
        """Why `got`, of the shape and dtype of `single`, is wrong; None when it is right. Integers must be equal.

        `loose` asks for the absolute tolerance only, for a baseline: torch.compile may round otherwise than eager does.
        """
        if not self.single.dtype.is_floating_point:
            return None if torch.equal(got, self.single) else "wrong_values"
        if self.mask is not None:
            if not _same_special(got, self.single):
                return "finite_mask"
            got = got[self.mask]
        return _too_large(torch.sub(got.to(self.dtype), self.high).sub_(self.low), *((self.ceiling,) * 2 if loose else (self.max_allowed, self.rms_allowed)))


class Near:
    """The output of a timed call: it was correct to the last digit on other inputs, and must now stay near the float32 reference.

    A float64 reference for every timed call would cost more than all the rest of a judgement. The distance allowed is twice
    what exact results of the same task may differ by, taken from those inputs that have a float64 reference.
    """

    def __init__(self, single: torch.Tensor, slack: tuple[float, float]):
        """`slack` (maximum, RMS) is `Expected.slack` of the same output on other inputs."""
        self.single = single
        self.slack = slack

    def fault(self, got: torch.Tensor) -> str | None:
        """As `Expected.fault`."""
        single = self.single
        if not single.dtype.is_floating_point:
            return None if torch.equal(got, single) else "wrong_values"
        if single.numel() == 0:
            return None
        scale = _largest(single)
        if not math.isfinite(scale):
            both = torch.isfinite(single)
            if not _same_special(got, single):
                return "finite_mask"
            got, single = got[both], single[both]
            scale = _largest(single) if single.numel() else 0.0
        return _too_large(torch.sub(got, single), 2 * self.slack[0] * scale, 2 * self.slack[1] * scale)


def _largest(values: torch.Tensor) -> float:
    """The largest absolute value, NaN if there is one. torch's infinity norm says the same and took fifteen times as long on cpu."""
    low, high = torch.aminmax(values)
    return max(-low.item(), high.item())


def _same_special(got: torch.Tensor, single: torch.Tensor) -> bool:
    """Whether NaNs, infinities and minus infinities are in the same places."""
    return all(torch.equal(special(got), special(single)) for special in (torch.isnan, torch.isposinf, torch.isneginf))


def _too_large(error: torch.Tensor, max_allowed: float, rms_allowed: float) -> str | None:
    if error.numel() == 0:
        return None
    error = error.float().flatten() if error.dtype in (torch.float16, torch.bfloat16) else error.flatten()
    largest = _largest(error)
    if not largest <= max_allowed:  # written so that NaN is wrong
        return "max_error" if math.isfinite(largest) else "finite_mask"
    return None if torch.linalg.vector_norm(error).item() / math.sqrt(error.numel()) <= rms_allowed else "rms_error"


def compare(got: torch.Tensor, single: torch.Tensor, expected: torch.Tensor, params: Params) -> str | None:
    """Why `got` is wrong, or None; `Expected` in one call."""
    return Expected(single, expected, params.sandbox, params.precision).fault(got)
