"""Whether a task is fit to be judged at all (DESIGN §5, Admission), and what the device could do with it at best.

Most of an admission is preparation, which many do side by side; only rounds that are timed have the device to themselves.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from components.core.config import Device, Params
from components.core.errors import TaskError, UserError
from components.core.task import check_contract
from components.judge.compile_baseline import DEFAULT
from components.judge.correctness import compare
from components.judge.device_scheduler import DeviceScheduler
from components.judge.measurement import StagedInputs
from components.judge.statistics import net
from components.judge.task_bench import RUNNER_SHARE, Bench
from components.judge.verdict import Admission
from components.sandbox.runner_factory import RunnerFactory

ROUNDS = 3
COPIED_BYTES = 2**27
DESCRIBED_BYTES = 1 << 30
"""Taken while a task runs for the first time, and nobody knows what it needs."""
TASK_SHARE = 0.25
"""Of a GPU's memory, for a task of a data set: memory is given in the order of asking, so that one that needs all of it holds up every other."""
MATRIX = {"cpu": 1024, "cuda": 8192}
TINY = 1e-30


@dataclass(frozen=True)
class Rates:
    """What the device can do: bytes a second of a copy, counted once read and once written, and operations a second of a
    float32 matrix product."""

    bandwidth: float
    flops: float


@functools.cache
def measure_rates(device: Device) -> Rates:
    """On an idle device, once for a process; on cpu of one thread, as the judge measures. A second at most."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.ones(COPIED_BYTES // 4, device=device)
        target = torch.empty_like(source)
        side = MATRIX[device]
        a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
        return Rates(
            2 * COPIED_BYTES / _seconds(lambda: target.copy_(source), device),
            2 * side**3 / _seconds(lambda: torch.mm(a, b), device),
        )
    finally:
        torch.set_num_threads(threads)


def _seconds(work: Callable[[], Any], device: Device) -> float:
    times = []
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def admit(
    params: Params, runner_factory: RunnerFactory, turns: DeviceScheduler, code: str, *, headroom: bool
) -> Admission:
    """Whether the judge can tell a cheat from an answer on this task, its eager time, and where asked for what torch.compile
    makes of it, with the figures that headroom is made of; a task that it cannot compile is not admitted then.

    A GPU's memory is shared with the tasks beside it: who ran out of it is tried once more, with the room that a runner may have at most.
    That is all of it where headroom is not asked for: a data set is made of tasks that leave room for others, a user's module is what it is.
    """
    try:
        check_contract(code, "task")
    except UserError as error:
        return _does_not_run(error)
    most = RUNNER_SHARE if headroom else 1.0
    for share, room in ((RUNNER_SHARE, 0), (most, int(most * turns.whole))) if turns.wall else ((1.0, 0),):
        try:
            with turns.reserve_memory(DESCRIBED_BYTES + room):
                bench = Bench(
                    params, runner_factory, turns, code, only="compile" if headroom else "plain", share=share
                )
            if headroom and bench.bytes > TASK_SHARE * turns.whole > 0:
                bench.close()
                return Admission(
                    False,
                    "too_large",
                    {"detail": f"takes {bench.bytes / 2**30:.0f} GiB of the device to judge"},
                )
            with (
                contextlib.closing(bench),
                turns.reserve_memory(bench.bytes + room),
                contextlib.closing(bench),
            ):  # closed before its room is given back
                bench.fill()
                return _admission(bench, turns, headroom)
        except TaskError as error:
            fault: Exception = error
            if not error.out_of_memory:
                break
        except torch.OutOfMemoryError as error:
            fault = error
            torch.cuda.empty_cache()
    return _does_not_run(fault)


def _admission(bench: Bench, turns: DeviceScheduler, headroom: bool) -> Admission:
    description = bench.description
    eager, steady = _timed(bench, turns, "eager")
    if not steady:
        return Admission(False, "not_deterministic", {})
    noop, _ = _timed(bench, turns, "noop")
    evidence: dict[str, Any] = {
        "inputs": [{"shape": form[0], "dtype": form[1]} for form in description.inputs if form is not None],
        "outputs": [{"shape": shape, "dtype": dtype} for shape, dtype in description.outputs],
        "parameters": [name for name, _, _ in description.state],
        "eager_seconds": float(statistics.median(net(eager, noop))),
    }
    low, high = bench.params.data.eager_seconds
    if not low <= evidence["eager_seconds"] <= high:
        return Admission(False, "eager_time", evidence)
    with turns.preparing():
        reason = find_trivial_answer(bench)
    if reason is None:
        reason, evidence["spread"] = _sensitivity(bench)
    if reason is not None:
        return Admission(False, reason, evidence)
    if headroom:
        try:
            evidence |= _compiled(bench, turns, noop)
        except TaskError as error:
            return Admission(False, "does_not_compile", {"detail": str(error)[:300]})
    return Admission(True, "", evidence)


def _timed(bench: Bench, turns: DeviceScheduler, role: str) -> tuple[list[float], bool]:
    """Seconds per call of one role in rounds on the same inputs, and whether its outputs were the same in all of them."""
    arm = bench.arm(role)
    seconds, steady, first = [], True, None
    with turns.measuring():
        sets = bench.sets.fresh(bench.per_round)
        staged = StagedInputs(bench, len(sets)).hold(sets)
        for _ in range(ROUNDS):
            found, taken = arm.round("time", staged)
            seconds.append(found)
            first = taken.clone() if first is None else first
            steady = steady and bench.differs(taken, first, sets) is None
    return seconds, steady


def _compiled(bench: Bench, turns: DeviceScheduler, noop: list[float]) -> dict[str, Any]:
    with turns.measuring():
        rates = measure_rates(bench.params.device)
    seconds, _ = _timed(bench, turns, DEFAULT)
    slots = [*bench.inputs.slots, *bench.outputs.slots, *bench.parameters_part.slots]
    return {
        "compile_seconds": float(statistics.median(net(seconds, noop))),
        "compulsory_bytes": sum(slot.bytes for slot in slots),
        "rates": asdict(rates),
    }


def _sensitivity(bench: Bench) -> tuple[str | None, float]:
    """Another input, another parameter, untouched parameters: each must change the output beyond the tolerance. And how much
    the output varies, with the judge's parameters or with untouched ones, whichever is less (see `_spread`)."""
    description = bench.description
    seed, parameters = bench.seeds[0], bench.parameter_seed
    orders: list[tuple[str, dict[str, Any]]] = [
        (f"input_{i}_does_not_matter", {"other_input": i})
        for i, form in enumerate(description.inputs)
        if form is not None and form[1].startswith("float")
    ]
    orders += [
        (f"parameter_{name}_does_not_matter", {"other_parameter": name}) for name in description.parameters
    ]
    if description.parameters:
        orders.append(("untouched_parameters_pass", {"parameters": None}))
    same: dict[str, Any] = {
        "op": "fill",
        "seed": seed,
        "distribution": "given",
        "outputs": True,
        "exact": False,
        "parameters": parameters,
    }
    expected = bench.expected.tensors(bench.bank_expected, 0)
    single = bench.outputs.tensors(bench.bank_single, 0)
    found = bench.probe([same | {"set": i} | change for i, (_, change) in enumerate(orders)])
    with bench.scheduler.preparing():
        for (reason, _), outputs in zip(orders, found, strict=True):
            if all(
                compare(got, one, wide, bench.params) is None
                for got, one, wide in zip(outputs, single, expected, strict=True)
            ):
                return reason, 0.0
        return None, min(_spread(single), _spread(found[-1]) if description.parameters else math.inf)


def _spread(outputs: list[torch.Tensor]) -> float:
    """Standard deviation of the output that varies most, as a share of its mean magnitude."""
    floats = [t.float() for t in outputs if t.dtype.is_floating_point]
    return max((float(t.std(correction=0) / t.abs().mean().clamp(min=TINY)) for t in floats), default=0.0)


def _does_not_run(error: Exception) -> Admission:
    return Admission(False, "does_not_run", {"detail": str(error)[:300]})


def find_trivial_answer(bench: Bench) -> str | None:
    """The first cheap answer that would pass as correct on this task, or None (knowledge: KernelBench's zeros, METR's list)."""
    single = bench.outputs.tensors(bench.bank_single, 0)
    other = bench.outputs.tensors(bench.bank_single, 1)
    expected = bench.expected.tensors(bench.bank_expected, 0)
    first_input = bench.inputs.tensors(bench.bank_inputs, 0)[:1]
    floats = [i for i, t in enumerate(single) if t.dtype.is_floating_point]
    if not floats:
        return "no_float_output"
    if not all(torch.isfinite(single[i]).all() for i in floats):
        return "not_finite"
    answers: dict[str, list[torch.Tensor]] = {
        "zeros_pass": [torch.zeros_like(t) for t in single],
        "mean_passes": [
            torch.full_like(t, t.double().mean().item()) if t.dtype.is_floating_point else t for t in single
        ],
        "seeds_agree": other,
    }
    if bench.params.precision != "tf32":  # whose products are rounded as much
        answers["half_precision_passes"] = [
            t.half().to(t.dtype) if t.dtype.is_floating_point else t for t in single
        ]
    if (
        len(single) == 1
        and first_input
        and first_input[0].shape == single[0].shape
        and first_input[0].dtype == single[0].dtype
    ):
        answers["first_input_passes"] = first_input
    for reason, answer in answers.items():
        if all(
            compare(a, s, e, bench.params) is None for a, s, e in zip(answer, single, expected, strict=True)
        ):
            return reason
    return None
