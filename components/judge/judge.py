"""The judge: one candidate on one task, measured, with a verdict.

Trusted. It holds the inputs, the expected outputs, the clock and the verdict; the candidate runs in a disposable
sandboxed process that shares nothing with it but fixed-layout memory and a socket (DESIGN §5).
"""

from __future__ import annotations

import contextlib
import platform
import re
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.agent.reward import MARGIN, milestone
from components.core.config import PROJECT, Params
from components.core.errors import InfrastructureError, TaskError, UserError
from components.core.files import check_executable, digest_bytes, digest_json
from components.core.task import KernelTask
from components.core.text import readable
from components.judge.admission import admit
from components.judge.compile_baseline import DEFAULT, begin, fastest
from components.judge.device_scheduler import DeviceScheduler
from components.judge.measurement import StagedInputs, TimedRunner
from components.judge.screen import screen_files, screen_python, screen_symbols
from components.judge.statistics import net, paired_ratio, wanted_rounds
from components.judge.task_bench import Bench
from components.judge.verdict import (
    Admission,
    Ratio,
    Seconds,
    Speedup,
    Status,
    Verdict,
)
from components.sandbox.build import EXTENSION_SUFFIX, Builder, build_result_channel
from components.sandbox.preflight import check_isolation
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import RunnerError
from components.sandbox.runner_protocol import RoleHeader

SOURCES = sorted(
    path
    for package in ("judge", "sandbox")
    for path in (PROJECT / "components" / package).iterdir()
    if path.suffix in (".py", ".cpp")
)
VERSION = digest_bytes(b"".join(path.read_bytes() for path in SOURCES))[:16]
"""Digest of the judge's own sources, part of every verdict's evidence."""

PLAIN_REASON = re.compile(
    "wrong_number_of_outputs|not_a_plain_tensor|output_aliases_input|unreadable_output|output_is_mapped|wrong_(?:shape|dtype|device)|torch_compute"
)
"""All that is told of a fault once a candidate has seen timed inputs: others of its task get the same ones, and its own
words could carry the answers to them."""
ROUNDS_SHARE = 0.1
"""More rounds are begun only while those before took less than this share of a candidate's limit: on a machine with many times
more work than cores the rounds alone used it up."""
TASK_DESCRIPTORS = 32
"""Open files of one warm task: the shared memory of its bank and of each arm, each arm's connection and process."""
OTHER_DESCRIPTORS = 512
"""Open files that are left to everything else in the judge's process."""
LOG_CHARACTERS = 2000
"""Longest log of a verdict; its middle is cut."""
STATUS_OF: dict[str, tuple[Status, str]] = {
    "crashed": ("crashed", "process_died"),
    "timed_out": ("timed_out", "run_limit"),
    "out_of_memory": ("out_of_memory", "memory_limit"),
    "error": ("crashed", "exception"),
    "protocol": ("crashed", "protocol"),
}


class _WrongOutput(Exception):
    """An output of a timed round is wrong; the text is the verdict's reason."""


class Judge:
    """Judges candidates one measurement at a time per device; builds and task preparation run beside it.

    Every warm task holds some twenty descriptors, and a shell's usual limit is 1,024: this process gets all that it may have, and
    where that is little fewer tasks are kept warm.
    """

    def __init__(self, params: Params, folder: Path):
        self.params = params
        if params.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "device=cuda: torch sees no GPU here; run with --set device=cpu, or on a machine with an NVIDIA GPU."
            )
        check_isolation(params.sandbox, params.device)
        folder.mkdir(parents=True, exist_ok=True)
        check_executable(folder, "give another folder with --home")
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.warm_tasks = max(
            1, min(params.sandbox.warm_tasks, (most - OTHER_DESCRIPTORS) // TASK_DESCRIPTORS)
        )
        self.builder = Builder(params.sandbox, params.device, folder / "builds")
        self.runner_factory = RunnerFactory(
            params.sandbox, params.device, folder / "runners", build_result_channel()
        )
        self.turns = DeviceScheduler(params.device)
        self.benches: OrderedDict[str, Bench] = OrderedDict()
        self.bench_locks: dict[str, threading.Lock] = {}
        self.lock = threading.Lock()
        self.turns.relieve = self._retire

    def verdict(self, task: KernelTask, files: dict[str, str], *, compare_compile: bool = False) -> Verdict:
        """Judge `files` (workspace path -> text) on `task`. InfrastructureError is the judge's own fault.

        `compare_compile` is an evaluation's question: the speed-up against torch.compile whatever the candidate's speed, in
        the fastest of its modes."""
        say = _Speaker(self.params)
        problem = screen_files(files)
        if problem is not None:
            return say(
                "load_failed",
                problem,
                "a candidate is model_new.py and plain UTF-8 sources kernels/NAME, of moderate size.",
            )
        code = files.get("model_new.py")
        if code is None:
            return say(
                "load_failed", "no_model_new", "model_new.py is missing: write class ModelNew(nn.Module)."
            )
        try:
            reason = screen_python(code)
        except (
            SyntaxError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:  # the last two: expressions nested too deep
            return say("load_failed", "syntax", f"model_new.py: {error}")
        if reason is not None:
            return say(
                "forbidden",
                reason,
                "model_new.py may allocate tensors and call cuda_extension; computing with torch is forbidden.",
            )
        built = self.builder.build(files)
        if built.timed_out:
            return say("timed_out", "build_limit", built.log)
        if built.library is None:
            return say("build_failed", "compiler", built.log)
        imported = screen_symbols(built.symbols, self.builder.binding_symbols)
        if imported is not None:
            return say(
                "forbidden",
                imported,
                f"the library imports {imported.partition(':')[2]}, which kernels may not use.",
            )
        try:
            with (
                self._bench(task) as bench,
                self._hosting(bench, compare_compile),
                built.library.open("rb") as library,
            ):
                return self._measure(say, bench, files, library.fileno(), compare_compile)
        except TaskError as error:
            return say("infrastructure", "task", f"the task itself fails: {error}")
        except torch.OutOfMemoryError as error:
            raise InfrastructureError(
                f"the judge's own work does not fit the device's memory: {error}"
            ) from error

    @contextlib.contextmanager
    def _hosting(self, bench: Bench, every_mode: bool) -> Iterator[None]:
        """Room for one candidate. On a GPU it is alone there, so what it is held against starts before, beside other tasks' work: with
        torch.compile begun under a candidate, everybody waited for it. Others of its task wait for their bench and not for
        the device, or one of them could begin, with the bench locked, what stands still until the one that measures is done."""
        with bench.lock if self.turns.wall else contextlib.nullcontext():
            if self.turns.wall:
                bench.arm("eager")
                bench.arm("noop")
                try:
                    if bench.compiles:
                        begin(bench) if every_mode else bench.arm(DEFAULT)
                except (
                    TaskError,
                    torch.OutOfMemoryError,
                ):  # a fault only for a candidate that is compared with it
                    bench.compiles = False
            with self.turns.exclusive_device():
                if self.turns.wall and every_mode:
                    with contextlib.suppress(TaskError):
                        fastest(bench)  # before the candidate takes memory: the slower modes are gone by then
                yield

    def _measure(
        self, say: _Speaker, bench: Bench, files: dict[str, str], library: int, compare_compile: bool
    ) -> Verdict:
        python = {
            "model_new.py": files["model_new.py"]
        }  # what nobody has screened is not there to be imported
        eager, noop = bench.arm("eager"), bench.arm("noop")
        header: RoleHeader = {"role": "candidate", "files": python, "suffix": EXTENSION_SUFFIX}
        try:
            candidate = TimedRunner(bench, header, library, seconds=self.params.sandbox.run_seconds)
        except RunnerError as error:
            status, reason = STATUS_OF.get(error.kind, ("crashed", error.kind))
            return say(
                "load_failed" if error.kind == "error" else status,
                "import" if error.kind == "error" else reason,
                error.text,
            )
        secret = False
        modes: dict[str, Any] = {}
        try:
            if (wrong := bench.verify(candidate, "check")) is not None:
                return say(
                    "wrong_output",
                    wrong,
                    f"the output is wrong ({wrong.replace(':', ' on inputs of the family ')}).",
                )
            secret = True
            arms = {"candidate": candidate, "eager": eager, "noop": noop}
            if compare_compile:
                arms["compile"], modes = self._compiled(bench, candidate, every_mode=True)
            with self._alone(candidate):
                raw = self._phase(bench, arms, ["eager", "compile"] if compare_compile else ["eager"])
            ratios = {name: self._ratio(raw, name) for name in ("eager", "compile") if name in raw}
            medians = {name: _median(raw, name) for name in raw if name != "noop"}
            if "compile" not in arms and ratios["eager"].estimate > MARGIN:
                arms["compile"], modes = self._compiled(bench, candidate, every_mode=False)
                with self._alone(candidate):
                    second = self._phase(bench, arms, ["compile"])
                ratios["compile"], medians["compile"] = (
                    self._ratio(second, "compile"),
                    _median(second, "compile"),
                )
                raw |= {f"{name}_2": values for name, values in second.items()}
            if (
                wrong := bench.verify(candidate, "check")
            ) is not None:  # once more, for candidates that count their calls
                return say("wrong_output", wrong, f"the output is wrong ({wrong}).")
        except _WrongOutput as error:
            return say("wrong_output", str(error), f"an output of a timed round is wrong ({error}).")
        except RunnerError as error:
            text = error.text
            if secret:
                known = PLAIN_REASON.match(text)
                text = known[0] if known else "it failed in a timed call, having passed verification"
            if error.kind == "wrong":
                return say("wrong_output", text, f"the output has not the reference's form: {text}")
            if error.kind == "forbidden":
                return say("forbidden", text, f"computing with torch is forbidden: {text}")
            status, reason = STATUS_OF.get(error.kind, ("crashed", error.kind))
            return say(status, reason, text)
        finally:
            candidate.close()
        evidence = self._evidence(bench, files) | {"raw_seconds": raw} | modes
        return say(
            "correct", "", "", speedup=Speedup(**ratios), seconds=Seconds(**medians), evidence=evidence
        )

    def _compiled(
        self, bench: Bench, candidate: TimedRunner, *, every_mode: bool
    ) -> tuple[TimedRunner, dict[str, Any]]:
        """The compile baseline, and what the verdict's evidence says of it; making it is not charged to the candidate's limit."""
        waited = time.monotonic()
        if every_mode:
            begin(bench)
            with self.turns.measuring():
                arm, mode, seconds = fastest(bench)
            evidence = {"compile_mode": mode, "compile_seconds": seconds}
        else:
            arm, evidence = bench.arm(DEFAULT), {"compile_mode": "default"}
        candidate.grant(time.monotonic() - waited)
        return arm, evidence

    @contextlib.contextmanager
    def _alone(self, candidate: TimedRunner) -> Iterator[None]:
        """Timed rounds take turns; waiting for one's turn is not charged to the candidate's limit."""
        waited = time.monotonic()
        with self.turns.measuring():
            candidate.grant(time.monotonic() - waited)
            yield

    def _phase(
        self, bench: Bench, arms: dict[str, TimedRunner], baselines: list[str]
    ) -> dict[str, list[float]]:
        """Alternating rounds of all arms, in rotating order, on inputs of the round's own; every output of the candidate must
        be eager's on the same inputs. Seconds per call by arm; raises _WrongOutput. The first round is not counted: an arm
        that stood still for a while took up to twice as long (seen on an H200). Until the ratio to each of `baselines` is settled
        there are twice as many rounds as before, up to `most_rounds` and while that takes a small part of the candidate's limit."""
        sandbox, started = self.params.sandbox, time.monotonic()
        raw: dict[str, list[float]] = {name: [] for name in arms}
        names, wanted, number, staging = list(arms), sandbox.rounds, 0, StagedInputs(bench, bench.per_round)
        while number <= wanted:
            staged, taken = staging.hold(bench.sets.fresh(bench.per_round, number)), {}
            for name in names:
                began = time.monotonic()
                try:
                    seconds, taken[name] = arms[name].round("time", staged)
                except RunnerError as error:
                    if name == "candidate":
                        raise
                    bench.lose(arms[name])  # no candidate's fault: the next attempt starts the arm anew
                    raise InfrastructureError(f"{name}: {error}") from error
                if name != "candidate":
                    arms["candidate"].grant(time.monotonic() - began)
                if number > 0:
                    raw[name].append(seconds)
                if arms[name].changed:
                    raise _WrongOutput("inputs_changed")
            if (reason := bench.differs(taken["candidate"], taken["eager"], staged.sets)) is not None:
                raise _WrongOutput(reason)
            names = [*names[1:], names[0]]
            if number == wanted and time.monotonic() - started < ROUNDS_SHARE * sandbox.run_seconds:
                wanted = max(
                    wanted_rounds(_ratio(raw, baseline), number, sandbox.most_rounds)
                    for baseline in baselines
                )
            number += 1
        return raw

    def _ratio(self, raw: dict[str, list[float]], baseline: str) -> Ratio:
        return _ratio(raw, baseline, self.params.sandbox.process_spread)

    def _evidence(self, bench: Bench, files: dict[str, str]) -> dict[str, Any]:
        cuda = self.params.device == "cuda"
        return {
            "judge": VERSION,
            "isolation": self.params.sandbox.isolation,
            "clock": "wall" if cuda else "cpu",
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "compiler": self.builder.toolchain_digest[:16],
            "task": digest_bytes(bench.code.encode()),
            "candidate": digest_json(sorted(files.items())),
            "seeds": [bench.parameter_seed, *bench.seeds[: len(bench.families)]],
            "sets_per_round": bench.per_round,
            "inputs": "turned and blended" if bench.sets.turned else "blended",
        }

    def _task_lock(self, task_id: str) -> threading.Lock:
        with self.lock:
            return self.bench_locks.setdefault(task_id, threading.Lock())

    @contextlib.contextmanager
    def _bench(self, task: KernelTask) -> Iterator[Bench]:
        """The task's bench, warm; beyond the limit the least recently used ones that nobody uses are closed, and before it where
        somebody needs their memory."""
        with self._task_lock(task.task_id):
            with self.lock:
                bench = self.benches.get(task.task_id)
                if bench is not None:
                    bench.users += 1  # at once, or others could retire it
            if bench is None:
                bench = Bench(
                    self.params, self.runner_factory, self.turns, task.code
                )  # a failure is never kept: it may have been the machine's
                room = contextlib.ExitStack()
                bench.closers.append(room)
                room.enter_context(self.turns.reserve_memory(bench.bytes))
                bench.fill()
                bench.users = 1
            with self.lock:
                self.benches[task.task_id] = bench
                self.benches.move_to_end(task.task_id)
                surplus = len(self.benches) - self.warm_tasks
        try:
            for _ in range(surplus):
                self._retire()
            yield bench
        finally:
            with self.lock:
                bench.users -= 1

    def _retire(self) -> None:
        """Close the bench that nobody has used for longest, if there is one."""
        with self.lock:
            idle = next((name for name, bench in self.benches.items() if bench.users == 0), None)
            bench = None if idle is None else self.benches.pop(idle)
        if bench is not None:
            bench.close()

    def admit(self, code: str, *, headroom: bool = False) -> Admission:
        """Whether the judge can tell a cheat from an answer on this task, its eager time, and where asked for its compile time."""
        return admit(self.params, self.runner_factory, self.turns, code, headroom=headroom)

    def close(self) -> None:
        with self.turns.measuring():
            for bench in self.benches.values():
                bench.close()
            self.benches.clear()
        self.runner_factory.close()


def _median(raw: dict[str, list[float]], name: str) -> float:
    return float(np.median(net(raw[name], raw["noop"])))


def _ratio(raw: dict[str, list[float]], baseline: str, process_spread: float = 0.0) -> Ratio:
    return paired_ratio(
        net(raw[baseline], raw["noop"]), net(raw["candidate"], raw["noop"]), process_spread=process_spread
    )


class _Speaker:
    """Makes verdicts with the run's device and precision filled in."""

    def __init__(self, params: Params):
        self.params = params

    def __call__(
        self,
        status: Status,
        reason: str,
        log: str,
        *,
        speedup: Speedup | None = None,
        seconds: Seconds | None = None,
        evidence: dict[str, Any] | None = None,
    ) -> Verdict:
        verdict = Verdict(
            status=status,
            reason=readable(reason, 200),
            device=self.params.device,
            precision=self.params.precision,
            seconds=seconds or Seconds(),
            speedup=speedup or Speedup(),
            evidence=evidence or {"judge": VERSION, "isolation": self.params.sandbox.isolation},
            log=readable(log, LOG_CHARACTERS),
        )
        return verdict.model_copy(update={"milestone": milestone(verdict)})
