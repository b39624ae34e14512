"""Correctness: a candidate's output against the float64 reference, measured by what float32 itself can reach.

The error may be at most a small multiple of the float32 reference's own error (maximum and RMS), and never above the
absolute tolerance; both are relative to the scale of the expected output (DESIGN §5). A fixed 1e-2 or 1e-4 lets zeros
pass where outputs are small, and refuses honest sums where they are large (knowledge: KernelBench #165).
"""

from __future__ import annotations

import torch

from components.config import Sandbox

FLOAT32_FLOOR = 8 * 2.0**-23
"""A few units in the last place of the largest output: no order of summation may be punished for less."""


def compare(got: torch.Tensor, single: torch.Tensor, expected: torch.Tensor, sandbox: Sandbox) -> str | None:
    """Why `got` is wrong, or None.

    `got` and `single` (the float32 reference's own output) share shape and dtype; `expected` is the same in float64.
    Integer and boolean outputs must be equal.
    """
    if not got.dtype.is_floating_point:
        return None if torch.equal(got, single) else "wrong_values"
    finite = torch.isfinite(single)
    if not torch.equal(torch.isfinite(got), finite):
        return "finite_mask"
    both = finite & torch.isfinite(expected)
    if not both.all():
        got, single, expected = got[both], single[both], expected[both]
    if expected.numel() == 0:
        return None
    expected = expected.double()
    scale = expected.abs().max().item()
    error = (got.double() - expected).abs_()
    own = (single.double() - expected).abs_()
    ceiling = sandbox.absolute_tolerance * scale
    allowed = min(max(sandbox.error_multiple * own.max().item(), FLOAT32_FLOOR * scale), ceiling)
    if not error.max().item() <= allowed:
        return "max_error"
    root_mean_square = error.square().mean().sqrt().item()
    allowed = min(max(sandbox.error_multiple * own.square().mean().sqrt().item(), FLOAT32_FLOOR / 4 * scale), ceiling)
    return None if root_mean_square <= allowed else "rms_error"
