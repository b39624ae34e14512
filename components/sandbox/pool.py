"""The pool of judges: one interface, jobs in, verdicts out."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from components.files import digest_json
from components.sandbox.verdict import Verdict
from components.task import KernelTask


@dataclass(frozen=True)
class Candidate:
    """What the policy wrote: text by workspace path (`model_new.py`, `kernels/…`)."""

    files: tuple[tuple[str, str], ...]

    @staticmethod
    def of(files: dict[str, str]) -> Candidate:
        return Candidate(tuple(sorted(files.items())))

    @property
    def digest(self) -> str:
        return digest_json(self.files)


@dataclass(frozen=True)
class Job:
    """One judgement. Equal task, candidate and epoch share one measurement; a new epoch measures anew."""

    task: KernelTask
    candidate: Candidate
    epoch: str


class JudgePool(Protocol):
    def submit(self, job: Job) -> Future[Verdict]: ...

    def close(self) -> None: ...
