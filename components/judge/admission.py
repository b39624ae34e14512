"""Admission of a task: a check that the judge would find wrong answers wrong, and a timing of the task.

A task is a PyTorch module that is to be made faster, with its inputs. Most of an admission is preparation,
which several threads can do at once for different tasks. Only timed rounds (series of timed calls) need
exclusive access to the device.
"""

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from components.core.errors import TaskError, TaskTooLarge, UserError
from components.core.params import JudgeParams
from components.core.task import check_contract
from components.core.workloads import Workload, workloads_of
from components.judge.baselines import COMPILE, EAGER, NOOP, Baseline, start_baseline
from components.judge.correctness import PART_NUMEL, ReferenceOutput
from components.judge.device_scheduler import DeviceScheduler
from components.judge.error_measures import FLOAT32_FLOOR, HALF_DTYPES, max_abs
from components.judge.limit import limit_of
from components.judge.memory_plan import MemoryBudget, plan_layout
from components.judge.role_processes import OneProcess, task_errors
from components.judge.staged_inputs import StagedInputs
from components.judge.statistics import geometric_mean, net
from components.judge.task_layout import Sizing
from components.judge.task_reference import TaskReference
from components.judge.timed_output_check import round_departures
from components.judge.verdict import UNSURE, Admission
from components.sandbox.runner_factory import RunnerFactory

ROUNDS = 3  # timed rounds of each baseline
# Bytes of device memory that are reserved for a task's first run, when its needs are unknown.
DESCRIPTION_BYTES = 1 << 30
# Number of calls and bytes in a round of an admission on a GPU, as a share of the usual number. The rounds
# are short, because nothing else runs on the GPU during a round, and small, because the GPU's memory limits
# how many tasks are prepared at once. The times that an admission measures need less precision than a reward.
ROUND_SHARE = 0.25
# Share of a GPU's memory that the process of one task may allocate while other tasks are prepared.
RUNNER_SHARE = 0.125
# Largest share of a GPU's memory for one task of a data set; a larger task would delay all other tasks.
TASK_SHARE = 0.25
# Figures of an admission's evidence of which a task with workloads has the geometric means.
MEANS = ("eager_seconds", "compile_seconds", "headroom")
# Largest number of characters of a refusal's detail, which include a hint (`role_processes.NO_GPU`).
MAX_DETAIL = 600
TINY = 1e-30  # smallest divisor
# Change of an order to the reference runner, with which it uses the initial values of the parameters.
UNTOUCHED: dict[str, Any] = {"parameters": None}


def named_workloads(code: str) -> list[Workload]:
    """Return the workloads of the task with source `code`: the calls of `get_inputs` on which it is judged.

    A task that names no workloads has one, whose `call` is "" and whose `code` is the source itself. Raises
    TaskError if the source names workloads in a form that is not valid.
    """
    try:
        return workloads_of(code, "task")
    except UserError as error:
        raise TaskError(str(error)) from error


def admit_workloads(code: str, admit_one: Callable[[str], Admission]) -> Admission:
    """Return the admission of the task with source `code`, made of the admissions of its workloads.

    An admission says whether the judge can judge a task, and a workload is one call of the task's
    `get_inputs`. `admit_one` returns the admission of a source with only this call. A task that names no
    workloads gets the admission of its own source. A list of workloads that is not valid is refused with the
    reason `does_not_run`. If workloads are refused, the result is the first refusal whose reason does not end
    with `UNSURE` (for an input without effect on the output), or else the first one, and its detail names the
    workload.

    The evidence (the measured figures) of a task that is admitted, or refused with a reason that ends with
    `UNSURE`, has the names of the parameters, the geometric mean of each figure in `MEANS`, the least spread
    (relative standard deviation of an output), the shapes of the first workload, and under `workloads` the
    call and the shapes of each workload. It is empty if `admit_one` returns no figures.
    """
    try:
        workloads = named_workloads(code)
    except TaskError as error:
        return refusal(error)
    found: list[dict[str, Any]] = []
    refused: Admission | None = None
    for workload in workloads:
        admission = admit_one(workload.code)
        if not workload.call:
            return admission
        if not admission.admitted:
            detail = f"{workload.call}: {admission.evidence.get('detail', admission.reason)}"
            named = Admission(False, admission.reason, admission.evidence | {"detail": detail})
            if not admission.reason.endswith(UNSURE):
                return named
            refused = refused or named
        found.append(admission.evidence)
    if not found[0]:
        return refused or Admission(True, "", {})
    evidence: dict[str, Any] = {
        name: found[0][name] for name in ("inputs", "outputs", "parameters") if name in found[0]
    }
    for name in (*MEANS, "spread"):
        values = [one[name] for one in found if name in one]
        if len(values) == len(found):
            evidence[name] = min(values) if name == "spread" else geometric_mean(values)
    evidence["workloads"] = [
        {"call": workload.call, **{name: one[name] for name in ("inputs", "outputs") if name in one}}
        for workload, one in zip(workloads, found, strict=True)
    ]
    if refused:
        return Admission(False, refused.reason, refused.evidence | evidence)
    return Admission(True, "", evidence)


def admit(
    params: JudgeParams,
    runner_factory: RunnerFactory,
    scheduler: DeviceScheduler,
    code: str,
    eager_seconds: tuple[float, float],
    *,
    headroom: bool,
) -> Admission:
    """Return whether the task with source `code` can be judged, with the figures that were measured.

    A single sandboxed process, which `runner_factory` starts, makes the reference data and runs the baselines
    (eager, torch.compile and the no-op, which computes nothing), because no candidate runs in an admission.
    `scheduler` gives access to the device and its memory, and `params` are the judge's settings.
    `eager_seconds` has the smallest and the largest time in seconds that one eager call may take. `headroom`
    is set for a task of a data set. Such a task must compile and must leave device memory for other tasks,
    and its time under torch.compile is measured too. A faulty task is refused and raises nothing; the reason
    of the result is then a code such as `eager_time`, `not_deterministic` or `does_not_compile`. On a GPU the
    task's process may have the share `RUNNER_SHARE` of the memory if `headroom` is set, and all memory if it
    is not set, as for a user's module, which may be large. A task that runs out of memory is tried a second
    time, with that much memory reserved.
    """
    try:
        check_contract(code, "task")
    except UserError as error:
        return refusal(error)
    share = RUNNER_SHARE if headroom and scheduler.is_exclusive else 1.0
    # Bytes that are reserved beyond the estimated need, for each attempt.
    attempts = (0, int(share * scheduler.reservable_bytes)) if scheduler.is_exclusive else (0,)
    sizing = Sizing(
        round_share=ROUND_SHARE if scheduler.is_exclusive else 1.0,
        min_correctness_sets=2,  # the outputs of two seeds are compared
        timed_sets=2,
        keep_references=False,
        one_process=True,
    )
    largest = int(TASK_SHARE * scheduler.reservable_bytes) if headroom and scheduler.is_exclusive else None
    for extra_bytes in attempts:
        processes = OneProcess(params.device, runner_factory, "compile" if headroom else "plain", share)
        try:
            reference = TaskReference(
                params,
                scheduler,
                code,
                processes,
                sizing,
                memory_share=share,
                describing_bytes=DESCRIPTION_BYTES + extra_bytes,
                extra_bytes=extra_bytes,
                largest_bytes=largest,
            )
            with contextlib.closing(reference):
                return _admission(reference, eager_seconds, headroom=headroom)
        except TaskError as error:
            fault: Exception = error
            if not error.out_of_memory:
                break
        except torch.OutOfMemoryError as error:
            fault = error
            torch.cuda.empty_cache()
    return refusal(fault)


def _admission(reference: TaskReference, eager_seconds: tuple[float, float], *, headroom: bool) -> Admission:
    scheduler, description = reference.scheduler, reference.layout.description
    # Candidates need more memory than an admission.
    plan_layout(description, reference.params, Sizing(), MemoryBudget.of(reference.params, scheduler))
    eager, is_deterministic = _timed(reference, EAGER)
    if not is_deterministic:
        return Admission(False, "not_deterministic", {})
    noop, _ = _timed(reference, NOOP)
    if reference.layout.placement.shares_buffers:
        # Device memory is scarce. The next timed runner allocates memory again, and the process itself unmaps
        # the memory when it leaves its role.
        with scheduler.preparing():
            reference.processes.close()
            torch.cuda.empty_cache()
    evidence = description.evidence | {"eager_seconds": float(statistics.median(net(eager, noop)))}
    low, high = eager_seconds
    if not low <= evidence["eager_seconds"] <= high:
        return Admission(False, "eager_time", evidence)
    with scheduler.preparing():
        reason = find_trivial_answer(reference)
    if reason is None:
        reason, evidence["spread"] = _sensitivity(reference)
    if reason is not None:
        return Admission(False, reason, evidence)
    if headroom:
        try:
            evidence |= _compile_evidence(reference, noop)
        except TaskError as error:
            return Admission(False, "does_not_compile", {"detail": str(error)[:300]})
    return Admission(True, "", evidence)


def _timed(reference: TaskReference, baseline: Baseline) -> tuple[list[float], bool]:
    """Time `ROUNDS` rounds of a baseline on the same inputs, and check whether their outputs are the same.

    A round is a series of timed calls. `reference` has the inputs of the task, and `baseline` is eager,
    torch.compile, or the no-op, which computes nothing. Returns the seconds per call in each round, and
    whether the outputs of all rounds agree up to `sandbox.absolute_tolerance`, a share of an output's largest
    absolute value. Raises TaskError if the baseline fails.
    """
    runner = start_baseline(reference, baseline, warm_up_seconds=reference.params.sandbox.run_seconds)
    seconds, is_deterministic, first = [], True, None
    tolerance = reference.params.sandbox.absolute_tolerance
    scheduler, limit = reference.scheduler, reference.params.sandbox.run_seconds
    with scheduler.measuring(), scheduler.limiting(limit):
        mixes = reference.inputs.repeated(reference.layout.calls)
        staged = StagedInputs(reference, len(mixes)).hold(mixes)
        for _ in range(ROUNDS):
            with task_errors():
                took, results = runner.round("time", staged)
            seconds.append(took)
            first = results.clone() if first is None else first
            figures = round_departures(reference, results, first, len(mixes), tolerance / FLOAT32_FLOOR)
            is_deterministic = is_deterministic and max(figures) <= 1
    return seconds, is_deterministic


def _compile_evidence(reference: TaskReference, noop: list[float]) -> dict[str, Any]:
    """Return the figures `compile_seconds`, `limit` and `headroom` of an admission, by their names.

    `compile_seconds` is the median seconds per call under torch.compile, less those of the no-op, which
    computes nothing. `limit` has the lower bound of the seconds per call by the roofline model and the
    figures from which it follows (`limit.Limit`). `headroom` is `compile_seconds` divided by this lower
    bound. It can be below 1 if the task's operands have a structure that saves work. `noop` has the no-op's
    seconds per call in each round (series of timed calls). Raises TaskError if torch.compile fails.
    """
    with reference.scheduler.measuring():
        limit = limit_of(reference.layout, reference.params.device, reference.params.precision)
    seconds, _ = _timed(reference, COMPILE)
    compiled = float(statistics.median(net(seconds, noop)))
    return {
        "compile_seconds": compiled,
        "limit": asdict(limit) | {"seconds": limit.seconds},
        "headroom": round(compiled / limit.seconds, 4),
    }


def _sensitivity(reference: TaskReference) -> tuple[str | None, float]:
    """Return which change of a call's data leaves the output correct, if any, and how much the output varies.

    `reference` has the task's inputs, parameters and reference outputs. Three kinds of change must each make
    the output wrong: drawing one input again, drawing one parameter again, and using the initial values of
    all parameters. The first change that does not is returned as a reason, for example
    `input_0_does_not_matter`; if there is none, None is returned. The variation is the largest relative
    standard deviation of an output tensor. It is measured with parameters that the judge has drawn and with
    the initial ones, and the smaller figure is returned. It is 0 if there is a reason.
    """
    description = reference.layout.description
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"input_{i}_does_not_matter", {"other_input": i})
        for i, spec in enumerate(description.inputs)
        if spec is not None and "float" in spec[1]
    ]
    changes += [
        (f"parameter_{name}_does_not_matter", {"other_parameter": name}) for name in description.parameters
    ]
    if description.parameters:
        changes.append(("untouched_parameters_pass", UNTOUCHED))
    single, exact = reference.correctness_outputs(0)
    with reference.scheduler.preparing():
        expected, smallest = reference.prepared(single, exact), math.inf
    with contextlib.closing(reference.probe([change for _, change in changes])) as probed:
        for (reason, change), outputs in zip(changes, probed, strict=True):
            with reference.scheduler.preparing():
                if _passes(outputs, expected):
                    return reason, 0.0
                if change == UNTOUCHED:
                    smallest = _spread(outputs)
    with reference.scheduler.preparing():
        return None, min(_spread(single), smallest)


def _passes(outputs: list[torch.Tensor], references: list[ReferenceOutput]) -> bool:
    """Return whether all outputs of one call are correct, as `ReferenceOutput.mismatch` decides."""
    return all(
        reference.mismatch(output) is None for output, reference in zip(outputs, references, strict=True)
    )


def _spread(outputs: list[torch.Tensor]) -> float:
    """Return the largest relative standard deviation of a tensor in `outputs`, the outputs of one call.

    It is the standard deviation over the tensor's elements, divided by their mean absolute value, and 0 if no
    tensor is of a floating-point type.
    """
    floats = [t.float() for t in outputs if t.dtype.is_floating_point and t.numel()]
    return max((float(t.std(correction=0) / t.abs().mean().clamp(min=TINY)) for t in floats), default=0.0)


def refusal(error: Exception) -> Admission:
    """Return the refusal of a task that fails with `error`, whose reason is `too_large` or `does_not_run`."""
    reason = "too_large" if isinstance(error, TaskTooLarge) else "does_not_run"
    return Admission(False, reason, {"detail": str(error)[:MAX_DETAIL]})


def find_trivial_answer(reference: TaskReference) -> str | None:
    """Return the reason why a trivial answer would be correct on this task, or None if all of them are wrong.

    A trivial answer is made without the task's computation, for example zeros (`zeros_pass`), the mean of the
    output (`mean_passes`), or the output for another seed (`seeds_agree`). A reason is also returned if the
    task has no output with floating-point numbers (`no_float_output`), or if one is not finite
    (`not_finite`). `reference` has the task's inputs and outputs for at least two seeds.
    """
    single, exact = reference.correctness_outputs(0)
    expected = reference.prepared(single, exact)
    other_seed, _ = reference.correctness_outputs(1)
    first_input = reference.layout.inputs.tensors(reference.input_buffer, 0)[:1]
    floats = [t for t in single if t.dtype.is_floating_point and t.numel()]
    if not floats:
        return "no_float_output"
    if not all(torch.isfinite(t).all() for t in floats):
        return "not_finite"

    def replaced(answer: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [answer(t) if t.dtype.is_floating_point and t.numel() else t for t in single]

    # Each answer is made only when it is compared, because the answers of a large task do not fit together.
    answers: dict[str, Callable[[], list[torch.Tensor]]] = {
        "zeros_pass": lambda: [torch.zeros_like(t) for t in single],
        "mean_passes": lambda: replaced(lambda t: torch.full_like(t, _mean(t))),
        "seeds_agree": lambda: other_seed,
    }
    halves = [t for t in floats if t.dtype in HALF_DTYPES]
    if halves:
        answers["float8_passes"] = lambda: replaced(_in_float8)
    # tf32 rounds products as much as half precision does.
    if len(halves) < len(floats) and reference.params.precision != "tf32":
        answers["half_precision_passes"] = lambda: replaced(lambda t: t.half().to(t.dtype))
    if len(single) == len(first_input) == 1 and (first_input[0].shape, first_input[0].dtype) == (
        single[0].shape,
        single[0].dtype,
    ):
        answers["first_input_passes"] = lambda: first_input
    return next((reason for reason, answer in answers.items() if _passes(answer(), expected)), None)


def _in_float8(values: torch.Tensor) -> torch.Tensor:
    """Return values in half precision rounded to float8_e4m3fn and converted back to their dtype.

    For the rounding they are scaled so that their largest absolute value becomes the largest float8_e4m3fn
    number. Values in another dtype are returned unchanged.
    """
    if values.dtype not in HALF_DTYPES:
        return values
    scale = torch.finfo(torch.float8_e4m3fn).max / max_abs(values.float().reshape(1, -1)).clamp(min=TINY)
    return ((values * scale).to(torch.float8_e4m3fn).float() / scale).to(values.dtype)


def _mean(values: torch.Tensor) -> float:
    """Return the mean of all elements, computed in float64 in parts."""
    sums = [part.double().sum() for part in values.reshape(-1).split(PART_NUMEL)]
    return float(torch.stack(sums).sum()) / values.numel()
