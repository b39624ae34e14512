"""Search random schedules for the speed-up that is attainable on each task of a suite.

A schedule is one set of the choices by which kernels for the same operators differ
(components/bootstrap/kernel_writer.py). The same schedules are drawn for all tasks, and a smaller draw is the
beginning of a larger one. Each task's kernels are written and judged once, and the correct ones a second
time in another epoch: schedules are chosen on the first measurement and reported on the second one, so the
reported speed-up is not biased upwards by the choice. `captured_share.py` computes the figures.

Every measurement is written to disk as soon as it is known, so a repeated call continues:

    out/plan.json               settings of the search; other settings in the same folder are refused
    out/tasks/<task_id>.json    measurements of one task so far
    out/cost.json               device-seconds, without those of interrupted calls
    out/results.json            the search; it is written last, so it exists only if all else is complete
"""

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from captured_share import Attainable, TaskSearch

from components.agent.workspace import Workspace
from components.bootstrap.demonstrations import SUFFIX
from components.bootstrap.kernel_writer import Schedule, all_schedules, write_kernel
from components.bootstrap.operator_chain import read_chain
from components.core.config import result_values
from components.core.files import digest_bytes, digest_json, read_json, write_json
from components.core.params import Params
from components.core.progress import Progress
from components.core.records import Device
from components.core.task import KernelTask
from components.evaluation.evaluate import add_cost, claim
from components.evaluation.results import RESULTS, Measurement
from components.judge.pool.local_pool import Candidate, Job, JudgePool
from components.judge.verdict import Verdict

# Name of the search in progress reports, and of its device-seconds in cost.json.
TITLE = "schedule search"
# Seed of the draw of schedules. It is fixed, so that the runs of all seeds share one search.
SEED = 0

Phase = Literal["first", "second"]


@dataclass
class TaskKernels:
    """The kernels of one task and their measurements so far.

    `starter` are the files that a policy finds in its workspace. `kernels` has the name of the kernel of each
    schedule, and `texts` maps these names to the kernels' texts. `first` and `second` map these names to the
    first and the second measurement. `file` is the file in which the measurements are kept. Measurements in
    which the judge failed are not written to this file, so the next call of `search` repeats them.
    """

    task: KernelTask
    starter: dict[str, str]
    kernels: tuple[str, ...]
    texts: dict[str, str]
    file: Path
    first: dict[str, Measurement] = field(default_factory=dict)
    second: dict[str, Measurement] = field(default_factory=dict)

    def record(self) -> TaskSearch:
        """Return the names of the kernels and their measurements so far as a frozen record."""
        return TaskSearch(
            task_id=self.task.task_id, kernels=self.kernels, first=self.first, second=self.second
        )

    def load(self) -> None:
        """Read the measurements of earlier calls of `search` from `file`, if it exists."""
        if self.file.is_file():
            kept = TaskSearch.model_validate(read_json(self.file))
            self.first, self.second = dict(kept.first), dict(kept.second)

    def measured(self, phase: Phase) -> dict[str, Measurement]:
        """Return the measurements of the phase, first or second, by the names of the kernels."""
        return self.first if phase == "first" else self.second

    def add(self, phase: Phase, kernel: str, verdict: Verdict) -> Measurement:
        """Keep and return the measurement of a kernel in a phase, which `verdict` has.

        The measurement is also written to `file`, unless the judge failed.
        """
        found = self.measured(phase)[kernel] = Measurement.of(verdict)
        if found.error:
            return found
        kept = {
            name: {key: value for key, value in measured.items() if not value.error}
            for name, measured in (("first", self.first), ("second", self.second))
        }
        write_json(self.file, self.record().model_copy(update=kept).model_dump(mode="json"))
        return found


def draw_schedules(device: Device, count: int, seed: int = SEED) -> list[Schedule]:
    """Return `count` schedules drawn at random without replacement, or all if the space has fewer.

    The schedules of a smaller draw are the first of a larger one.
    """
    space = list(all_schedules(device))
    random.Random(seed).shuffle(space)
    return space[:count]


def search(
    tasks: Sequence[KernelTask],
    params: Params,
    pool: JudgePool,
    out: Path,
    *,
    schedules: int,
    epoch: str,
    progress: Progress,
) -> Attainable:
    """Judge the kernels of `schedules` random schedules on `tasks`, and keep all measurements in `out`.

    Tasks whose source is not a chain of operators, or whose outputs are not known from an admission, are left
    out and counted. Equal kernels of a task are judged once, and the correct ones a second time. `epoch` is
    part of the key under which the pool keeps its verdicts. A repeated call continues an interrupted search.
    Raises UserError if `out` holds a different search.
    """
    drawn = draw_schedules(params.device, schedules)
    searched = []
    different = {task.task_id: task for task in tasks}
    for task in different.values():
        chain, starter = read_chain(task.code), Workspace(task).files
        if chain is None or not starter:
            continue
        texts = [write_kernel(chain, schedule) for schedule in drawn]
        names = tuple(digest_bytes(text.encode())[:16] for text in texts)
        file = out / "tasks" / f"{task.task_id}.json"
        searched.append(TaskKernels(task, starter, names, dict(zip(names, texts, strict=True)), file))
    claim(
        out,
        {
            "schedules": digest_json([_choices(schedule) for schedule in drawn]),
            "kernels": digest_json({one.task.task_id: one.kernels for one in searched}),
            "epoch": epoch,
            **result_values(params, ("device", "precision", "sandbox")),
        },
    )
    if (out / RESULTS).is_file():
        return Attainable.model_validate(read_json(out / RESULTS))
    for one in searched:
        one.load()
    started = time.monotonic()
    Judging(params.device, pool, epoch, progress).run(searched)
    add_cost(out, TITLE, time.monotonic() - started)
    found = Attainable(
        schedules=tuple(_choices(schedule) for schedule in drawn),
        space=len(all_schedules(params.device)),
        tasks=tuple(one.record() for one in searched),
        left_out=len(different) - len(searched),
        judgements=sum(len(one.first) + len(one.second) for one in searched),
        errors=sum(
            measurement.error
            for one in searched
            for measurement in (*one.first.values(), *one.second.values())
        ),
    )
    write_json(out / RESULTS, found.model_dump(mode="json"))
    return found


@dataclass
class Judging:
    """The measurements of all kernels of one search.

    `done` is the number of measurements so far, and `correct` the number of those of correct kernels. `total`
    is the number of all measurements of the search, which is estimated until the first measurement of all
    kernels is complete.
    """

    device: Device
    pool: JudgePool
    epoch: str
    progress: Progress
    total: int = 0
    done: int = 0
    correct: int = 0

    def run(self, searched: Sequence[TaskKernels]) -> None:
        """Make both measurements of all tasks; the second one is made for correct kernels only."""
        first = [(one, kernel) for one in searched for kernel in one.texts]
        self.total = 2 * len(first)
        self.judge("first", first)
        second = [(one, kernel) for one, kernel in first if one.first[kernel].status == "correct"]
        self.total = len(first) + len(second)
        self.judge("second", second)

    def judge(self, phase: Phase, kernels: Sequence[tuple[TaskKernels, str]]) -> None:
        """Judge the kernels whose measurement is not known yet.

        `kernels` are pairs of a task's record and the name of one of its kernels.
        """
        pending: dict[Future[Verdict], tuple[TaskKernels, str]] = {}
        for one, kernel in kernels:
            if kernel in one.measured(phase):
                self.count(one.measured(phase)[kernel])
                continue
            files = one.starter | {f"kernels/forward.{SUFFIX[self.device]}": one.texts[kernel]}
            # None: no comparison with torch.compile, because no figure needs it.
            job = Job(one.task, Candidate.of(files), f"{self.epoch}/{phase}", compare_compile=None)
            pending[self.pool.submit(job)] = one, kernel
        for future in as_completed(list(pending)):
            one, kernel = pending.pop(future)
            self.count(one.add(phase, kernel, future.result()))
            self.progress.update(TITLE, self.done, self.total, pass_rate=self.correct / self.done)

    def count(self, measurement: Measurement) -> None:
        """Add a measurement to `done` and, if its kernel is correct, to `correct`."""
        self.done += 1
        self.correct += measurement.status == "correct"


def _choices(schedule: Schedule) -> dict[str, Any]:
    """Return the choices of a schedule by their names, with values that JSON can represent."""
    return {
        name: value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in asdict(schedule).items()
    }
