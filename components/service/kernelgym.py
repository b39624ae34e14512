"""The routes of a KernelGYM server for evaluations, answered by the judge.

A client of KernelGYM (Dr. Kernel's reward client, for example) works with this service if it is given its
address. The client sends `POST /evaluate` with a name for the evaluation, its `task_id`, then `GET
/status/{task_id}` until the status is final, then `GET /results/{task_id}`. The name is valid for the
caller's token and refers to a job of the service.

The labels of the verdicts are KernelBench's (docs/judge.md): the candidate may also compute with torch, its
constructor runs under the same seed as the task's, and the tolerances are those of KernelBench. Numbers of
trials, timeouts and the other settings of KernelGYM are accepted and not used. Repeated evaluations of equal
sources share one measurement, whatever their names, and also with `force_refresh`.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Path, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from components.judge.kernelbench import NOT_COMPILED
from components.judge.verdict import Labels
from components.service.errors import ServiceError
from components.service.job_store import State
from components.service.jobs import JobService
from components.service.requests import JobView, JudgementBody, Source
from components.service.tokens import Token
from components.service.waiting import ended

LABELS = Labels(rules="any", weights="seed", tolerance="kernelbench")
# Seconds that a request waits for results. Clients of KernelGYM ask for the status afterwards.
WAIT_SECONDS = 50.0
ENTRY_POINT = "Model"

Status = Literal["pending", "processing", "completed", "failed", "cancelled"]
STATUSES: dict[State, Status] = {
    "queued": "pending",
    "running": "processing",
    "done": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
}
Name = Annotated[str, Field(min_length=1, max_length=100)]
NameInPath = Annotated[str, Path(min_length=1, max_length=100)]


class Evaluation(BaseModel):
    """Request of KernelGYM to judge the candidate `kernel_code`, one file, on the task `reference_code`.

    `task_id` is the name that the caller gives the evaluation, and `entry_point` must be "Model". All other
    fields of KernelGYM have no effect.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    task_id: Name
    reference_code: Source = Field(min_length=1)
    kernel_code: Source
    entry_point: str = ENTRY_POINT


class Batch(BaseModel):
    """Request of KernelGYM to judge several candidates; `batch_id` is the caller's name for it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    batch_id: Name
    tasks: list[Evaluation] = Field(min_length=1, max_length=100)


class Result(BaseModel):
    """Answer of KernelGYM to an evaluation, with times in milliseconds and the whole verdict in `metadata`.

    The reference is the task in eager mode, and `speedup` is the candidate's speed-up over it. The fields
    that come from the verdict are None until there is one. `decoy_kernel` is always false then, and
    `error_code` always None.
    """

    task_id: str
    status: Status
    compiled: bool | None = None
    correctness: bool | None = None
    decoy_kernel: bool | None = None
    reference_runtime: float | None = None
    kernel_runtime: float | None = None
    speedup: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    error_message: str | None = None
    error_code: str | None = None


class BatchResult(BaseModel):
    """Answer of KernelGYM to a batch, with the results in the order of the batch's tasks."""

    batch_id: str
    total_tasks: int
    completed_tasks: int
    failed_tasks: int
    results: list[Result]
    batch_status: Status


class TaskStatus(BaseModel):
    """Answer of KernelGYM to a request for the state of an evaluation."""

    task_id: str
    status: Status
    queue_position: int | None = None
    error_message: str | None = None


def result_of(name: str, job: JobView) -> Result:
    """Return KernelGYM's form of a job's state or verdict; `name` is the caller's name for the job."""
    verdict = job.verdict
    if verdict is None:
        return Result(task_id=name, status=STATUSES[job.state], error_message=job.error or None)
    is_correct, ratio = verdict.status == "correct", verdict.speedup.eager
    return Result(
        task_id=name,
        status="completed",
        compiled=verdict.status not in NOT_COMPILED,
        correctness=is_correct,
        decoy_kernel=False,
        reference_runtime=_milliseconds(verdict.seconds.eager),
        kernel_runtime=_milliseconds(verdict.seconds.candidate),
        speedup=0.0 if ratio is None else ratio.estimate,
        metadata={"verdict": verdict.model_dump(mode="json"), "measurements": job.measurements},
        error_message=None if is_correct else f"{verdict.status} ({verdict.reason}) {verdict.log}".strip(),
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def add_kernelgym_routes(app: FastAPI, service: JobService, caller: Callable[..., Token]) -> None:
    """Add KernelGYM's routes to the application `app` of the service.

    `caller` is a dependency of FastAPI that returns the token of a request.
    """

    def submit(token: Token, evaluation: Evaluation) -> JobView:
        if evaluation.entry_point != ENTRY_POINT:
            raise ServiceError(
                422,
                f"entry_point: {evaluation.entry_point[:40]!r} is not judged; name the classes "
                f"{ENTRY_POINT} and {ENTRY_POINT}New.",
            )
        files = {"model_new.py": evaluation.kernel_code}
        request = {"code": evaluation.reference_code, "files": files, "labels": LABELS}
        job = service.submit(token, JudgementBody.model_validate(request))
        service.store.name(token.name, evaluation.task_id, job.id)
        return job

    def job_named(token: Token, name: str) -> str:
        job_id = service.store.named(token.name, name)
        if job_id is None:
            raise ServiceError(404, f"task_id: no evaluation {name!r} of the token {token.name}.")
        return job_id

    @app.post("/evaluate", tags=["KernelGYM"])
    async def evaluate(
        body: Evaluation, token: Annotated[Token, Depends(caller)], response: Response
    ) -> Result:
        """Judge a candidate of one file, and wait up to 50 seconds for the result.

        Without a result by then, the answer has the evaluation's state `pending` or `processing`.
        """
        job = await run_in_threadpool(submit, token, body)
        job = await ended(service, token, job.id, WAIT_SECONDS)
        if job.state == "failed" and job.status == 503:  # clients send the request again
            response.status_code = 503
        return result_of(body.task_id, job)

    @app.post("/evaluate/batch", tags=["KernelGYM"])
    async def evaluate_batch(body: Batch, token: Annotated[Token, Depends(caller)]) -> BatchResult:
        """Judge up to 100 candidates, and wait up to 50 seconds for all results.

        A candidate without a result by then has the state `pending` or `processing`.
        """
        jobs = [await run_in_threadpool(submit, token, task) for task in body.tasks]
        deadline = time.monotonic() + WAIT_SECONDS
        views = [await ended(service, token, job.id, deadline - time.monotonic()) for job in jobs]
        results = [result_of(task.task_id, job) for task, job in zip(body.tasks, views, strict=True)]
        completed = sum(result.status == "completed" for result in results)
        return BatchResult(
            batch_id=body.batch_id,
            total_tasks=len(results),
            completed_tasks=completed,
            failed_tasks=sum(result.status == "failed" for result in results),
            results=results,
            batch_status="completed" if all(job.has_ended for job in views) else "processing",
        )

    @app.get("/status/{task_id}", tags=["KernelGYM"])
    def status(task_id: NameInPath, token: Annotated[Token, Depends(caller)]) -> TaskStatus:
        """Return the state of the evaluation that the caller named `task_id`, or 404 if there is none."""
        job = service.view(token, job_named(token, task_id))
        return TaskStatus(
            task_id=task_id,
            status=STATUSES[job.state],
            queue_position=job.position,
            error_message=job.error or None,
        )

    @app.get("/results/{task_id}", tags=["KernelGYM"])
    def results(task_id: NameInPath, token: Annotated[Token, Depends(caller)], response: Response) -> Result:
        """Return the result of the evaluation that the caller named `task_id`, or 404 if there is none.

        The status code is 202 while the evaluation has no result.
        """
        job = service.view(token, job_named(token, task_id))
        response.status_code = 200 if job.has_ended else 202
        return result_of(task_id, job)

    @app.delete("/tasks/{task_id}", tags=["KernelGYM"])
    def cancel(task_id: NameInPath, token: Annotated[Token, Depends(caller)]) -> TaskStatus:
        """Cancel the evaluation that the caller named `task_id`, or answer 409 if it is not queued."""
        job = service.cancel(token, job_named(token, task_id))
        return TaskStatus(task_id=task_id, status=STATUSES[job.state])
