"""Timed runners of a task's baselines (eager, the no-op and torch.compile), and the choice of a compile mode.

A timed runner is a sandboxed process whose calls are timed. Training compares with the default mode of
torch.compile only, because each other mode takes seconds to minutes per task (max-autotune times kernels
while it compiles). Evaluations compare with the fastest mode on each task. The fastest mode is chosen once
per task and installation, in rounds (series of timed calls) without a candidate, and kept in the compile
cache (`compile_cache.py`). The ratio in the verdict is measured in other rounds, beside the candidate, so
that random errors in the choice do not affect it.
"""

import contextlib
import functools
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from components.core.errors import InfrastructureError, TaskError
from components.core.records import Device
from components.judge.compile_cache import (
    has_artefacts,
    load_mode_seconds,
    start_compiled,
    store_mode_seconds,
)
from components.judge.staged_inputs import StagedInputs
from components.judge.statistics import UNPAIRED_ROUNDS, net, precise_rounds
from components.judge.task_reference import TaskReference
from components.judge.timed_runner import BASELINE_LIMITS, TimedRunner
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.runner_process import RunnerError

# Wall-time limit of a baseline's runner in seconds; each of its rounds also has a shorter limit.
BASELINE_SECONDS = 24 * 3600

# Largest error of torch.compile's outputs, as a multiple of the absolute tolerance. It adds in another order;
# where the terms of a long sum cancel, its result is much less exact than eager's. The error is a thousandth
# of the scale in `tanh(x * x.sum())` of rows of 131,072 whose sum is small by chance.
COMPILED_TOLERANCE = 100.0
# Addition to the reason why the task's own second result is wrong.
DIFFERS = (
    ": it is not deterministic, because another call with equal inputs and weights gives another result; if "
    "only the constructor draws random values, --weights seed judges it"
)


@dataclass(frozen=True)
class Baseline:
    """A computation of a task that is timed beside that of a candidate, or to choose a mode of torch.compile.

    A candidate is an implementation of the task's module that is judged. `role` says whether the baseline is
    the task's module in eager mode, the module under torch.compile in the mode `mode`, or the no-op. The
    no-op computes nothing, and its time is subtracted from all other times.
    """

    role: Literal["eager", "noop", "compile"]
    mode: str = "default"

    @property
    def is_optional(self) -> bool:
        """Whether a task can be judged without this baseline.

        This holds for the modes of torch.compile other than the default mode.
        """
        return self.mode != "default"

    def __str__(self) -> str:
        return f"{self.role} {self.mode}" if self.is_optional else self.role


EAGER, NOOP, COMPILE = Baseline("eager"), Baseline("noop"), Baseline("compile")
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


class BaselineCache:
    """Timed runners of a task's baselines, each of which is started at its first use and then kept.

    A timed runner is a sandboxed process whose calls are timed, and a baseline is eager, torch.compile in
    some mode, or the no-op, which computes nothing. `reference` has the data of the task.
    """

    def __init__(self, reference: TaskReference):
        self.reference = reference
        self.runners: dict[Baseline, TimedRunner] = {}
        self.lock = threading.RLock()
        # Seconds of one call by mode of torch.compile, which is empty until the modes have been compared.
        self.mode_seconds: dict[Baseline, float] = {}
        # Whether an early start of torch.compile has failed (`start_early`).
        self.failed_early = False

    def get(self, baseline: Baseline) -> TimedRunner:
        """Return the runner (sandboxed process) of `baseline`, after starting it if it does not run yet.

        Raises TaskError if the baseline fails or one of its outputs is wrong.
        """
        with self.lock:
            if (runner := self.runners.get(baseline)) is None:
                limit = BASELINE_LIMITS * self.reference.params.sandbox.run_seconds
                runner = start_baseline(self.reference, baseline, warm_up_seconds=limit)
                self.runners[baseline] = runner
            return runner

    @property
    def fastest(self) -> Baseline:
        """Fastest of the modes of torch.compile that have been compared."""
        return min(self.mode_seconds, key=self.mode_seconds.__getitem__)

    def drop(self, baseline: Baseline) -> None:
        """End the runner (sandboxed process) of `baseline`, if there is one.

        The next call of `get` for this baseline starts another runner. The lock is not taken, because the
        thread that holds it may be starting a runner, which on cuda is paused while the caller measures.
        """
        if (runner := self.runners.pop(baseline, None)) is not None:
            runner.close()

    def drop_runner(self, runner: TimedRunner) -> None:
        """End `runner`, the sandboxed process of a baseline, and remove it from the cache."""
        for baseline in list(self.runners):
            if self.runners.get(baseline) is runner:
                self.drop(baseline)

    def close(self) -> None:
        for baseline in list(self.runners):
            self.drop(baseline)


def start_baseline(reference: TaskReference, baseline: Baseline, *, warm_up_seconds: float) -> TimedRunner:
    """Start the timed runner of a baseline, warm it up, verify its outputs, and return it.

    A timed runner is a sandboxed process whose calls are timed. `reference` has the task's source, inputs and
    expected outputs. The no-op, which computes nothing, is neither warmed up nor verified. The warm-up may
    take `warm_up_seconds` of wall time. Raises TaskError if the baseline fails or an output is wrong.
    """
    start = functools.partial(_start_baseline, reference, baseline, warm_up_seconds)
    if baseline.role == "compile":
        return start_compiled(reference, baseline.mode, start, save_seconds=warm_up_seconds)
    return start(None)


def _start_baseline(
    reference: TaskReference, baseline: Baseline, warm_up_seconds: float, library: int | None
) -> TimedRunner:
    """Start, warm up and verify the timed runner of a baseline, and return it.

    A timed runner is a sandboxed process whose calls are timed. The no-op, which computes nothing, is only
    started. The warm-up may take `warm_up_seconds` of wall time. For torch.compile, `library` is the
    descriptor of a file with the artefacts of an earlier compilation, which is empty if there are none; for
    other baselines it is None. Raises TaskError if the baseline fails or an output is wrong.
    """
    header: RoleHeader = {"role": baseline.role, "code": reference.code, "compile_mode": baseline.mode}
    try:
        with contextlib.ExitStack() as cleanup:
            runner = TimedRunner(reference, header, library, seconds=BASELINE_SECONDS)
            cleanup.callback(runner.close)
            if baseline != NOOP:
                runner.work_untimed("warm", warm_up_seconds)
                scheduler = reference.scheduler
                with scheduler.preparing(), scheduler.limiting(reference.params.sandbox.run_seconds):
                    found = runner.verify(
                        "time", loose=1.0 if baseline.role == "eager" else COMPILED_TOLERANCE
                    )
                if found is not None:
                    hint = DIFFERS if baseline.role == "eager" else ""
                    raise TaskError(f"{baseline}: {found.reason}{hint}")
            cleanup.pop_all()
            return runner
    except RunnerError as error:
        raise TaskError(f"{baseline}: {error.kind} {error.text[-200:]}") from error


def compile_modes(reference: TaskReference) -> tuple[Baseline, ...]:
    """Return the baselines of the torch.compile modes that are compared on the task of `reference`.

    They depend on the device, on sandbox.compile_modes, and on whether the task is so large that its
    baselines share buffers.
    """
    layout = reference.layout
    modes = (SHARING_MODES if layout.placement.shares_buffers else COMPILE_MODES)[layout.device]
    return (COMPILE,) if reference.params.sandbox.compile_modes == "default" else modes


def start_early(baselines: BaselineCache, *, every_mode: bool) -> None:
    """Start torch.compile before a candidate is compared with it: every mode, or the default mode only.

    `baselines` has the running processes of the task. If `every_mode` is set and the fastest mode is known
    from an earlier comparison, only that mode is started. If a start fails, the error is ignored, and no
    further early start is tried for the task. Such an error occurs again when a candidate (an implementation
    that is judged) is compared with torch.compile. Candidates that are not compared with torch.compile are
    not affected.
    """
    if baselines.failed_early:
        return
    try:
        start_modes(baselines) if every_mode else baselines.get(COMPILE)
    except (TaskError, torch.OutOfMemoryError):
        baselines.failed_early = True


def start_modes(baselines: BaselineCache) -> None:
    """Start the torch.compile baselines that `fastest_mode` needs and that can start beside other work.

    Each of these baselines stands for one mode of torch.compile on the task of `baselines`. If the modes of
    this task were compared before, only the baseline of the fastest mode is started, and otherwise those of
    every mode. A mode that times kernels while it compiles can start beside other work only if the compile
    cache has what it compiles. Raises TaskError if the default mode fails.
    """
    reference = baselines.reference
    modes = compile_modes(reference)
    _load_seconds(baselines, modes)
    if baselines.mode_seconds:
        modes = (baselines.fastest,)
    start_available(
        baselines,
        [
            mode
            for mode in modes
            if not mode.mode.startswith(MAX_AUTOTUNE.mode) or has_artefacts(reference, mode.mode)
        ],
    )


def fastest_mode(baselines: BaselineCache) -> tuple[TimedRunner, Baseline, dict[Baseline, float]]:
    """Return the runner of a task's fastest torch.compile mode, the mode, and the seconds per call by mode.

    The runner is the sandboxed process of this mode, and modes are represented by their `Baseline`. The
    seconds are those of an earlier comparison on this device if the compile cache has them, and are measured
    otherwise. The dictionary is empty on a device with one mode. The calling thread must have exclusive
    access to the device. A mode that fails on the task is left out. If the default mode fails, TaskError or
    InfrastructureError is raised.
    """
    modes = compile_modes(baselines.reference)
    if len(modes) == 1:
        return baselines.get(COMPILE), COMPILE, {}
    _load_seconds(baselines, modes)
    if not baselines.mode_seconds:
        reference = baselines.reference
        with reference.scheduler.limiting(reference.params.sandbox.run_seconds):
            baselines.mode_seconds.update(baseline_seconds(baselines, modes))
        if len(baselines.mode_seconds) == len(modes):  # A mode that failed may work the next time.
            seconds = {mode.mode: baselines.mode_seconds[mode] for mode in modes}
            store_mode_seconds(baselines.reference, list(seconds), seconds)
    while (best := baselines.fastest).is_optional and not start_available(baselines, [best]):
        del baselines.mode_seconds[best]
    for mode in modes:
        if mode not in (COMPILE, best):  # training uses the default mode
            baselines.drop(mode)
    return baselines.get(best), best, dict(baselines.mode_seconds)


def _load_seconds(baselines: BaselineCache, modes: Sequence[Baseline]) -> None:
    """Fill `baselines.mode_seconds` (seconds per call by mode) from the compile cache.

    `modes` are the baselines of the torch.compile modes that are compared. Nothing is done if there is only
    one, if `mode_seconds` is filled already, or if the cache has nothing.
    """
    if len(modes) > 1 and not baselines.mode_seconds:
        known = load_mode_seconds(baselines.reference, [mode.mode for mode in modes])
        baselines.mode_seconds.update({mode: known[mode.mode] for mode in modes if mode.mode in known})


def start_available(baselines: BaselineCache, wanted: Sequence[Baseline]) -> list[Baseline]:
    """Start the process of each baseline in `wanted`, and return the baselines that work on the task.

    A baseline is eager, torch.compile in some mode, or the no-op. Raises TaskError if a baseline fails that
    is not optional. Only modes of torch.compile other than the default mode are optional.
    """
    available = []
    for baseline in wanted:
        try:
            baselines.get(baseline)
            available.append(baseline)
        except TaskError:
            if not baseline.is_optional:
                raise
    return available


def baseline_seconds(baselines: BaselineCache, wanted: Sequence[Baseline]) -> dict[Baseline, float]:
    """Return the median seconds per call of each baseline that works on the task.

    A baseline is eager or torch.compile in some mode. The median seconds of the no-op, a process that
    computes nothing, are subtracted. The baselines are measured in alternating rounds of several calls each.
    The first round is not included, and more rounds are made as long as a median is uncertain
    (`statistics.precise_rounds`). Raises TaskError or InfrastructureError if a baseline fails that is not
    optional (`Baseline.is_optional`); others that fail are left out.
    """
    reference = baselines.reference
    sandbox, calls, number = reference.params.sandbox, reference.layout.calls, 0
    raw: dict[Baseline, list[float]] = {b: [] for b in (NOOP, *start_available(baselines, wanted))}
    order, rounds, staging = list(raw), sandbox.rounds, StagedInputs(reference, calls)
    while number <= rounds:
        staged = staging.hold(reference.inputs.repeated(calls))
        for baseline in list(order):
            try:
                seconds, _ = baselines.get(baseline).round("time", staged)
            except RunnerError as error:
                baselines.drop(baseline)
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
