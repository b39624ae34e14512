"""Correctness of a candidate's output: its error relative to float64, compared with the error of float32.

The maximum error and the root mean square (RMS) error of the output may be at most a small multiple of the
same errors of the float32 reference output, and never above the absolute tolerance. The tolerance is a share
of the largest absolute value of the reference output (docs/design/correctness-criterion.md). A fixed
tolerance of 1e-2 or 1e-4 would accept zeros if outputs are small, and refuse honest sums if outputs are
large.
"""

import math

import torch

from components.core.params import Params, Precision, Sandbox

# Smallest limit of the maximum error, relative to the largest absolute value of the reference output. It is a
# few float32 units in the last place, because the float32 reference may happen to have no error.
FLOAT32_FLOOR = 8 * 2.0**-23
# Bytes of reference outputs that are compared at a time.
COMPARED_BYTES = 1 << 26


class ReferenceOutput:
    """Reference for one output tensor of a call, prepared so that a comparison takes three passes in float32.

    The float64 value is stored as its float32 part and the float32 part of the remainder. The difference
    between an output and the value is then exact if both are close to each other. If they are far apart, the
    difference is rounded, but the output is wrong in any case.
    """

    def __init__(self, single: torch.Tensor, expected: torch.Tensor, sandbox: Sandbox, precision: Precision):
        """Prepare `single`, the reference output at `precision`, and `expected`, the float64 output.

        Both tensors have the same shape and are used by `mismatch`.
        """
        self.single = single
        self.mask: torch.Tensor | None = None
        # Largest distance (maximum, RMS) of a correct output from `single`, relative to the scale. The scale
        # is the largest absolute value of `expected`.
        self.slack = (0.0, 0.0)
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
        """Return the reason why `output` is wrong, or None if it is correct.

        `output` has the shape and dtype of `single`. Integers must be equal. If `loose` is set, only the
        absolute tolerance is applied; this is used for baselines, because torch.compile may round
        differently.
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
    """Return the index of the first call with a wrong output and the reason, or None if all are right.

    `outputs` and `single`, a baseline's outputs for the same inputs, have the shape [calls, *shape]. `slack`
    has `ReferenceOutput.slack` for each call. Integers must be equal.

    There is no float64 reference for timed calls, because computing one would take longer than the rest of a
    judgement. Instead, an output may differ from the baseline's output by at most twice the slack, which is
    known from the correctness sets. Many calls are compared at once, because on cuda each synchronisation
    takes as long as a small call.
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
        wrong = ~((max_error <= allowed[:, 0]) & (rms_error <= allowed[:, 1]))  # NaN is wrong too
        if wrong.any():
            row = _first_true(wrong)
            return first + row, _excess(error[row], *allowed[row].tolist()) or "max_error"
    return None


def _mismatch_with_special_values(
    output: torch.Tensor, single: torch.Tensor, slack: tuple[float, float]
) -> str | None:
    """Return the reason why the output of one call is wrong, or None if it is right.

    This comparison is used if `single`, the baseline's output, contains NaN or infinity.
    """
    if not _same_special_values(output, single):
        return "finite_mask"
    finite = torch.isfinite(single)
    output, single = output[finite], single[finite]
    scale = _max_abs(single[None]).item() if single.numel() else 0.0
    return _excess(torch.sub(output, single), 2 * slack[0] * scale, 2 * slack[1] * scale)


def _first_true(rows: torch.Tensor) -> int:
    return int(rows.nonzero()[0].item())


def _max_abs(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each row, which is NaN for a row that contains NaN.

    This is several times faster than an infinity norm.
    """
    low, high = (
        (edge[None] for edge in torch.aminmax(rows)) if len(rows) == 1 else (rows.amin(1), rows.amax(1))
    )
    return torch.maximum(-low, high)


def _magnitudes(error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest absolute value and the root mean square of each row, as float64 tensors."""
    error = error.float() if error.dtype in (torch.float16, torch.bfloat16) else error
    norm = torch.linalg.vector_norm(error, dim=1).double()
    return _max_abs(error).double(), norm / math.sqrt(error.shape[1])


def _same_special_values(output: torch.Tensor, single: torch.Tensor) -> bool:
    """Return whether NaN, infinity and negative infinity are at the same positions in both tensors."""
    return all(
        torch.equal(special(output), special(single))
        for special in (torch.isnan, torch.isposinf, torch.isneginf)
    )


def _excess(error: torch.Tensor, max_allowed: float, rms_allowed: float) -> str | None:
    """Return the reason why `error` exceeds a limit, or None if it exceeds neither limit.

    The reason is `max_error`, `rms_error`, or `finite_mask` if the largest error is not finite.
    """
    if error.numel() == 0:
        return None
    largest, rms = (figure.item() for figure in _magnitudes(error.reshape(1, -1)))
    if not largest <= max_allowed:  # NaN is wrong too
        return "max_error" if math.isfinite(largest) else "finite_mask"
    return None if rms <= rms_allowed else "rms_error"


def compare(output: torch.Tensor, single: torch.Tensor, expected: torch.Tensor, params: Params) -> str | None:
    """Return the reason why `output` is wrong according to `ReferenceOutput`, or None if it is correct."""
    return ReferenceOutput(single, expected, params.sandbox, params.precision).mismatch(output)
