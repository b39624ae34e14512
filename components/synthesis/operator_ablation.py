"""Decide which operator sequences are held out for evaluation, and whether each operator of a task matters.

A task is a PyTorch module that a policy has to make faster. All composers, which make tasks of operators, use
this module.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from components.bootstrap.operator_chain import canonical
from components.core.files import digest_bytes
from components.core.task import KernelTask
from components.synthesis.mined_operators import FIT_ERRORS

# Share of operator sequences that are reserved for held-out tasks.
HELD_OUT_SHARE = 0.2
# Rows and columns of the small input on which chains are tested.
PROBE = (8, 256)
# Least RMS change of the output that leaving out an operator must cause, relative to the output's RMS.
MIN_EFFECT = 1e-2
# Smallest standard deviation of the output, relative to its RMS.
MIN_SPREAD = 3e-3
# Lower and upper bound of the output's RMS.
OUTPUT_RMS = (1e-4, 1e4)
T = TypeVar("T")


def split_of(ops: Sequence[str], seed: int) -> Literal["train", "held_out"]:
    """Return the split of a task with the operator sequence `ops`: "held_out" (evaluation only) or "train".

    `ops` has the operators' names in their order, and `seed` is data.held_out_seed. A hash of the seed and
    the sequence decides, so that all parts of the pipeline agree without a common list. It reserves the share
    HELD_OUT_SHARE of all sequences. All spellings of an operator, such as nn.ReLU and F.relu, give the same
    result.
    """
    digest = digest_bytes(f"{seed}:{'>'.join(map(canonical, ops))}".encode())
    return "held_out" if int(digest[:16], 16) < HELD_OUT_SHARE * 2**64 else "train"


def composed_task(code: str, ops: tuple[str, ...], seed: int, data_source: str = "") -> KernelTask:
    """Return a task with the source `code`, the operators `ops`, and the split that `split_of` gives them.

    `seed` is data.held_out_seed. `data_source` says what kind of task it is; by default, it is torch#N for N
    operators.
    """
    return KernelTask(
        code=code, ops=ops, data_source=data_source or f"torch#{len(ops)}", split=split_of(ops, seed)
    )


def draw_weighted(rng: random.Random, weights: Mapping[T, float]) -> T:
    """Return a random key of `weights`, whose probability is proportional to its value."""
    return rng.choices(list(weights), weights=list(weights.values()))[0]


@torch.no_grad()
def passes_ablation(
    chain: Sequence[T],
    run: Callable[[Sequence[T], torch.dtype], Tensor],
    *,
    max_float32_error: float,
    min_values: int,
    max_samples: int,
    ablate_single: bool,
) -> bool:
    """Return whether a chain of operators has a usable output that changes if any operator is left out.

    `run` applies a chain to a fixed input in the given dtype and returns the output. The output must vary,
    and its root mean square (RMS) must lie within OUTPUT_RMS. It must have at least `min_values` elements. Of
    a sample of at most `max_samples` of them, at least 100 must be distinct, or 60 % if that is fewer.
    `max_float32_error` is the largest RMS difference between the outputs in float32 and float64, relative to
    the output's RMS. Leaving out an operator must change the shape, or the values by MIN_EFFECT of the RMS or
    more. If the chain has one operator, its output is compared with its input if `ablate_single` is true;
    otherwise the effect of that operator is not tested. The result is false if `run` fails on the whole
    chain.
    """
    try:
        out = run(chain, torch.float32)
        size, sample = rms(out), out.flatten()[:: out.numel() // max_samples + 1]
        if (
            out.numel() < min_values
            or not OUTPUT_RMS[0] < size < OUTPUT_RMS[1]
            or out.std().item() < MIN_SPREAD * size
            or count_distinct(sample / size) < min(100, 0.6 * sample.numel())
            or rms(out.double() - run(chain, torch.float64)) > max_float32_error * size
        ):
            return False
    except FIT_ERRORS:
        return False
    return (len(chain) == 1 and not ablate_single) or all(
        _has_effect(out, [*chain[:index], *chain[index + 1 :]], run, MIN_EFFECT * size)
        for index in range(len(chain))
    )


def _has_effect(
    out: Tensor, rest: Sequence[T], run: Callable[[Sequence[T], torch.dtype], Tensor], min_change: float
) -> bool:
    """Return whether leaving out an operator changes the output's shape, or its values by `min_change`.

    The change of the values is a root mean square, and a larger one counts too. `out` is the output of the
    whole chain of operators, and `rest` is the chain without the operator, which `run` applies to a fixed
    input. The result is also true if `run` cannot apply `rest` to that input.
    """
    try:
        without = run(rest, torch.float32)
    except FIT_ERRORS:
        return True
    return without.shape != out.shape or rms(without - out) >= min_change


def probe(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return two different tensors of this shape with standard normal values, the same two in every call."""
    generator = torch.Generator().manual_seed(20260227)
    x, y = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x, y


def count_distinct(values: Tensor) -> int:
    """Return the number of distinct values after rounding to three decimal places."""
    return len(torch.unique((values * 1000).round()))


def rms(values: Tensor) -> float:
    """Return the root mean square of all values."""
    return values.double().square().mean().sqrt().item()
