"""Measurement of a candidate: verification, and alternating timed rounds with its baselines.

A candidate is an implementation of a task's module that is judged, a round is a series of timed calls, and a
baseline is eager, torch.compile or another candidate.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import torch

from components.core.errors import InfrastructureError, TaskError
from components.core.params import JudgeParams
from components.core.progress import Report
from components.judge.baselines import COMPILE, EAGER, NOOP, fastest_mode, start_early, start_modes
from components.judge.candidate import BuiltCandidate
from components.judge.candidate_runner import start_candidate
from components.judge.gpu_state import steady
from components.judge.limit import checked_limit
from components.judge.source_runner import TOO_LONG
from components.judge.staged_inputs import StagedInputs
from components.judge.statistics import net, paired_ratio, wanted_rounds
from components.judge.task_bench import TaskBench
from components.judge.timed_runner import BASELINE_LIMITS, TimedRunner
from components.judge.verdict import (
    MARGIN,
    RUN_ERRORS,
    WORKLOAD_MARGIN,
    Ratio,
    Rejected,
    Seconds,
    Speedup,
    rejecting,
)
from components.sandbox.runner_process import RunnerError
from components.sandbox.unsuspended_time import unsuspended_seconds

# Names of the runners that are measured.
Timed = Literal["candidate", "eager", "compile", "noop", "against"]
# Seconds per call in each round, by the name of the runner.
RawSeconds = dict[Timed, list[float]]
# Speed-ups, median seconds per call, and entries of a verdict's evidence.
Measurement = tuple[Speedup, Seconds, dict[str, Any]]
# Share of the time limit `sandbox.run_seconds` after which no more rounds are added to a measurement.
ROUNDS_SHARE = 0.1
# Number of timed rounds that are enough for a speed-up of a task that is almost too slow to be measured.
LEAST_ROUNDS = 3
# Largest number of rounds that are made again because results of the candidate may have been prepared. Before
# it is reached, a candidate that prepares results has as many of them that it is refused, or gains little.
MOST_REPEATED = 32


def measure_candidate(
    params: JudgeParams,
    bench: TaskBench,
    built: BuiltCandidate,
    compare_compile: bool | None,
    report: Report,
    against: BuiltCandidate | None = None,
    *,
    is_workload: bool = False,
) -> Measurement:
    """Load a candidate, verify its outputs before and after timing it, and return the measured figures.

    `built` is the candidate, `bench` has the reference data and baselines of its task, and `params` are the
    judge's settings. `compare_compile` determines when a correct candidate is also compared with
    torch.compile: True always, with the fastest mode of torch.compile on the task; False only if the
    candidate is faster than eager, with the default mode; None never. `is_workload` is set if the task was
    made from one workload (one of several calls of `get_inputs`) of another task. The ratio above which a
    candidate is called faster than eager is then lower, because the mean over the workloads decides. If
    `against` is given, another candidate, `built` is compared with eager and with `against` in the same
    series of timed calls, and not with torch.compile, because memory is planned for at most
    `memory_plan.TIMED_RUNNERS` timed processes. `report` is called with the name of each step when it begins.
    On a GPU nothing else uses the device meanwhile. Returns the speed-ups, the median seconds per call, and
    entries for the verdict's evidence (the record of what was measured). Raises Rejected if a candidate
    fails, TaskError if the task's own source does, and InfrastructureError if a baseline fails otherwise.
    """
    if against is not None:
        compare_compile = None
    with _exclusive_device(bench, compare_compile), bench.scheduler.limiting(params.sandbox.run_seconds):
        baselines = bench.baselines
        runners: dict[Timed, TimedRunner] = {"eager": baselines.get(EAGER), "noop": baselines.get(NOOP)}
        with contextlib.ExitStack() as stack:
            if against is not None:
                # The other candidate needs their memory. On cpu other threads may be timing them.
                for baseline in list(baselines.runners) if bench.scheduler.is_exclusive else ():
                    if baseline.role == "compile":
                        baselines.drop(baseline)
                with blaming_the_other():
                    other = start_candidate(params, bench.reference, against, BASELINE_LIMITS)
                    runners["against"] = stack.enter_context(contextlib.closing(other))
                    with rejecting(RUN_ERRORS):
                        _verify(other, detailed=True)
            candidate = start_candidate(params, bench.reference, built)
            stack.enter_context(contextlib.closing(candidate))
            bench.timed_output_check.forget_deferred()
            report("comparing outputs with the reference")
            with rejecting(RUN_ERRORS):
                _verify(candidate, detailed=True)
            with rejecting(RUN_ERRORS, hide_text=True):
                measurement = _compare(
                    params,
                    bench,
                    {"candidate": candidate, **runners},
                    compare_compile,
                    report,
                    is_workload=is_workload,
                )
                # A candidate that counts its calls could be right only until it is timed. It has seen timed
                # inputs, so numbers that depend on its outputs are not told.
                _verify(candidate, detailed=False)
        with rejecting(RUN_ERRORS, hide_text=True):
            reason = bench.wrong_deferred_call()
        if reason is not None:
            raise wrong_timed_output(reason)
        return measurement


@contextlib.contextmanager
def blaming_the_other() -> Iterator[None]:
    """Convert a Rejected raised inside the context into one that blames the other candidate of a comparison.

    A Rejected is the error of a candidate that fails. The one that is raised has the status `infrastructure`,
    the reason `against`, and a log that has the status, reason and log of the original one.
    """
    try:
        yield
    except Rejected as error:
        text = f"the candidate to compare with: {error.status} ({error.reason}). {error.log}"
        raise Rejected("infrastructure", "against", text) from error


@contextlib.contextmanager
def _exclusive_device(bench: TaskBench, compare_compile: bool | None) -> Iterator[None]:
    """Hold a GPU exclusively for one candidate, after its baselines have been started; do nothing on cpu.

    A candidate is an implementation that is judged. The started baselines are eager, the no-op (which
    computes nothing) and, unless `compare_compile` is None, torch.compile: in the default mode if
    `compare_compile` is False, and in every mode that can be started beside other work if it is True. An
    error of torch.compile is ignored. A thread that starts a baseline holds the lock of the task's
    `BaselineCache`, and the start is paused while another thread measures. If that other thread judged a
    candidate of the same task and needed the lock too, neither thread would continue. Candidates of one task
    therefore first wait for `candidate_lock`.
    """
    scheduler = bench.scheduler
    if not scheduler.is_exclusive:
        yield
        return
    # The GPU is held between the candidate's rounds too, because kernels that the candidate has launched
    # continue to run while its process is stopped.
    with bench.candidate_lock:
        bench.baselines.get(EAGER)
        bench.baselines.get(NOOP)
        if compare_compile is not None:
            start_early(bench.baselines, every_mode=compare_compile)
        with scheduler.measuring():
            if compare_compile:
                # The slower modes free their memory before the candidate allocates any.
                with contextlib.suppress(TaskError):
                    fastest_mode(bench.baselines)
            if bench.reference.layout.placement.shares_buffers:
                torch.cuda.empty_cache()
            yield


def _verify(candidate: TimedRunner, *, detailed: bool) -> None:
    """Raise Rejected if the candidate's output is wrong on an input set that has a reference output.

    `candidate` is the process of the candidate, and an input set has the inputs of one call. If `detailed` is
    set, the log of the error says how many elements are wrong. Raises RunnerError if the process fails.
    """
    if (found := candidate.verify("check")) is not None:
        where = found.reason.replace(":", " on inputs of the distribution ")
        detail = f": {found.detail}" if detailed else ""
        log = f"the output is wrong ({where}){detail}. {CONDITIONS}"
        raise Rejected("wrong_output", found.reason, log)


def _compare(
    params: JudgeParams,
    bench: TaskBench,
    runners: dict[Timed, TimedRunner],
    compare_compile: bool | None,
    report: Report,
    *,
    is_workload: bool,
) -> Measurement:
    """Time the candidate beside the baselines, and return its speed-ups, median times and the evidence.

    The baselines are eager, the other candidate if `runners` has one, and torch.compile in the cases that
    `compare_compile` and `is_workload` determine (`measure_candidate`). `runners` has the running sandboxed
    processes by name: the candidate, eager, the no-op (whose time is subtracted from all others) and, if
    there is one, the other candidate (`against`); torch.compile is added to it. Times are in seconds per
    call. The evidence (a record of what was measured, for the verdict) has the times of all rounds (series of
    timed calls) by name of the process, the least time of a call that the device allows (`limit.Limit`), the
    state of the GPU before and after the rounds, what the inputs were, and, if torch.compile was measured,
    its mode. Rounds in which the GPU was slowed down are repeated once. Raises Rejected if an output is wrong
    or the times are not possible.
    """
    candidate, reference = runners["candidate"], bench.reference
    spread = params.sandbox.process_spread
    speedups, medians = dict[str, Ratio](), dict[str, float]()
    staged = StagedInputs(reference, reference.layout.calls)
    evidence: dict[str, Any] = {"raw_seconds": {}}

    def time_beside(baselines: list[Timed], suffix: str = "") -> None:
        with contextlib.ExitStack() as stack:
            with candidate.waiting():
                stack.enter_context(bench.scheduler.measuring())
            raw, states = steady(lambda: timed_rounds(bench, runners, baselines, staged), params.device)
        if states:
            evidence[f"gpu{suffix}"] = states
        speedups.update({name: speedup(raw, name, spread) for name in baselines})
        for name in ("candidate", *baselines):
            medians.setdefault(name, median_seconds(raw, name))
        evidence["raw_seconds"] |= {f"{name}{suffix}": samples for name, samples in raw.items()}

    if compare_compile:
        report("starting torch.compile")
        _add_compile(bench, runners, evidence, every_mode=True)
    report("timing")
    time_beside([name for name in ("eager", "compile", "against") if name in runners])
    margin = WORKLOAD_MARGIN if is_workload else MARGIN
    if compare_compile is False and speedups["eager"].estimate > margin:
        _add_compile(bench, runners, evidence, every_mode=False)
        time_beside(["compile"], suffix="_2")
    _refuse_prepared(candidate)
    limit = checked_limit(params, reference, medians)
    evidence["limit"] = asdict(limit)
    evidence["inputs"] = {
        "drawn": reference.inputs.draws,
        "distributions": sorted({*reference.distributions, *reference.inputs.usable()}),
        "different_calls": len(staged.fingerprints),
    }
    return (
        Speedup.model_validate(speedups),
        Seconds.model_validate(medians | {"limit": limit.seconds}),
        evidence,
    )


def _add_compile(
    bench: TaskBench, runners: dict[Timed, TimedRunner], evidence: dict[str, Any], *, every_mode: bool
) -> None:
    """Add the timed process of torch.compile to `runners`, and what says its mode to `evidence`.

    `bench` has the baselines of the task. The mode is the fastest one on the task if `every_mode` is set, and
    otherwise the default mode. The entries of `evidence` (a record for the verdict) are `compile_mode`,
    `compile_cached` (whether nothing had to be compiled) and, if `every_mode` is set, `compile_seconds`, the
    seconds per call by mode. The time that starting and choosing take does not count toward the time limit of
    the candidate. Raises TaskError if torch.compile fails on the task.
    """
    with runners["candidate"].waiting():
        best = COMPILE
        if every_mode:
            start_modes(bench.baselines)
            with bench.scheduler.measuring():
                _, best, seconds = fastest_mode(bench.baselines)
            evidence["compile_seconds"] = {baseline.mode: took for baseline, took in seconds.items()}
        runners["compile"] = bench.baselines.get(best)
    evidence |= {"compile_mode": best.mode, "compile_cached": runners["compile"].is_cached}


def timed_rounds(
    bench: TaskBench, runners: dict[Timed, TimedRunner], baselines: Sequence[Timed], staged: StagedInputs
) -> RawSeconds:
    """Measure all runners in alternating rounds, and return each runner's seconds per call in each round.

    A runner is a sandboxed process, and a round is a series of timed calls. `runners` has the candidate,
    eager, the no-op (which computes nothing) and further baselines by name, and `baselines` has those with
    which the candidate is compared. In each round all runners get the same new inputs (`staged`), and their
    order rotates from one round to the next. If the baselines share their memory, the order is reversed
    instead, so that the candidate and eager, whose outputs are compared, always follow each other. The first
    round is left out, because a runner that has been stopped for a while is slow in it. A round in which
    results of the candidate may have been prepared (`ResultMemory.may_be_prepared`) is made again, up to
    `MOST_REPEATED` times in all. There are `sandbox.rounds` rounds at first. Their number is doubled, up to
    `sandbox.most_rounds`, until the candidate's speed-up over each of `baselines` is precise enough
    (`statistics.wanted_rounds`) or the rounds have taken the share `ROUNDS_SHARE` of `sandbox.run_seconds`.

    Raises Rejected if an output of the candidate is found to be wrong (`TimedOutputCheck.wrong_call`), if the
    candidate changed its inputs or prepares results, or if the other candidate of a comparison fails. Raises
    RunnerError if the candidate fails, InfrastructureError if a baseline fails, and TaskError if eager is too
    inexact to tell whether an output is wrong, or if the task's own runners use up the time limit of this
    thread (`DeviceScheduler.limiting`). When less than half of `sandbox.run_seconds` is left of that limit
    and at least `LEAST_ROUNDS` rounds have been made, no further round is begun. The time of making inputs
    and of comparing outputs counts neither toward the candidate's time limit nor toward the share
    `ROUNDS_SHARE`.
    """
    candidate, reference, spent = runners["candidate"], bench.reference, 0.0
    sandbox, calls = reference.params.sandbox, reference.layout.calls
    raw: RawSeconds = {name: [] for name in runners}
    order, rounds, number, repeated = list(runners), sandbox.rounds, 0, 0
    while number <= rounds:
        with candidate.waiting():
            staged.hold_fresh(calls, number)
        results: dict[Timed, torch.Tensor] = {}
        for name in order:
            began = unsuspended_seconds()
            try:
                with contextlib.nullcontext() if name == "candidate" else candidate.waiting():
                    seconds, outputs = runners[name].round("time", staged)
            except RunnerError as error:
                if name == "candidate":
                    raise
                if name == "against":
                    with blaming_the_other(), rejecting(RUN_ERRORS):
                        raise
                bench.baselines.drop_runner(runners[name])  # the next attempt starts a new one
                if error.kind == "timed_out":
                    raise TaskError(f"{name} took {TOO_LONG}") from error
                raise InfrastructureError(f"{name}: {error}") from error
            spent += unsuspended_seconds() - began
            if number > 0:
                raw[name].append(seconds)
            if runners[name].inputs_changed:
                with blaming_the_other() if name == "against" else contextlib.nullcontext():
                    raise wrong_timed_output("inputs_changed")
            if name not in ("candidate", "eager"):
                continue
            results[name] = outputs
            if len(results) == 2:
                with candidate.waiting():
                    reason = bench.timed_output_check.wrong_call(
                        staged.mixes, staged.inputs, results["candidate"], results["eager"]
                    )
                if reason is not None:
                    raise wrong_timed_output(reason)
        shares = reference.layout.placement.shares_buffers
        order = order[::-1] if shares else [*order[1:], order[0]]
        if number > 0 and repeated < MOST_REPEATED and candidate.result_memory.may_be_prepared(calls):
            _refuse_prepared(candidate)
            repeated += 1
            for samples in raw.values():
                samples.pop()
            number -= 1
        elif number == rounds and spent < ROUNDS_SHARE * sandbox.run_seconds:
            rounds = max(
                wanted_rounds(speedup(raw, baseline), number, sandbox.most_rounds) for baseline in baselines
            )
        if number >= LEAST_ROUNDS and 2 * bench.scheduler.left.seconds < sandbox.run_seconds:
            break
        number += 1
    return raw


def _refuse_prepared(candidate: TimedRunner) -> None:
    """Raise Rejected if many results of the candidate may have been prepared before its clock ran."""
    if candidate.result_memory.is_prepared:
        raise Rejected(
            "wrong_output",
            "prepared_outputs",
            "most outputs lie in memory in which no earlier output lay, so parts of them can have been "
            "written before the clock ran; let each call allocate its outputs, or write all of one that is "
            "used again.",
        )


# What strangers to the judge most often overlook.
CONDITIONS = (
    "Modules run in evaluation mode, and parameters and buffers have new values; with --weights seed they "
    "have the constructor's. Every element of an output has to be written in each call, because the judge "
    "overwrites earlier outputs."
)


def wrong_timed_output(reason: str) -> Rejected:
    """Return the error for a candidate whose output in a timed round is wrong for `reason`.

    A candidate is an implementation that is judged, and a round is a series of timed calls. `reason` is a
    code such as `max_error:given` or `inputs_changed`.
    """
    log = (
        f"an output of a timed round is wrong ({reason}). Those of the verification before were right, so "
        "this depends on the call, or concerns a few elements, such as one that is rounded the other way."
    )
    return Rejected("wrong_output", reason, log)


def speedup(raw: RawSeconds, baseline: Timed, process_spread: float = 0.0) -> Ratio:
    """Return the candidate's speed-up over `baseline`, after the no-op's time has been subtracted from both.

    `raw` has the seconds per call in each round (series of timed calls) by the name of the process; that of
    the no-op computes nothing. `process_spread` is the standard deviation of the log-ratio between two
    processes that run the same code. It widens the interval of the result.
    """
    baseline_seconds, candidate_seconds = net(raw[baseline], raw["noop"]), net(raw["candidate"], raw["noop"])
    return paired_ratio(baseline_seconds, candidate_seconds, process_spread=process_spread)


def median_seconds(raw: RawSeconds, name: Timed) -> float:
    """Return the median seconds of one call of `name`, after the no-op's time has been subtracted.

    `raw` has the seconds per call in each round (series of timed calls) by the name of the process, such as
    `candidate` or `eager`; that of the no-op computes nothing.
    """
    return float(np.median(net(raw[name], raw["noop"])))
