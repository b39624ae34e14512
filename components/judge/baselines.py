"""Start, verify and keep the timed runners of a task's baselines: eager, the no-op and torch.compile."""

import contextlib
import functools
import threading
from dataclasses import dataclass
from typing import Literal

from components.core.errors import TaskError
from components.judge.compile_cache import start_compiled
from components.judge.role_processes import OneProcess, ProcessPerRole
from components.judge.task_reference import TaskReference
from components.judge.timed_runner import BASELINE_LIMITS, TimedRunner
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.runner_process import RunnerError

# Wall-time limit of a baseline's runner in seconds; each of its rounds also has a shorter limit.
BASELINE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Baseline:
    """A computation with whose time a candidate's is compared.

    `role` says whether it is eager mode, torch.compile in the mode `mode`, or the no-op. The no-op computes
    nothing, and its time is subtracted from all other times.
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


class BaselineCache:
    """Timed runners of a task's baselines, each of which is started at its first use and then kept."""

    def __init__(self, reference: TaskReference, processes: ProcessPerRole):
        self.reference = reference
        self.processes = processes
        self.runners: dict[Baseline, TimedRunner] = {}
        self.lock = threading.RLock()

    def get(self, baseline: Baseline) -> TimedRunner:
        """Return the runner of `baseline`, after starting it if it does not run yet.

        Raises TaskError if the baseline fails or an output is wrong.
        """
        with self.lock:
            if baseline not in self.runners:
                limit = BASELINE_LIMITS * self.reference.params.sandbox.run_seconds
                self.runners[baseline] = start_baseline(
                    self.reference, self.processes, baseline, warm_up_seconds=limit
                )
            return self.runners[baseline]

    def drop(self, baseline: Baseline) -> None:
        """End the runner of `baseline`; its next use starts another runner."""
        if baseline in self.runners:
            self.runners.pop(baseline).close()

    def drop_runner(self, runner: TimedRunner) -> None:
        """End `runner`, the runner of a baseline, and remove it from the cache."""
        for baseline in [baseline for baseline, known in self.runners.items() if known is runner]:
            self.drop(baseline)

    def close(self) -> None:
        for baseline in list(self.runners):
            self.drop(baseline)


def start_baseline(
    reference: TaskReference,
    processes: ProcessPerRole | OneProcess,
    baseline: Baseline,
    *,
    warm_up_seconds: float,
) -> TimedRunner:
    """Start the timed runner of a baseline, warm it up, verify its outputs, and return it.

    `processes` starts the process of the runner. The no-op is neither warmed up nor verified. The warm-up may
    take `warm_up_seconds`. Raises TaskError if the baseline fails or an output is wrong.
    """
    start = functools.partial(_start_baseline, reference, processes, baseline, warm_up_seconds)
    if baseline.role == "compile":
        return start_compiled(reference, baseline.mode, start, save_seconds=warm_up_seconds)
    return start(None)


def _start_baseline(
    reference: TaskReference,
    processes: ProcessPerRole | OneProcess,
    baseline: Baseline,
    warm_up_seconds: float,
    library: int | None,
) -> TimedRunner:
    """Start, warm up and verify the timed runner of a baseline; the no-op is only started.

    `processes` starts the process of the runner. The warm-up may take `warm_up_seconds`. `library` is the
    descriptor of a file with the artefacts of an earlier compilation by torch.compile, which is empty if
    there are none, or None for other baselines. Raises TaskError if the baseline fails or an output is wrong.
    """
    header: RoleHeader = {
        "role": baseline.role,
        "code": reference.code,
        "compile_mode": baseline.mode,
    }
    try:
        with contextlib.ExitStack() as cleanup:
            runner = TimedRunner(reference, processes, header, library, seconds=BASELINE_SECONDS)
            cleanup.callback(runner.close)
            if baseline != NOOP:
                runner.warm_up(warm_up_seconds)
                with reference.scheduler.preparing():
                    reason = runner.verify("time", loose=True)
                if reason is not None:
                    raise TaskError(f"{baseline}: {reason}")
            cleanup.pop_all()
            return runner
    except RunnerError as error:
        raise TaskError(f"{baseline}: {error.kind} {error.text[-200:]}") from error
