"""Client of the judge's HTTP service (`cuda-agent serve`), over TCP or a Unix socket.

The machine of the client needs neither a GPU nor a sandbox. This module imports no torch, so that a command
that uses a running service starts fast.
"""

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

import httpx

from components.core.config import result_values
from components.core.errors import InfrastructureError, UserError
from components.core.params import Params
from components.core.progress import Report, ignore
from components.core.records import Device
from components.core.task import KernelTask
from components.judge.verdict import VERSION, Admission, Verdict, protocol_digest

# Seconds that one request waits for a result, and that its transfer may take beyond that.
WAIT_SECONDS, TRANSFER_SECONDS = 50, 30.0
# Seconds between two requests for the progress of a job.
PROGRESS_SECONDS = 0.2
# Seconds for which a request is repeated if the service does not answer, for example because it restarts, and
# seconds between two attempts.
RESTART_SECONDS, RETRY_SECONDS = 60.0, 1.0
# Seconds after which a Unix socket that accepts no connection counts as one without a service.
CONNECT_SECONDS = 5.0
# Largest number of a measurement of a candidate.
MOST_MEASUREMENTS = 1_000_000
# HTTP statuses of jobs that failed because of the task's own source, and because of the judge.
TASK_FAILED, JUDGE_FAILED = 422, 503
# HTTP statuses of a service that is busy or restarts, after which a request is repeated. It is also repeated
# after 503 with Retry-After; without this header, the judge has failed.
UNAVAILABLE = (429, 502, 504)


class ServiceClient:
    """Client of the judge's HTTP service, with the methods of a judge (`judge.Judge`).

    By default, the service is the one at `pool.service`. It has to have the same settings of judging as
    `params`, because verdicts with other settings must not be mixed. With `socket`, the path of a Unix
    socket, the service of this account at this socket is used; each request then has all parameters. The
    constructor raises UserError if there is no service at `pool.service`, if the service refuses the token,
    or if it has other settings.
    """

    def __init__(self, params: Params, *, socket: Path | None = None):
        self.params = params
        self.is_local = socket is not None
        self.address = params.pool.service if socket is None else "http://localhost"
        headers, transport = dict[str, str](), None
        with contextlib.ExitStack() as resources:
            if socket is not None:
                transport = httpx.HTTPTransport(uds=socket_address(socket, resources))
            elif params.pool.service_token:
                headers = token_headers(params.pool.service_token, "pool.service_token")
            try:
                self.client = resources.enter_context(
                    httpx.Client(
                        transport=transport,
                        base_url=self.address,
                        headers=headers,
                        timeout=WAIT_SECONDS + TRANSFER_SECONDS,
                    )
                )
                if not self.is_local:
                    self._check_settings()
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last of a host name
                raise UserError(
                    f"pool.service: no service at {self.address} ({error}); start one with cuda-agent serve "
                    "--http, or leave it empty to judge here."
                ) from error
            self.resources = resources.pop_all()

    def _check_settings(self) -> None:
        answer = self.client.get("/v1/settings")
        if answer.status_code != 200:
            raise UserError(f"pool.service: {self.address} refused: {_error(answer)}")
        settings = _json(answer)
        if not {"protocol", "settings"} <= settings.keys():
            raise UserError(
                f"pool.service: {self.address} is no judge; give the address of a cuda-agent serve --http."
            )
        if settings["protocol"] != protocol_digest(self.params):
            own, there = result_values(self.params, ("device", "precision", "sandbox")), settings["settings"]
            names = [name for name in sorted(own) if own[name] != there.get(name)]
            values = ", ".join(f"{name} is {there.get(name)} there and {own[name]} here" for name in names)
            raise UserError(
                f"pool.service: {self.address} judges with other settings ({values}); use the same."
            )

    def verdict(
        self,
        task: KernelTask,
        files: dict[str, str],
        *,
        compare_compile: bool | None = False,
        against: dict[str, str] | None = None,
        measurement: int = 0,
        report: Report = ignore,
    ) -> Verdict:
        """Return the service's verdict on the candidate with `files` on `task`.

        A candidate is an implementation of the task's module. `files` maps each workspace path
        (`model_new.py`, `kernels/NAME`) to the text of the file. `compare_compile` determines when a correct
        candidate is also compared with torch.compile: True always, with the fastest mode of torch.compile on
        the task; False only if the candidate is faster than eager, with the default mode; None never. If
        `against` is given, the files of another candidate, the candidate is compared with eager and with this
        other one, and never with torch.compile. The service measures a candidate once for each value of
        `measurement`, and later requests with the same value get the same verdict. The value 0 stands for 1,
        or on a Unix socket for a random number, so that the candidate is measured anew. `report` is called
        with the name of each step of the judge. If the judge or the task fails, the verdict is
        `infrastructure`. Raises InfrastructureError if the service does not answer, and UserError if it
        refuses the request.
        """
        request = {
            "code": task.code,
            "files": files,
            "compare_compile": compare_compile,
            "against": against,
            "measurement": measurement or (secrets.randbelow(MOST_MEASUREMENTS) + 1 if self.is_local else 1),
        }
        job = self._ask("/v1/judgements", request, report)
        if job["state"] == "done":
            return Verdict.model_validate(job["verdict"])
        return Verdict(
            status="infrastructure",
            # Older services give no reason.
            reason=job.get("reason") or ("task" if job["status"] == TASK_FAILED else "judge"),
            device=self.params.device,
            precision=self.params.precision,
            log=job["error"],
        )

    def admit(
        self,
        code: str,
        eager_seconds: tuple[float, float],
        *,
        headroom: bool = False,
        memory_only: bool = False,
    ) -> Admission:
        """Return the service's admission of the task with source `code`, which says whether it can be judged.

        `eager_seconds` has the smallest and the largest time in seconds that one eager call may take. With
        `headroom`, the task must also compile and leave device memory for other tasks, and its time under
        torch.compile is measured too. With `memory_only`, nothing is measured, and the task is admitted if
        its source runs and the memory suffices to judge candidates (implementations of the task's module).
        Raises InfrastructureError if the service or its judge fails, and UserError if the service refuses the
        request.
        """
        request = {
            "code": code,
            "headroom": headroom,
            "eager_seconds": eager_seconds,
            "memory_only": memory_only,
        }
        job = self._ask("/v1/admissions", request, ignore)
        if job["state"] != "done":
            raise InfrastructureError(job["error"])
        return Admission(**job["admission"])

    def _ask(self, path: str, request: dict[str, Any], report: Report) -> dict[str, Any]:
        """Post `request` to `path` until its job is done or failed, and return the job's record.

        A job is the service's work for one request. `path` is a path of the service, such as
        `/v1/judgements`. The record has the `state` of the job (`done` or `failed`), the result under
        `verdict` or `admission`, or the text `error`. The HTTP status of the answer is added as `status`.

        If `report` is not `ignore`, it is called with the job's progress. The request may be sent several
        times, also to a service that was restarted, because equal requests have the same job. On a Unix
        socket the run's parameters are added to `request` under the key `params`. Raises InfrastructureError
        if the service does not answer for `RESTART_SECONDS` or cannot serve, and UserError if it refuses the
        request.
        """
        if self.is_local:
            request["params"] = self.params.model_dump(mode="json")
        wait = WAIT_SECONDS if report is ignore else 0
        silent_since: float | None = None
        while True:
            try:
                answer = self.client.post(path, params={"wait": wait}, json=request)
                if answer.status_code == 202 and report is not ignore and (job_id := _json(answer).get("id")):
                    answer = self._follow(job_id, report)
            except httpx.HTTPError as error:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > RESTART_SECONDS:
                    raise InfrastructureError(f"{self.address} did not answer: {error}") from error
                time.sleep(RETRY_SECONDS)
                continue
            silent_since = None
            after = answer.headers.get("Retry-After", "")
            if answer.status_code in UNAVAILABLE or (answer.status_code == JUDGE_FAILED and after):
                time.sleep(float(after) if after.isdecimal() else RETRY_SECONDS)  # it may be a date
                continue
            # The answer to a refused request has no state.
            job = _json(answer)
            if job.get("state") == "done" or (
                job.get("state") == "failed" and answer.status_code in (TASK_FAILED, JUDGE_FAILED)
            ):
                return job | {"status": answer.status_code}
            if answer.status_code not in (200, 202) or "state" not in job:
                text = _error(answer) if self.is_local else f"pool.service: {self.address}: {_error(answer)}"
                raise InfrastructureError(text) if answer.status_code == JUDGE_FAILED else UserError(text)

    def _follow(self, job_id: str, report: Report) -> httpx.Response:
        """Call `report` with each new step of the job `job_id` until it ends, and return the last answer.

        A job is the service's work for one request. The answer is the HTTP response with the record of the
        job. Raises httpx.HTTPError if the service does not answer.
        """
        reported = ""
        while True:
            answer = self.client.get(f"/v1/jobs/{job_id}", params={"wait": PROGRESS_SECONDS})
            job = _json(answer)
            if job.get("state") not in ("queued", "running"):
                return answer
            if job["progress"] not in ("", reported):
                reported = job["progress"]
                report(reported)

    def prepare(self) -> None:
        """Do nothing, because the service's judge is ready."""

    def close(self) -> None:
        self.resources.close()


def token_headers(path: str, option: str) -> dict[str, str]:
    """Return the HTTP header `Authorization` with the bearer token that is the content of the file `path`.

    `option` is the name of the parameter or option that gave `path`, for messages. Raises UserError if the
    file cannot be read.
    """
    try:
        return {"Authorization": f"Bearer {Path(path).expanduser().read_text('ascii').strip()}"}
    except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError if ~ has no home folder
        raise UserError(
            f"{option}: {path} cannot be read ({error}); give the file with the token."
        ) from error


def socket_path(folder: Path, device: Device) -> Path:
    """Return the path of the Unix socket of the service whose judges of `device` work in `folder`."""
    return folder / f"service-{device}.sock"


def socket_address(path: Path, resources: contextlib.ExitStack) -> str:
    """Return a short path of the socket `path`, which is valid until the stack `resources` is closed.

    The path of a Unix socket is limited to 107 bytes, and the path of a folder may be longer. The short path
    therefore leads through a descriptor of the folder, which is closed with `resources`.
    """
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    resources.callback(os.close, descriptor)
    return f"/proc/self/fd/{descriptor}/{path.name}"


def connect(params: Params, folder: Path) -> ServiceClient | None:
    """Return a client of the service whose Unix socket is in `folder`, or None if no service answers there.

    Raises UserError if a service runs there whose sources differ from those of the caller. None is not
    returned in this case, because the caller would start a second judge, and two judges of one device would
    disturb each other's measurements.
    """
    path = socket_path(folder, params.device)
    if not path.exists():
        return None
    client = ServiceClient(params, socket=path)
    try:
        # A busy server may answer late, and a second judge would disturb its measurements.
        limits = httpx.Timeout(WAIT_SECONDS + TRANSFER_SECONDS, connect=CONNECT_SECONDS)
        answer = client.client.get("/health", timeout=limits).raise_for_status()
    except httpx.HTTPError:
        client.close()
        return None
    if (version := _json(answer).get("version")) != VERSION:
        client.close()
        raise UserError(
            f"{path}: the running judge has other sources ({version}) than this command ({VERSION}); end it "
            "and start it again with cuda-agent serve."
        )
    return client


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _error(answer: httpx.Response) -> str:
    return str(_json(answer).get("error", f"HTTP status {answer.status_code}, which no judge has sent"))
