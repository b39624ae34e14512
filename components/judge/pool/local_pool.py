"""Pool of judges, which accepts jobs and returns verdicts.

A job asks for the verdict on one candidate (an implementation of a task's module). Each verdict is written to
a journal, a folder of results, before it is returned. Its key is made of task, candidate, epoch (the caller's
name for one set of judgements) and protocol (a digest of the judge's settings). A stage of the pipeline that
was killed and runs again therefore gets the same verdicts (docs/design/caching-and-resume.md).
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar

from components.core import telemetry
from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_bytes, digest_json, read_json, write_json
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.pool.task_threads import TaskThreads
from components.judge.verdict import Admission, Verdict, protocol_digest

if TYPE_CHECKING:
    from components.judge.judge import Judge
    from components.judge.pool.ray_pool import RayBackend
    from components.judge.pool.service_client import ServiceClient


# Reasons of verdicts `infrastructure` that the task's own source causes; another attempt would not help.
TASK_FAULTS = ("task", "too_large", "against")


@dataclass(frozen=True)
class Candidate:
    """Source files of one candidate, an implementation of a task's module with its own kernels.

    `files` holds sorted pairs of workspace path (`model_new.py`, `kernels/…`) and text.
    """

    files: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, files: dict[str, str]) -> Self:
        """Return the candidate with `files`, which maps each workspace path to the text of the file.

        Lone surrogates are replaced by question marks, because UTF-8 cannot represent them.
        """

        def encodable(text: str) -> str:
            return text.encode(errors="replace").decode()

        return cls(tuple(sorted((encodable(name), encodable(text)) for name, text in files.items())))

    @property
    def digest(self) -> str:
        return digest_json(self.files)


@dataclass(frozen=True)
class Job:
    """Request to judge one candidate (an implementation of a task's module) on one task.

    `epoch` is the caller's name for a set of judgements, for example `step-12` for one update of the policy.
    Jobs with the same task, candidate and epoch share one measurement and one entry in the journal, the
    folder of stored results.

    `compare_compile` determines when a correct candidate is also compared with torch.compile: True always,
    with the fastest mode of torch.compile on the task; False only if the candidate is faster than eager, with
    the default mode; None never. It must be equal for all jobs of an epoch, because the key of a journal
    entry does not contain it.
    """

    task: KernelTask
    candidate: Candidate
    epoch: str
    compare_compile: bool | None = False


T = TypeVar("T")
# What a pool judges with.
Backend: TypeAlias = "Judge | RayBackend | ServiceClient"


def verdict_key(protocol: str, job: Job) -> str:
    """Return the journal's key of a job's verdict under the judge's settings with the digest `protocol`.

    A job is a request to judge one candidate on one task. The journal is a folder with a file for each
    verdict, and the key is the file's name without its suffix.
    """
    return digest_json(["verdict", protocol, job.task.code_digest, job.candidate.digest, job.epoch])


def admission_key(
    protocol: str, window: tuple[float, float], code: str, *, headroom: bool, memory_only: bool = False
) -> str:
    """Return the key of the admission of the task with source `code` in the journal, a folder of results.

    An admission says whether the task can be judged. `protocol` is the digest of the judge's settings, and
    `window` the parameter `data.eager_seconds`, the smallest and the largest time in seconds of one eager
    call. `headroom` is whether torch.compile is measured too, and `memory_only` whether nothing is measured,
    in which case `window` and `headroom` do not enter the key.
    """
    if memory_only:
        return digest_json(["shapes", protocol, digest_bytes(code.encode())])
    return digest_json(["admission", protocol, window, headroom, digest_bytes(code.encode())])


def journal_path(verdicts: Path, key: str) -> Path:
    """Return the path of the entry for `key` in the journal, the folder `verdicts` of stored results."""
    return verdicts / key[:2] / f"{key}.json"


def infrastructure_verdict(params: Params, error: InfrastructureError) -> Verdict:
    """Return the verdict of a judge that itself failed with `error`.

    Its status is `infrastructure`, its reason `judge`, and its log the text of the error.
    """
    return Verdict(
        status="infrastructure",
        reason="judge",
        device=params.device,
        precision=params.precision,
        log=str(error)[:500],
    )


def judge_with_retries(params: Params, judge: Callable[[], Verdict]) -> Verdict:
    """Call `judge` until its verdict is not `infrastructure`, and return the verdict.

    The status `infrastructure` means that the judge or the task failed. `judge` is called at most
    `sandbox.attempts` times. A verdict `infrastructure` is returned if another call would not help
    (`TASK_FAULTS`), or if it is that of the last call. An InfrastructureError of `judge` counts as such a
    verdict.
    """
    with telemetry.judging() as status:
        for _ in range(params.sandbox.attempts):
            try:
                verdict = judge()
            except InfrastructureError as error:
                verdict = infrastructure_verdict(params, error)
            if verdict.status != "infrastructure" or verdict.reason in TASK_FAULTS:
                break
        status.append(verdict.status)
    return verdict


def admit_with_retries(params: Params, admit: Callable[[], Admission]) -> Admission:
    """Return the admission that `admit` returns, calling it again if the judge itself failed.

    An admission says whether a task can be judged. `admit` is called at most `sandbox.attempts` times. If all
    calls raise InfrastructureError, the task is refused with the reason `infrastructure`.
    """
    for _ in range(params.sandbox.attempts):
        try:
            return admit()
        except InfrastructureError as error:
            admission = Admission(False, "infrastructure", {"detail": str(error)[:300]})
    return admission


class JudgePool(Protocol):
    """Interface through which training and evaluations get verdicts and check tasks.

    `prepare` starts the judges before they are needed. `submit` returns a future of the verdict on a job,
    which is one candidate and its task. `check` returns a future that says whether the task with source
    `code` can be judged, and `admit` one that also says whether a wrong kernel could pass. `drop` cancels
    jobs that no judge has begun, and `close` ends the judges.
    """

    def prepare(self) -> Future[None]: ...

    def submit(self, job: Job) -> Future[Verdict]: ...

    def check(self, code: str) -> Future[Admission]: ...

    def admit(self, code: str) -> Future[Admission]: ...

    def drop(self) -> None: ...

    def close(self) -> None: ...


class LocalPool:
    """Pool whose journal is on this machine, with one judge on this machine or several on a Ray cluster.

    The judges are on a Ray cluster if `pool.judges`, their number, is not 0. Each judge builds and prepares
    several candidates (implementations of a task's module) at once, and measures one at a time. `verdicts` is
    the journal's folder, with a file for each verdict or admission (the check whether a task can be judged).
    Entries are added to the journal and never changed. `folder` is where a judge on this machine keeps its
    builds and caches; by default it is the folder `judge` beside the journal. If `use_service` is true and a
    service of this account (`cuda-agent serve`) runs on `folder`, the pool uses it and starts no judge. If
    `trains` is true, this process trains the policy on the GPU of its judge, which leaves it the memory that
    it is planned to need.
    """

    def __init__(
        self,
        params: Params,
        verdicts: Path,
        folder: Path | None = None,
        *,
        use_service: bool = False,
        trains: bool = False,
    ):
        self.params = params
        self.use_service = use_service
        self.trains = trains
        self.verdicts = verdicts
        self.folder = folder if folder is not None else verdicts.parent / "judge"
        self.protocol = protocol_digest(params)
        threads = max(1, params.pool.judges) * params.sandbox.build_workers
        self.threads = TaskThreads(threads)
        self.lock = threading.Lock()
        self.in_flight: dict[str, Future[Any]] = {}
        self._judge: Backend | None = None

    @property
    def judge(self) -> Backend:
        """Backend that judges for this pool, which is started at the first access and then kept.

        The backend is a judge, a group of judges on a Ray cluster, or a client of a service. The pool
        accesses it in `prepare`, or for the first job (request for a verdict) whose result is not stored.
        """
        with self.lock:
            if self._judge is None:
                self._judge = self.start()
            return self._judge

    def start(self) -> Backend:
        """Return the judges on a Ray cluster, a client of the running service, or a new judge.

        The cluster is used if `pool.judges` is not 0, and the service if `use_service` is set and a service
        of this account runs on the pool's folder; otherwise a judge is made in this process. The modules of
        these classes are imported in this method, because a run whose results are all stored needs neither
        torch nor a client.
        """
        if self.params.pool.judges:
            from components.judge.pool.ray_pool import RayBackend

            return RayBackend(self.params)
        if self.use_service:
            from components.judge.pool.service_client import connect

            if (service := connect(self.params, self.folder)) is not None:
                return service
        from components.judge.judge import Judge

        judge = Judge(self.params, self.folder)
        policy = self.params.policy
        # A server that a run starts on this GPU.
        has_sampler = policy.backend == "vllm-server" and not policy.servers and not self.params.pool.samplers
        share, size = policy.gpu_memory_share if has_sampler else 0.0, 0.0
        if self.trains and self.params.device == "cuda":
            from components.planning.model_shapes import policy_shapes
            from components.planning.role_memory import trainer_bytes

            with contextlib.suppress(UserError):  # of a policy that is given otherwise than by its parameters
                size = trainer_bytes(self.params, policy_shapes(self.params))
        judge.scheduler.leave(share, size)
        return judge

    def prepare(self) -> Future[None]:
        """Start the judge and its processes in a background thread, before the first jobs need them.

        A job is a request for a verdict or an admission. When the returned future is done, the judge is ready
        for jobs, while its processes may still be starting.
        """
        return self.threads.submit("", lambda: self.judge.prepare())

    def submit(self, job: Job) -> Future[Verdict]:
        """Return a future of the verdict on a job, which is read from the journal or measured.

        A job is one candidate and its task, and the journal is the folder of stored results. If the judge
        itself fails in every attempt, the verdict has the status `infrastructure`. A verdict with this status
        is not written to the journal.
        """
        key = verdict_key(self.protocol, job)

        def measure() -> Verdict:
            verdict = judge_with_retries(self.params, lambda: self.ask(job))
            if verdict.status != "infrastructure":
                write_json(journal_path(self.verdicts, key), verdict.model_dump())
            return verdict

        return self._measure_once(key, job.task.task_id, measure, Verdict.model_validate)

    def ask(self, job: Job) -> Verdict:
        """Return the judge's verdict on a job (a candidate and its task) for which no verdict is stored."""
        return self.judge.verdict(job.task, dict(job.candidate.files), compare_compile=job.compare_compile)

    def check(self, code: str) -> Future[Admission]:
        """Return a future that says whether candidates of the task with source `code` can be judged here.

        A candidate is an implementation of the task's module. The task's source runs in a sandboxed process
        that only describes the task, and nothing is measured. The reason of a refusal is `too_large`,
        `does_not_run` or `infrastructure`. Refusals are not stored, because the memory of the machine may
        suffice the next time.
        """
        return self.admit(code, memory_only=True)

    def admit(self, code: str, *, headroom: bool = False, memory_only: bool = False) -> Future[Admission]:
        """Return a future of the admission of the task with source `code`: whether it can be judged.

        The result is read from the journal (the folder of stored results) or measured. With `headroom`, the
        task must compile and leave device memory for other tasks, and its time under torch.compile is
        measured too. With `memory_only`, nothing is measured (`check`), and a refusal is not written to the
        journal. A refusal as `infrastructure` or `too_large` is never written, because the judge may work and
        have more memory the next time.
        """
        window = self.params.data.eager_seconds
        key = admission_key(self.protocol, window, code, headroom=headroom, memory_only=memory_only)

        def measure() -> Admission:
            admission = admit_with_retries(
                self.params,
                lambda: self.judge.admit(code, window, headroom=headroom, memory_only=memory_only),
            )
            may_change = memory_only or admission.reason in ("infrastructure", "too_large")
            if admission.admitted or not may_change:
                write_json(journal_path(self.verdicts, key), asdict(admission))
            return admission

        return self._measure_once(key, key, measure, lambda record: Admission(**record))

    def _measure_once(
        self, key: str, task: str, measure: Callable[[], T], read: Callable[[Any], T]
    ) -> Future[T]:
        """Return a future of the result for `key`, and have a thread call `measure` only if there is none.

        `key` is the result's key in the journal, the folder of stored results, and `task` names the task on
        behalf of which `measure` is called (`TaskThreads`). If `measure` has been submitted for `key` and has
        not ended, its future is returned. If the journal has an entry for `key`, the future is already done,
        and its result is the entry as converted by `read`.
        """
        path = journal_path(self.verdicts, key)
        with self.lock:
            if key in self.in_flight:
                return self.in_flight[key]
            if path.exists():
                done: Future[T] = Future()
                done.set_result(read(read_json(path)))
                return done
            future = self.threads.submit(task, measure)
            self.in_flight[key] = future
            telemetry.WAITING.inc()

        def forget(_: Future[T]) -> None:
            telemetry.WAITING.dec()
            with self.lock:
                self.in_flight.pop(key, None)

        future.add_done_callback(forget)
        return future

    def drop(self) -> None:
        """Cancel the jobs (requests for a verdict or an admission) that no judge has begun.

        Threads that wait for a cancelled job get concurrent.futures.CancelledError.
        """
        with self.lock:
            waiting = list(self.in_flight.values())
        for future in waiting:
            future.cancel()

    def close(self) -> None:
        """Cancel the jobs that have not begun, wait for the running jobs, and end every sandboxed process.

        A job is a request for a verdict or an admission. A service, or judges that another process has
        started on the Ray cluster, are not ended.
        """
        self.threads.close()
        with self.lock:
            judge, self._judge = self._judge, None
        if judge is not None:
            judge.close()


def with_any_duration(params: Params) -> Params:
    """Return a copy of `params` with which a task can be admitted however long its eager call takes.

    The parameter `data.eager_seconds`, the smallest and the largest time in seconds, becomes 1e-9 to 1e9.
    """
    data = params.data.model_copy(update={"eager_seconds": (1e-9, 1e9)})
    return params.model_copy(update={"data": data})
