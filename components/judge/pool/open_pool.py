"""Choice of where candidates are judged: on this machine, on a Ray cluster, or by the judge's HTTP service.

The service (`cuda-agent serve`) is used through `ServiceClient`, for which a machine needs neither a GPU nor
a sandbox. This module imports no torch, so that a command that uses a running service starts fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from components.core.config import result_values
from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_json, read_json, write_json
from components.core.params import Params
from components.core.progress import Report, ignore
from components.core.records import Device
from components.core.task import KernelTask, load_task
from components.judge.candidate import read_candidate
from components.judge.pool.local_pool import Job, LocalPool, infrastructure_verdict
from components.judge.verdict import VERSION, Admission, Verdict, protocol_digest
from components.sandbox.build import open_factory
from components.sandbox.preflight import check_isolation

if TYPE_CHECKING:
    from components.judge.judge import Judge

# Seconds that one request waits for a result, and that its transfer may take beyond that.
WAIT_SECONDS, TRANSFER_SECONDS = 50, 30.0
# Seconds for which a request is repeated if the service does not answer, for example because it restarts, and
# seconds between two attempts.
RESTART_SECONDS, RETRY_SECONDS = 60.0, 1.0
# Seconds after which a Unix socket that accepts no connection counts as one without a service.
CONNECT_SECONDS = 5.0
# Largest number of a measurement of a candidate.
MOST_MEASUREMENTS = 1_000_000
# HTTP statuses of a service that is busy or restarts, after which a request is repeated.
UNAVAILABLE = (429, 502, 504)


def open_pool(params: Params, verdicts: Path, *, use_service: bool = False) -> LocalPool:
    """Return a pool whose judges are where the parameters of the section pool say.

    `verdicts` is the folder of the journal. With `use_service`, a pool on this machine uses the service that
    runs on its folder (`cuda-agent serve`), instead of a new judge. If the judge is on this machine, the
    isolation of runners is checked at once, because the caller may do long work before the first job. Raises
    IsolationUnavailable if runners cannot be isolated, and UserError if both `pool.service` and `pool.judges`
    are set.
    """
    if params.pool.service:
        if params.pool.judges:
            raise UserError("pool.service: pool.judges starts other judges; set pool.judges to 0.")
        return HttpPool(params, verdicts)
    if not params.pool.judges:
        check_isolation(params.sandbox, params.device)
    return LocalPool(params, verdicts, use_service=use_service)


def judge_workdir(
    params: Params, workdir: Path, task: Path | None, folder: Path, report: Report = ignore
) -> Verdict:
    """Return the verdict on a candidate, which is compared with eager and torch.compile.

    `workdir` is a workspace or a single Python file. `task` is the path of a task file; if it is None, the
    task is the workspace's model.py. If the parameter `pool.service` is set, the HTTP service at this address
    judges. Otherwise the service whose socket is in `folder` judges, or, if none runs there, a new judge that
    keeps its builds in `folder`. `report` is called with the name of each step when it begins. If the judge
    itself fails, the verdict has the status `infrastructure`. Raises UserError if a file is missing or not
    valid.
    """
    files = read_candidate(workdir)
    if task is None and workdir.is_file():
        raise UserError(f"{workdir}: a single file has no task; give its task file with --task.")
    kernel_task = load_task(task if task is not None else workdir / "model.py")
    if params.pool.service:
        judge: Judge | ServiceClient = ServiceClient(params)
    else:
        judge = connect(params, folder) or start_judge(params, folder, report)
    with contextlib.closing(judge):
        try:
            return judge.verdict(kernel_task, files, compare_compile=True, report=report)
        except InfrastructureError as error:
            return infrastructure_verdict(params, error)


def start_judge(params: Params, folder: Path, report: Report) -> Judge:
    """Start the processes of a new judge, import torch at the same time as they do, and return the judge.

    `folder` is where the judge keeps its builds. `report` is called with a text for the user, who has to wait
    for the start.
    """
    factory = open_factory(params.sandbox, params.device, folder)
    report("starting a judge; cuda-agent serve keeps one ready")
    try:
        factory.prepare()
        from components.judge.judge import Judge

        return Judge(params, folder, factory=factory)
    except BaseException:
        factory.close()
        raise


class ServiceClient:
    """Client of the judge's HTTP service, with the methods of a judge (`judge.Judge`).

    By default, the service is the one at `pool.service`. It has to have the same settings as `params`,
    because verdicts with other settings must not be mixed. With `socket`, the path of a Unix socket, it is
    the service of this account there; each request then has all parameters. The constructor raises UserError
    if there is no service at `pool.service`, if it refuses the token, or if it has other settings.
    """

    def __init__(self, params: Params, *, socket: Path | None = None):
        self.params = params
        self.resources = contextlib.ExitStack()
        self.is_local = socket is not None
        self.address = params.pool.service if socket is None else "http://localhost"
        headers, transport = {}, None
        if socket is not None:
            transport = httpx.HTTPTransport(uds=socket_address(socket, self.resources))
        elif params.pool.service_token:
            path = Path(params.pool.service_token).expanduser()
            try:
                headers["Authorization"] = f"Bearer {path.read_text().strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"pool.service_token: {path} cannot be read ({error}); give the file with the token."
                ) from error
        self.client = self.resources.enter_context(
            httpx.Client(
                transport=transport,
                base_url=self.address,
                headers=headers,
                timeout=WAIT_SECONDS + TRANSFER_SECONDS,
            )
        )
        if not self.is_local:
            self._check_settings()

    def _check_settings(self) -> None:
        try:
            answer = self.client.get("/v1/settings")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"pool.service: no service at {self.address} ({error}); start one with cuda-agent serve "
                "--http, or leave it empty to judge here."
            ) from error
        if answer.status_code != 200:
            raise UserError(f"pool.service: {self.address} refused: {_error(answer)}")
        if answer.json()["protocol"] != protocol_digest(self.params):
            own, there = (
                result_values(self.params, ("device", "precision", "sandbox")),
                answer.json()["settings"],
            )
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
        measurement: int = 0,
        report: Report = ignore,
    ) -> Verdict:
        """Return the service's verdict on the candidate with `files` on `task`.

        `files` maps each workspace path to the text of the file. `compare_compile` determines when a correct
        candidate is also compared with torch.compile: always, with its fastest mode (True), only if it is
        faster than eager, with the default mode (False), or never (None). The service measures a candidate
        once for each value of `measurement`; if it is 0, it is the first one, or a new one on a Unix socket.
        `report` is called with the name of each step of the judge. Raises InfrastructureError if the service
        or its judge fails, and UserError if the service refuses the request.
        """
        request = {
            "code": task.code,
            "files": files,
            "compare_compile": compare_compile,
            "measurement": measurement or (secrets.randbelow(MOST_MEASUREMENTS) + 1 if self.is_local else 1),
        }
        return Verdict.model_validate(self._ask("/v1/judgements", request, report)["verdict"])

    def admit(self, code: str, eager_seconds: tuple[float, float], *, headroom: bool = False) -> Admission:
        """Return the service's admission of the task with source `code`.

        `eager_seconds` is the range in which the time of one call must be. With `headroom`, the task must
        compile and leave device memory for other tasks, and its time under torch.compile is measured too.
        Raises InfrastructureError if the service or its judge fails, and UserError if the service refuses
        the request.
        """
        request = {"code": code, "headroom": headroom, "eager_seconds": eager_seconds}
        return Admission(**self._ask("/v1/admissions", request, ignore)["admission"])

    def _ask(self, path: str, request: dict[str, Any], report: Report) -> dict[str, Any]:
        """Post `request` to `path` until the service has finished its job, and return the job's record.

        If `report` is not `ignore`, it is called with the job's progress. The request may be sent several
        times, also to a service that was restarted, because equal requests have the same job. Raises
        InfrastructureError if the service does not answer for `RESTART_SECONDS` or if the task or the judge
        failed, and UserError if the service refuses the request.
        """
        if self.is_local:
            request["params"] = self.params.model_dump(mode="json")
        wait = WAIT_SECONDS if report is ignore else 0
        silent_since = time.monotonic()
        while True:
            try:
                answer = self.client.post(path, params={"wait": wait}, json=request)
                if answer.status_code == 202 and report is not ignore:
                    answer = self._follow(answer.json()["id"], report)
            except httpx.HTTPError as error:
                if time.monotonic() - silent_since > RESTART_SECONDS:
                    raise InfrastructureError(f"{self.address} did not answer: {error}") from error
                time.sleep(RETRY_SECONDS)
                continue
            silent_since = time.monotonic()
            if answer.status_code == 200:
                job: dict[str, Any] = answer.json()
                if job["state"] == "done":
                    return job
            elif answer.status_code in UNAVAILABLE:
                time.sleep(float(answer.headers.get("Retry-After", RETRY_SECONDS)))
            elif answer.status_code in (422, 503):  # the task or the judge failed
                raise InfrastructureError(f"{self.address}: {_error(answer)}")
            elif answer.status_code != 202:
                raise UserError(f"pool.service: {self.address} refused: {_error(answer)}")

    def _follow(self, job_id: str, report: Report) -> httpx.Response:
        """Report the progress of a job until its events end, and return the service's answer about it."""
        with self.client.stream("GET", f"/v1/jobs/{job_id}/events") as events:
            for line in events.iter_lines():
                if line.startswith("data: ") and (progress := json.loads(line[6:])["progress"]):
                    report(progress)
        return self.client.get(f"/v1/jobs/{job_id}")

    def prepare(self) -> None:
        """Do nothing, because the service's judge is ready."""

    def close(self) -> None:
        self.resources.close()


def socket_path(folder: Path, device: Device) -> Path:
    """Return the path of the Unix socket of the service whose judges work in `folder`."""
    return folder / f"service-{device}.sock"


def socket_address(path: Path, resources: contextlib.ExitStack) -> str:
    """Return a short path of the socket `path`, which is valid until `resources` are closed.

    The path of a Unix socket is limited to 107 bytes, and the path of a folder may be longer. The short path
    therefore leads through a descriptor of the folder.
    """
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    resources.callback(os.close, descriptor)
    return f"/proc/self/fd/{descriptor}/{path.name}"


def connect(params: Params, folder: Path) -> ServiceClient | None:
    """Return a client of the service whose Unix socket is in `folder`, or None if none runs there.

    Raises UserError if one runs whose sources differ from those of the caller. None is not returned in this
    case, because the caller would start a second judge, and two judges of one device would disturb each
    other's measurements.
    """
    path = socket_path(folder, params.device)
    if not path.exists():
        return None
    client = ServiceClient(params, socket=path)
    try:
        # A busy server may answer late, and a second judge would disturb its measurements.
        limits = httpx.Timeout(WAIT_SECONDS + TRANSFER_SECONDS, connect=CONNECT_SECONDS)
        version = client.client.get("/health", timeout=limits).raise_for_status().json()["version"]
    except httpx.HTTPError:
        client.close()
        return None
    if version != VERSION:
        client.close()
        raise UserError(
            f"{path}: the running judge has other sources ({version}) than this command ({VERSION}); end it "
            "and start it again with cuda-agent serve."
        )
    return client


class HttpPool(LocalPool):
    """Pool whose journal is on this machine and whose judge is the service at `pool.service`.

    Requests to the service identify a measurement of a candidate by a number, and not by an epoch. This pool
    therefore numbers the epochs of each candidate and task in the order in which they first occur in jobs.
    The numbers are stored in the journal's folder, so that a run that continues gets the same measurements.
    """

    def start(self) -> ServiceClient:
        return ServiceClient(self.params)

    def ask(self, job: Job) -> Verdict:
        judge = self.judge
        assert isinstance(judge, ServiceClient)
        return judge.verdict(
            job.task,
            dict(job.candidate.files),
            compare_compile=job.compare_compile,
            measurement=self._number(job),
        )

    def _number(self, job: Job) -> int:
        subject = digest_json([self.protocol, job.task.task_id, job.candidate.digest])
        path = self.verdicts / "measurements" / subject[:2] / f"{subject}.json"
        with self.lock:
            epochs: list[str] = read_json(path) if path.exists() else []
            if job.epoch not in epochs:
                epochs.append(job.epoch)
                write_json(path, epochs)
        return epochs.index(job.epoch) + 1


def _error(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {answer.status_code}"
