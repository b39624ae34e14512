"""Building the data set: compose candidates, hold them against the task_filter, keep every rejected one with its reason.

Candidates are taken in the order of composition, so the admitted set depends on the parameters and the verdicts alone,
not on which judgement came back first. Admissions are journalled by the pool: a killed build that is started again
judges nothing twice.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from components.core.config import Data, Params
from components.core.errors import InfrastructureError, UserError
from components.core.files import atomic_folder
from components.core.progress import Progress
from components.core.task import KernelTask, dataset_version, write_tasks
from components.judge.verdict import Admission
from components.synthesis.compose import compose_tasks
from components.synthesis.dataset_summary import DatasetSummary, Rejection, write_summary
from components.synthesis.headroom import compute_headroom
from components.synthesis.model_composer import ModelComposer
from components.synthesis.operator_table import load_operator_table
from components.synthesis.task_filter import TaskFilter
from components.synthesis.torch_composer import Draft, TorchComposer

HOPELESS = 60
"""Executed candidates in a row without one admission, after which the parameters are to blame."""
DRY = 5000
"""Duplicates in a row, after which the composer has nothing new to offer."""

LOOKAHEAD = 16
"""Candidates in the window for each that is judged at once: decisions come in order, and one task may take torch.compile a minute."""
AHEAD = 2
"""Candidates given to the pool for each that is judged at once. Not all of the window: a resized one, which stands first and is
waited for, would wait for the whole window there, and nothing would enter meanwhile."""


class Admitting(Protocol):
    """What of the judge pool is needed here."""

    def admit(self, code: str, *, headroom: bool = False) -> Future[Admission]: ...


@dataclass(frozen=True)
class Candidate:
    """A composed task on its way: refused at first look, or with time under judgement."""

    task: KernelTask
    refused: Rejection | None = None
    judgement: Future[Admission] | None = None
    draft: Draft | None = None
    """What it was written from, where it was composed of mined operators."""
    resized: bool = False
    """Whether its size was searched by a measurement already; that is done once."""

    @property
    def hopeless(self) -> bool:
        """Whether neither it nor another size of it will be admitted, as far as is known."""
        if self.refused is not None or self.judgement is None or not self.judgement.done():
            return self.refused is not None
        admission = self.judgement.result()
        return not admission.admitted and (
            self.resized or self.draft is None or admission.reason != "eager_time"
        )


Place = tuple[str, str]
"""Split and kind: what a data set asks for so and so many of."""


def targets(data: Data) -> Counter[Place]:
    """How many tasks are asked for of each split, and of each kind where the mined table is composed from, so that the mix
    of the data set is the mix of the parameters. The core table's tasks are of one kind, "": their mix is drawn."""
    wanted: Counter[Place] = Counter()
    for split, count in (("train", data.tasks), ("held_out", data.held_out)):
        for kind, share in kinds(data).items():
            wanted[split, kind] = int(count * share)
        # What rounding down left goes to the largest remainders.
        rest = sorted(
            kinds(data), key=lambda kind: (int(count * kinds(data)[kind]) - count * kinds(data)[kind], kind)
        )
        for kind in rest[: count - sum(number for (place, _), number in wanted.items() if place == split)]:
            wanted[split, kind] += 1
    return wanted


def kinds(data: Data) -> dict[str, float]:
    """Share of each data_source; everything under "" for the core table."""
    if data.operators == "core":
        return {"": 1.0}
    modules = data.transformers_share if data.operators == "all" and not data.composer else 0.0
    shares = {f"torch#{count}": share * (1 - modules) for count, share in data.operator_mix.items()}
    return shares | ({"transformers": modules} if modules else {})


class Builder:
    """One build in progress: candidates enter a window in the order of their source and are decided in that order.

    Without `wanted` every candidate of a finite source is judged: that is an import."""

    def __init__(self, params: Params, pool: Admitting, progress: Progress, wanted: Counter[Place] | None):
        self.params, self.pool, self.progress, self.wanted = params, pool, progress, wanted
        self.composer: TorchComposer | None = None
        self.task_filter = TaskFilter(params.data)
        self.done: Counter[Place] = Counter()
        self.window: deque[Candidate] = deque()
        self.admitted: list[KernelTask] = []
        self.rejected: list[Rejection] = []
        self.candidates = self.surplus = self.fruitless = self.dry = 0

    def run(self, source: Iterator[Candidate], total: int) -> None:
        width = LOOKAHEAD * self.params.sandbox.build_workers
        while self.wanted is None or self.done != self.wanted:
            entering = next(source, None) if len(self.window) < width else None
            if entering is not None:
                self.window.append(self.enter(entering))
                self.feed()
            elif self.window:
                self.decide()
                step = len(self.admitted) if self.wanted is not None else self.candidates
                self.progress.update(
                    "data", step, total, candidates=self.candidates, rejected=len(self.rejected)
                )
            else:
                return

    def place(self, task: KernelTask) -> Place:
        return task.split, task.data_source if self.wanted is not None and (
            "train",
            "",
        ) not in self.wanted else ""

    def enter(self, candidate: Candidate) -> Candidate:
        task = candidate.task
        reason, detail = (
            (candidate.refused.reason, candidate.refused.detail)
            if candidate.refused
            else self.task_filter.check_source(task)
        )
        self.dry = 0 if not reason and self.needs(candidate, self.room()) else self.dry + 1
        if self.dry > DRY and self.wanted is not None:
            missing = ", ".join(
                f"{count - self.done[key]} {' '.join(filter(None, key))}"
                for key, count in self.wanted.items()
                if count > self.done[key]
            )
            raise UserError(
                f"data.tasks: after {len(self.admitted)} tasks the composer finds nothing new that is needed (missing: {missing}); "
                "ask for fewer tasks or widen data.numel."
            )
        return replace(candidate, refused=Rejection(task, reason, detail)) if reason else candidate

    def needs(self, candidate: Candidate, room: Counter[Place]) -> bool:
        """Whether the candidate is needed even if all before it are admitted of which that is not ruled out; takes its place in `room` then."""
        place = self.place(candidate.task)
        if candidate.hopeless or (self.wanted is not None and room[place] <= 0):
            return False
        room[place] -= 1
        return True

    def room(self) -> Counter[Place]:
        """How many more tasks are asked for, of each kind, than there could be with those in the window."""
        room = Counter(self.wanted or {})
        room.subtract(self.done)
        for candidate in self.window:
            self.needs(candidate, room)
        return room

    def admit(self, task: KernelTask) -> Future[Admission]:
        return self.pool.admit(task.code, headroom=self.params.data.headroom)

    def feed(self) -> None:
        """Give the pool the first of the window that are needed, as many as keep it busy."""
        under_way = sum(
            1
            for candidate in self.window
            if candidate.judgement is not None and not candidate.judgement.done()
        )
        room = Counter(self.wanted or {})
        room.subtract(self.done)
        for place, candidate in enumerate(self.window):
            if under_way >= AHEAD * self.params.sandbox.build_workers:
                return
            if self.needs(candidate, room) and candidate.judgement is None:
                self.window[place] = replace(candidate, judgement=self.admit(candidate.task))
                under_way += 1

    def judged(self) -> Admission | None:
        """The admission of the window's first, while the pool is kept busy with those after it; None where it need not be judged."""
        first = self.window[0]
        place = self.place(first.task)
        if first.refused or (self.wanted is not None and self.done[place] >= self.wanted[place]):
            return None
        judgement = first.judgement or self.admit(first.task)
        self.window[0] = replace(first, judgement=judgement)
        while not judgement.done():
            self.feed()
            others = (
                other.judgement
                for other in self.window
                if other.judgement is not None and not other.judgement.done()
            )
            wait([judgement, *others], return_when=FIRST_COMPLETED)
        return judgement.result()

    def decide(self) -> None:
        admission = self.judged()
        candidate = self.window.popleft()
        task = candidate.task
        self.candidates += 1
        if candidate.refused:
            self.rejected.append(candidate.refused)
            return
        if admission is None:
            self.surplus += 1
            return
        if (
            admission.reason == "infrastructure"
        ):  # a set must not depend on what failed beside it; who builds again goes on here
            raise InfrastructureError(
                f"the judge failed by its own fault: {admission.evidence.get('detail', '')}"
            )
        reason, detail = self.task_filter.check_admission(admission)
        if not reason:
            self.fruitless = 0
            self.done[self.place(task)] += 1
            flops = candidate.draft.flops if candidate.draft is not None else None
            evidence = (
                {"device": self.params.device}
                | admission.evidence
                | self.task_filter.similarity_evidence(task)
                | compute_headroom(admission.evidence, flops)
            )
            self.admitted.append(
                task.model_copy(update={"evidence": evidence, "name": task.name or "-".join(task.ops)})
            )
            return
        self.fruitless += 1
        self.rejected.append(Rejection(task, reason, detail))
        if self.wanted is not None and self.fruitless >= HOPELESS:
            raise UserError(
                f"data: the last {HOPELESS} candidates that ran were all refused, this one for {reason}; widen data.eager_seconds or data.numel."
            )
        if (
            reason == "eager_time"
            and candidate.draft is not None
            and self.composer is not None
            and not candidate.resized
        ):
            resized = self.composer.resized(candidate.draft, admission.evidence["eager_seconds"])
            if resized is not None:
                self.window.appendleft(self.enter(Candidate(resized.task, draft=resized, resized=True)))
                self.feed()

    def write(self, out: Path) -> DatasetSummary:
        with atomic_folder(out) as folder:
            write_tasks(folder / "tasks.parquet", self.admitted)
            similarities = tuple(
                sorted(similarity for similarity, _ in self.task_filter.nearest_programs.values())
            )
            version = dataset_version(folder / "tasks.parquet")
            if (
                out.is_dir()
                and any(out.iterdir())
                and (old := dataset_version(out / "tasks.parquet")) != version
            ):
                raise UserError(
                    f"{out}: holds data set {old[:12]}, and this one is {version[:12]}; give another folder, or delete it first."
                )
            summary = DatasetSummary(
                version,
                self.candidates,
                self.surplus,
                tuple(self.admitted),
                tuple(self.rejected),
                similarities,
            )
            write_summary(folder, self.params, summary)
        return summary


def check_out(out: Path) -> None:
    """UserError unless `out` is a new or empty folder, or holds a data set: what lies there would be gone."""
    if out.is_dir() and (not any(out.iterdir()) or (out / "tasks.parquet").is_file()):
        return
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: holds something else than a data set; give a new or empty folder.")


def build_dataset(
    params: Params, out: Path, pool: Admitting, progress: Progress, seeds: Path | None = None
) -> DatasetSummary:
    """Make a data set and write it to the folder `out` in one step: tasks.parquet, rejected.parquet, metrics.json,
    plots/*.csv and README.md. Equal parameters and verdicts give an equal data set, in whatever order verdicts come.
    `seeds` is the folder of the mined table; it is not looked at where data.operators is core; the journal of
    data.composer's answers lies beside it.

    Raises UserError when data.against cannot be read, when the parameters admit next to nothing, or when `out` holds another data set.
    """
    check_out(out)
    data = params.data
    builder = Builder(params, pool, progress, targets(data))
    source: Iterator[Candidate]
    if data.operators == "core":
        source = (Candidate(task) for task in compose_tasks(data.seed, data, params.device))
    else:
        if seeds is None:
            raise UserError(
                f"data.operators: {data.operators} needs the folder of the mined table; give one, or set data.operators to core."
            )
        table = load_operator_table(seeds, progress)
        if data.composer:
            asked = ModelComposer(
                sorted({form.name for form in table.templates}), data, seeds.parent / "answers"
            )
            source = (
                Candidate(item) if isinstance(item, KernelTask) else Candidate(item.task, refused=item)
                for item in asked
            )
        else:
            builder.composer = TorchComposer(table, data, params.device, modules=data.operators == "all")
            source = (Candidate(draft.task, draft=draft) for draft in builder.composer)
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # probes are small: fifteen more threads that wait for each took two of sixteen cores from the judge
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks on many a mined form; the task_filter decides
            builder.run(source, data.tasks + data.held_out)
    finally:
        torch.set_num_threads(threads)
    return builder.write(out)


def admit_tasks(
    params: Params, tasks: Iterable[KernelTask], total: int, out: Path, pool: Admitting, progress: Progress
) -> DatasetSummary:
    """Hold given tasks against the task_filter and the judge, every one of them, and write those that pass as `build_dataset` does.

    Raises UserError when none passes: an empty data set is none."""
    check_out(out)
    builder = Builder(params, pool, progress, None)
    builder.run((Candidate(task) for task in itertools.islice(tasks, total)), total)
    if not builder.admitted:
        reasons = (
            ", ".join(
                f"{reason} {count}"
                for reason, count in Counter(item.reason for item in builder.rejected).most_common()
            )
            or "no rows"
        )
        raise UserError(
            f"{out}: no task was admitted ({reasons}), so nothing was written; see cuda-agent data check for each row."
        )
    return builder.write(out)
