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

# Smallest limit of the maximum error, relative to the largest absolute value of the reference output. It is a
# few float32 units in the last place, because the float32 reference may happen to have no error. The limit of
# the RMS error is a quarter of it.
FLOAT32_FLOOR = 8 * 2.0**-23
# The same limit of float64 outputs, with which a computation in float32 is wrong. The error of a float64
# output is not known, because nothing is computed more precisely.
FLOAT64_FLOOR = 1e-10
# Smallest absolute tolerance in units in the last place (at 1) of an output in half precision.
HALF_TOLERANCE = 8
HALF_DTYPES = (torch.float16, torch.bfloat16)
# Largest rounding error (`rounding_error`) of an output in half precision, as a multiple of the reference
# output's own. Rounding the exact answer once gives 0.29 units, rounding it twice 0.41, truncating it 0.58.
ROUNDING_MULTIPLE = 1.5
# Largest rounding error that is always allowed: the first number, plus the second divided by the root of the
# number of elements, because the rounding error of few elements is a matter of chance.
ROUNDING_FLOOR = 0.25, 2.0
# Units of an element's error that count at most, because an error is large where much cancels.
MOST_UNITS = 4.0
# Smallest unit of bfloat16, whose subnormal numbers a float kernel may flush to 0 as those of float32.
FLUSHED = 2.0**-124
# KernelBench's tolerances, absolute and relative alike, by dtype of the output.
KERNELBENCH_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
# Range of the maximum error in which squares of float32 errors neither overflow nor vanish.
SQUARABLE = (1e-12, 1e14)
# Largest absolute value in an output whose errors are computed in float32. A difference of larger values
# could overflow.
LARGEST_SCALE = 1e37
# Largest number of elements of a block, and smallest one with which a block is seldom small by cancellation.
BLOCK, MIN_BLOCK = 64, 16
# Multiple of the reference output's error that must still be right for a block to be compared, and the same
# in half precision, where rounding alone is an eighth of what a block may differ.
BLOCK_MULTIPLE, HALF_BLOCK_MULTIPLE = 16, 8
# Elements of one output that are compared at a time.
PART_NUMEL = 1 << 26


def smallest_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest limits of the maximum and the RMS error of an output of type `dtype`.

    The limits are relative to the largest absolute value of the reference output, with which the output is
    compared. An output in half precision has larger limits, because rounding the exact value to `dtype`
    changes it by up to half a unit in the last place.
    """
    unit = torch.finfo(dtype).eps
    floor = FLOAT64_FLOOR if dtype == torch.float64 else FLOAT32_FLOOR
    return max(floor, unit), max(floor / 4, unit / 2)


def block_size(shape: torch.Size) -> int:
    """Return the number of elements of each block in which an output with this shape is compared.

    It is 1 if the output has fewer than two dimensions. Otherwise it is the length of the last dimension, at
    most `BLOCK`.
    """
    return 1 if len(shape) < 2 else max(1, min(BLOCK, shape[-1]))


def block_limits(dtype: torch.dtype, block: int) -> tuple[tuple[int, float, int], ...]:
    """Return the limits for single elements and for blocks of `block` elements of an output of type `dtype`.

    The result has a limit for single elements and one for blocks. Each limit is a tuple of the number of
    elements of a block, the error relative to the block's largest value that is always allowed, and a number
    n: at most one in n blocks may have a larger error, because the values of a few blocks are small by
    cancellation.
    """
    share = 2.0**-6
    if block >= MIN_BLOCK:
        share = 2.0**-27 if dtype == torch.float64 else max(2.0**-12, 4 * torch.finfo(dtype).eps)
    return (1, 0.25, 64), (block, share, 512)


def rounding_error(error: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rounding error of outputs of the half-precision type `dtype`, as a float64 vector [calls].

    `error` has the errors of the outputs and `values` the right values, both with the shape [calls, n]. The
    result is the root mean square of the errors, each in units in the last place of its own value and at most
    `MOST_UNITS`. A unit is at least `FLOAT32_FLOOR` of the call's largest value, because a computation in
    float32 is no more exact. Elements whose value is NaN or infinite count as exact.
    """
    unit = torch.finfo(dtype).eps
    smallest = unit * torch.finfo(dtype).smallest_normal if dtype == torch.float16 else FLUSHED
    floor = FLOAT32_FLOOR * max_abs(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    # The exponent of `frexp` is one more than that of the unit's number.
    units = torch.ldexp(torch.full_like(values, unit / 2), torch.frexp(values).exponent)
    units = torch.maximum(units, floor.clamp_(min=smallest)[:, None])
    found = (error / units).nan_to_num_(nan=0.0).clamp_(-MOST_UNITS, MOST_UNITS)
    return found.square().mean(1, dtype=torch.float64).sqrt()


def wrong_blocks(
    error: torch.Tensor, values: torch.Tensor, share: float, block: int, resolved: torch.Tensor | None = None
) -> torch.Tensor:
    """Return which blocks of outputs are wrong, in the shape [calls, blocks].

    `error` has the errors of the outputs and `values` the right values, both with the shape [calls, n]. A
    block has `block` consecutive elements and is wrong if its largest error is more than `share` of its
    largest value. A block is not called wrong if its values vanish or are not finite, or if the mask
    `resolved`, in the shape of the result, is False for it. Elements after the last whole block are not
    compared.
    """
    length = error.shape[1] // block * block
    largest, size = (_largest(tensor[:, :length].unflatten(1, (-1, block))) for tensor in (error, values))
    is_wrong = (largest > share * size) & (size > 1e3 * torch.finfo(values.dtype).smallest_normal)
    is_wrong &= size.isfinite()
    return is_wrong if resolved is None else is_wrong & resolved


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value in the last dimension, which the result does not have."""
    return torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())


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
        self.kept: list[_Part] = []
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

    def _part(self, start: int) -> _Part:
        if self.kept and start // PART_NUMEL < len(self.kept):
            return self.kept[start // PART_NUMEL]
        return _Part(self._piece(self.single, start), self._piece(self.expected, start))

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
            distance = _distance(ours, single).masked_fill_(same_special(ours, single), 0.0)
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

    def _is_close(self, flat: torch.Tensor, tolerance: float) -> bool:
        """Return whether the flattened output `flat` is close to the reference output in KernelBench's sense.

        The comparison is torch.allclose, with `tolerance` as absolute and as relative tolerance.
        """
        return all(
            torch.allclose(self._piece(self.single, start), self._piece(flat, start), tolerance, tolerance)
            for start in self._starts
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
                if not bool(is_right.all()):
                    return "wrong_values"
            return None
        if self.tolerance is not None and self._is_close(flat, self.tolerance):
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


class _Part:
    """Elements of a reference output, prepared so that comparing an output with them takes little time.

    `single` has the elements at the task's precision, and `expected` has them in float64, both in one
    dimension. If all values are finite and not too large (`LARGEST_SCALE`), an output is compared with the
    sum of `high` and `low`: `high` has the values of `expected` rounded to float32, and `low` the remainders,
    also in float32. If `single` is float64, `high` is `expected` and `low` is 0. The difference between an
    output and this sum is exact if both are close to each other. If they are far apart, the difference is
    rounded, but the output is wrong in any case. If a value is not finite or too large, `high` and `low` do
    not exist. Errors are then computed in float64, with `rounded`, which has the values of `expected` rounded
    to the dtype of `single`.

    From `scale` and `reach` follow the errors that are allowed. `scale` is the largest absolute value of the
    elements; in half precision, a value that overflows counts as the largest finite number. `reach` is 0
    except in half precision, where it is the largest absolute float64 value, also if this value overflows in
    half precision: an honest kernel that sums in float32 may be wrong by float32's rounding of terms of this
    size, even where they cancel.
    """

    def __init__(self, single: torch.Tensor, expected: torch.Tensor):
        self.single, self.expected = single, expected
        rounded = expected.to(single.dtype)
        all_finite = bool(torch.isfinite(rounded).all())
        values = expected
        if not all_finite:
            values = torch.where(torch.isfinite(rounded), expected, single.double())
            values = values[torch.isfinite(values)]
        self.scale = max_abs(values.reshape(1, -1)).item() if values.numel() else 0.0
        largest, self.reach = torch.finfo(single.dtype).max, 0.0
        if single.dtype in HALF_DTYPES:
            self.reach = self.scale
            if not all_finite:
                self.reach = max_abs(expected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)[None]).item()
            self.scale = min(max(self.scale, self.reach), largest)
            all_finite &= self.scale < largest / 2
        # Rounded values if the errors must be computed in float64, element by element; None otherwise.
        self.rounded: torch.Tensor | None = None
        if all_finite and self.scale < LARGEST_SCALE and bool(torch.isfinite(single).all()):
            dtype = torch.float64 if single.dtype == torch.float64 else torch.float32
            self.high = expected.to(dtype)
            self.low = (expected.double() - self.high.double()).to(dtype)
        else:
            self.rounded = rounded

    def errors(self, output: torch.Tensor) -> tuple[float, float]:
        """Return the maximum and the Euclidean norm of the error of `output`, as Python floats.

        `output` has the elements of another output at the places of this part, in one dimension. Both results
        are NaN or infinity if `output` and the reference differ in where they are NaN or infinite.
        """
        largest, norm = row_magnitudes(self._error(output).reshape(1, -1))
        return largest.item(), norm.item()

    def has_wrong_blocks(self, output: torch.Tensor, block: int) -> bool:
        """Return whether too many elements, or blocks of `block` elements, of `output` are wrong.

        `output` has the elements of another output at the places of this part, in one dimension. An element
        or a block is wrong if its error is large relative to its own values (`wrong_blocks`). One element in
        64 and one block in 512 may be wrong (`block_limits`). Blocks in which the reference output's own
        error is not far below the limit are left out.
        """
        values = (self.high if self.rounded is None else self.expected)[None]
        multiple = HALF_BLOCK_MULTIPLE if output.dtype in HALF_DTYPES else BLOCK_MULTIPLE
        for length, share, blocks_per_wrong in block_limits(output.dtype, block):
            # Where the reference output itself is far more exact.
            resolved = ~wrong_blocks(self._error(self.single)[None], values, share / multiple, length)
            found = wrong_blocks(self._error(output)[None], values, share, length, resolved)
            if int(found.sum()) > found.numel() // blocks_per_wrong:
                return True
        return False

    def is_badly_rounded(self, output: torch.Tensor) -> bool:
        """Return whether `output` is in half precision and its rounding error is above its limit.

        `output` has the elements of another output at the places of this part. The rounding error is the root
        mean square of the errors in units in the last place (`rounding_error`). The limit is
        `ROUNDING_MULTIPLE` times the rounding error of the reference output, but at least the limit that
        `ROUNDING_FLOOR` gives. The latter holds for a reference output without rounding error, as that of a
        maximum.
        """
        if output.dtype not in HALF_DTYPES:
            return False
        values = (self.high if self.rounded is None else self.expected)[None]
        ours, own = (
            rounding_error(self._error(tensor)[None], values, output.dtype).item()
            for tensor in (output, self.single)
        )
        lowest, by_chance = ROUNDING_FLOOR
        return ours > max(ROUNDING_MULTIPLE * own, lowest + by_chance / math.sqrt(output.numel()))

    def _error(self, output: torch.Tensor) -> torch.Tensor:
        if self.rounded is None:
            return torch.sub(output.to(self.high.dtype), self.high).sub_(self.low)
        is_same = same_special(output, self.single) | same_special(output, self.rounded)
        if output.dtype in HALF_DTYPES:
            # An overflow near the largest finite number is an error by the difference from that number.
            largest = torch.finfo(output.dtype).max
            is_near = output.isinf() & (self.expected * output.sign() > largest / 2)
            output = torch.where(is_near, output.double().clamp(-largest, largest), output.double())
        distance = _distance(output, self.expected)
        # A float64 value that overflows in the output's type does not replace a finite reference output.
        from_single = _distance(output, self.single).masked_fill_(self.rounded.isfinite(), math.inf)
        return torch.minimum(distance, from_single).masked_fill_(is_same, 0.0)


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


def same_special(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that are NaN in both tensors, or the same infinity in both."""
    return (first.isnan() & second.isnan()) | (first.isinf() & (first == second))


def _distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference in float64, which is infinite where a tensor is not finite."""
    return (first.double() - second.double()).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)


def max_abs(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each row of a matrix, which is NaN for a row that contains NaN.

    This is several times faster than an infinity norm.
    """
    low, high = (
        (edge[None] for edge in torch.aminmax(rows)) if len(rows) == 1 else (rows.amin(1), rows.amax(1))
    )
    return torch.maximum(-low, high)


def row_magnitudes(error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest absolute value and the Euclidean norm of each row of a matrix, as float64 vectors.

    Rows whose squares would overflow or vanish are divided by their largest value first.
    """
    largest = max_abs(error)
    low, high = SQUARABLE
    is_divided = (largest != 0) & ((largest < low) | (largest > high))
    divisor = torch.where(is_divided, largest, 1.0)
    if is_divided.any():
        error = error / divisor[:, None]
    return largest.double(), torch.linalg.vector_norm(error, dim=1).double() * divisor.double()


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
