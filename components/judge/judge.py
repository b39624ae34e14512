"""The judge, which builds, verifies and measures one candidate on one task and returns a verdict.

A task is a PyTorch module with its inputs, and a candidate is an implementation of this module. The judge is
trusted. It holds the inputs, the reference outputs, the clock and the verdict. The candidate runs in a
separate sandboxed process that shares nothing with the judge but memory of a fixed layout and a socket
(docs/design/judge-protocol.md).
"""

import contextlib
import functools
import platform
import resource
import time
from pathlib import Path
from typing import Any

import torch

from components.core.errors import InfrastructureError, TaskError, TaskTooLarge, UserError
from components.core.files import digest_bytes
from components.core.params import JudgeParams
from components.core.progress import Report, ignore
from components.core.task import KernelTask
from components.judge.admission import admit, admit_workloads, named_workloads, refusal
from components.judge.candidate import BuiltCandidate, build_candidate, screen_candidate
from components.judge.candidate_runner import with_compiled_kernels
from components.judge.counters import check_counters, count
from components.judge.device_scheduler import DeviceScheduler
from components.judge.measurement import blaming_the_other, measure_candidate
from components.judge.task_bench import BenchCache, TaskBench, make_reference
from components.judge.verdict import (
    LOAD_ERRORS,
    Admission,
    Rejected,
    Status,
    Verdict,
    WorkloadFigures,
    holds_everywhere,
    rejecting,
    with_standard_labels,
)
from components.judge.verdict_making import make_verdict, verdict_over_workloads
from components.sandbox.build import Builder, open_factory
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.runner_factory import RunnerFactory

# Number of file descriptors that are assumed to be open for one task bench. They belong to the shared memory
# of its reference and of each runner, and to each runner's connection and pidfd.
TASK_DESCRIPTORS = 40
# Number of file descriptors that are reserved for everything else in the judge's process.
OTHER_DESCRIPTORS = 512
# Reasons of a verdict if a sandboxed process was killed, and seconds after which the zygote from which it was
# forked is known to have ended too, if that was killed.
KILLED_REASONS, ZYGOTE_SECONDS = ("process_died", "task"), 0.1
# Log of a correct candidate on a task on which KernelBench's tolerances accept a trivial answer.
TRIVIAL_ANSWER = (
    "On this task a trivial answer is correct within KernelBench's tolerances too ({}), so they do not show "
    "that the kernel computes the task."
)


class Judge:
    """Judge of candidates (implementations of a task's module) on one device, with one measurement at a time.

    `params` are the judge's settings, and `folder` is where it keeps builds and the files of runners, its
    sandboxed processes. `factory` is a factory of runners made by `open_factory`; by default one is made.
    `scheduler` has to be given if several judges share one device. The caller then has to set its
    `release_idle_memory` to a function that closes unused task benches (the reference data and running
    baselines of one task, `task_bench.py`). Builds and preparations for several candidates run in parallel.
    The constructor raises the process's limit of open files to its hard limit; if that limit is low, fewer
    task benches are kept. Raises UserError if the device, the isolation or the folder cannot be used.
    """

    def __init__(
        self,
        params: JudgeParams,
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
        check_counters(params)
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
        against: dict[str, str] | None = None,
        report: Report = ignore,
    ) -> Verdict:
        """Return the verdict on the candidate (the implementation of a task's module) with `files` on `task`.

        `files` maps each workspace path (`model_new.py`, `kernels/NAME`) to the text of the file.
        `compare_compile` determines when a correct candidate is also compared with torch.compile: True
        always, with the fastest mode of torch.compile on the task; False only if the candidate is faster than
        eager, with the default mode; None never. If `against` is given, the files of another candidate, the
        candidate is compared with eager and with this other one in the same series of timed calls, and never
        with torch.compile; if the other one fails, the verdict has the status `infrastructure` and the reason
        `against`. If the task names workloads (several calls of its `get_inputs`), the candidate is built
        once, and measured on one workload after the other until it fails. `report` is called with the name of
        each step when it begins. Failures of the candidate and of the task are verdicts too, with a status
        other than `correct`. Raises InfrastructureError if the judge itself fails.
        """
        call = ""  # that makes the inputs of the present workload
        ended = self.runner_factory.ended_zygotes()

        def failed(status: Status, reason: str, log: str) -> Verdict:
            if reason in KILLED_REASONS:
                self._check_zygotes(ended)
            failing = (WorkloadFigures(call=call),) if call else ()
            log = f"with the inputs of {call}: {log}" if call else log
            return make_verdict(self.params, status, reason, log, workloads=failing)

        try:
            workloads = named_workloads(task.code)
            parts = [KernelTask(code=workload.code) for workload in workloads]
            report("building the candidate")
            built = self._build(parts[0], files)
            with blaming_the_other():
                other = self._build(parts[0], against) if against is not None else None
            verdicts = []
            for workload, part in zip(workloads, parts, strict=True):
                call = workload.call
                verdict = self._measured(part, built, other, compare_compile, report, is_workload=bool(call))
                verdicts.append(verdict)
                figures = WorkloadFigures(call=call, speedup=verdict.speedup)
                if compare_compile is False and not holds_everywhere([figures], "eager"):
                    compare_compile = None  # the candidate cannot be called faster any more
            if not call:
                return verdicts[0]
            return verdict_over_workloads(task, [workload.call for workload in workloads], verdicts)
        except Rejected as error:
            return failed(error.status, error.reason, error.log)
        except TaskTooLarge as error:
            return failed("infrastructure", "too_large", f"the task is too large: {error}")
        except TaskError as error:
            return failed("infrastructure", "task", f"the task itself fails: {error}")
        except torch.OutOfMemoryError as error:
            raise InfrastructureError(
                f"the judge's own work does not fit the device's memory: {error}"
            ) from error

    def _measured(
        self,
        task: KernelTask,
        built: BuiltCandidate,
        other: BuiltCandidate | None,
        compare_compile: bool | None,
        report: Report,
        *,
        is_workload: bool,
    ) -> Verdict:
        """Return the verdict `correct` on the candidate `built`, on a task that names no workloads.

        A workload is one of several calls of a task's `get_inputs`. `is_workload` is set if `task` was made
        from one workload of another task. `other` is another candidate to compare with, or None.
        `compare_compile` says when torch.compile is measured too (True always, False if the candidate is
        faster than eager, None never), and `report` is called with the name of each step. Raises Rejected if
        a candidate fails, and TaskError if the task's own source does.
        """
        report("preparing inputs, reference outputs and baselines")
        with self.bench(task) as bench:
            built = with_compiled_kernels(self.params, bench.reference, built)
            if other is not None:
                with blaming_the_other():
                    other = with_compiled_kernels(self.params, bench.reference, other)
            speedups, seconds, evidence = measure_candidate(
                self.params, bench, built, compare_compile, report, other, is_workload=is_workload
            )
            evidence |= {"candidate": built.digest, "extensions_not_built": sorted(built.failures)}
            if self.params.sandbox.counters:
                report("reading the GPU's counters")
                evidence["counters"] = count(self.params, bench.reference, built)
            return make_verdict(
                self.params,
                "correct",
                speedup=speedups,
                seconds=seconds,
                log=TRIVIAL_ANSWER.format(bench.trivial_answer) if bench.trivial_answer else "",
                evidence=self._evidence(bench) | evidence,
            )

    def _build(self, task: KernelTask, files: dict[str, str]) -> BuiltCandidate:
        """Screen and build a candidate; raise Rejected if a file is refused or does not compile.

        A candidate is an implementation of the task's module. `files` maps each workspace path, such as
        `model_new.py`, to the text of the file. The arguments of the task's constructor are needed to find
        the extensions (C++ or CUDA modules) that the candidate requests.
        """
        sandbox = self.params.sandbox
        candidate = screen_candidate(files, sandbox, self.params.device)
        requested = (
            self._requested_extensions(task, candidate.runner_files) if candidate.uses_extensions else b"[]"
        )
        return build_candidate(candidate, self.builder, sandbox, requested)

    def _requested_extensions(self, task: KernelTask, files: dict[str, str]) -> bytes:
        """Return the JSON list of the extensions that a candidate's model_new.py requests at its import.

        An extension is a C++ or CUDA module that the file requests from torch.utils.cpp_extension
        (`sandbox/inside/inline_extension.py`). A runner, which is a sandboxed process, imports the file.
        `files` maps the workspace paths that the runner gets to texts. The result is `[]` if none is
        requested. Raises Rejected if the import fails before any extension is requested.
        """
        with self.bench(task) as bench:
            init_inputs = bench.reference.layout.description.init_inputs
        header: RoleHeader = {
            "role": "record",
            "device": self.params.device,
            "precision": self.params.precision,
            "files": files,
            "init_inputs": init_inputs,
        }
        with rejecting(LOAD_ERRORS):
            runner = self.runner_factory.spawn(header, seconds=self.params.sandbox.run_seconds)
            with contextlib.closing(runner), self.scheduler.background_work(runner):
                return runner.receive()

    def bench(self, task: KernelTask) -> contextlib.AbstractContextManager[TaskBench]:
        """Return a context that yields the task's reference data and baselines, from the cache or made anew.

        Reference data are inputs, parameters and reference outputs, and baselines are processes of eager,
        torch.compile and the no-op. Entering the context raises TaskError if the task's own source fails.
        """
        make = functools.partial(TaskBench, self.params, self.runner_factory, self.scheduler, task.code)
        return self.bench_cache.use(self.bench_key(task), make)

    def bench_key(self, task: KernelTask) -> str:
        """Return the key of the task's bench (reference data and baselines) in the cache.

        It changes when a zygote has ended, because the processes of earlier benches have ended with it.
        """
        return f"{task.code_digest}-{self.runner_factory.ended_zygotes()}"

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
            "trivial_answer": bench.trivial_answer,
        }

    def admit(
        self,
        code: str,
        eager_seconds: tuple[float, float],
        *,
        headroom: bool = False,
        memory_only: bool = False,
    ) -> Admission:
        """Return whether the task with source `code` can be judged, with the figures that were measured.

        `eager_seconds` has the smallest and the largest time in seconds that one eager call may take. With
        `headroom`, the headroom is measured too, which is the time of torch.compile divided by the least time
        that the device allows; the task must then also compile and leave device memory for other tasks. With
        `memory_only`, nothing is measured, `eager_seconds` and `headroom` are ignored, and the task is
        admitted if its source runs and the memory suffices to judge its candidates. A task that names
        workloads (several calls of its `get_inputs`) is admitted if each of them is
        (`admission.admit_workloads`).
        """
        # An admission shows that a task is sound, whatever the rules of the candidates.
        params = with_standard_labels(self.params)

        def admit_one(source: str) -> Admission:
            if memory_only:
                return self._admit_memory(source)
            return admit(
                params, self.runner_factory, self.scheduler, source, eager_seconds, headroom=headroom
            )

        ended = self.runner_factory.ended_zygotes()
        admission = admit_workloads(code, admit_one)
        if not admission.admitted:
            self._check_zygotes(ended)
        return admission

    def _check_zygotes(self, ended: int) -> None:
        """Raise InfrastructureError if more than `ended` zygotes have ended by themselves until now.

        A zygote is a process with torch that sandboxed processes are forked from, and that ends them if it is
        killed. A failure of a candidate or task at that time may therefore not be its own.
        """
        time.sleep(ZYGOTE_SECONDS)
        if self.runner_factory.ended_zygotes() > ended:
            raise InfrastructureError(
                "a process of the judge that holds torch ended while it judged; if that happens again, see "
                "whether the machine runs out of memory."
            )

    def _admit_memory(self, code: str) -> Admission:
        """Return whether the task with source `code` runs and the memory suffices to judge candidates of it.

        Nothing is measured. The evidence has the shapes of the inputs and outputs and the names of the
        parameters. The reason of a refusal is `too_large` or `does_not_run`.
        """
        try:
            reference = make_reference(
                self.params, self.runner_factory, self.scheduler, code, makes_data=False
            )
        except TaskError as error:
            return refusal(error)
        reference.close()
        return Admission(True, "", reference.layout.description.evidence)

    def prepare(self) -> None:
        """Start the zygotes, from which the sandboxed processes are forked, without waiting for them.

        A zygote is a process that has torch loaded.
        """
        self.runner_factory.prepare()

    def close(self) -> None:
        with self.scheduler.measuring():
            self.bench_cache.close()
        self.runner_factory.close()
