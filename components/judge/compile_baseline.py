"""Choice of the torch.compile mode that evaluations compare with, which is the fastest mode on each task.

Training compares with the default mode only, because each other mode takes seconds to minutes per task
(max-autotune times kernels while it compiles). The mode is chosen once per task and installation, in rounds
without a candidate, and kept in the compile cache. The ratio in the verdict is measured in other rounds,
beside the candidate, so that random errors in the choice do not affect it.
"""

import statistics
from collections.abc import Sequence

from components.core.errors import InfrastructureError, TaskError
from components.core.records import Device
from components.judge.baselines import COMPILE, NOOP, Baseline
from components.judge.compile_cache import has_artefacts, load_mode_seconds, store_mode_seconds
from components.judge.statistics import UNPAIRED_ROUNDS, net, precise_rounds
from components.judge.task_bench import TaskBench
from components.judge.timed_runner import StagedInputs, TimedRunner
from components.sandbox.runner_process import RunnerError

# Baseline in the mode that times kernels while it compiles, and therefore needs the device exclusively.
MAX_AUTOTUNE = Baseline("compile", "max-autotune")
# Baselines of the torch.compile modes that are compared, by device. The modes other than the default add CUDA
# graphs and the tuning of Triton kernels, so cpu has the default mode only.
COMPILE_MODES: dict[Device, tuple[Baseline, ...]] = {
    "cpu": (COMPILE,),
    "cuda": (COMPILE, Baseline("compile", "reduce-overhead"), MAX_AUTOTUNE),
}
# Baselines of the modes that are compared on a task whose baselines share buffers (`Placement`). No mode uses
# CUDA graphs, because a CUDA graph keeps its memory between rounds. The launch time that a graph saves is
# negligible in calls of such a size.
SHARING_MODES: dict[Device, tuple[Baseline, ...]] = {
    "cpu": (COMPILE,),
    "cuda": (COMPILE, Baseline("compile", "max-autotune-no-cudagraphs")),
}


def compile_modes(bench: TaskBench) -> tuple[Baseline, ...]:
    """Return the baselines of the torch.compile modes that are compared on a task."""
    layout = bench.reference.layout
    return (SHARING_MODES if layout.placement.shares_buffers else COMPILE_MODES)[layout.device]


def start_modes(bench: TaskBench) -> None:
    """Start the torch.compile baselines that `fastest_mode` needs and that can start beside other work.

    These are the baseline of the fastest mode if the modes of this task were compared before, and otherwise
    those of every mode. A mode that times kernels while it compiles can start beside other work if the cache
    has what it compiles.
    """
    modes = compile_modes(bench)
    _load_seconds(bench, modes)
    if bench.mode_seconds:
        modes = (min(bench.mode_seconds, key=bench.mode_seconds.__getitem__),)
    reference = bench.reference
    start_available(
        bench,
        [
            mode
            for mode in modes
            if not mode.mode.startswith(MAX_AUTOTUNE.mode) or has_artefacts(reference, mode.mode)
        ],
    )


def fastest_mode(bench: TaskBench) -> tuple[TimedRunner, Baseline, dict[Baseline, float]]:
    """Return the runner of a task's fastest torch.compile mode, the mode, and the seconds per call by mode.

    Modes are represented by their baselines. The seconds are those of an earlier comparison on this device if
    the cache has them, and are measured otherwise. The dictionary is empty on a device with one mode. The
    calling thread must have exclusive access to the device. A mode that fails on the task is left out. If the
    default mode fails, TaskError or InfrastructureError is raised.
    """
    modes = compile_modes(bench)
    if len(modes) == 1:
        return bench.baselines.get(COMPILE), COMPILE, {}
    _load_seconds(bench, modes)
    if not bench.mode_seconds:
        bench.mode_seconds.update(baseline_seconds(bench, modes))
        if len(bench.mode_seconds) == len(modes):  # A mode that failed may work the next time.
            seconds = {mode.mode: bench.mode_seconds[mode] for mode in modes}
            store_mode_seconds(bench.reference, list(seconds), seconds)
    best = min(bench.mode_seconds, key=bench.mode_seconds.__getitem__)
    while best.is_optional and not start_available(bench, [best]):
        del bench.mode_seconds[best]
        best = min(bench.mode_seconds, key=bench.mode_seconds.__getitem__)
    for mode in modes:
        if mode not in (COMPILE, best):  # training uses the default mode
            bench.baselines.drop(mode)
    return bench.baselines.get(best), best, dict(bench.mode_seconds)


def _load_seconds(bench: TaskBench, modes: Sequence[Baseline]) -> None:
    """Fill `bench.mode_seconds` from the compile cache, if it is empty and there are several modes."""
    if len(modes) > 1 and not bench.mode_seconds:
        known = load_mode_seconds(bench.reference, [mode.mode for mode in modes])
        bench.mode_seconds.update({mode: known[mode.mode] for mode in modes if mode.mode in known})


def start_available(bench: TaskBench, baselines: Sequence[Baseline]) -> list[Baseline]:
    """Start the runner of each baseline, and return the baselines whose runners work on the task.

    Raises TaskError if a baseline that is not optional fails.
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
    """Return the median seconds per call of each baseline that works on the task.

    The median seconds of the no-op, a runner that computes nothing, are subtracted. The baselines are
    measured in alternating rounds. The first round is not included, and more rounds are made as long as a
    median is uncertain (`statistics.precise_rounds`). If a baseline that is not optional fails, TaskError or
    InfrastructureError is raised.
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
