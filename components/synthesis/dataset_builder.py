"""Decide which proposed tasks enter a data set of training tasks, and write the data set.

A task is a PyTorch module that a policy has to make faster. In this package a proposed task is called a
candidate (`TaskCandidate`). Every rejected candidate is stored with the reason. Candidates are decided in the
order of their composition, so the admitted tasks depend only on the parameters and the admissions, and not on
which admission finished first. An admission is the judge's answer to whether kernels for a task can be
judged. The pool of judges stores admissions in a journal on disk, so that no candidate is judged again if a
killed build is started again.
"""

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from components.core.errors import InfrastructureError, UserError
from components.core.files import atomic_folder
from components.core.params import Data, Params
from components.core.progress import Progress
from components.core.records import TaskDtype
from components.core.task import KernelTask, dataset_version, dtype_of, write_tasks
from components.judge.verdict import Admission
from components.synthesis.dataset_summary import DatasetSummary, Rejection, write_summary
from components.synthesis.task_filter import TaskFilter

# Number of successive executed candidates at which the build fails if all were refused.
MAX_REFUSED_IN_A_ROW = 60
# Largest number of successive candidates that are refused because of their source or are not needed. After
# more, the build fails.
MAX_USELESS_IN_A_ROW = 5000

# Number of candidates in the window (see DatasetBuilder) for each worker of the pool. The window is large,
# because candidates are decided in order and one admission may take a minute.
LOOKAHEAD = 16
# Largest number of undecided submitted candidates for each worker of the pool. It is small, because the tasks
# that are still needed change with every decision.
AHEAD = 2


class AdmissionPool(Protocol):
    """Interface to the part of the judge pool that building a data set needs.

    `admit` submits the source of a task, and returns the future of the judge's answer to whether kernels for
    the task can be judged. If `headroom` is true, the headroom is measured too, which is the time of
    torch.compile divided by the least time that any kernel can take on the device.
    """

    def admit(self, code: str, *, headroom: bool = False) -> Future[Admission]: ...


@dataclass(frozen=True)
class TaskCandidate:
    """A task that may become part of a data set, with its state in the build.

    The task is composed, or read from an imported file. `refused` is the refusal if the task is refused
    because of its source. `judgement` is the future of the judge's answer to whether kernels for the task can
    be judged; it is None until the task is submitted to the judge.
    """

    task: KernelTask
    refused: Rejection | None = None
    judgement: Future[Admission] | None = None

    @property
    def is_ruled_out(self) -> bool:
        """Return whether it is already known that the task will not enter the data set.

        The task's source was then refused, or the judge has checked the task and not admitted it.
        """
        if self.refused is not None or self.judgement is None or not self.judgement.done():
            return self.refused is not None
        return not self.judgement.result().admitted


# Type of a pair (split, kind). The split is `train` or `held_out`. The kind is a task's `data_source`, such
# as torch#2 for a chain of two operators of torch, or transformers for a module of that library, and the
# dtype of a task in half precision (`kind_of`).
Quota = tuple[str, str]


def task_quotas(data: Data) -> Counter[Quota]:
    """Return how many tasks of each split and kind a data set with these parameters is to have.

    The split is "train" or "held_out" (for evaluation only), and the kind is made of `data_source` and dtype
    (`kind_of`). For tasks of the core operators (data.operators is `core`), `data_source` is "" here, because
    the number of operators of each task is drawn at random.
    """
    wanted: Counter[Quota] = Counter()
    for split, count in (("train", data.tasks), ("held_out", data.held_out)):
        exact = {kind: count * share for kind, share in source_shares(data).items()}
        # The numbers with the largest remainders are rounded up, so that the sum is correct.
        by_remainder = sorted(exact, key=lambda kind: (int(exact[kind]) - exact[kind], kind))
        rounded_up = by_remainder[: count - sum(map(int, exact.values()))]
        wanted.update({(split, kind): int(number) + (kind in rounded_up) for kind, number in exact.items()})
    return wanted


def source_shares(data: Data) -> dict[str, float]:
    """Return the share of the data set's tasks for each kind of task, from 0 to 1.

    A kind is made of the column data_source and the dtype (`kind_of`). If data.operators is `core`, "" stands
    for all values of the column.
    """
    half = data.half_share / 2
    dtypes: dict[TaskDtype, float] = {"float16": half, "bfloat16": half, "float32": 1 - data.half_share}
    return {
        kind_of(source, dtype): share * part
        for source, share in _source_shares(data).items()
        for dtype, part in dtypes.items()
        if part
    }


def kind_of(data_source: str, dtype: TaskDtype) -> str:
    """Return the kind of a task: its `data_source`, such as torch#2, followed by the dtype in half precision.

    An example of the latter is `torch#2 bfloat16`.
    """
    return data_source if dtype == "float32" else f"{data_source} {dtype}".strip()


def _source_shares(data: Data) -> dict[str, float]:
    """Return the share of the data set's tasks, from 0 to 1, for each value of the column data_source.

    If data.operators is `core`, the one key "" stands for all values.
    """
    if data.operators == "core":
        return {"": 1.0}
    modules = data.transformers_share if data.operators == "all" and not data.composer else 0.0
    shares = {f"torch#{count}": share * (1 - modules) for count, share in data.operator_mix.items()}
    return shares | ({"transformers": modules} if modules else {})


class DatasetBuilder:
    """A builder that decides which proposed tasks (`TaskCandidate`) enter a data set, and writes the set.

    Proposed tasks enter a queue, the window, in the order in which they are composed or read. The judge may
    check them in any order while they are in the window, but they are admitted or rejected in the order of
    the window. `wanted` has the number of tasks for each split (train or held_out) and kind, such as torch#3
    (`kind_of`). If `wanted` is None, as for an import, the judge checks every proposed task whose source
    passes the filter.
    """

    def __init__(
        self, params: Params, pool: AdmissionPool, progress: Progress, wanted: Counter[Quota] | None
    ):
        self.params, self.pool, self.progress, self.wanted = params, pool, progress, wanted
        self.task_filter = TaskFilter(params.data)
        self.done: Counter[Quota] = Counter()
        self.window: deque[TaskCandidate] = deque()
        self.admitted: list[KernelTask] = []
        self.rejected: list[Rejection] = []
        self.candidates = self.surplus = self.refused_in_a_row = self.useless_in_a_row = 0

    def run(self, source: Iterator[TaskCandidate], total: int) -> None:
        width = LOOKAHEAD * self.params.sandbox.build_workers
        while self.wanted is None or self.done != self.wanted:
            entering = next(source, None) if len(self.window) < width else None
            if entering is not None:
                self.window.append(self.enter(entering))
                self.feed()
            elif self.window:
                self.decide()
                self.progress.update(
                    "data",
                    len(self.admitted) if self.wanted is not None else self.candidates,
                    total,
                    candidates=self.candidates,
                    rejected=len(self.rejected),
                )
            else:
                return

    def quota(self, task: KernelTask) -> Quota:
        source = "" if self.params.data.operators == "core" else task.data_source
        return task.split, kind_of(source, dtype_of(task.code))

    def enter(self, candidate: TaskCandidate) -> TaskCandidate:
        task = candidate.task
        reason, detail = (
            (candidate.refused.reason, candidate.refused.detail)
            if candidate.refused
            else self.task_filter.check_source(task)
        )
        self.useless_in_a_row = (
            0 if not reason and self.needs(candidate, self.open_quotas()) else self.useless_in_a_row + 1
        )
        if self.useless_in_a_row > MAX_USELESS_IN_A_ROW and self.wanted is not None:
            missing = ", ".join(
                f"{count} {' '.join(filter(None, key))}" for key, count in self.missing().items() if count > 0
            )
            raise UserError(
                f"data.tasks: after {len(self.admitted)} tasks the composer finds nothing new that is needed "
                f"(missing: {missing}); ask for fewer tasks or widen data.numel."
            )
        return replace(candidate, refused=Rejection(task, reason, detail)) if reason else candidate

    def needs(self, candidate: TaskCandidate, open_quotas: Counter[Quota]) -> bool:
        """Return whether a candidate, a proposed task, is needed, and if so, subtract it from `open_quotas`.

        `open_quotas` has for each split and kind how many tasks the data set would still lack if all earlier
        candidates of the window (the queue of proposed tasks) that can still be admitted were admitted. A
        candidate is not needed if it can no longer be admitted, or if no more tasks of its split and kind are
        lacking. If `wanted` is None, every candidate that can be admitted is needed.
        """
        quota = self.quota(candidate.task)
        if candidate.is_ruled_out or (self.wanted is not None and open_quotas[quota] <= 0):
            return False
        open_quotas[quota] -= 1
        return True

    def missing(self) -> Counter[Quota]:
        """Return the number of tasks of each split and kind that the data set still lacks.

        The split is "train" or "held_out". The result is empty if `wanted` is None.
        """
        return Counter({quota: count - self.done[quota] for quota, count in (self.wanted or {}).items()})

    def open_quotas(self) -> Counter[Quota]:
        """Return how many tasks of each split and kind would be lacking if all open candidates were admitted.

        The open candidates are the proposed tasks in the window, the queue, that can still be admitted.
        """
        open_quotas = self.missing()
        for candidate in self.window:
            self.needs(candidate, open_quotas)
        return open_quotas

    def admit(self, task: KernelTask) -> Future[Admission]:
        return self.pool.admit(task.code, headroom=self.params.data.headroom)

    def feed(self) -> None:
        """Submit those candidates of the window that are needed (`needs`) to the judge, in their order.

        The window is the queue of proposed tasks. No more are submitted when AHEAD candidates for each worker
        of the pool are submitted and not yet judged.
        """
        in_flight = sum(
            1
            for candidate in self.window
            if candidate.judgement is not None and not candidate.judgement.done()
        )
        open_quotas = self.missing()
        for index, candidate in enumerate(self.window):
            if in_flight >= AHEAD * self.params.sandbox.build_workers:
                return
            if self.needs(candidate, open_quotas) and candidate.judgement is None:
                self.window[index] = replace(candidate, judgement=self.admit(candidate.task))
                in_flight += 1

    def await_admission(self) -> Admission | None:
        """Wait until the judge has checked the first proposed task of the window, and return the admission.

        The window is the queue of proposed tasks, and an admission says whether kernels for a task can be
        judged. Returns None if the task need not be checked, because it is refused or no more tasks of its
        split and kind are needed. While this method waits, it submits later tasks of the window to the judge.
        """
        first = self.window[0]
        quota = self.quota(first.task)
        if first.refused or (self.wanted is not None and self.done[quota] >= self.wanted[quota]):
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
        admission = self.await_admission()
        candidate = self.window.popleft()
        task = candidate.task
        self.candidates += 1
        if candidate.refused:
            self.rejected.append(candidate.refused)
            return
        if admission is None:
            self.surplus += 1
            return
        if admission.reason == "infrastructure":
            raise InfrastructureError(
                f"the judge failed by its own fault: {admission.evidence.get('detail', '')}"
            )
        reason, detail = self.task_filter.check_admission(admission)
        if not reason:
            self.refused_in_a_row = 0
            self.done[self.quota(task)] += 1
            evidence = (
                {"device": self.params.device}
                | admission.evidence
                | self.task_filter.similarity_evidence(task)
            )
            self.admitted.append(
                task.model_copy(update={"evidence": evidence, "name": task.name or "-".join(task.ops)})
            )
            return
        self.refused_in_a_row += 1
        self.rejected.append(Rejection(task, reason, detail))
        if self.wanted is not None and self.refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise UserError(
                f"data: the last {MAX_REFUSED_IN_A_ROW} candidates that ran were all refused, "
                f"this one for {reason}; widen data.eager_seconds or data.numel."
            )

    def write(self, out: Path) -> DatasetSummary:
        with atomic_folder(out) as folder:
            write_tasks(folder / "tasks.parquet", self.admitted)
            version = dataset_version(folder / "tasks.parquet")
            if (
                out.is_dir()
                and any(out.iterdir())
                and (old := dataset_version(out / "tasks.parquet")) != version
            ):
                raise UserError(
                    f"{out}: holds data set {old[:12]}, and this one is {version[:12]}; "
                    "give another folder, or delete it first."
                )
            summary = DatasetSummary(
                version,
                self.candidates,
                self.surplus,
                tuple(self.admitted),
                tuple(self.rejected),
                tuple(sorted(similarity for similarity, _ in self.task_filter.nearest_programs.values())),
            )
            write_summary(folder, self.params, summary)
        return summary
