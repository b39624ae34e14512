"""Choice of the torch.compile mode that evaluations compare with, the fastest one on each task.

Training compares with the default mode alone, since each other mode takes seconds to minutes per task
(max-autotune times kernels while it compiles). The mode is chosen once per task, in separate rounds. The
ratio in the verdict is measured again beside the candidate, so that the choice itself cannot favour a mode.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from components.core.config import Device
from components.core.errors import InfrastructureError, TaskError
from components.judge.measurement import StagedInputs, TimedRunner
from components.judge.statistics import UNPAIRED_ROUNDS, net, precise_rounds
from components.judge.task_bench import COMPILE, NOOP, Baseline, TaskBench
from components.sandbox.runner_process import RunnerError

MAX_AUTOTUNE = Baseline("compile", "max-autotune")
"""Mode that times kernels while it compiles, so that nothing else may use the device meanwhile."""
COMPILE_MODES: dict[Device, tuple[Baseline, ...]] = {
    "cpu": (COMPILE,),
    "cuda": (COMPILE, Baseline("compile", "reduce-overhead"), MAX_AUTOTUNE),
}
"""Modes that are compared, by device.

The modes other than the default add CUDA graphs and the tuning of Triton kernels, so cpu has only the
default.
"""


def start_modes(bench: TaskBench) -> None:
    """Start the modes that may compile beside other work, before the device is needed exclusively."""
    if not bench.mode_seconds:
        modes = COMPILE_MODES[bench.reference.params.device]
        start_available(bench, [mode for mode in modes if mode != MAX_AUTOTUNE])


def fastest_mode(bench: TaskBench) -> tuple[TimedRunner, Baseline, dict[Baseline, float]]:
    """Return the runner of the fastest mode, the mode, and the seconds of one call by mode.

    The seconds are empty on a device with one mode. The calling thread must have exclusive access to the
    device. A mode that fails on the task is left out, except for the default one, whose failure raises
    TaskError or InfrastructureError.
    """
    modes = COMPILE_MODES[bench.reference.params.device]
    if len(modes) == 1:
        return bench.baselines.get(COMPILE), COMPILE, {}
    if not bench.mode_seconds:
        bench.mode_seconds.update(baseline_seconds(bench, modes))
    best = min(bench.mode_seconds, key=bench.mode_seconds.__getitem__)
    for mode in modes:
        if mode not in (COMPILE, best):  # training compares with the default mode
            bench.baselines.drop(mode)
    return bench.baselines.get(best), best, dict(bench.mode_seconds)


def start_available(bench: TaskBench, baselines: Sequence[Baseline]) -> list[Baseline]:
    """Start each baseline and return those that the task supports.

    Raises TaskError if a required one fails.
    """
    available = []
    for baseline in baselines:
        try:
            bench.baselines.get(baseline)
            available.append(baseline)
        except TaskError:
            if not baseline.is_optional:
                raise
    return available


def baseline_seconds(bench: TaskBench, baselines: Sequence[Baseline]) -> dict[Baseline, float]:
    """Return the median seconds per call of each baseline that the task supports, from alternating rounds.

    As in a verdict, the first round is not counted, and rounds are added while a median is uncertain.
    """
    reference = bench.reference
    sandbox, calls, number = reference.params.sandbox, reference.layout.calls, 0
    raw: dict[Baseline, list[float]] = {b: [] for b in (NOOP, *start_available(bench, baselines))}
    order, rounds, staging = list(raw), sandbox.rounds, StagedInputs(reference, calls)
    while number <= rounds:
        staged = staging.hold(reference.inputs.fresh(calls))
        for baseline in list(order):
            try:
                seconds, _ = bench.baselines.get(baseline).round("time", staged)
            except RunnerError as error:
                bench.baselines.drop(baseline)
                if not baseline.is_optional:
                    raise InfrastructureError(f"{baseline}: {error}") from error
                del raw[baseline]
                order.remove(baseline)
                continue
            if number > 0:
                raw[baseline].append(seconds)
        order = [*order[1:], order[0]]
        if number == rounds:
            others = {baseline: samples for baseline, samples in raw.items() if baseline != NOOP}
            most = min(sandbox.most_rounds, UNPAIRED_ROUNDS * sandbox.rounds)
            rounds = precise_rounds(list(others.values()), raw[NOOP], number, most)
        number += 1
    noop = raw.pop(NOOP)
    return {baseline: float(statistics.median(net(samples, noop))) for baseline, samples in raw.items()}
