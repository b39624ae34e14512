"""Client of a resident judge (`resident.py`), with the interface of `judge.Judge`.

This module imports neither torch nor the judge, so that a command that uses a resident judge starts fast.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import httpx

from components.core.errors import InfrastructureError, UserError
from components.core.param_types import Device
from components.core.params import Params
from components.core.progress import Report, ignore
from components.core.records import FrozenModel
from components.core.task import KernelTask
from components.judge.verdict import Admission, Verdict
from components.judge.version import VERSION

# Seconds after which a socket that accepts no connection counts as one without a server.
CONNECT_SECONDS = 5.0


class JudgementRequest(FrozenModel):
    """Request for a verdict, with the arguments of `Judge.verdict`."""

    params: Params
    task: KernelTask
    files: dict[str, str]
    compare_compile: bool | None


class AdmissionRequest(FrozenModel):
    """Request for an admission, with the arguments of `Judge.admit`."""

    params: Params
    code: str
    headroom: bool


def socket_path(folder: Path, device: Device) -> Path:
    return folder / f"resident-{device}.sock"


def socket_address(path: Path, resources: contextlib.ExitStack) -> str:
    """Return a short path of the socket `path`, which is valid until `resources` are closed.

    The path of a Unix socket is limited to 107 bytes, and the path of a folder may be longer. The short path
    therefore leads through a descriptor of the folder.
    """
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    resources.callback(os.close, descriptor)
    return f"/proc/self/fd/{descriptor}/{path.name}"


class ResidentJudge:
    """Client with the methods of a judge, which sends each call to the resident judge at the socket `path`.

    Each request contains the parameters `params`. The methods raise InfrastructureError if the server ends.
    """

    def __init__(self, params: Params, path: Path):
        self.params = params
        self.resources = contextlib.ExitStack()
        self.client = self.resources.enter_context(
            httpx.Client(
                transport=httpx.HTTPTransport(uds=socket_address(path, self.resources)),
                base_url="http://resident",
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            )
        )

    def version(self) -> str:
        """Return the digest of the server's sources; raise httpx.HTTPError if it does not answer."""
        return str(self.client.get("/v1/health").raise_for_status().json()["version"])

    def verdict(
        self,
        task: KernelTask,
        files: dict[str, str],
        *,
        compare_compile: bool | None = False,
        report: Report = ignore,
    ) -> Verdict:
        """Return the resident judge's verdict on the candidate with `files` on `task`.

        `files` maps each workspace path to the text of the file. `compare_compile` determines when a correct
        candidate is also compared with torch.compile: always, with its fastest mode (True), only if it is
        faster than eager, with the default mode (False), or never (None). `report` is called with the name of
        each step when it begins. Raises UserError or InfrastructureError if the judge raises it, and
        InfrastructureError if the server does not answer.
        """
        request = JudgementRequest(
            params=self.params, task=task, files=files, compare_compile=compare_compile
        )
        return Verdict.model_validate(self._ask("/v1/judgements", request, report))

    def admit(self, code: str, *, headroom: bool = False) -> Admission:
        """Return the resident judge's admission of the task with source `code`.

        With `headroom`, the task must also compile and leave device memory for other tasks, and its time
        under torch.compile is measured too. Raises UserError or InfrastructureError if the judge raises it,
        and InfrastructureError if the server does not answer.
        """
        request = AdmissionRequest(params=self.params, code=code, headroom=headroom)
        return Admission(**self._ask("/v1/admissions", request, ignore))

    def _ask(self, path: str, request: FrozenModel, report: Report) -> dict[str, Any]:
        try:
            with self.client.stream("POST", path, json=request.model_dump(mode="json")) as reply:
                reply.raise_for_status()
                for line in reply.iter_lines():
                    kind, content = json.loads(line)
                    if kind == "progress":
                        report(content)
                    elif kind == "result":
                        result: dict[str, Any] = content
                        return result
                    else:
                        raise (UserError if kind == "UserError" else InfrastructureError)(content)
        except httpx.HTTPError as error:
            raise InfrastructureError(f"the resident judge did not answer: {error}") from error
        raise InfrastructureError("the resident judge ended before it answered")

    def prepare(self) -> None:
        """Do nothing, because a resident judge is ready."""

    def close(self) -> None:
        self.resources.close()


def connect(params: Params, folder: Path) -> ResidentJudge | None:
    """Return a client of the resident judge whose socket is in `folder`, or None if none runs there.

    Raises UserError if one runs whose sources differ from those of the caller. None is not returned in this
    case, because the caller would start a second judge, and two judges of one device would disturb each
    other's measurements.
    """
    path = socket_path(folder, params.device)
    if not path.exists():
        return None
    judge = ResidentJudge(params, path)
    try:
        version = judge.version()
    except httpx.HTTPError:
        judge.close()
        return None
    if version != VERSION:
        judge.close()
        raise UserError(
            f"{path}: the resident judge runs other sources ({version}) than this command "
            f"({VERSION}); end it and start it again with cuda-agent serve."
        )
    return judge
