"""This module checks the outputs of a candidate's timed calls, against eager's outputs and float64 outputs.

A candidate is an implementation of a task's module that is judged, and eager is the module itself. All
outputs are compared with eager's. Of the calls whose outputs depart too far, up to three in a round (a series
of timed calls) are also compared with float64 outputs, which a sandboxed process that runs the task's own
source (`SourceRunner`) computes.
"""

import math
import secrets
from typing import NamedTuple

import torch

from components.judge.correctness import PART_NUMEL, first_mismatch
from components.judge.error_measures import (
    HALF_DTYPES,
    block_limits,
    block_size,
    max_abs,
    rounding_error,
    row_magnitudes,
    same_special,
    smallest_limits,
    wrong_blocks,
)
from components.judge.input_mixing import InputMix
from components.judge.source_runner import SourceRunner
from components.judge.task_reference import TaskReference

# Largest error that is accepted in a timed call, as a multiple of the limit for a correctness set. It exceeds
# 1 for two reasons. An output that departs little from eager's is not compared with float64 (`departures`).
# And the largest error of hundreds of calls counts, which also for a correct kernel exceeds that of one call.
TIMED_MULTIPLE = 2.0
# Largest rounding error (`rounding_error`) of an output in half precision against eager's. Two outputs that
# both are rounded once seldom differ; a truncated one has 0.71 against a rounded one.
ROUNDING_DEPARTURE = 0.6
# Largest number of blocks of one call that are compared in a timed round.
SAMPLED_BLOCKS = 4096
# Bytes of outputs of several calls that are compared at a time.
COMPARED_BYTES = 1 << 26


def suspicious_calls(departures: list[float], mixes: list[InputMix]) -> list[int]:
    """Return the indices of the calls of a round that must be compared with float64 outputs, at most three.

    A round is a series of timed calls. `departures` says how far each call's output departs from that of
    eager, the task's own module, as a multiple of what errors of both together may amount to
    (`round_departures`), and `mixes` describes each call's inputs. Calls with a departure of at most 1 are
    right. Of all other calls with inputs of the distribution `given` (as the task draws them), the result has
    the one that departs most, and a random one of the rest. Of those with inputs of another distribution
    (changed afterwards, such as `scaled`), the result has the one that departs most.

    The random call is needed because eager itself can be inexact. A correct answer then departs far from
    eager, and if only the largest departure were examined, one such call would hide wrong answers in others.
    """
    flagged = sorted(
        (i for i, figure in enumerate(departures) if not figure <= 1), key=departures.__getitem__
    )
    given = [i for i in flagged if mixes[i].distribution == "given"]
    others = [i for i in flagged if mixes[i].distribution != "given"]
    rest = [secrets.choice(given[:-1])] if len(given) > 1 else []
    return given[-1:] + rest + others[-1:]


class DeferredCall(NamedTuple):
    """Timed call that is compared with float64 outputs only after the process of the candidate has ended.

    `departure` says how far the candidate's output departs from that of eager, the task's own module, as a
    multiple of the largest allowed difference (`round_departures`), and `mix` describes the inputs of the
    call. `results` and `eager_results` are all outputs of the call from the candidate and from eager, as flat
    uint8 tensors in host memory.
    """

    departure: float
    mix: InputMix
    results: torch.Tensor
    eager_results: torch.Tensor


class TimedOutputCheck:
    """Check of timed calls of a task's candidates against float64 outputs, which a `SourceRunner` computes.

    `reference` has the data of the task, and the `SourceRunner` is a sandboxed process that runs the task's
    own source. The methods may be called only while no process of a candidate computes. Only suspicious calls
    are checked, whose outputs differ clearly from those of eager, the task's own module (`suspicious_calls`).
    `wrong_call` checks them at once, unless memory is so scarce that the baselines of the task share buffers
    (`Placement.shares_buffers`), because the device memory then does not hold the float64 outputs and the
    processes that are timed at the same time. In that case, `wrong_call` keeps at most two suspicious calls
    of the candidate in host memory, the one that departs most from eager and a random other one, and
    `wrong_deferred_call` checks them after the timed processes have ended.
    """

    def __init__(self, reference: TaskReference):
        self.reference = reference
        self.source = SourceRunner(reference.data, computes=True)
        self.deferred: list[DeferredCall] = []
        # Number of calls that could have been deferred since the last comparison of deferred calls.
        self.deferrable = 0

    def wrong_call(
        self,
        mixes: list[InputMix],
        inputs: torch.Tensor,
        results: torch.Tensor,
        eager_results: torch.Tensor,
    ) -> str | None:
        """Return the reason why a call of a timed round is wrong, or None if no call was found to be wrong.

        A round is a series of timed calls, and `mixes` describes each call's inputs. The other arguments are
        uint8 tensors that hold the inputs, the candidate's results and the results of eager (the task's own
        module), one call after another. Only calls whose results differ clearly from eager's
        (`suspicious_calls`) are computed again in float64. If the task's baselines share buffers because
        device memory is scarce, these calls are kept for `wrong_deferred_call` instead, and None is returned.
        The reason ends with the name of the input distribution (the change that was made to the inputs), as
        in `max_error:given`, where `given` means none. Raises TaskError if eager is too inexact to tell or
        the task's source takes too long, and InfrastructureError if the float64 outputs cannot be computed.
        """
        figures = round_departures(self.reference, results, eager_results, len(mixes))
        calls, ours, eager = (t.view(len(mixes), -1) for t in (inputs, results, eager_results))
        for index in suspicious_calls(figures, mixes):
            if self.reference.layout.placement.shares_buffers:
                self._defer(figures[index], mixes[index], ours[index], eager[index])
                continue
            given = self.reference.layout.inputs.views(calls[index], 0)
            for target, source in zip(self.source.inputs(), given, strict=True):
                target.copy_(source)
            expected = self.source.float64_outputs()
            reason = self._mismatch(mixes[index], ours[index], eager[index], expected)
            if reason is not None:
                return reason
        return None

    def _mismatch(
        self,
        mix: InputMix,
        results: torch.Tensor,
        eager_results: torch.Tensor,
        expected: list[torch.Tensor],
    ) -> str | None:
        """Return the reason why the results of one call are wrong, or None if they are right.

        `mix` describes the call's inputs. `results` and `eager_results` are the outputs of the candidate and
        of eager (the task's own module) as flat uint8 tensors, and `expected` are the float64 outputs. The
        reason ends with the input distribution of `mix` (the change that was made to the inputs), as in
        `max_error:given`, where `given` means none. Raises TaskError if eager is too inexact to tell.
        """
        layout = self.reference.layout
        references = self.reference.prepared(layout.outputs.views(eager_results, 0), expected)
        outputs = layout.outputs.views(results, 0)
        found = first_mismatch(references, outputs, mix.distribution, multiple=TIMED_MULTIPLE)
        return None if found is None else found.reason

    def _defer(
        self, departure: float, mix: InputMix, results: torch.Tensor, eager_results: torch.Tensor
    ) -> None:
        """Keep a suspicious call for a later comparison with float64 outputs; at most two calls are kept.

        A call is suspicious if its output differs clearly from that of eager, the task's own module.
        `departure` is this difference as a multiple of what is allowed, `mix` describes the call's inputs,
        and `results` and `eager_results` are the outputs of the candidate and of eager as flat uint8 tensors.
        The first kept call is the one that departs most from eager. A new call that departs more becomes the
        first, and the previous first call becomes the second. Any other new call becomes the second call with
        a probability of 1/n, where n is the number of calls that were suspicious so far, or if there is no
        second call yet.
        """
        self.deferrable += 1
        is_largest = not self.deferred or not departure <= self.deferred[0].departure
        if is_largest or len(self.deferred) < 2 or secrets.randbelow(self.deferrable) == 0:
            call = DeferredCall(
                departure, mix, results.to("cpu", copy=True), eager_results.to("cpu", copy=True)
            )
            self.deferred = [call, *self.deferred[:1]] if is_largest else [self.deferred[0], call]

    def forget_deferred(self) -> None:
        """Drop all deferred calls (timed calls that wait for their comparison with float64 outputs).

        A candidate that fails leaves such calls behind, which must not be compared when the next candidate is
        judged.
        """
        self.deferred, self.deferrable = [], 0

    def wrong_deferred_call(self) -> str | None:
        """Compare the outputs of deferred calls with float64 outputs, and return why one is wrong, or None.

        A deferred call is a timed call whose output departed from that of eager (the task's own module), and
        whose comparison waits until the device's memory is free. The processes of the task whose calls are
        timed must have ended before this method is called. It drops all deferred calls. The reason ends with
        the name of the input distribution (the change that was made to the inputs), as in `max_error:given`,
        where `given` means none. Raises TaskError if eager is too inexact to tell or the task's source takes
        too long, and InfrastructureError if the float64 outputs cannot be computed.
        """
        deferred = self.deferred
        self.forget_deferred()
        try:
            for call in deferred:
                self.reference.write_inputs(call.mix, self.source.inputs())
                self.reference.drawing.close()
                expected = self.source.float64_outputs()
                reason = self._mismatch(call.mix, call.results, call.eager_results, expected)
                if reason is not None:
                    return reason
            return None
        finally:
            self.source.close()


def round_departures(
    reference: TaskReference,
    memory: torch.Tensor,
    baseline: torch.Tensor,
    calls: int,
    floors: float = TIMED_MULTIPLE - 1,
) -> list[float]:
    """Return how far the results of each call of a timed round depart from those of a baseline.

    A round is a series of timed calls, here of `calls` calls. `memory` and `baseline` are uint8 tensors that
    hold the results of these calls from the process that is compared, and from the baseline (such as eager,
    the task's own module) on the same inputs. `reference` has the layout of the outputs. The result has one
    departure for each call, the largest over its output tensors: a difference divided by the largest one that
    is allowed. A departure of at most 1 is within the limits that `departures` computes from the baseline's
    output; `floors` multiplies these limits.
    """
    largest = torch.zeros(calls, dtype=torch.float64)
    for slot in reference.layout.outputs.slots:
        # As a bool, any byte but 0 would equal True.
        dtype = torch.uint8 if slot.dtype == "bool" else getattr(torch, slot.dtype)
        ours, theirs = (
            rows.view(calls, -1)[:, slot.offset : slot.offset + slot.bytes].view(dtype)
            for rows in (memory, baseline)
        )
        block = block_size(torch.Size(slot.shape))
        largest = torch.maximum(largest, departures(ours, theirs, floors, block=block))
    return largest.tolist()


def departures(
    outputs: torch.Tensor,
    single: torch.Tensor,
    floors: float = TIMED_MULTIPLE - 1,
    *,
    block: int | None = None,
) -> torch.Tensor:
    """Return how far one output tensor of each call departs from a baseline's output for the same inputs.

    A baseline is for example eager, the task's own module. `outputs` has the outputs of the calls, and
    `single` those of the baseline, both with the shape [calls, *shape]. The result has one departure for each
    call, with the shape [calls], and is on the cpu.

    A departure is the maximum difference or the root mean square of the differences, each divided by its
    limit, whichever is larger. The limits are those of `smallest_limits`, times `floors` and the baseline's
    largest absolute value. With the default `floors`, an output with a departure of at most 1 is correct,
    because the errors of output and baseline together are then at most `TIMED_MULTIPLE` times the limit of
    `ReferenceOutput`. With a larger departure, either the output or the baseline may be wrong. If n integers
    differ, the departure is n + 1, or 0 if none differ, and if NaN or infinity is in n different places, it
    is at least n + 1. A departure is at least 2 if a secret sample of the output's blocks has too many that
    are wrong (`wrong_blocks`). In half precision it is also above 1 if the rounding error against the
    baseline (`rounding_error`) is above `ROUNDING_DEPARTURE` times `floors`. `block` is the number of
    elements of a block, by default that of the shape of `single`.

    Many calls are compared at once, because on cuda each synchronisation takes as long as a small call.
    """
    if single.is_complex():
        outputs, single = torch.view_as_real(outputs), torch.view_as_real(single)
    calls, block = len(single), block or block_size(single.shape[1:])
    found = torch.zeros(calls, dtype=torch.float64)
    step = max(1, COMPARED_BYTES // max(1, single[0].nbytes))
    for first in range(0, calls if single[0].numel() else 0, step):
        ours, theirs = (rows[first : first + step].flatten(1) for rows in (outputs, single))
        pieces = list(zip(ours.split(PART_NUMEL, 1), theirs.split(PART_NUMEL, 1), strict=True))
        if not single.dtype.is_floating_point:
            different = torch.stack([(one != other).sum(1) for one, other in pieces]).sum(0)
            found[first : first + step] = _counted(different).cpu()
            continue
        scale = torch.stack([max_abs(other).double() for _, other in pieces]).amax(0)
        magnitudes = [
            row_magnitudes(torch.sub(_at_least_float32(one), _at_least_float32(other)))
            for one, other in pieces
        ]
        max_error = torch.stack([largest for largest, _ in magnitudes]).amax(0)
        norm = torch.linalg.vector_norm(torch.stack([norm for _, norm in magnitudes]), dim=0)
        rms_error = norm / math.sqrt(ours.shape[1])
        units = torch.maximum(*_in_units(max_error, rms_error, scale, single.dtype, floors))
        if single.dtype in HALF_DTYPES:
            rounding = [
                rounding_error(one.float() - other.float(), other.float(), single.dtype)
                for one, other in pieces
            ]
            units = torch.maximum(units, torch.stack(rounding).amax(0) / (floors * ROUNDING_DEPARTURE))
        for index in (~torch.isfinite(scale + max_error)).nonzero().flatten().tolist():
            units[index] = _special_departure(ours[index], theirs[index], floors)
        found[first : first + step] = torch.maximum(units, 2.0 * _wrong_samples(ours, theirs, block)).cpu()
    return found


def _wrong_samples(outputs: torch.Tensor, single: torch.Tensor, block: int) -> torch.Tensor:
    """Return for each call 1 if too many elements or blocks in a random sample are wrong, and 0 otherwise.

    `outputs` has the outputs that are compared, and `single` those of the baseline for the same inputs, both
    with the shape [calls, elements]. The result has the shape [calls]. `block` is the number of elements of a
    block. `block_limits` determines which difference makes an element or a block wrong, and how many may be
    wrong.
    """
    found = torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)
    for length, share, blocks_per_wrong in block_limits(single.dtype, block):
        count = outputs.shape[1] // length
        step = -(-count // SAMPLED_BLOCKS) or 1
        first = secrets.randbelow(step)
        ours, theirs = (
            _at_least_float32(rows[:, : count * length].view(len(rows), count, length)[:, first::step])
            for rows in (outputs, single)
        )
        wrong = wrong_blocks((ours - theirs).flatten(1), theirs.flatten(1), share, length)
        found |= wrong.sum(1) > wrong.shape[1] // blocks_per_wrong
    return found.double()


def _in_units(
    max_error: torch.Tensor, rms_error: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, floors: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `max_error` and `rms_error` divided by their limits, in the shape of `max_error`.

    The errors are the maximum and the root mean square of the differences between an output and the
    baseline's. The limits are those of `smallest_limits` for the outputs' type `dtype`, times `floors` and
    `scale`, which has the largest absolute value of each baseline output.
    """
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    max_unit, rms_unit = (floors * (limit * scale).clamp_(min=smallest) for limit in smallest_limits(dtype))
    return max_error / max_unit, rms_error / rms_unit


def _counted(number: torch.Tensor) -> torch.Tensor:
    return torch.where(number > 0, number + 1, 0).double()


def _special_departure(output: torch.Tensor, single: torch.Tensor, floors: float) -> torch.Tensor:
    """Return the departure of one call's output if this or the baseline's output is not all finite.

    A departure is a difference divided by the largest one that is allowed (`departures`). `output` and
    `single`, the baseline's output, have one dimension. The result is a scalar: the departure of the elements
    that are finite in both, with limits multiplied by `floors`, or n + 1 if that is larger, where n is the
    number of places at which NaN or infinity differs.
    """
    different = torch.zeros((), dtype=torch.int64, device=single.device)
    scales, magnitudes, finite_count = [], list[tuple[torch.Tensor, torch.Tensor]](), 0
    for ours, theirs in zip(output.split(PART_NUMEL), single.split(PART_NUMEL), strict=True):
        finite = torch.isfinite(ours) & torch.isfinite(theirs)
        different += (~finite & ~same_special(ours, theirs)).sum()
        if finite.any():
            finite_count += int(finite.sum())
            magnitudes.append(row_magnitudes((ours[finite].double() - theirs[finite].double())[None]))
        if (values := theirs[torch.isfinite(theirs)]).numel():
            scales.append(max_abs(values[None])[0].double())
    if not magnitudes:
        return _counted(different)
    max_error = torch.stack([largest[0] for largest, _ in magnitudes]).max()
    norm = torch.linalg.vector_norm(torch.stack([norm[0] for _, norm in magnitudes]))
    rms_error = norm / math.sqrt(finite_count)
    scale = torch.stack(scales).max()
    numeric = torch.stack(_in_units(max_error, rms_error, scale, single.dtype, floors)).max()
    return torch.maximum(_counted(different), numeric)


def _at_least_float32(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in HALF_DTYPES else values
