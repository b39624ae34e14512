"""The pool of judges: one interface, jobs in, verdicts out.

Verdicts are journalled before anybody sees them, by task, candidate, epoch and protocol. So a stage that was killed and
runs again gets the verdicts that it had, and comes to the same end as if nothing had happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from components.core import telemetry
from components.core.config import Params
from components.core.errors import InfrastructureError
from components.core.files import digest_bytes, digest_json, read_json, write_json
from components.core.task import KernelTask
from components.judge.verdict import Admission, Verdict
from components.sandbox.preflight import check_isolation


@dataclass(frozen=True)
class Candidate:
    """What the policy wrote: text by workspace path (`model_new.py`, `kernels/…`)."""

    files: tuple[tuple[str, str], ...]

    @staticmethod
    def of(files: dict[str, str]) -> Candidate:
        # A lone surrogate, which JSON can spell, is no text: it becomes a question mark, and the compiler says so.
        return Candidate(
            tuple(
                sorted(
                    (name.encode(errors="replace").decode(), text.encode(errors="replace").decode())
                    for name, text in files.items()
                )
            )
        )

    @property
    def digest(self) -> str:
        return digest_json(self.files)


@dataclass(frozen=True)
class Job:
    """One judgement to make; jobs of equal task, candidate and epoch share one measurement and one journal entry.

    With `compare_compile` every correct candidate is compared with the fastest mode of torch.compile; without it only
    one that beats eager, with the default mode. All jobs of an epoch have the same `compare_compile`.
    """

    task: KernelTask
    candidate: Candidate
    epoch: str
    compare_compile: bool = False


class JudgePool(Protocol):
    def prepare(self) -> None: ...

    def submit(self, job: Job) -> Future[Verdict]: ...

    def drop(self) -> None: ...

    def close(self) -> None: ...


class LocalPool:
    """Judges on this machine: builds and preparation in parallel, measurements one at a time (DESIGN §5).

    `verdicts` is the journal's folder. Files are added and never changed.
    """

    def __init__(self, params: Params, verdicts: Path, folder: Path | None = None, *, workers: int = 0):
        self.params = params
        self.verdicts = verdicts
        self.folder = folder if folder is not None else verdicts.parent / "judge"
        self.protocol = digest_json(
            [
                params.device,
                params.precision,
                params.sandbox.model_dump(
                    exclude={"build_workers", "warm_tasks", "attempts", "pool", "judges", "resource"}
                ),
            ]
        )
        self.executor = ThreadPoolExecutor(
            max_workers=workers or params.sandbox.build_workers, thread_name_prefix="judge"
        )
        self.lock = threading.Lock()
        self.in_flight: dict[str, Future[Any]] = {}
        self._judge: Any = None

    @property
    def judge(self) -> Any:
        """What measures, started with the first job that the journal cannot answer."""
        with self.lock:
            if self._judge is None:
                self._judge = self.start()
            return self._judge

    def start(self) -> Any:
        from components.judge.judge import (
            Judge,  # torch comes with it, and a night that is cached judges nothing
        )

        return Judge(self.params, self.folder)

    def prepare(self) -> None:
        """Begin to warm up what the first jobs would wait for: most of a minute of one core, best spent beside other work."""
        self.executor.submit(lambda: self.judge.runner_factory.prepare())

    def submit(self, job: Job) -> Future[Verdict]:
        """The verdict, from the journal or by measurement. `infrastructure` verdicts are not journalled."""
        key = digest_json(["verdict", self.protocol, job.task.task_id, job.candidate.digest, job.epoch])

        def work() -> Verdict:
            with telemetry.judging() as status:
                verdict = self._retried(
                    lambda: self.judge.verdict(
                        job.task, dict(job.candidate.files), compare_compile=job.compare_compile
                    )
                )
                status.append(verdict.status)
            if verdict.status != "infrastructure":
                write_json(self._path(key), verdict.model_dump())
            return verdict

        return self._once(key, work, lambda record: Verdict.model_validate(record))

    def admit(self, code: str, *, headroom: bool = False) -> Future[Admission]:
        """Whether a task's source is admitted (DESIGN §5, Admission), from the journal or by measurement."""
        key = digest_json(
            [
                "admission",
                self.protocol,
                self.params.data.eager_seconds,
                headroom,
                digest_bytes(code.encode()),
            ]
        )

        def work() -> Admission:
            for _ in range(self.params.sandbox.attempts):
                try:
                    admission = self.judge.admit(code, headroom=headroom)
                    break
                except InfrastructureError as error:
                    admission = Admission(False, "infrastructure", {"detail": str(error)[:300]})
            if admission.reason != "infrastructure":
                write_json(self._path(key), asdict(admission))
            return admission

        return self._once(key, work, lambda record: Admission(**record))

    def _retried(self, judge: Callable[[], Verdict]) -> Verdict:
        for _ in range(self.params.sandbox.attempts):
            try:
                verdict = judge()
            except InfrastructureError as error:
                verdict = Verdict(
                    status="infrastructure",
                    reason="judge",
                    device=self.params.device,
                    precision=self.params.precision,
                    log=str(error)[:500],
                )
            if verdict.status != "infrastructure":
                return verdict
        return verdict

    def _once(self, key: str, work: Callable[[], Any], read: Callable[[Any], Any]) -> Future[Any]:
        path = self._path(key)
        with self.lock:
            if key in self.in_flight:
                return self.in_flight[key]
            if path.exists():
                done: Future[Any] = Future()
                done.set_result(read(read_json(path)))
                return done
            future = self.executor.submit(work)
            self.in_flight[key] = future
            telemetry.WAITING.inc()

        def forget(_: Future[Any]) -> None:
            telemetry.WAITING.dec()
            with self.lock:
                self.in_flight.pop(key, None)

        future.add_done_callback(forget)
        return future

    def _path(self, key: str) -> Path:
        return self.verdicts / key[:2] / f"{key}.json"

    def drop(self) -> None:
        """Cancel what no judge has begun, so that whoever waits for it ends (concurrent.futures.CancelledError)."""
        with self.lock:
            waiting = list(self.in_flight.values())
        for future in waiting:
            future.cancel()

    def close(self) -> None:
        """Drop what has not begun, end what runs, and every sandboxed process."""
        self.executor.shutdown(wait=True, cancel_futures=True)
        if self._judge is not None:
            self._judge.close()


def with_any_duration(params: Params) -> Params:
    """Return `params` with which a task is admitted whatever its eager time."""
    data = params.data.model_copy(update={"eager_seconds": (1e-9, 1e9)})
    return params.model_copy(update={"data": data})


def open_pool(params: Params, verdicts: Path) -> LocalPool:
    """The judges of this machine, or those of a Ray cluster where `sandbox.pool` says so; `verdicts` is the journal's folder.

    Raises IsolationUnavailable where no runner can be isolated on this machine, before anything is loaded or sampled.
    """
    if params.sandbox.pool == "ray":
        from components.judge.ray_pool import RayPool

        return RayPool(params, verdicts)
    check_isolation(params.sandbox, params.device)
    return LocalPool(params, verdicts)
