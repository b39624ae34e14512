"""The torch.compile that an evaluation is held against: the fastest of its modes on this task, found once per task.

Training compares with the default mode alone: the others cost a task seconds to minutes (max-autotune times kernels of
its own), and a reward asks only whether a kernel beats what everybody gets. Which mode is fastest is decided in rounds
of its own; the ratio that counts is then measured anew beside the candidate, so the choice makes no mode look better.
"""

from __future__ import annotations

import statistics

from components.core.errors import InfrastructureError, TaskError
from components.judge.measurement import StagedInputs
from components.judge.statistics import LONGEST, net, precise_rounds
from components.judge.task_bench import Bench, TimedRunner
from components.sandbox.runner_process import RunnerError

DEFAULT = "compile"
ROLES: dict[str, dict[str, str]] = {
    "cpu": {"default": DEFAULT},
    "cuda": {
        "default": DEFAULT,
        "reduce-overhead": "compile reduce-overhead",
        "max-autotune": "compile max-autotune",
    },
}
"""The arm of each mode. CUDA graphs and Triton's tuning are what the other two add, so on cpu there is one mode."""
ALONE = "max-autotune"
"""The mode that times kernels as it compiles: nothing may run beside it."""


def begin(bench: Bench) -> None:
    """Compile the modes that need not be alone, beside whatever else runs: seconds in which the device would stand still."""
    if not bench.modes:
        started(bench, {mode: role for mode, role in ROLES[bench.params.device].items() if mode != ALONE})


def fastest(bench: Bench) -> tuple[TimedRunner, str, dict[str, float]]:
    """The arm of the fastest mode, the mode, and the seconds of one call in each where there are several. Call with the clock to oneself.

    A mode that cannot compile the task, computes something else or dies is left out; the default mode has to be there.
    """
    roles = ROLES[bench.params.device]
    if len(roles) == 1:
        return bench.arm(DEFAULT), "default", {}
    if not bench.modes:
        bench.modes.update(seconds(bench, roles))
    best = min(bench.modes, key=bench.modes.__getitem__)
    for mode, role in roles.items():
        if mode not in ("default", best):  # the default's is what training compares with
            bench.drop(role)
    return bench.arm(roles[best]), best, dict(bench.modes)


def started(bench: Bench, roles: dict[str, str]) -> list[str]:
    """Start each named arm, which compiles; those that the task does without are left out of the names that come back."""
    names = []
    for name, role in roles.items():
        try:
            bench.arm(role)
            names.append(name)
        except TaskError:
            if not _optional(role):
                raise
    return names


def seconds(bench: Bench, roles: dict[str, str]) -> dict[str, float]:
    """Median seconds of one call of each named arm, in alternating rounds of rotating order; modes that the task does without are left
    out. As in a verdict the first round is not counted, and there are more rounds while a median is uncertain."""
    sandbox, number = bench.params.sandbox, 0
    raw: dict[str, list[float]] = {name: [] for name in ("noop", *started(bench, roles))}
    names, wanted, staging = list(raw), sandbox.rounds, StagedInputs(bench, bench.per_round)
    while number <= wanted:
        staged = staging.hold(bench.sets.fresh(bench.per_round))
        for name in list(names):
            role = roles.get(name, name)
            try:
                took = bench.arm(role).round("time", staged)[0]
            except RunnerError as error:
                bench.drop(role)
                if not _optional(role):
                    raise InfrastructureError(f"{name}: {error}") from error
                del raw[name]
                names.remove(name)
                continue
            if number > 0:
                raw[name].append(took)
        names = [*names[1:], names[0]]
        if number == wanted:
            wanted = precise_rounds(raw, number, min(sandbox.most_rounds, LONGEST * sandbox.rounds))
        number += 1
    return {
        name: float(statistics.median(net(samples, raw["noop"])))
        for name, samples in raw.items()
        if name != "noop"
    }


def _optional(role: str) -> bool:
    return role.startswith(f"{DEFAULT} ")
