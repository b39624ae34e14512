"""Jobs of the service: a durable queue that is fair between callers, and threads that judge the jobs in it.

A job is the request of one caller, who is known by a token, for a verdict on a candidate (an implementation
of a task's module) or for an admission (the check whether a task can be judged). All jobs are judged on one
device. The journal is a folder with a file for each verdict or admission. The id of a job is the key of its
result in the journal, so that a repeated request costs nothing. The key of a verdict covers the settings of
the judge, the task, the candidate and a text called epoch, which consists of the token's name, the number of
the measurement, how the candidate is compared with torch.compile and, if it is compared with another
candidate instead of torch.compile, the digest of that candidate.
"""

import contextlib
import functools
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from components.core.errors import UserError
from components.core.files import digest_json, read_json, write_json
from components.core.params import Params
from components.core.task import KernelTask, check_contract
from components.judge.pool.local_pool import (
    TASK_FAULTS,
    Candidate,
    Job,
    admission_key,
    journal_path,
    verdict_key,
)
from components.judge.pool.service_client import JUDGE_FAILED, TASK_FAILED
from components.judge.verdict import Admission, Verdict, protocol_digest
from components.service.job_store import JobStore, State, StoredJob
from components.service.judges import WarmJudges, admit_request, judge_request
from components.service.requests import (
    AdmissionBody,
    JobView,
    JudgementBody,
    ServiceError,
    public_verdict,
)
from components.service.tokens import OWNER, Token

DAY = 86_400.0
# Pause after a failure of the queue's database, in seconds.
RETRY_SECONDS = 1.0
# Jobs of all tokens that may be queued or running.
CAPACITY = 20_000
# Bytes of the requests of such jobs, of one token and of all.
OWN_BYTES, ALL_BYTES = 256 << 20, 1 << 30
# Seconds after which a caller is asked to try again if its own jobs, or those of all, fill the queue.
OWN_QUEUE_SECONDS, QUEUE_SECONDS = 2.0, 20.0

T = TypeVar("T")


class JobService:
    """Service that accepts jobs, queues them, has them judged, and reports their states and results.

    A job is a request to judge a candidate (an implementation of a PyTorch module) or to check a task (the
    module that is to be made faster). `judges` judge them, with the settings `params` unless a request has
    others. `folder` has the queue and, in `verdicts`, the journal with a file for each result. `tasks` are
    the tasks that callers may name. `workers` is the number of threads that judge, by default
    sandbox.build_workers; if it is 0, jobs are accepted and stay queued. `capacity` is the largest number of
    jobs of all callers that may be queued or running.
    """

    def __init__(
        self,
        judges: WarmJudges,
        params: Params,
        folder: Path,
        tasks: list[KernelTask],
        *,
        workers: int | None = None,
        capacity: int = CAPACITY,
    ):
        self.judges = judges
        self.params = params
        self.capacity = capacity
        self.verdicts = folder / "verdicts"
        self.tasks = {task.task_id: task for task in tasks}
        self.store = JobStore(folder / "jobs.sqlite")
        self.workers = params.sandbox.build_workers if workers is None else workers
        self.condition = threading.Condition()
        self.closing = False
        self.running: Counter[str] = Counter()  # jobs of each token
        self.served: dict[str, int] = {}  # number of the turn in which a token was served last
        self.turn = 0
        self.progress: dict[str, str] = {}
        self.watchers: set[tuple[str, Callable[[], None]]] = set()  # with the ids of their jobs
        self.threads = [
            threading.Thread(target=self._work, name=f"service-{number}") for number in range(self.workers)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, token: Token, body: JudgementBody | AdmissionBody) -> JobView:
        """Return the job of the request `body`, after adding it to the queue unless that is needless.

        It is needless if the job's result is known, or if the job is queued or running already. `token` is
        the caller's. Raises ServiceError if the request is not allowed, or if the queue is full.
        """
        if body.params is not None and token is not OWNER:
            raise ServiceError(403, "params: only the account that runs the service may send them.")
        made = (
            self._judgement(token, body) if isinstance(body, JudgementBody) else self._admission(token, body)
        )
        with self.condition:
            job = self.store.get(made.id)
            is_known = journal_path(self.verdicts, made.id).exists()
            if job is None or job.state in ("failed", "cancelled") or (job.state == "done" and not is_known):
                if job is None or job.state == "cancelled":
                    self._check_measurements(token, made)
                if not is_known:
                    self._check_space(token, len(made.body))
                self.store.put(replace(made, state="done", body="") if is_known else made)
                self.condition.notify()
        return self.view(token, made.id)

    def _judgement(self, token: Token, body: JudgementBody) -> StoredJob:
        task = self.task(token, body)
        candidate = Candidate.of(body.files)
        epoch = f"service/{token.name}/{body.measurement}/{body.compare_compile}"
        if body.against is not None:
            epoch += f"/{Candidate.of(body.against).digest}"
        protocol = protocol_digest(body.settings(self.params))
        return StoredJob(
            id=verdict_key(protocol, Job(task, candidate, epoch)),
            token=token.name,
            subject=digest_json([token.name, protocol, task.task_id, candidate.digest]),
            kind="judgement",
            task_id=task.task_id,
            measurement=body.measurement,
            body=body.model_copy(update={"task": "", "code": task.code}).model_dump_json(),
        )

    def _admission(self, token: Token, body: AdmissionBody) -> StoredJob:
        key = admission_key(
            protocol_digest(body.settings(self.params)),
            body.eager_seconds,
            body.code,
            headroom=body.headroom,
            memory_only=body.memory_only,
        )
        key = digest_json([token.name, key])
        return StoredJob(
            id=key,
            token=token.name,
            subject=key,
            kind="admission",
            task_id=self.task(token, body).task_id,
            body=body.model_dump_json(),
        )

    def task(self, token: Token, body: JudgementBody | AdmissionBody) -> KernelTask:
        """Return the task (the PyTorch module that is to be made faster) that a request names or contains.

        Raises ServiceError if the service lists no task of this name, if the source is not that of a task, or
        if the caller's token does not allow sources of tasks and the task is not among the listed ones.
        """
        if isinstance(body, JudgementBody) and body.task:
            return self.listed_task(body.task)
        task = KernelTask(code=body.code)
        try:
            if isinstance(body, JudgementBody):
                check_contract(body.code, "code")
            task_id = task.task_id
        except (UserError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            text = str(error) if isinstance(error, UserError) else f"code: not valid Python ({error})."
            raise ServiceError(422, text) from error
        if token.own_tasks:
            return task
        if task_id not in self.tasks:
            raise ServiceError(
                403, f"code: the token {token.name} may only name tasks that GET /v1/tasks lists."
            )
        return self.tasks[task_id]

    def listed_task(self, task_id: str) -> KernelTask:
        if (task := self.tasks.get(task_id)) is None:
            raise ServiceError(404, f"task: no task {task_id[:100]!r}; GET /v1/tasks lists all.")
        return task

    def _check_measurements(self, token: Token, job: StoredJob) -> None:
        if max(job.measurement, self.store.measurements(job.subject) + 1) > token.measurements:
            raise ServiceError(
                403,
                f"measurement: the token {token.name} may measure an equal candidate {token.measurements} "
                "times; use one of those measurements, or ask the service's operator for more.",
            )

    def _check_space(self, token: Token, size: int) -> None:
        """Raise ServiceError unless the queue has space for another job, whose request has `size` bytes.

        The jobs of each token (caller) and those of all tokens are limited in number and in bytes.
        """
        active, own_bytes = self.store.active(token.name)
        if active >= token.queued or own_bytes + size > OWN_BYTES:
            raise ServiceError(
                429,
                f"queue: the token {token.name} has {active} jobs of {own_bytes >> 20} MB waiting, and may "
                f"have {token.queued} of {OWN_BYTES >> 20} MB.",
                retry_after=OWN_QUEUE_SECONDS,
            )
        jobs, all_bytes = self.store.active()
        if jobs >= self.capacity or all_bytes + size > ALL_BYTES:
            raise ServiceError(
                429, "queue: the service has no place for another job.", retry_after=QUEUE_SECONDS
            )

    def find(self, token: Token, job_id: str) -> StoredJob:
        """Return the job `job_id`; raise ServiceError if the caller with this token has no such job."""
        job = self.store.get(job_id)
        if job is None or job.token != token.name:
            raise ServiceError(404, f"job: no job {job_id[:100]!r} of the token {token.name}.")
        return job

    def view(self, token: Token, job_id: str) -> JobView:
        """Return the state of the job `job_id`, and its result if it is done.

        Raises ServiceError if the caller with this token has no such job, or if the job's result was deleted.
        """
        job = self.find(token, job_id)
        verdict, admission = None, None
        if job.state == "done":
            try:
                record = read_json(journal_path(self.verdicts, job.id))
            except FileNotFoundError as error:  # it is being deleted (delete_old)
                raise ServiceError(404, f"job: the verdict of {job_id!r} was deleted; ask again.") from error
            if job.kind == "judgement":
                verdict = public_verdict(Verdict.model_validate(record))
            else:
                admission = Admission(**record)
        return JobView(
            id=job.id,
            kind=job.kind,
            state=job.state,
            task_id=job.task_id,
            measurement=job.measurement,
            measurements=self.store.measurements(job.subject),
            position=(self.store.position(job) or None) if job.state == "queued" else None,
            progress=self.progress.get(job.id, "") if job.state == "running" else "",
            verdict=verdict,
            admission=admission,
            error=job.error,
            reason=job.reason,
            status=job.status,
        )

    def cancel(self, token: Token, job_id: str) -> JobView:
        """Cancel a queued job, and return it.

        A job that was cancelled before is returned too. Raises ServiceError if `token` has no such job, or if
        the job is running, done or failed.
        """
        job = self.find(token, job_id)
        if not self.store.move(job.id, "cancelled", "queued", "cancelled"):
            raise ServiceError(409, f"job: it is {job.state}; only a queued job can be cancelled.")
        self._notify(job.id)
        return self.view(token, job_id)

    @contextlib.contextmanager
    def watch(self, job_id: str, changed: Callable[[], None]) -> Iterator[None]:
        """Return a context in which `changed` is called when the job `job_id` ends or is cancelled.

        It is also called when the service closes. The call may come from any thread.
        """
        watcher = (job_id, changed)
        with self.condition:
            self.watchers.add(watcher)
        try:
            yield
        finally:
            with self.condition:
                self.watchers.remove(watcher)

    def _notify(self, job_id: str = "") -> None:
        """Call the functions that watch a job, or those that watch any job if no id is given."""
        with self.condition:
            watching = [changed for watched, changed in self.watchers if job_id in ("", watched)]
        for changed in watching:
            changed()

    def _work(self) -> None:
        while (job := self._stored(self._next)) is not None:
            try:
                state, error, status, reason = self._judge(job)
            except UserError as failure:  # the settings of the request
                state, error, status, reason = "failed", str(failure), 400, ""
            except Exception as failure:
                error = f"the judge failed: {str(failure)[:300]}"
                state, status, reason = "failed", JUDGE_FAILED, "judge"
            with self.condition:
                self.running[job.token] -= 1
                self.condition.notify_all()
            self._stored(functools.partial(self.store.finish, job.id, state, error, status, reason))
            self.progress.pop(job.id, None)
            self._notify(job.id)

    def _stored(self, call: Callable[[], T]) -> T | None:
        """Return the result of `call`, which is repeated while the queue's database fails, as on a full disk.

        Return None if the database fails while the service is closing.
        """
        while True:
            try:
                return call()
            except sqlite3.Error as error:
                logging.getLogger(__name__).warning("the queue of the service: %s; it is tried again", error)
                if self.closing:
                    return None
                time.sleep(RETRY_SECONDS)

    def _next(self) -> StoredJob | None:
        """Wait for a job that may run, mark it as running and return it.

        Return None if the service is closing.
        """
        with self.condition:
            while not self.closing:
                if (job := self._choose()) is not None and self.store.move(job.id, "running", "queued"):
                    self.turn += 1
                    self.served[job.token] = self.turn
                    self.running[job.token] += 1
                    return job
                self.condition.wait()
        return None

    def _choose(self) -> StoredJob | None:
        """Return the first queued job of the token (caller) that was served least recently.

        The jobs of one token may occupy all workers but one, so that another token's job can begin at once.
        The jobs of the account that runs the service may occupy all workers. Return None if no job is queued
        or may run.
        """
        most = max(1, self.workers - 1)
        jobs = [
            job
            for token, job in self.store.waiting().items()
            if token == OWNER.name or self.running[token] < most
        ]
        return min(jobs, key=lambda job: (self.served.get(job.token, 0), job.seq), default=None)

    def _judge(self, job: StoredJob) -> tuple[State, str, int, str]:
        """Judge one job, store its result, and return the job's state, error text, HTTP status and reason.

        The result is `("done", "", 200, "")`, or `("failed", text, status, reason)` with the status 422 if
        the source of the task (the module that is to be made faster) is the cause and 503 if the judge is.
        `reason` is a word for the cause, such as `task` or `judge`. Raises UserError if the settings of the
        request cannot be used.
        """
        path = journal_path(self.verdicts, job.id)
        if path.exists():  # written before the process was killed
            return "done", "", 200, ""
        with self.judges.scheduler.on_behalf_of(job.token):
            if job.kind == "admission":
                admission = admit_request(
                    self.judges, AdmissionBody.model_validate_json(job.body), self.params
                )
                if admission.reason == "infrastructure":
                    text = f"the judge failed: {admission.evidence['detail']}"
                    return "failed", text, JUDGE_FAILED, "judge"
                write_json(path, asdict(admission))
            else:
                report = functools.partial(self.progress.__setitem__, job.id)
                body = JudgementBody.model_validate_json(job.body)
                verdict = judge_request(self.judges, body, self.params, report)
                if verdict.status == "infrastructure":
                    cause = TASK_FAILED if verdict.reason in TASK_FAULTS else JUDGE_FAILED
                    return "failed", verdict.log, cause, verdict.reason
                write_json(path, verdict.model_dump())
        return "done", "", 200, ""

    def delete_old(self, moment: float) -> None:
        """Delete the jobs that ended before `moment` with their verdicts.

        `moment` is in seconds of Unix time. The jobs are deleted in small numbers at a time, between which
        requests are accepted, until none is left or the service closes. A verdict is deleted after its job,
        so that no job is left without its verdict if the process is killed between the two.
        """
        while not self.closing:
            with self.condition:  # no request may find a verdict that is being deleted
                jobs = self.store.delete_ended(moment)
                for job in jobs:
                    journal_path(self.verdicts, job).unlink(missing_ok=True)
            if not jobs:
                return

    def stop(self) -> None:
        """Set `closing`, so that no further job begins and every request that waits for a job is answered."""
        with self.condition:
            self.closing = True
            self.condition.notify_all()
        self._notify()

    def close(self) -> None:
        """Wait for the end of the running jobs, and close the queue.

        No further job begins; queued jobs stay queued for the next service on the same folder.
        """
        self.stop()
        for thread in self.threads:
            thread.join()
        self.store.close()
