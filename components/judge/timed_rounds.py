"""Measurement of a candidate and its baselines in alternating timed rounds."""

import time
from collections.abc import Sequence
from typing import Literal

import torch

from components.core.errors import InfrastructureError
from components.judge.rejection import Rejected
from components.judge.statistics import net, paired_ratio, wanted_rounds
from components.judge.task_bench import TaskBench
from components.judge.timed_runner import StagedInputs, TimedRunner
from components.judge.verdict import Ratio
from components.sandbox.runner_process import RunnerError

# Names of the runners that are measured.
Timed = Literal["candidate", "eager", "compile", "noop"]
# Seconds per call in each round, by the name of the runner.
RawSeconds = dict[Timed, list[float]]
# Share of the time limit `sandbox.run_seconds` after which no more rounds are added to a measurement.
ROUNDS_SHARE = 0.1


def timed_rounds(
    bench: TaskBench, runners: dict[Timed, TimedRunner], baselines: Sequence[Timed]
) -> RawSeconds:
    """Measure all runners in alternating rounds, and return each runner's seconds per call in each round.

    In each round all runners get the same new inputs, and their order rotates from one round to the next. If
    the baselines share their memory, the order is reversed instead, so that the candidate and eager, whose
    outputs are compared, always follow each other. The first round is left out of the result, because a
    runner that has been stopped for a while is slow in it. There are `sandbox.rounds` rounds at first. Their
    number is doubled, up to `sandbox.most_rounds`, until the candidate's speed-up over each of `baselines` is
    precise enough (`statistics.wanted_rounds`) or the rounds have taken `ROUNDS_SHARE` of the time limit.

    Raises Rejected if an output of the candidate is found to be wrong (`ExactRunner.wrong_call`), or if the
    candidate changed its inputs. Raises RunnerError if the candidate fails, InfrastructureError if a baseline
    fails, and TaskError if eager is too inexact to tell whether an output is wrong. The time of comparing
    outputs counts neither toward the candidate's time limit nor toward the rounds' share of it.
    """
    reference, started = bench.reference, time.monotonic()
    sandbox, calls = reference.params.sandbox, reference.layout.calls
    raw: RawSeconds = {name: [] for name in runners}
    order, rounds, number, staging = list(runners), sandbox.rounds, 0, StagedInputs(reference, calls)
    while number <= rounds:
        staged = staging.hold(reference.inputs.fresh(calls, number))
        results: dict[Timed, torch.Tensor] = {}
        for name in order:
            began = time.monotonic()
            try:
                seconds, outputs = runners[name].round("time", staged)
            except RunnerError as error:
                if name == "candidate":
                    raise
                bench.baselines.drop_runner(runners[name])  # the next attempt starts a new one
                raise InfrastructureError(f"{name}: {error}") from error
            if name != "candidate":
                runners["candidate"].extend_deadline(time.monotonic() - began)
            if number > 0:
                raw[name].append(seconds)
            if runners[name].inputs_changed:
                raise wrong_timed_output("inputs_changed")
            if name not in ("candidate", "eager"):
                continue
            results[name] = outputs
            if len(results) == 2:
                began = time.monotonic()
                reason = bench.exact.wrong_call(
                    staged.mixes, staged.inputs, results["candidate"], results["eager"]
                )
                if reason is not None:
                    raise wrong_timed_output(reason)
                compared = time.monotonic() - began
                runners["candidate"].extend_deadline(compared)
                started += compared
        shares = reference.layout.placement.shares_buffers
        order = order[::-1] if shares else [*order[1:], order[0]]
        if number == rounds and time.monotonic() - started < ROUNDS_SHARE * sandbox.run_seconds:
            rounds = max(
                wanted_rounds(speedup(raw, baseline), number, sandbox.most_rounds) for baseline in baselines
            )
        number += 1
    return raw


def wrong_timed_output(reason: str) -> Rejected:
    """Return the error for a candidate whose output in a timed round is wrong for `reason`."""
    return Rejected("wrong_output", reason, f"an output of a timed round is wrong ({reason}).")


def speedup(raw: RawSeconds, baseline: Timed, process_spread: float = 0.0) -> Ratio:
    """Return the candidate's speed-up over `baseline`, after the no-op's time has been subtracted from both.

    `process_spread` is the standard deviation of the log-ratio between two processes that run the same code.
    It widens the interval of the result.
    """
    baseline_seconds, candidate_seconds = net(raw[baseline], raw["noop"]), net(raw["candidate"], raw["noop"])
    return paired_ratio(baseline_seconds, candidate_seconds, process_spread=process_spread)
