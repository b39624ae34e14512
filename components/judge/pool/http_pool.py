"""Client of the HTTP service (`cuda-agent serve --http`), and the pool whose jobs this service judges.

The machine of the client needs neither a GPU nor a sandbox, and this module imports no torch.
"""

import time
from pathlib import Path
from typing import Any

import httpx

from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_json, read_json, write_json
from components.core.param_kinds import result_values
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.pool.local_pool import Job, LocalPool
from components.judge.verdict import Admission, Verdict
from components.judge.version import protocol_digest

# Seconds that one request waits for a result, and that its transfer may take beyond that.
WAIT_SECONDS, TRANSFER_SECONDS = 50, 30.0
# Seconds for which a request is repeated if the service does not answer, for example because it restarts, and
# seconds between two attempts.
RESTART_SECONDS, RETRY_SECONDS = 60.0, 1.0
# HTTP statuses of a service that is busy or restarts, after which a request is repeated.
UNAVAILABLE = (429, 502, 504)


class HttpJudge:
    """Client of the HTTP service at `pool.service`, with the methods of a judge (`pool.JudgeLike`).

    The constructor raises UserError if there is no service, if the token is refused, or if the service has
    other settings than `params`, because verdicts with other settings must not be mixed.
    """

    def __init__(self, params: Params):
        self.params = params
        self.address = params.pool.service
        headers = {}
        if params.pool.service_token:
            path = Path(params.pool.service_token).expanduser()
            try:
                headers["Authorization"] = f"Bearer {path.read_text().strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"pool.service_token: {path} cannot be read ({error}); give the file with the token."
                ) from error
        self.client = httpx.Client(
            base_url=self.address, headers=headers, timeout=WAIT_SECONDS + TRANSFER_SECONDS
        )
        try:
            answer = self.client.get("/v1/settings")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"pool.service: no service at {self.address} ({error}); start one with cuda-agent serve "
                "--http, or leave it empty to judge here."
            ) from error
        if answer.status_code != 200:
            raise UserError(f"pool.service: {self.address} refused: {_error(answer)}")
        if answer.json()["protocol"] != protocol_digest(params):
            own, there = result_values(params, ("device", "precision", "sandbox")), answer.json()["settings"]
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
        measurement: int = 1,
    ) -> Verdict:
        """Return the service's verdict on the candidate with `files` on `task`.

        `files` maps each workspace path to the text of the file. `compare_compile` determines when a correct
        candidate is also compared with torch.compile: always, with its fastest mode (True), only if it is
        faster than eager, with the default mode (False), or never (None). The service measures a candidate
        once for each value of `measurement`. Raises InfrastructureError if the service or its judge fails,
        and UserError if the service refuses the request.
        """
        request = {
            "code": task.code,
            "files": files,
            "compare_compile": compare_compile,
            "measurement": measurement,
        }
        return Verdict.model_validate(self._ask("/v1/judgements", request)["verdict"])

    def admit(self, code: str, *, headroom: bool = False) -> Admission:
        """Return the service's admission of the task with source `code`.

        With `headroom`, the task must compile and leave device memory for other tasks, and its time under
        torch.compile is measured too. Raises InfrastructureError if the service or its judge fails, and
        UserError if the service refuses the request.
        """
        window = self.params.data.eager_seconds
        request = {"code": code, "headroom": headroom, "eager_seconds": window}
        return Admission(**self._ask("/v1/admissions", request)["admission"])

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Post `request` to `path` until the service has finished its job, and return the job's record.

        The request may be sent several times, also to a service that was restarted, because equal requests
        have the same job. Raises InfrastructureError if the service does not answer for `RESTART_SECONDS` or
        if the task or the judge failed, and UserError if the service refuses the request.
        """
        silent_since = time.monotonic()
        while True:
            try:
                answer = self.client.post(path, params={"wait": WAIT_SECONDS}, json=request)
            except httpx.HTTPError as error:
                if time.monotonic() - silent_since > RESTART_SECONDS:
                    raise InfrastructureError(f"{self.address} did not answer: {error}") from error
                time.sleep(RETRY_SECONDS)
                continue
            silent_since = time.monotonic()
            if answer.status_code == 200:
                job: dict[str, Any] = answer.json()
                return job
            if answer.status_code in UNAVAILABLE:
                time.sleep(float(answer.headers.get("Retry-After", RETRY_SECONDS)))
            elif answer.status_code in (422, 503):  # the task or the judge failed
                raise InfrastructureError(f"{self.address}: {_error(answer)}")
            elif answer.status_code != 202:
                raise UserError(f"pool.service: {self.address} refused: {_error(answer)}")

    def prepare(self) -> None:
        """Do nothing, because the service's judge is ready."""

    def close(self) -> None:
        self.client.close()


class HttpPool(LocalPool):
    """Pool whose journal is on this machine and whose judge is the service at `pool.service`.

    Requests to the service identify a measurement of a candidate by a number, and not by an epoch. This pool
    therefore numbers the epochs of each candidate and task in the order in which they first occur in jobs.
    The numbers are stored in the journal's folder, so that a run that continues gets the same measurements.
    """

    def start(self) -> HttpJudge:
        return HttpJudge(self.params)

    def ask(self, job: Job) -> Verdict:
        judge = self.judge
        assert isinstance(judge, HttpJudge)
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
