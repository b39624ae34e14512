"""Building the data set: compose candidates, hold them against the rubric, keep every rejected one with its reason.

    python -m components.synthesis.dataset --params params.yaml --out data/tasks --verdicts verdicts

Candidates are taken in the order of composition, so the admitted set depends on the parameters and the verdicts alone,
not on which judgement came back first. Admissions are journalled by the pool: a killed build that is started again
judges nothing twice.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from components.config import BadInput, Params, resolve
from components.files import atomic_folder, digest_file
from components.progress import Progress
from components.sandbox.judge import Admission
from components.sandbox.pool import LocalPool
from components.synthesis.compose import stream
from components.synthesis.rubric import Rubric
from components.synthesis.summary import Rejection, Summary, write_summary
from components.task import KernelTask, write_tasks

HOPELESS = 60
"""Executed candidates in a row without one admission, after which the parameters are to blame."""
DRY = 5000
"""Duplicates in a row, after which the composer has nothing new to offer."""


class Admitting(Protocol):
    """What of the judge pool is needed here."""

    def admit(self, code: str) -> Future[Admission]: ...


@dataclass(frozen=True)
class Candidate:
    """A composed task on its way: refused at first look, under judgement, or neither (not asked for yet)."""

    task: KernelTask
    refused: Rejection | None = None
    judgement: Future[Admission] | None = None


class Builder:
    """One build in progress: candidates enter a window in the order of composition and are decided in that order."""

    def __init__(self, params: Params, pool: Admitting, progress: Progress):
        self.params, self.pool, self.progress = params, pool, progress
        self.rubric = Rubric(params.data)
        self.targets = {"train": params.data.tasks, "held_out": params.data.held_out}
        self.done = {"train": 0, "held_out": 0}
        self.window: deque[Candidate] = deque()
        self.admitted: list[KernelTask] = []
        self.rejected: list[Rejection] = []
        self.candidates = self.surplus = self.fruitless = 0

    def run(self) -> None:
        source = stream(self.params.data.seed, self.params.data, self.params.device)
        # One more than is prepared at once, so that the device never waits for the composer.
        width, dry = self.params.sandbox.build_workers + 1, 0
        while self.done != self.targets:
            if len(self.window) < width:
                candidate = self.enter(next(source))
                self.window.append(candidate)
                dry = dry + 1 if candidate.refused else 0
                if dry > DRY:
                    raise BadInput(f"data.tasks: after {len(self.admitted)} tasks the composer finds nothing new; ask for fewer tasks or widen data.numel.")
            else:
                self.decide(self.window.popleft())
                total = sum(self.targets.values())
                self.progress.update("data", len(self.admitted), total, candidates=self.candidates, rejected=len(self.rejected))

    def enter(self, task: KernelTask) -> Candidate:
        reason, detail = self.rubric.look(task)
        if reason:
            return Candidate(task, refused=Rejection(task, reason, detail))
        pending = sum(1 for other in self.window if other.judgement is not None and other.task.split == task.split)
        # Judged ahead of time only if it is needed even when everything before it is admitted.
        ahead = self.done[task.split] + pending < self.targets[task.split]
        return Candidate(task, judgement=self.pool.admit(task.code) if ahead else None)

    def decide(self, candidate: Candidate) -> None:
        self.candidates += 1
        task = candidate.task
        if candidate.refused:
            self.rejected.append(candidate.refused)
            return
        if self.done[task.split] >= self.targets[task.split]:
            self.surplus += 1
            return
        admission = (candidate.judgement or self.pool.admit(task.code)).result()
        reason, detail = self.rubric.weigh(admission)
        if not reason:
            self.fruitless = 0
            self.done[task.split] += 1
            self.admitted.append(task.model_copy(update={"evidence": admission.evidence, "name": "-".join(task.ops)}))
            return
        self.fruitless += 1
        self.rejected.append(Rejection(task, reason, detail))
        if self.fruitless >= HOPELESS:
            raise BadInput(f"data: the last {HOPELESS} candidates that ran were all refused, this one for {reason}; widen data.eager_seconds or data.numel.")


def version(out: Path) -> str:
    """The data set's version: the digest of its tasks.parquet."""
    return digest_file(out / "tasks.parquet")


def build(params: Params, out: Path, pool: Admitting, progress: Progress) -> Summary:
    """Make a data set and write it to the folder `out` in one step: tasks.parquet, rejected.parquet, metrics.json,
    plots/*.csv and card.md. Equal parameters and verdicts give an equal data set, in whatever order verdicts come.

    Raises BadInput when data.against cannot be read, or when the parameters admit next to nothing.
    """
    builder = Builder(params, pool, progress)
    builder.run()
    with atomic_folder(out) as folder:
        write_tasks(folder / "tasks.parquet", builder.admitted)
        summary = Summary(version(folder), builder.candidates, builder.surplus, tuple(builder.admitted), tuple(builder.rejected))
        write_summary(folder, params, summary)
    return summary


# --- the command of the DVC stage --------------------------------------------------------------------------------------


class Lines:
    """Progress as plain lines on standard error, one every few seconds and the last one."""

    def __init__(self, seconds: float = 5.0):
        self.seconds = seconds
        self.last = 0.0

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        now = time.monotonic()
        if step == total or now - self.last >= self.seconds:
            self.last = now
            print(f"{stage} {step}/{total}", *(f"{name}={value:g}" for name, value in figures.items()), file=sys.stderr, flush=True)


def read_params(path: Path) -> Params:
    """Parameters of a resolved file, or of one with profiles: then CUDA_AGENT_PROFILE names one, and none is the base."""
    try:
        profiles = "profiles" in (yaml.safe_load(path.read_text()) or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError):
        profiles = False  # resolve() says what is wrong with the file
    return resolve(os.environ.get("CUDA_AGENT_PROFILE", "") if profiles else "", path=path).params


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m components.synthesis.dataset", description="Build the data set.")
    parser.add_argument("--params", type=Path, required=True, help="resolved parameters, or params.yaml with its profiles")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--verdicts", type=Path, default=Path(os.environ.get("CUDA_AGENT_VERDICTS", "verdicts")), help="journal of verdicts")
    options = parser.parse_args(arguments)
    try:
        params = read_params(options.params)
        pool = LocalPool(params, options.verdicts)
        try:
            summary = build(params, options.out, pool, Lines())
        finally:
            pool.close()
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    refused = ", ".join(f"{reason} {count}" for reason, count in summary.reasons.items()) or "none"
    print(f"data set {summary.version[:16]}: {len(summary.admitted)} tasks of {summary.candidates} candidates; refused: {refused}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
