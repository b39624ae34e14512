"""Measures of the errors of outputs, and the limits of these measures that follow from the outputs' type.

`correctness.py` decides with them whether an output is right, and `timed_output_check.py` whether an output
of a timed call departs from that of a baseline.
"""

import math

import torch

# Smallest limit of the maximum error, relative to the largest absolute value of the reference output. It is a
# few float32 units in the last place, because the float32 reference may happen to have no error. The limit of
# the RMS error is a quarter of it.
FLOAT32_FLOOR = 8 * 2.0**-23
# The same limit of float64 outputs, with which a computation in float32 is wrong. The error of a float64
# output is not known, because nothing is computed more precisely.
FLOAT64_FLOOR = 1e-10
HALF_DTYPES = (torch.float16, torch.bfloat16)
# Units of an element's error that count at most, because an error is large where much cancels.
MOST_UNITS = 4.0
# Smallest unit of bfloat16, whose subnormal numbers a float kernel may flush to 0 as those of float32.
FLUSHED = 2.0**-124
# Range of the maximum error in which squares of float32 errors neither overflow nor vanish.
SQUARABLE = (1e-12, 1e14)
# Largest number of elements of a block, and smallest one with which a block is seldom small by cancellation.
BLOCK, MIN_BLOCK = 64, 16
# Largest rounding error (`rounding_error`) of an output in half precision, as a multiple of the reference
# output's own. Rounding the exact answer once gives 0.29 units, rounding it twice 0.41, truncating it 0.58.
ROUNDING_MULTIPLE = 1.5
# Largest rounding error that is always allowed: the first number, plus the second divided by the root of the
# number of elements, because the rounding error of few elements is a matter of chance.
ROUNDING_FLOOR = 0.25, 2.0
# Largest absolute value in an output whose errors are computed in float32. A difference of larger values
# could overflow.
LARGEST_SCALE = 1e37
# A block is compared only if the reference output's error in it, multiplied by this number, is still within
# the block's limit. The second number is for half precision, where rounding alone makes an error of an eighth
# of the limit.
BLOCK_MULTIPLE, HALF_BLOCK_MULTIPLE = 16, 8


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


def same_special(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that are NaN in both tensors, or the same infinity in both."""
    return (first.isnan() & second.isnan()) | (first.isinf() & (first == second))


def difference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
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


class ReferencePart:
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
        distance = difference(output, self.expected)
        # A float64 value that overflows in the output's type does not replace a finite reference output.
        from_single = difference(output, self.single).masked_fill_(self.rounded.isfinite(), math.inf)
        return torch.minimum(distance, from_single).masked_fill_(is_same, 0.0)
