"""The routes of the HTTP service (docs/service.md).

Every error of a route is answered with a JSON object whose field `error` is one sentence. A judgement that
the judge itself could not make is answered with the status 503, and never with a verdict.
"""

import asyncio
import contextlib
import math
import time
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from components.core import telemetry
from components.core.config import result_values
from components.core.text import readable
from components.judge.verdict import VERSION, protocol_digest
from components.policy.prompts import task_message
from components.service.jobs import JobService
from components.service.requests import (
    AdmissionBody,
    JobView,
    JudgementBody,
    ServiceError,
    TaskSummary,
    TaskView,
)
from components.service.tokens import Token, TokenFile

# Largest number of bytes of a request's body, and of a larger body that are read and dropped before the
# answer, because the client of a connection that is closed while it sends gets no answer.
BODY_BYTES, DROPPED_BYTES = 8 << 20, 32 << 20
NO_TOKEN = "Authorization: give a token, as in Authorization: Bearer TOKEN."
# Longest wait of one request for a result, in seconds.
WAIT_SECONDS = 60.0
# Host names of requests to a service without tokens; others are requests that a web page redirected.
LOOPBACK_HOSTS = ["127.0.0.1", "localhost"]

Wait = Annotated[
    float, Query(ge=0, le=WAIT_SECONDS, description="seconds to wait for the result", allow_inf_nan=False)
]


def make_app(service: JobService, callers: TokenFile | Token) -> FastAPI:
    """Return the ASGI application with all routes of the service.

    `callers` has the tokens of the callers. If it is one token, every caller has the rights of this token
    without sending it, and only requests whose Host header names this machine (LOOPBACK_HOSTS) are answered.
    """
    app = FastAPI(
        title="CUDA Agent judge",
        version=VERSION,
        description="Judges CUDA and C++ kernels: secret inputs, a clock outside, an interval.",
    )
    app.add_middleware(with_body_limit, callers=callers)
    if isinstance(callers, Token):
        app.add_middleware(for_own_hosts)
    _add_error_handlers(app)
    bearer = HTTPBearer(auto_error=False, description="made by cuda-agent token create")

    def caller(
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
    ) -> Token:
        if isinstance(callers, Token):
            return callers
        if credentials is None:
            raise ServiceError(401, NO_TOKEN)
        return callers.find(credentials.credentials)

    Caller = Annotated[Token, Depends(caller)]

    @app.post("/v1/judgements", status_code=202, responses=RESPONSES)
    async def judge(body: JudgementBody, token: Caller, response: Response, wait: Wait = 0) -> JobView:
        """Submit a candidate; answer 200 with its verdict if known within `wait` seconds, or else 202.

        A candidate is an implementation of a PyTorch module, the task. A job that fails within this time is
        answered with 422 if the task is the cause, 400 if the settings of the request are, and 503 if the
        judge is.
        """
        return await submit(body, token, response, wait)

    @app.post("/v1/admissions", status_code=202, responses=RESPONSES)
    async def admit(body: AdmissionBody, token: Caller, response: Response, wait: Wait = 0) -> JobView:
        """Submit a task; answer 200 with its admission if known within `wait` seconds, or else 202.

        A task is the source of a PyTorch module to make faster. The admission says whether candidates
        (implementations of a PyTorch module) of the task can be judged, with measured figures. A job that
        fails within this time is answered with 400 if the settings of the request are the cause, and 503 if
        the judge is.
        """
        return await submit(body, token, response, wait)

    async def submit(
        body: JudgementBody | AdmissionBody, token: Token, response: Response, wait: float
    ) -> JobView:
        job = await run_in_threadpool(service.submit, token, body)
        if job.state != "done" and wait:
            job = await ended(service, token, job.id, wait)
        response.status_code = {"done": 200, "failed": job.status}.get(job.state, 202)
        return job

    @app.get("/v1/jobs/{job_id}", responses=RESPONSES)
    async def job(job_id: str, token: Caller, response: Response, wait: Wait = 0) -> JobView:
        """Return the state of the job `job_id`, after waiting up to `wait` seconds for its end.

        If the job is done, the answer has its verdict or admission (the result of judging a candidate, or of
        checking a task). The HTTP status is 200 while the job is queued or running, and if it is done or
        cancelled. For a job that failed it is 422 if the task is the cause, 400 if the settings of the
        request are, and 503 if the judge is. It is 404 if the token has no such job.
        """
        found = await ended(service, token, job_id, wait)
        response.status_code = found.status
        return found

    @app.delete("/v1/jobs/{job_id}", responses=RESPONSES)
    def cancel(job_id: str, token: Caller) -> JobView:
        """Cancel a job that is queued, and return it; answer 409 if the job is running, done or failed."""
        return service.cancel(token, job_id)

    @app.get("/v1/tasks")
    def tasks(token: Caller) -> list[TaskSummary]:
        """List the tasks (PyTorch modules to make faster) that a request can name by their task_id."""
        return [TaskSummary.model_validate(task, from_attributes=True) for task in service.tasks.values()]

    @app.get("/v1/tasks/{task_id}", responses=RESPONSES)
    def task(task_id: str, token: Caller) -> TaskView:
        """Return a task (a PyTorch module to make faster) with its source.

        The answer also has the message that asks a language model for a kernel (`prompt`). The HTTP status is
        404 if there is no such task.
        """
        found = service.listed_task(task_id)
        listed = found.model_dump(include={"name", "level", "ops", "code"}) | {"task_id": found.task_id}
        return TaskView(**listed, prompt=task_message(found.code, service.params.device))

    @app.get("/v1/settings")
    def settings(token: Caller) -> dict[str, Any]:
        """Return the settings that verdicts depend on, their digest (`protocol`), and the judge's version."""
        return {
            "protocol": protocol_digest(service.params),
            "version": VERSION,
            "settings": result_values(service.params, ("device", "precision", "sandbox")),
        }

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return the judge's version and device."""
        return {"status": "ok", "version": VERSION, "device": service.params.device}

    @app.get("/metrics")
    def metrics(token: Caller) -> Response:
        """Return the metrics for Prometheus; only a token of an operator may read them, others get 403."""
        if not token.operator:
            raise ServiceError(403, "metrics: only a token made with --operator may read them.")
        telemetry.SERVICE_JOBS.set(service.store.active()[0])
        return Response(generate_latest(telemetry.REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return app


RESPONSES: dict[int | str, dict[str, Any]] = {
    401: {"description": "no token, an unknown one, or an expired one"},
    403: {"description": "not allowed to this token"},
    404: {"description": "no such job or task"},
    413: {"description": "the body is too large"},
    422: {"description": "the request, or the task itself, is faulty"},
    429: {"description": "the queue is full; Retry-After says when to try again"},
    503: {"description": "the judge failed, through no fault of the candidate"},
}


def _add_error_handlers(app: FastAPI) -> None:
    def answer(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": text}, status, headers)

    @app.exception_handler(ServiceError)
    async def refused(request: Request, error: ServiceError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        if error.retry_after is not None:
            headers["Retry-After"] = str(math.ceil(error.retry_after))
        return answer(error.status, str(error), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return answer(422, f"body: not valid JSON ({first['ctx']['error']}).")
        place = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        text = str(first["msg"]).removeprefix("Value error, ")
        more = f" ({len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
        return answer(422, readable(f"{place[:200]}: {text[:300]}{more}.", 600))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return answer(500, "the service failed; its log says why.")


def for_own_hosts(app: ASGIApp) -> ASGIApp:
    """Return ASGI middleware around `app` that answers 400 if the Host is none of LOOPBACK_HOSTS."""
    text = "Host: without tokens only 127.0.0.1 and localhost are served; use one of these as the address."
    refusal = JSONResponse({"error": text}, 400)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_own = scope["type"] == "lifespan" or (
            Headers(scope=scope).get("host", "").lower().partition(":")[0] in LOOPBACK_HOSTS
        )
        await (app if is_own else refusal)(scope, receive, send)

    return answer


def with_body_limit(app: ASGIApp, callers: TokenFile | Token) -> ASGIApp:
    """Return ASGI middleware around `app` that answers 413 to a request body of more than BODY_BYTES.

    A larger body is not kept, nor is that of a caller without one of the tokens `callers`, who gets 401.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            is_first = received == 0
            received += len(message.get("body", b""))
            refusal = _unknown_caller(callers, Headers(scope=scope)) if is_first and received else None
            if received > BODY_BYTES:
                refusal = HTTPException(
                    413, f"body: larger than {BODY_BYTES} bytes; send the sources of one candidate."
                )
            if refusal is not None:
                while message.get("more_body", False) and received < DROPPED_BYTES:
                    message = await receive()
                    received += len(message.get("body", b""))
                raise refusal
            return message

        await app(scope, limited, send)

    return answer


def _unknown_caller(callers: TokenFile | Token, headers: Headers) -> HTTPException | None:
    """Return the answer to a caller without a token that is known, or None if the token is known."""
    if isinstance(callers, Token):
        return None
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    try:
        if scheme.lower() != "bearer" or not secret:
            raise ServiceError(401, NO_TOKEN)
        callers.find(secret)
    except ServiceError as error:
        challenge = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        return HTTPException(error.status, str(error), challenge)
    return None


async def ended(service: JobService, token: Token, job_id: str, seconds: float) -> JobView:
    """Wait until a job has ended, but at most `seconds` or until the service closes, and return the job.

    The returned job may thus be queued or running. Raises ServiceError if the caller with this token has no
    such job, or if the result of the job was deleted.
    """
    deadline = time.monotonic() + seconds
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def changed() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(event.set)

    with service.watch(job_id, changed):
        while True:
            event.clear()
            job = await run_in_threadpool(service.view, token, job_id)
            left = deadline - time.monotonic()
            if job.has_ended or left <= 0 or service.closing:
                return job
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), left)
