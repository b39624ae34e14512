"""Structures of a task's inputs on which a kernel may rely, and the input distributions that keep them.

An input distribution is a change of the inputs, such as `scaled`. A kernel may read half of a symmetric
matrix, or search in sorted edges. Inputs with such a structure are therefore never mixed (combined from two
sets of inputs): every call gets inputs that the task's own `get_inputs` has drawn.
"""

import itertools
import math
from collections.abc import Sequence

import torch

# Input distributions that keep a structure, by the name of the structure.
KEPT_BY: dict[str, frozenset[str]] = {
    # Zeros at the same places in all sets, as in triangular matrices.
    "zeros": frozenset({"scaled", "flipped", "integers", "wide"}),
    # Rows, columns or the whole tensor in ascending or descending order.
    "sorted": frozenset({"scaled", "shifted", "integers"}),
    "symmetric": frozenset({"scaled", "shifted", "flipped", "integers"}),
    # Rows that all have the same sum or the same norm, or that are logarithms of probabilities.
    "normalised": frozenset(),
    # At most FEW_VALUES different values, as in a mask of zeros and ones.
    "few_values": frozenset(),
    # Floating-point numbers that are all integers, as class numbers are.
    "whole": frozenset(),
    # Many equal values, as after a clamp, or in rows that repeat.
    "repeated": frozenset({"scaled", "shifted", "flipped", "integers"}),
    # Infinity, as in an additive mask, or NaN.
    "not_finite": frozenset({"scaled", "integers", "wide"}),
    # Correlation with another input of the same shape.
    "related": frozenset({"scaled", "flipped"}),
    # Integers, booleans and complex numbers, which no input distribution changes.
    "not_real": frozenset(),
}
FEW_VALUES = 16
# Largest numbers of elements that are examined in a sample of rows, and of single elements.
MAX_ROWS_NUMEL = 1 << 18
MAX_SAMPLE = 1 << 14
# Elements of a tensor that are examined or moved to the device at a time.
BLOCK_NUMEL = 1 << 26
# Smallest share of different values in a sample of floating-point numbers of 32 bits or more that were drawn
# from a continuous distribution, and smallest number of different values of 16 bits.
DISTINCT_SHARE = 0.99
DISTINCT_HALVES = 128
# Rows are normalised if the spread of their sums is below this share of the spread of sums of as many
# independent elements.
NORMALISED_SHARE = 0.02
# Smallest number of rows whose sums are compared; those of two rows are close by chance.
MIN_ROWS = 4
# Smallest absolute correlation that related inputs have in each of so many sets. Unrelated inputs seldom have
# it in one set, because at least RELATED_NUMEL elements are compared, unless most of these repeat.
RELATED, RELATED_NUMEL, RELATED_SETS = 0.2, 1024, 4


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements of a tensor are finite, which is always so for integers and booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex()) or all(
        bool(block.isfinite().all()) for block in tensor.reshape(-1).split(BLOCK_NUMEL)
    )


def input_structures(sets: Sequence[Sequence[torch.Tensor]], device: str) -> list[frozenset[str]]:
    """Return the set of structures of each input, by their names in `KEPT_BY`, such as `sorted`.

    A structure is a property of an input on which a kernel may rely. `sets[i][j]` is input `j` of set `i`,
    and the sets were drawn under different seeds. An input has a structure if it has it in every set; the
    correlation with another input (`related`) is looked for in the first `RELATED_SETS` sets only. The
    tensors are examined on `device`.
    """
    found = [_structures([one[j] for one in sets], device) for j in range(len(sets[0]))]
    for i, j in itertools.combinations(range(len(sets[0])), 2):
        if all(_are_related(one[i], one[j], device) for one in sets[:RELATED_SETS]):
            found[i] |= {"related"}
            found[j] |= {"related"}
    return found


def _structures(tensors: list[torch.Tensor], device: str) -> frozenset[str]:
    if tensors[0].numel() == 0:
        return frozenset()
    if not tensors[0].is_floating_point():
        return frozenset({"not_real"})
    if not all(map(is_finite, tensors)):
        return frozenset({"not_finite"})
    # Slices along the last and along the first dimension; a tensor of one dimension is one row.
    matrices = [tensor if tensor.dim() > 1 else tensor.reshape(1, -1) for tensor in tensors]
    rows = [_sample_rows(matrix.flatten(0, -2)).to(device).double() for matrix in matrices]
    columns = [_sample_rows(matrix.flatten(1).T).to(device).double() for matrix in matrices]
    samples = [_sample(tensor).to(device) for tensor in tensors]
    common = torch.stack([row == 0 for row in rows]).all(0)
    checks = {
        "zeros": float(common.double().mean()) > 0.01 and not bool(common.all()),
        "sorted": all(map(_is_sorted, rows)) or all(map(_is_sorted, columns)),
        "symmetric": all(map(_is_symmetric, tensors)),
        "normalised": _are_normalised(torch.cat(rows)),
        "few_values": all(len(sample.unique()) <= min(FEW_VALUES, sample.numel() / 2) for sample in samples),
        "whole": all(bool((sample == sample.round()).all()) for sample in samples),
        "repeated": all(map(_repeats_values, samples)),
    }
    return frozenset(name for name, holds in checks.items() if holds)


def _sample_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced rows of a matrix, with at most `MAX_ROWS_NUMEL` elements together.

    A single row that has more elements is cut to this number.
    """
    most = max(1, MAX_ROWS_NUMEL // matrix.shape[1])
    return matrix[:: -(-len(matrix) // most), :MAX_ROWS_NUMEL]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most `MAX_SAMPLE` evenly spaced elements of `tensor`, in one dimension."""
    flat = tensor.reshape(-1)
    return flat[:: -(-flat.numel() // MAX_SAMPLE)]


def _is_sorted(rows: torch.Tensor) -> bool:
    steps = rows.diff(dim=-1)
    # Short rows are in order by chance.
    return steps.numel() >= 16 and rows.shape[-1] > 2 and bool((steps >= 0).all() or (steps <= 0).all())


def _is_symmetric(tensor: torch.Tensor) -> bool:
    is_matrix = tensor.dim() >= 2 and tensor.shape[-2] == tensor.shape[-1] > 1
    return is_matrix and torch.equal(tensor[..., 0], tensor[..., 0, :]) and torch.equal(tensor, tensor.mT)


def _are_normalised(rows: torch.Tensor) -> bool:
    """Return whether the rows of a float64 matrix all have nearly the same sum, or the same sum of squares.

    The result is also True if each row has the logarithms of probabilities that add up to 1. It is False for
    rows of at most two elements, and for fewer than `MIN_ROWS` rows.
    """
    if rows.shape[-1] <= 2 or len(rows) < MIN_ROWS:
        return False
    for values in (rows, rows.square()):
        sums = values.sum(-1)
        independent = math.sqrt(rows.shape[-1]) * float(values.std())
        if float(sums.max() - sums.min()) < NORMALISED_SHARE * independent:
            return True
    return bool((rows.logsumexp(-1).abs() < 1e-3).all())


def _repeats_values(sample: torch.Tensor) -> bool:
    distinct = len(sample.unique())
    if sample.element_size() < 4:
        return distinct < min(DISTINCT_HALVES, sample.numel() / 2)
    return distinct < DISTINCT_SHARE * sample.numel()


def _are_related(one: torch.Tensor, other: torch.Tensor, device: str) -> bool:
    if one.shape != other.shape or one.numel() < RELATED_NUMEL or one.is_complex() or other.is_complex():
        return False
    pair = torch.stack([_sample(tensor).to(device).double() for tensor in (one, other)])
    return abs(float(torch.corrcoef(pair)[0, 1])) > RELATED  # NaN, of a constant, is not
