"""Correctness of a candidate's output: its error against float64, compared with the error of float32.

The error may be at most a small multiple of the float32 reference's own error, in maximum and in root mean
square (RMS), and never above the absolute tolerance. Both are relative to the scale of the reference output
(docs/design/correctness-criterion.md). A fixed tolerance of 1e-2 or 1e-4 accepts zeros where outputs are
small, and refuses honest sums where they are large.
"""

from __future__ import annotations

import math

import torch

from components.core.config import Params, Precision, Sandbox

FLOAT32_FLOOR = 8 * 2.0**-23
"""Smallest allowed maximum error, relative to the largest output: a few units in the last place."""
COMPARED_BYTES = 1 << 26
"""Bytes of reference outputs compared at a time."""


class ReferenceOutput:
    """Reference output of one call, prepared once so that a comparison takes three passes in float32.

    The float64 value is stored as its float32 part and the float32 part of the remainder. The difference to a
    result close to the value is then exact; of a result far from it, only that it is far has to be known.
    """

    def __init__(self, single: torch.Tensor, expected: torch.Tensor, sandbox: Sandbox, precision: Precision):
        """Prepare the reference's output at `precision`, `single`, and in float64, `expected`.

        Both have the same shape.
        """
        self.single = single
        self.mask: torch.Tensor | None = None
        self.slack = (0.0, 0.0)
        """Allowed distance of a correct result from `single`: maximum and RMS, relative to the scale."""
        if not single.dtype.is_floating_point:
            return
        both_finite = torch.isfinite(single) & torch.isfinite(expected)
        if not both_finite.all():
            self.mask, single, expected = both_finite, single[both_finite], expected[both_finite]
        expected = expected.double()
        self.dtype = torch.float64 if single.dtype == torch.float64 else torch.float32
        self.high = expected.to(self.dtype)
        self.low = (expected - self.high.double()).to(self.dtype)
        if expected.numel() == 0:
            self.max_allowed = self.rms_allowed = self.ceiling = 0.0
            return
        scale = expected.abs().max().item()
        error = (single.double() - expected).abs_()
        max_error, rms_error = error.max().item(), error.square().mean().sqrt().item()
        self.ceiling = (sandbox.tf32_tolerance if precision == "tf32" else sandbox.absolute_tolerance) * scale
        multiple = sandbox.error_multiple
        self.max_allowed = min(max(multiple * max_error, FLOAT32_FLOOR * scale), self.ceiling)
        self.rms_allowed = min(max(multiple * rms_error, FLOAT32_FLOOR / 4 * scale), self.ceiling)
        if scale > 0:
            self.slack = ((self.max_allowed + max_error) / scale, (self.rms_allowed + rms_error) / scale)

    def mismatch(self, output: torch.Tensor, *, loose: bool = False) -> str | None:
        """Return why `output`, of the shape and dtype of `single`, is wrong, or None.

        Integers must be equal. With `loose` only the absolute tolerance counts; this is meant for baselines,
        since torch.compile may round differently.
        """
        if not self.single.dtype.is_floating_point:
            return None if torch.equal(output, self.single) else "wrong_values"
        if self.mask is not None:
            if not _same_special_values(output, self.single):
                return "finite_mask"
            output = output[self.mask]
        allowed = (self.ceiling, self.ceiling) if loose else (self.max_allowed, self.rms_allowed)
        return _excess(torch.sub(output.to(self.dtype), self.high).sub_(self.low), *allowed)


def first_mismatch(
    outputs: torch.Tensor, single: torch.Tensor, slack: list[tuple[float, float]]
) -> tuple[int, str] | None:
    """Return the first timed call whose output is wrong, and why; return None if all are right.

    `outputs` and `single`, a baseline's float32 outputs for the same inputs, are [calls, *shape]; `slack` is
    `ReferenceOutput.slack` by call. Integers must be equal.

    A float64 reference for every timed call would cost more than the rest of a judgement. Instead an error
    may be twice the distance of two correct results, which is known from the correctness sets. Many calls are
    compared at once, since on cuda each synchronisation costs as much as a small call.
    """
    if outputs[0].numel() == 0:
        return None
    step = max(1, COMPARED_BYTES // single[0].nbytes)
    for first in range(0, outputs.shape[0], step):
        ours, theirs = (rows[first : first + step].flatten(1) for rows in (outputs, single))
        if not single.dtype.is_floating_point:
            if not torch.equal(ours, theirs):
                return first + _first_true((ours != theirs).any(1)), "wrong_values"
            continue
        scale = _max_abs(theirs).double()
        if not torch.isfinite(scale).all():
            for index in range(ours.shape[0]):
                reason = _mismatch_with_special_values(ours[index], theirs[index], slack[first + index])
                if reason is not None:
                    return first + index, reason
            continue
        error = torch.sub(ours, theirs)
        max_error, rms_error = _magnitudes(error)
        relative = torch.tensor(slack[first : first + step], dtype=torch.float64, device=scale.device)
        allowed = 2 * scale[:, None] * relative
        wrong = ~((max_error <= allowed[:, 0]) & (rms_error <= allowed[:, 1]))  # in this form NaN is wrong
        if wrong.any():
            row = _first_true(wrong)
            return first + row, _excess(error[row], *allowed[row].tolist()) or "max_error"
    return None


def _mismatch_with_special_values(
    output: torch.Tensor, single: torch.Tensor, slack: tuple[float, float]
) -> str | None:
    """Return why one call's output is wrong, or None, if the baseline's output is not finite everywhere."""
    if not _same_special_values(output, single):
        return "finite_mask"
    finite = torch.isfinite(single)
    output, single = output[finite], single[finite]
    scale = _max_abs(single[None]).item() if single.numel() else 0.0
    return _excess(torch.sub(output, single), 2 * slack[0] * scale, 2 * slack[1] * scale)


def _first_true(rows: torch.Tensor) -> int:
    return int(rows.nonzero()[0].item())


def _max_abs(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each row, or NaN for a row that has one.

    This is several times faster than an infinity norm.
    """
    low, high = (
        (edge[None] for edge in torch.aminmax(rows)) if len(rows) == 1 else (rows.amin(1), rows.amax(1))
    )
    return torch.maximum(-low, high)


def _magnitudes(error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum and the RMS of each row, in float64."""
    error = error.float() if error.dtype in (torch.float16, torch.bfloat16) else error
    norm = torch.linalg.vector_norm(error, dim=1).double()
    return _max_abs(error).double(), norm / math.sqrt(error.shape[1])


def _same_special_values(output: torch.Tensor, single: torch.Tensor) -> bool:
    """Return whether NaNs, infinities and negative infinities are at the same positions."""
    return all(
        torch.equal(special(output), special(single))
        for special in (torch.isnan, torch.isposinf, torch.isneginf)
    )


def _excess(error: torch.Tensor, max_allowed: float, rms_allowed: float) -> str | None:
    """Return which of the two limits `error` exceeds, or None."""
    if error.numel() == 0:
        return None
    largest, rms = (figure.item() for figure in _magnitudes(error.reshape(1, -1)))
    if not largest <= max_allowed:  # in this form NaN is wrong
        return "max_error" if math.isfinite(largest) else "finite_mask"
    return None if rms <= rms_allowed else "rms_error"


def compare(output: torch.Tensor, single: torch.Tensor, expected: torch.Tensor, params: Params) -> str | None:
    """Return why `output` is wrong, or None; see `ReferenceOutput`."""
    return ReferenceOutput(single, expected, params.sandbox, params.precision).mismatch(output)
