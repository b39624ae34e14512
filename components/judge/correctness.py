"""This module decides whether an output is correct, by its error relative to a float64 output.

The maximum error and the root mean square (RMS) error of the output may be at most a small multiple of the
same errors of the reference output, which the task's own source (the module that is to be made faster)
computes at the task's precision. They may never be above the absolute tolerance, except that the reference
output itself is correct. The absolute tolerance is a share of the largest absolute value of the reference
output (docs/design/correctness-criterion.md). A fixed tolerance of 1e-2 or 1e-4 would accept zeros if outputs
are small, and refuse honest sums if outputs are large.

The largest values of an output determine these limits, so a part of it whose values are all small is compared
block by block too (`wrong_blocks`).

The exact answer, which is the float64 value rounded to the output's type, is always correct, and so is the
reference output.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from components.core.errors import TaskError
from components.core.params import Sandbox
from components.core.records import Precision
from components.judge.error_measures import (
    ReferencePart,
    block_size,
    difference,
    same_special,
    smallest_limits,
)

# Smallest absolute tolerance in units in the last place (at 1) of an output in half precision.
HALF_TOLERANCE = 8
# KernelBench's tolerances, absolute and relative alike, by dtype of the output.
KERNELBENCH_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
# Elements of one output that are compared at a time.
PART_NUMEL = 1 << 26


class ReferenceOutput:
    """Reference values for one output tensor of a call, with the limits for the errors of other outputs.

    The task's own source, the module that is to be made faster, has computed the reference values. Other
    outputs are compared with them in parts of at most `PART_NUMEL` elements, so that a comparison needs
    little memory beside the tensors.
    """

    def __init__(
        self,
        single: torch.Tensor,
        expected: torch.Tensor,
        sandbox: Sandbox,
        precision: Precision,
        *,
        device: str | torch.device | None = None,
        keep_parts: bool = True,
    ):
        """Prepare `single`, the reference output at `precision`, and `expected`, the float64 output.

        Both are results of the task's own source and have the same shape. Comparisons are made on `device`,
        which is by default that of `single`. `sandbox` are the parameters of that section, whose tolerances
        determine the limits of errors. If `keep_parts` is set, the parts of the output are prepared once and
        kept, which takes as much memory as `expected`. Otherwise each comparison prepares them again.
        """
        self.shape, self.device = single.shape, device or single.device
        self.block = block_size(single.shape)
        self.single, self.expected = _flat(single), _flat(expected)
        self.errors = self.limits = (0.0, 0.0)  # of the maximum and the RMS error
        self.ceiling = 0.0
        # Tolerance with which an output may also be correct, or None.
        self.tolerance: float | None = None
        if sandbox.tolerance == "kernelbench":
            self.tolerance = KERNELBENCH_TOLERANCES.get(single.dtype, 1e-4)
        self.kept: list[ReferencePart] = []
        if not self.single.dtype.is_floating_point or self.single.numel() == 0:
            return
        scale, reach, errors = 0.0, 0.0, []
        for start in self._starts:
            part = self._part(start)
            scale, reach = max(scale, part.scale), max(reach, part.reach)
            errors.append(part.errors(part.single))
            if keep_parts:
                self.kept.append(part)
        self.errors = _combined(errors, self.single.numel())
        unit, smallest = torch.finfo(single.dtype).eps, torch.finfo(single.dtype).smallest_normal
        smallest *= unit  # the smallest subnormal number, below which nothing can be represented
        share = sandbox.tf32_tolerance if precision == "tf32" else sandbox.absolute_tolerance
        self.ceiling = max(share, HALF_TOLERANCE * unit) * scale + smallest
        max_limit, rms_limit = (
            max(sandbox.error_multiple * error, floor * scale, least * reach, smallest)
            for error, floor, least in zip(
                self.errors, smallest_limits(single.dtype), smallest_limits(torch.float32), strict=True
            )
        )
        self.limits = max_limit, rms_limit

    @property
    def _starts(self) -> range:
        """Indices in the flattened output at which its parts begin."""
        return range(0, self.single.numel(), PART_NUMEL)

    def _piece(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        return tensor[start : start + PART_NUMEL].to(self.device)

    def _part(self, start: int) -> ReferencePart:
        if self.kept and start // PART_NUMEL < len(self.kept):
            return self.kept[start // PART_NUMEL]
        return ReferencePart(self._piece(self.single, start), self._piece(self.expected, start))

    @property
    def exceeds_tolerance(self) -> bool:
        """Whether the reference output's own maximum error is above the absolute tolerance.

        The error is the difference from the float64 output, and the tolerance is a share of the largest
        absolute value. If the property is True, the reference output cannot decide whether another output is
        correct. With KernelBench's tolerances it is always False, because outputs are then compared with the
        reference output itself.
        """
        return self.tolerance is None and not self.errors[0] <= self.ceiling

    def is_repeated_by(self, output: torch.Tensor) -> bool:
        """Return whether `output` equals the reference output `single`, up to the absolute tolerance.

        Elements that are NaN or the same infinity in both are equal.
        """
        return self.departures(output, self.ceiling)[0] == 0

    def departures(self, output: torch.Tensor, limit: float) -> tuple[int, float]:
        """Return how many elements of `output` differ from the reference output by more than `limit`.

        The second result is the largest difference of any element. Integers are compared in the same way.
        Elements that are NaN or the same infinity in both are equal; others that are not finite differ by
        infinity.
        """
        flat, count, largest = _flat(output), 0, 0.0
        for start in self._starts:
            ours, single = self._piece(flat, start), self._piece(self.single, start)
            distance = difference(ours, single).masked_fill_(same_special(ours, single), 0.0)
            count += int((distance > limit).sum())
            largest = max(largest, float(distance.max()))
        return count, largest

    def describe_departures(self, output: torch.Tensor) -> str:
        """Return a clause that says how many elements of `output` differ from the reference, and how far.

        Differences up to the limit of the maximum error, or up to KernelBench's tolerance if it is used, are
        not counted.
        """
        limit = self.limits[0] if self.tolerance is None else self.tolerance
        count, largest = self.departures(output, limit)
        return (
            f"{count} of {self.single.numel()} elements differ from the task's own output by more than"
            f" {limit:.1e}, by {largest:.1e} at most"
        )

    def mismatch(self, output: torch.Tensor, *, multiple: float = 1.0, loose: float = 0.0) -> str | None:
        """Return the reason why `output` is wrong, or None if it is correct.

        `output` is the output of a candidate (an implementation that is judged) or of a baseline such as
        torch.compile. It has the shape and dtype of the reference output, which is the task's own output at
        the task's precision (the argument `single` of this class) and is always correct itself. The reasons
        are `wrong_values` for integers, and `max_error`, `rms_error`, `block_error` (`wrong_blocks`) and
        `finite_mask` (NaN or infinity at a wrong place) for floating-point numbers. In half precision there
        is `rounding_error` too (`ROUNDING_MULTIPLE`), whose limit `multiple` does not change.

        Errors are differences from the float64 output. Their limits are multiplied by `multiple`, but are at
        most the absolute tolerance, or the reference output's own error if that is larger. If `loose` is not
        0, errors up to `loose` times the absolute tolerance, or up to their limit if that is larger, are
        allowed, and neither blocks nor rounding errors are compared. This is used for baselines, because
        torch.compile may round differently.

        Where the reference output or the rounded float64 output is NaN or infinite, an element is correct if
        it is the same special value as in one of the two. If only one of the two is finite there, an element
        that is close to it is correct too. An integer is correct if it equals the one at its place in the
        reference output or in the float64 output. Both are right, because rounding decides, for example,
        which of two nearly equal elements is the largest.

        With the parameter sandbox.tolerance=kernelbench, a floating-point output is also correct if
        it is close to the reference output by torch.allclose, with KernelBench's tolerance
        (`KERNELBENCH_TOLERANCES`) as absolute and as relative tolerance.
        """
        flat = _flat(output)
        if flat.numel() == 0:
            return None
        pieces = [(start, self._piece(flat, start)) for start in self._starts]
        if not self.single.dtype.is_floating_point:
            for start, ours in pieces:
                is_right = (ours == self._piece(self.single, start)) | (
                    ours == self._piece(self.expected, start)
                )
                if ours.dtype == torch.bool:  # any byte but 0 equals True
                    is_right &= ours.view(torch.uint8) <= 1
                if not bool(is_right.all()):
                    return "wrong_values"
            return None
        if self.tolerance is not None and all(
            torch.allclose(self._piece(self.single, start), ours, self.tolerance, self.tolerance)
            for start, ours in pieces
        ):
            return None
        largest, rms = _combined([self._part(start).errors(ours) for start, ours in pieces], flat.numel())
        if loose:
            allowed = [max(limit, loose * self.ceiling) for limit in self.limits]
        else:
            allowed = [
                max(min(multiple * limit, self.ceiling), error if math.isfinite(error) else 0.0)
                for limit, error in zip(self.limits, self.errors, strict=True)
            ]
        if not largest <= allowed[0]:  # NaN is wrong too
            return "max_error" if math.isfinite(largest) else "finite_mask"
        if not rms <= allowed[1]:
            return "rms_error"
        if not loose and any(self._part(start).has_wrong_blocks(ours, self.block) for start, ours in pieces):
            return "block_error"
        if not loose and any(self._part(start).is_badly_rounded(ours) for start, ours in pieces):
            return "rounding_error"
        return None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` in one dimension; a complex number becomes two elements."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _combined(errors: list[tuple[float, float]], count: int) -> tuple[float, float]:
    """Return the maximum and the RMS of the error of an output of `count` elements.

    `errors` has the maximum and the Euclidean norm of the error of each part of the output. The maximum is
    NaN if the maximum of any part is NaN.
    """
    largest = [part[0] for part in errors]
    return math.nan if any(map(math.isnan, largest)) else max(largest), math.hypot(
        *(norm for _, norm in errors)
    ) / math.sqrt(count)


class Mismatch(NamedTuple):
    """The reason why an output is wrong, as a verdict names it, and a clause for people with the details.

    `reason` is a code such as `max_error:given`, which names the kind of the error and the input distribution
    (the change that was made to the inputs, with `given` for none). `detail` says for example how many
    elements are wrong.
    """

    reason: str
    detail: str


def first_mismatch(
    references: list[ReferenceOutput],
    outputs: list[torch.Tensor],
    distribution: str,
    *,
    multiple: float = 1.0,
    loose: float = 0.0,
    repeats: bool = False,
) -> Mismatch | None:
    """Return why an output of one call is wrong, or None if all outputs are right.

    `outputs` are the output tensors of the call, each with one dimension, and `references` has the reference
    output of each, in the same order. The reason ends with `distribution`, the name of the change that was
    made to the inputs, such as `scaled`, or `given` for none. The largest errors that
    `ReferenceOutput.mismatch` allows are multiplied by `multiple`. `loose`, if it is not 0, allows errors up
    to this multiple of the absolute tolerance (`sandbox.absolute_tolerance` times the largest absolute
    value); it is meant for outputs of the task's own source, such as those of its baselines.

    `repeats` says that the task's own source has computed `outputs` once more. With KernelBench's tolerances,
    which do not compare the reference output with float64, `outputs` must then equal the reference outputs up
    to the absolute tolerance, because otherwise the task is not deterministic.

    The error of a reference output against float64 may be above the absolute tolerance
    (`ReferenceOutput.exceeds_tolerance`), so that it cannot decide about every output. With `loose`,
    TaskError is raised in this case if the output equals the reference output up to the absolute tolerance;
    otherwise two runs of the same source differ, so the task is not deterministic, and the output is called
    wrong. Without `loose`, TaskError is raised in this case if the output is wrong but would be right with
    `loose` 1.
    """
    for output, reference in zip(outputs, references, strict=True):
        shaped = output.view(reference.shape)
        reason = reference.mismatch(shaped, multiple=multiple, loose=loose)
        decides = repeats if reference.tolerance is not None else loose and reference.exceeds_tolerance
        if decides and not reference.is_repeated_by(shaped):
            # The task is not deterministic.
            return Mismatch(f"max_error:{distribution}", reference.describe_departures(shaped))
        if reference.exceeds_tolerance and (
            loose or (reason is not None and reference.mismatch(shaped, loose=1.0) is None)
        ):
            raise TaskError(
                f"its result differs from its float64 result by {reference.errors[0]:.1e} on inputs of the"
                f" distribution {distribution}, where sandbox.absolute_tolerance allows"
                f" {reference.ceiling:.1e}; make the task better conditioned or raise the tolerance. If it"
                " uses low precision on purpose, --tolerance kernelbench compares with its own output."
            )
        if reason is not None:
            return Mismatch(f"{reason}:{distribution}", reference.describe_departures(shaped))
    return None
