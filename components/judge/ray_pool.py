"""Judges as actors of a Ray cluster: the same jobs, journal and retries as on one machine, measured on many.

Each actor is one judge with a device of its own; its node needs this project, bubblewrap and the compilers. The journal
stays with the caller, so a run may change from one pool to the other between two nights and judges nothing twice.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from components.core.config import Params
from components.core.errors import InfrastructureError, UserError
from components.core.files import remove_tree, scratch_folder
from components.core.task import KernelTask
from components.judge.judge import Judge
from components.judge.pool import LocalPool
from components.judge.verdict import Admission, Verdict

ENDED_FROM_OUTSIDE = ("crashed", "build_failed", "load_failed", "out_of_memory")
"""What a runner that is killed from outside looks like."""
DEATH_SECONDS = 0.2


class JudgeActor:
    """One judge, in a folder of its own on its node. Answers are plain records: the caller's classes may be older."""

    def __init__(self, params: dict[str, Any]):
        self.life = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="cuda-agent-judge-", dir=scratch_folder()))
        self.judge = Judge(Params.model_validate(params), self.folder)

    def which(self) -> str:
        """Tells one life of this actor from the next."""
        return self.life

    def verdict(
        self, task: KernelTask, files: dict[str, str], compare_compile: bool
    ) -> tuple[str, dict[str, Any]]:
        return self.life, self.judge.verdict(task, files, compare_compile=compare_compile).model_dump(
            mode="json"
        )

    def admit(self, code: str, headroom: bool) -> dict[str, Any]:
        return asdict(self.judge.admit(code, headroom=headroom))

    def prepare(self) -> None:
        self.judge.runner_factory.prepare()

    def close(self) -> None:
        self.judge.close()
        remove_tree(self.folder)


class RemoteJudges:
    """Stands where one judge stands in a local pool, and hands each job to one of the actors."""

    def __init__(self, params: Params):
        connect()
        sandbox, cuda = params.sandbox, params.device == "cuda"
        # On cpu a judge measures with a core of its own; beside a GPU it needs cores for its builds only now and then.
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": 1 if cuda else 0,
            "max_restarts": -1,
            "max_concurrency": sandbox.build_workers + 1,
        }
        if sandbox.resource:
            options["resources"] = {sandbox.resource: 1}
        actor: Any = ray.remote(JudgeActor)
        self.actors = [
            actor.options(**options).remote(params.model_dump(mode="json")) for _ in range(sandbox.judges)
        ]
        self.loads = [0] * sandbox.judges
        self.failed: dict[str, int] = {}
        """The actor that last failed a job of this key: the next try goes to another."""
        self.workers = sandbox.build_workers
        self.lock = threading.Lock()

    def verdict(self, task: KernelTask, files: dict[str, str], *, compare_compile: bool = False) -> Verdict:
        with self._place(task.task_id) as actor:
            life, record = _answer(actor.verdict.remote(task, files, compare_compile))
            if record["status"] in ENDED_FROM_OUTSIDE:
                # Ray ends an actor's children before the actor: a dying judge sees its runner die and would blame the candidate.
                time.sleep(DEATH_SECONDS)
                if _answer(actor.which.remote()) != life:
                    raise InfrastructureError("the judge's Ray actor died while it judged")
            return Verdict.model_validate(record)

    def admit(self, code: str, *, headroom: bool = False) -> Admission:
        with self._place(code) as actor:
            return Admission(**_answer(actor.admit.remote(code, headroom)))

    def prepare(self) -> None:
        for actor in self.actors:
            _answer(actor.prepare.remote())

    def close(self) -> None:
        for actor in self.actors:
            try:
                ray.get(actor.close.remote(), timeout=30)
            except (RayActorError, RayTaskError, TimeoutError):
                continue  # its node is gone, or it hangs: ended all the same
            finally:
                ray.kill(actor)

    @contextmanager
    def _place(self, key: str) -> Iterator[Any]:
        """The actor that keeps this task's baselines warm, unless it has a full set of jobs more than the idlest."""
        with self.lock:
            places = [place for place in range(len(self.actors)) if place != self.failed.get(key)] or [0]
            place = places[int.from_bytes(key.encode()[-8:], "big") % len(places)]
            idlest = min(places, key=self.loads.__getitem__)
            if self.loads[place] - self.loads[idlest] >= self.workers:
                place = idlest
            self.loads[place] += 1
        try:
            yield self.actors[place]
        except InfrastructureError:
            self.failed[key] = place
            raise
        finally:
            with self.lock:
                self.loads[place] -= 1


class RayPool(LocalPool):
    """A `JudgePool` whose judges are the actors; threads here only wait for them."""

    def __init__(self, params: Params, verdicts: Path):
        super().__init__(params, verdicts, workers=params.sandbox.judges * params.sandbox.build_workers)

    def start(self) -> Any:
        return RemoteJudges(self.params)

    def prepare(self) -> None:
        self.executor.submit(lambda: self.judge.prepare())


def connect() -> None:
    """Join the cluster that RAY_ADDRESS names, or the one that runs on this machine; UserError when there is none."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address=address, log_to_driver=False, namespace="cuda-agent")
    except ConnectionError as error:
        raise UserError(
            f"sandbox.pool: no Ray cluster at RAY_ADDRESS={address}; start one (ray start --head) or set sandbox.pool=local."
        ) from error


def _answer(reference: Any) -> Any:
    """What the actor returned; InfrastructureError when it died, or failed by its own fault."""
    try:
        return ray.get(reference)
    except RayActorError as error:
        raise InfrastructureError(f"the judge's Ray actor died: {str(error)[:300]}") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, InfrastructureError | UserError):
            raise cause from error
        raise
