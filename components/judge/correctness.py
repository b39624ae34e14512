"""Correctness: a candidate's output against the float64 reference, measured by what float32 itself can reach.

The error may be at most a small multiple of the float32 reference's own error (maximum and RMS), and never above the
absolute tolerance; both are relative to the scale of the expected output (DESIGN §5). A fixed 1e-2 or 1e-4 lets zeros
pass where outputs are small, and refuses honest sums where they are large (knowledge: KernelBench #165).
"""

from __future__ import annotations

import math

import torch

from components.core.config import Params, Precision, Sandbox

FLOAT32_FLOOR = 8 * 2.0**-23
"""A few units in the last place of the largest output: no order of summation may be punished for less."""


COMPARED_BYTES = 1 << 26
"""Of the reference's outputs, compared at one time."""


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
        """What another result may differ from a float32 reference, maximum and RMS, relative to the scale: for `departure`."""
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
        return _too_large(
            torch.sub(got.to(self.dtype), self.high).sub_(self.low),
            *((self.ceiling,) * 2 if loose else (self.max_allowed, self.rms_allowed)),
        )


def departure(
    got: torch.Tensor, single: torch.Tensor, slack: list[tuple[float, float]]
) -> tuple[int, str] | None:
    """The first of the timed calls whose output is wrong, and why; None when all are right. Integers must be equal.

    `got` and `single` have a call in each row of their first dimension: [calls, *shape]. What was correct to the last digit on
    other inputs must now stay near the float32 reference `single`: a float64 reference for every timed call would cost more than
    all the rest of a judgement. The distance allowed is twice what exact results of the same task may differ by, taken from
    those inputs that have a float64 reference: `slack` is `Expected.slack` by call. Calls are looked at many together, since
    on cuda each question to the device costs as much as a small call itself.
    """
    count = got.shape[0]
    if got[0].numel() == 0:
        return None
    many = max(1, COMPARED_BYTES // single[0].nbytes)
    for first in range(0, count, many):
        ours, theirs = (rows[first : first + many].flatten(1) for rows in (got, single))
        if not single.dtype.is_floating_point:
            if not torch.equal(ours, theirs):
                return first + _first_true((ours != theirs).any(1)), "wrong_values"
            continue
        scale = _largest(theirs).double()
        if not torch.isfinite(scale).all():
            for index in range(ours.shape[0]):
                if (
                    reason := _special_departure(ours[index], theirs[index], slack[first + index])
                ) is not None:
                    return first + index, reason
            continue
        error = torch.sub(ours, theirs)
        largest, rms = _magnitudes(error)
        allowed = (
            2
            * scale[:, None]
            * torch.tensor(slack[first : first + many], dtype=torch.float64, device=scale.device)
        )
        wrong = ~((largest <= allowed[:, 0]) & (rms <= allowed[:, 1]))  # written so that NaN is wrong
        if wrong.any():
            row = _first_true(wrong)
            return first + row, _too_large(error[row], *allowed[row].tolist()) or "max_error"
    return None


def _special_departure(got: torch.Tensor, single: torch.Tensor, slack: tuple[float, float]) -> str | None:
    """As `departure`, of one call whose reference is not finite everywhere."""
    both = torch.isfinite(single)
    if not _same_special(got, single):
        return "finite_mask"
    got, single = got[both], single[both]
    scale = _largest(single[None]).item() if single.numel() else 0.0
    return _too_large(torch.sub(got, single), 2 * slack[0] * scale, 2 * slack[1] * scale)


def _first_true(rows: torch.Tensor) -> int:
    return int(rows.nonzero()[0].item())


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The largest absolute value in each row, NaN if there is one. torch's infinity norm says the same and took fifteen times
    as long on cpu, and so does `aminmax` of many rows."""
    low, high = (
        (edge[None] for edge in torch.aminmax(rows)) if len(rows) == 1 else (rows.amin(1), rows.amax(1))
    )
    return torch.maximum(-low, high)


def _magnitudes(error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and RMS of each row, in float64."""
    error = error.float() if error.dtype in (torch.float16, torch.bfloat16) else error
    return _largest(error).double(), torch.linalg.vector_norm(error, dim=1).double() / math.sqrt(
        error.shape[1]
    )


def _same_special(got: torch.Tensor, single: torch.Tensor) -> bool:
    """Whether NaNs, infinities and minus infinities are in the same places."""
    return all(
        torch.equal(special(got), special(single))
        for special in (torch.isnan, torch.isposinf, torch.isneginf)
    )


def _too_large(error: torch.Tensor, max_allowed: float, rms_allowed: float) -> str | None:
    if error.numel() == 0:
        return None
    largest, rms = (figure.item() for figure in _magnitudes(error.reshape(1, -1)))
    if not largest <= max_allowed:  # written so that NaN is wrong
        return "max_error" if math.isfinite(largest) else "finite_mask"
    return None if rms <= rms_allowed else "rms_error"


def compare(got: torch.Tensor, single: torch.Tensor, expected: torch.Tensor, params: Params) -> str | None:
    """Why `got` is wrong, or None; `Expected` in one call."""
    return Expected(single, expected, params.sandbox, params.precision).fault(got)
