"""The judge, which builds, verifies and measures one candidate on one task and returns a verdict.

The judge is trusted. It holds the inputs, the reference outputs, the clock and the verdict. The candidate
runs in a separate sandboxed process that shares nothing with the judge but memory of a fixed layout and a
socket (docs/design/judge-protocol.md).
"""

import contextlib
import functools
import os
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.core.errors import InfrastructureError, TaskError, TaskTooLarge, UserError
from components.core.files import digest_bytes
from components.core.params import Params
from components.core.progress import Report, ignore
from components.core.task import KernelTask
from components.core.text import readable
from components.judge.admission import admit
from components.judge.baselines import COMPILE, EAGER, NOOP
from components.judge.bench_cache import BenchCache
from components.judge.candidate_build import BuiltCandidate, build_candidate
from components.judge.compile_baseline import fastest_mode, start_modes
from components.judge.device_scheduler import DeviceScheduler
from components.judge.rejection import LOAD_ERRORS, RUN_ERRORS, Rejected, rejecting
from components.judge.statistics import net
from components.judge.task_bench import TaskBench, open_bench
from components.judge.timed_rounds import RawSeconds, Timed, speedup, timed_rounds, wrong_timed_output
from components.judge.timed_runner import TimedRunner
from components.judge.verdict import (
    MARGIN,
    Admission,
    Labels,
    Seconds,
    Speedup,
    Status,
    Verdict,
    milestone,
    with_standard_labels,
)
from components.judge.version import VERSION
from components.sandbox.build import EXTENSION_SUFFIX, Builder, open_factory
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.runner_factory import RunnerFactory

# Number of file descriptors that are assumed to be open for one task bench. They belong to the shared memory
# of its reference and of each runner, and to each runner's connection and pidfd.
TASK_DESCRIPTORS = 40
# Number of file descriptors that are reserved for everything else in the judge's process.
OTHER_DESCRIPTORS = 512
# Largest number of characters in the log of a verdict; the middle of a longer log is cut out.
LOG_CHARACTERS = 2000
REASON_CHARACTERS = 200


class Judge:
    """Judge of candidates on one device, which makes one measurement at a time.

    `folder` is where the judge keeps builds and the files of runners. `factory` is a factory of runners made
    by `open_factory`; by default one is made. `scheduler` is the device's scheduler, if several judges share
    it; its owner then frees the memory of idle task benches. Builds and preparations for several candidates
    run in parallel. The constructor raises the process's limit of open files to its hard limit; if that limit
    is low, fewer task benches are kept. Raises UserError if the device, the isolation or the folder cannot be
    used.
    """

    def __init__(
        self,
        params: Params,
        folder: Path,
        *,
        factory: RunnerFactory | None = None,
        scheduler: DeviceScheduler | None = None,
    ):
        self.params = params
        if params.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "device=cuda: torch sees no GPU here; run with --set device=cpu, or on a machine with an "
                "NVIDIA GPU."
            )
        self.runner_factory = factory or open_factory(params.sandbox, params.device, folder)
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self.builder = Builder(params.sandbox, params.device, folder / "builds")
        self.scheduler = scheduler or DeviceScheduler(params.device)
        capacity = min(params.sandbox.warm_tasks, (limit - OTHER_DESCRIPTORS) // TASK_DESCRIPTORS)
        self.bench_cache = BenchCache(max(1, capacity))
        if scheduler is None:
            self.scheduler.release_idle_memory = self.bench_cache.close_unused

    def verdict(
        self,
        task: KernelTask,
        files: dict[str, str],
        *,
        compare_compile: bool | None = False,
        report: Report = ignore,
    ) -> Verdict:
        """Return the verdict on the candidate with `files` on `task`.

        `files` maps each workspace path to the text of the file. `compare_compile` determines when a correct
        candidate is also compared with torch.compile: always, with its fastest mode (True), only if it is
        faster than eager, with the default mode (False), or never (None). `report` is called with the name of
        each step when it begins. Raises InfrastructureError if the judge itself fails.
        """
        try:
            report("building the candidate")
            built = self._build(task, files)
            report("preparing inputs, reference outputs and baselines")
            with (
                self.bench(task) as bench,
                self._device(bench, compare_compile),
                open(built.library or os.devnull, "rb") as library_file,
            ):
                return self._measure(bench, built, library_file.fileno(), compare_compile, report)
        except Rejected as error:
            return make_verdict(self.params, error.status, error.reason, error.log)
        except TaskTooLarge as error:
            return make_verdict(self.params, "infrastructure", "too_large", f"the task is too large: {error}")
        except TaskError as error:
            return make_verdict(self.params, "infrastructure", "task", f"the task itself fails: {error}")
        except torch.OutOfMemoryError as error:
            raise InfrastructureError(
                f"the judge's own work does not fit the device's memory: {error}"
            ) from error

    def _build(self, task: KernelTask, files: dict[str, str]) -> BuiltCandidate:
        """Screen and build a candidate; raise Rejected if a file is refused or does not compile."""

        def record(runner_files: dict[str, str]) -> bytes:
            with self.bench(task) as bench:
                init_inputs = bench.reference.layout.description.init_inputs
            header: RoleHeader = {
                "role": "record",
                "device": self.params.device,
                "precision": self.params.precision,
                "files": runner_files,
                "init_inputs": init_inputs,
            }
            with rejecting(LOAD_ERRORS):
                runner = self.runner_factory.spawn(header, seconds=self.params.sandbox.run_seconds)
                with contextlib.closing(runner), self.scheduler.background_work(runner):
                    return runner.receive()

        return build_candidate(files, self.builder, self.params.sandbox, record)

    def bench(self, task: KernelTask) -> contextlib.AbstractContextManager[TaskBench]:
        """Return a context that yields the task's bench, which is made if the cache does not have it.

        Entering the context raises TaskError if the task's own source fails.
        """
        make = functools.partial(open_bench, self.params, self.runner_factory, self.scheduler, task.code)
        return self.bench_cache.use(task.task_id, make)

    @contextlib.contextmanager
    def _device(self, bench: TaskBench, compare_compile: bool | None) -> Iterator[None]:
        """Hold a GPU exclusively for one candidate, after its baselines have been started; do nothing on cpu.

        The started baselines include those of torch.compile that the candidate may be compared with, as
        `compare_compile` determines (`verdict`). A thread that starts a baseline holds the lock of the task's
        `BaselineCache`, and the start is paused while another thread measures. If that other thread judged a
        candidate of the same task and needed the lock too, neither thread would continue. Candidates of one
        task therefore first wait for `candidate_lock`.
        """
        if not self.scheduler.is_exclusive:
            yield
            return
        with bench.candidate_lock:
            bench.baselines.get(EAGER)
            bench.baselines.get(NOOP)
            if bench.starts_compile_early and compare_compile is not None:
                try:
                    start_modes(bench) if compare_compile else bench.baselines.get(COMPILE)
                except (TaskError, torch.OutOfMemoryError):
                    # Only candidates that are compared with torch.compile fail, in `_compare`.
                    bench.starts_compile_early = False
            with self.scheduler.exclusive_device():
                if compare_compile:
                    # The slower modes free their memory before the candidate allocates any.
                    with contextlib.suppress(TaskError):
                        fastest_mode(bench)
                if bench.reference.layout.placement.shares_buffers:
                    self.scheduler.release_cache()
                yield

    def _measure(
        self,
        bench: TaskBench,
        built: BuiltCandidate,
        library: int,
        compare_compile: bool | None,
        report: Report,
    ) -> Verdict:
        """Load a candidate, verify its outputs before and after timing it, and return its verdict.

        `library` is the descriptor of the candidate's library, or of an empty file if it has none. For
        `compare_compile` see `verdict`. Raises Rejected if the candidate fails.
        """
        runners: dict[Timed, TimedRunner] = {
            "eager": bench.baselines.get(EAGER),
            "noop": bench.baselines.get(NOOP),
        }
        header: RoleHeader = {
            "role": "candidate",
            "files": built.files,
            "extensions": None if built.extensions is None else list(built.extensions),
            "suffix": EXTENSION_SUFFIX,
            "rules": self.params.sandbox.rules,
        }
        try:
            with rejecting(LOAD_ERRORS):
                candidate = TimedRunner(
                    bench.reference, bench.processes, header, library, seconds=self.params.sandbox.run_seconds
                )
        except Rejected as error:
            if not built.failures:
                raise
            then = f"The file then failed to load ({error.status} {error.reason}): {error.log}"
            raise Rejected("build_failed", "compiler", "\n".join([*built.failures.values(), then])) from error
        runners = {"candidate": candidate, **runners}
        bench.exact.forget_deferred()
        try:
            report("comparing outputs with the reference")
            with rejecting(RUN_ERRORS):
                _verify(candidate)
            with rejecting(RUN_ERRORS, hide_text=True):
                speedups, medians, evidence = self._compare(bench, runners, compare_compile, report)
                # A candidate that counts its calls could be right only until it is timed.
                _verify(candidate)
        finally:
            candidate.close()
        with rejecting(RUN_ERRORS, hide_text=True):
            reason = bench.wrong_deferred_call()
        if reason is not None:
            raise wrong_timed_output(reason)
        return make_verdict(
            self.params,
            "correct",
            speedup=speedups,
            seconds=medians,
            evidence=self._evidence(bench)
            | {"candidate": built.digest, "extensions_not_built": sorted(built.failures)}
            | evidence,
        )

    def _compare(
        self,
        bench: TaskBench,
        runners: dict[Timed, TimedRunner],
        compare_compile: bool | None,
        report: Report,
    ) -> tuple[Speedup, Seconds, dict[str, Any]]:
        """Time the candidate beside the baselines, and return its speed-ups, median times and the evidence.

        The baselines are eager, and torch.compile in the cases that `compare_compile` determines (`verdict`).
        `runners` has the running candidate, eager and no-op; torch.compile is added to it. Times are in
        seconds per call. The evidence has the times of all rounds by runner, and the mode of torch.compile.
        """
        candidate, baselines = runners["candidate"], list[Timed](["eager"])
        evidence: dict[str, Any] = {}
        if compare_compile:
            report("starting torch.compile")
            runners["compile"], evidence = self._compile_baseline(bench, candidate, every_mode=True)
            baselines.append("compile")
        report("timing")
        with self._timing(candidate):
            raw = timed_rounds(bench, runners, baselines)
        spread = self.params.sandbox.process_spread
        speedups = {name: speedup(raw, name, spread) for name in baselines}
        medians = {name: median_seconds(raw, name) for name in ("candidate", *baselines)}
        evidence["raw_seconds"] = dict(raw)
        if compare_compile is False and speedups["eager"].estimate > MARGIN:
            runners["compile"], compile_evidence = self._compile_baseline(bench, candidate, every_mode=False)
            with self._timing(candidate):
                raw = timed_rounds(bench, runners, ["compile"])
            speedups["compile"] = speedup(raw, "compile", spread)
            medians["compile"] = median_seconds(raw, "compile")
            evidence["raw_seconds"] |= {f"{name}_2": samples for name, samples in raw.items()}
            evidence |= compile_evidence
        return Speedup.model_validate(speedups), Seconds.model_validate(medians), evidence

    def _compile_baseline(
        self, bench: TaskBench, candidate: TimedRunner, *, every_mode: bool
    ) -> tuple[TimedRunner, dict[str, Any]]:
        """Return the timed runner of torch.compile, and the entries about its mode for the evidence.

        The mode is the fastest one on the task if `every_mode` is set, and otherwise the default mode. The
        candidate's time limit is extended by the time that starting and choosing take.
        """
        began = time.monotonic()
        if every_mode:
            start_modes(bench)
            with self.scheduler.measuring():
                runner, best, seconds = fastest_mode(bench)
            evidence: dict[str, Any] = {
                "compile_mode": best.mode,
                "compile_seconds": {baseline.mode: took for baseline, took in seconds.items()},
            }
        else:
            runner, evidence = bench.baselines.get(COMPILE), {"compile_mode": COMPILE.mode}
        candidate.extend_deadline(time.monotonic() - began)
        return runner, evidence | {"compile_cached": runner.is_cached}

    @contextlib.contextmanager
    def _timing(self, candidate: TimedRunner) -> Iterator[None]:
        """Hold the device for timed rounds, and add the wait for the device to the candidate's time limit."""
        began = time.monotonic()
        with self.scheduler.measuring():
            candidate.extend_deadline(time.monotonic() - began)
            yield

    def _evidence(self, bench: TaskBench) -> dict[str, Any]:
        cuda, reference = self.params.device == "cuda", bench.reference
        return {
            "clock": "wall" if cuda else "cpu",
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "compiler": self.builder.toolchain_digest[:16],
            "task": digest_bytes(reference.code.encode()),
            "seeds": [reference.parameter_seed, *reference.seeds[: len(reference.layout.distributions)]],
            "sets_per_round": reference.layout.calls,
            "inputs": "rotated and blended" if reference.inputs.rotates else "blended",
        }

    def admit(self, code: str, *, headroom: bool = False) -> Admission:
        """Return the admission of the task with source `code`.

        With `headroom`, the task must also compile and leave device memory for other tasks, and its time
        under torch.compile is measured too.
        """
        # An admission shows that a task is sound, whatever the rules of the candidates.
        return admit(
            with_standard_labels(self.params), self.runner_factory, self.scheduler, code, headroom=headroom
        )

    def prepare(self) -> None:
        """Start the zygotes, the processes that runners are forked from, without waiting for them."""
        self.runner_factory.prepare()

    def close(self) -> None:
        with self.scheduler.measuring():
            self.bench_cache.close()
        self.runner_factory.close()


def _verify(candidate: TimedRunner) -> None:
    """Raise Rejected if the candidate's output is wrong on an input set that has a reference output."""
    if (reason := candidate.verify("check")) is not None:
        where = reason.replace(":", " on inputs of the distribution ")
        raise Rejected("wrong_output", reason, f"the output is wrong ({where}).")


def median_seconds(raw: RawSeconds, name: Timed) -> float:
    """Return the median seconds of one call of runner `name`, after the no-op's time has been subtracted."""
    return float(np.median(net(raw[name], raw["noop"])))


def make_verdict(
    params: Params,
    status: Status,
    reason: str = "",
    log: str = "",
    *,
    speedup: Speedup | None = None,
    seconds: Seconds | None = None,
    evidence: dict[str, Any] | None = None,
) -> Verdict:
    """Return a verdict with the given fields, and with the milestone that follows from them.

    The milestone is the reward (-1, 1, 2 or 3), computed from the status and the speed-ups by
    `verdict.milestone`. Long reasons and logs are shortened, and their terminal escapes and control
    characters are removed.
    """
    verdict = Verdict(
        status=status,
        reason=readable(reason, REASON_CHARACTERS),
        device=params.device,
        precision=params.precision,
        seconds=seconds or Seconds(),
        speedup=speedup or Speedup(),
        evidence={
            "judge": VERSION,
            "isolation": params.sandbox.isolation,
            "labels": Labels.of(params.sandbox).model_dump(),
            **(evidence or {}),
        },
        log=readable(log, LOG_CHARACTERS),
    )
    return verdict.model_copy(update={"milestone": milestone(verdict)})
