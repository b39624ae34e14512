"""The interfaces of the judges that the service uses, which `judge/resident.py` implements."""

import contextlib
from typing import Protocol

from components.core.param_types import Device
from components.core.params import Params
from components.core.progress import Report
from components.core.task import KernelTask
from components.judge.verdict import Admission, Verdict


class ServiceJudge(Protocol):
    """Interface of a judge that returns the verdict on a candidate's `files` for a task.

    While it judges, it calls `report` with a text that describes the present step. `compare_compile` has the
    meaning of the field of `JudgementBody` with this name.
    """

    def verdict(
        self, task: KernelTask, files: dict[str, str], *, compare_compile: bool | None, report: Report
    ) -> Verdict: ...


class ServiceJudges(Protocol):
    """Interface of the judges of one device (`resident.Judges`).

    `using` yields the judge for the parameters `params`. `admit` checks whether the task with the source
    `code` can be judged. Inside the context `on_behalf_of(caller)`, the measurements of this thread count as
    those of `caller`, so that the device can be shared fairly between callers.
    """

    device: Device

    def using(self, params: Params) -> contextlib.AbstractContextManager[ServiceJudge]: ...

    def admit(self, params: Params, code: str, *, headroom: bool) -> Admission: ...

    def on_behalf_of(self, caller: str) -> contextlib.AbstractContextManager[None]: ...
