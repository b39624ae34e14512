"""The interface of the judges that the service needs, which `judge/resident.py` implements."""

import contextlib
from typing import Protocol

from components.core.param_types import Device
from components.core.params import Params
from components.core.progress import Report
from components.core.task import KernelTask
from components.judge.verdict import Admission, Verdict


class ServiceJudge(Protocol):
    """Interface of a judge that calls `report` with the step of its work."""

    def verdict(
        self, task: KernelTask, files: dict[str, str], *, compare_compile: bool | None, report: Report
    ) -> Verdict: ...


class ServiceJudges(Protocol):
    """Interface of the judges of one device (`resident.Judges`).

    `using` yields the judge for these parameters, `admit` checks a task, and `on_behalf_of` attributes the
    work of this thread in its block to a caller.
    """

    device: Device

    def using(self, params: Params) -> contextlib.AbstractContextManager[ServiceJudge]: ...

    def admit(self, params: Params, code: str, *, headroom: bool) -> Admission: ...

    def on_behalf_of(self, caller: str) -> contextlib.AbstractContextManager[None]: ...
