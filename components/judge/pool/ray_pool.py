"""Judges that are actors of a Ray cluster, among which `LocalPool` distributes its jobs.

A job is a request for a verdict or an admission. Each actor is one judge with a device of its own. The
devices belong to a placement group that only the judges use, and not the run's trainers and samplers. The
node of an actor needs this project, bubblewrap and the compilers. The actors have names, so that all
processes of a run, such as the flow (the main process) and a trainer, use the same judges. The calling
process keeps the journal, the folder of verdicts. The next run with the same folder can therefore judge on
one machine, or on a cluster again, and reuses these verdicts.
"""

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
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_bytes, digest_json, remove_tree, scratch_folder
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.judge import Judge
from components.judge.verdict import Admission, Verdict
from components.planning.ray_cluster import NAMESPACE, bundle, connect, name_in_run, reserve

# Statuses that a verdict can have if the candidate's runner was killed from outside.
KILLED_STATUSES = ("crashed", "build_failed", "load_failed", "out_of_memory")
# Sections of the parameters on which a judge depends.
SETTINGS = {"device", "precision", "sandbox", "data", "pool"}
# Seconds to wait so that an actor that Ray is terminating has ended.
RESTART_SECONDS = 0.2


class RayActor:
    """Ray actor that runs one judge on a node of the cluster, with a folder of its own.

    The methods `verdict` and `admit` return plain dictionaries and not the records `Verdict` and `Admission`,
    because the caller may have been started with an older version of these classes. `verdict` returns a pair,
    whose first item is the actor's identifier (`incarnation`). The argument of the constructor is a
    dictionary of all parameters.
    """

    def __init__(self, params: dict[str, Any]):
        self.incarnation_id = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="cuda-agent-judge-", dir=scratch_folder()))
        self.judge = Judge(Params.model_validate(params), self.folder)

    def incarnation(self) -> str:
        """Return a random identifier of this actor's process, which changes when Ray restarts the actor."""
        return self.incarnation_id

    def verdict(
        self, task: KernelTask, files: dict[str, str], compare_compile: bool | None
    ) -> tuple[str, dict[str, Any]]:
        verdict = self.judge.verdict(task, files, compare_compile=compare_compile)
        return self.incarnation_id, verdict.model_dump(mode="json")

    def admit(
        self, code: str, eager_seconds: tuple[float, float], headroom: bool, memory_only: bool
    ) -> dict[str, Any]:
        return asdict(self.judge.admit(code, eager_seconds, headroom=headroom, memory_only=memory_only))

    def prepare(self) -> None:
        self.judge.prepare()

    def close(self) -> None:
        self.judge.close()
        remove_tree(self.folder)


class RayBackend:
    """Group of judges that run as Ray actors, with the methods of a `Judge` that `LocalPool` calls.

    Each call of `verdict` or `admit` is sent to one of the actors. `prepare` is sent to all of them. `close`
    ends all of them if this process has started them, and otherwise does nothing.
    """

    def __init__(self, params: Params):
        """Find the judges that another process of this run has started, or start `pool.judges` of them.

        Raises UserError if there is no Ray cluster, or if its resources for the judges do not become free.
        """
        connect()
        count = params.pool.judges
        self.loads = [0] * count
        # Index of the actor that failed on the last job with a key, which the next job with this key avoids.
        self.failed: dict[str, int] = {}
        self.workers = params.sandbox.build_workers
        self.lock = threading.Lock()
        # The names contain a digest of the settings, so that judges with other settings are not found.
        settings = digest_json(params.model_dump(mode="json", include=SETTINGS))[:8]
        names = [name_in_run(f"judge-{settings}-{index}") for index in range(count)]
        # The placement group of the judges that this process started; None if another process did.
        self.group: PlacementGroup | None = None
        try:
            self.actors = [ray.get_actor(name, NAMESPACE) for name in names]
        except ValueError:
            self.group = group = reserve(params, "judges", count)
            self.actors = [self._start(params, name, group, index) for index, name in enumerate(names)]

    def _start(self, params: Params, name: str, group: PlacementGroup, index: int) -> Any:
        resources = bundle(params)
        actor: Any = ray.remote(RayActor)
        return actor.options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=resources.pop("CPU"),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=-1,
            max_concurrency=self.workers + 1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        ).remote(params.model_dump(mode="json"))

    def verdict(
        self, task: KernelTask, files: dict[str, str], *, compare_compile: bool | None = False
    ) -> Verdict:
        with self._actor(task.task_id) as actor:
            incarnation, record = _result(actor.verdict.remote(task, files, compare_compile))
            if record["status"] in KILLED_STATUSES:
                # Ray kills an actor's runners before the actor, and the actor then reports a crash.
                time.sleep(RESTART_SECONDS)
                if _result(actor.incarnation.remote()) != incarnation:
                    raise InfrastructureError("the judge's Ray actor died while it judged")
            return Verdict.model_validate(record)

    def admit(
        self,
        code: str,
        eager_seconds: tuple[float, float],
        *,
        headroom: bool = False,
        memory_only: bool = False,
    ) -> Admission:
        with self._actor(digest_bytes(code.encode())) as actor:
            return Admission(**_result(actor.admit.remote(code, eager_seconds, headroom, memory_only)))

    def prepare(self) -> None:
        preparing: list[Any] = [actor.prepare.remote() for actor in self.actors]
        for reference in preparing:
            _result(reference)

    def close(self) -> None:
        if self.group is None:
            return
        closing: list[Any] = [actor.close.remote() for actor in self.actors]
        for actor, reference in zip(self.actors, closing, strict=True):
            try:
                ray.get(reference, timeout=30)
            except (RayActorError, RayTaskError, TimeoutError):
                continue  # the node is gone, or the actor hangs; it is killed below
            finally:
                ray.kill(actor)
        remove_placement_group(self.group)

    @contextmanager
    def _actor(self, key: str) -> Iterator[Any]:
        """Yield the actor for a job with this key, and count the job as one of the actor's jobs meanwhile.

        A job is a request for a verdict or an admission. The key is the task's id for a verdict, and a digest
        of the task's source for an admission. Jobs with equal keys get the same actor, because an actor keeps
        the baselines of its tasks running. Another actor is chosen if that actor failed on the last job with
        this key, or if it has at least `sandbox.build_workers` jobs more than the least loaded actor.
        """
        with self.lock:
            indices = [index for index in range(len(self.actors)) if index != self.failed.get(key)] or [0]
            index = indices[int(digest_bytes(key.encode())[:8], 16) % len(indices)]
            least_loaded = min(indices, key=self.loads.__getitem__)
            if self.loads[index] - self.loads[least_loaded] >= self.workers:
                index = least_loaded
            self.loads[index] += 1
        try:
            yield self.actors[index]
            with self.lock:
                self.failed.pop(key, None)
        except InfrastructureError:
            with self.lock:
                self.failed[key] = index
            raise
        finally:
            with self.lock:
                self.loads[index] -= 1


def _result(reference: Any) -> Any:
    """Wait for the result of a call of an actor's method, and return it.

    `reference` is the Ray object reference that the call returned. Raises InfrastructureError if the actor
    died. An InfrastructureError or UserError that the method raised is raised unchanged, and any other error
    of the method as RayTaskError.
    """
    try:
        return ray.get(reference)
    except RayActorError as error:
        raise InfrastructureError(f"the judge's Ray actor died: {str(error)[:300]}") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, InfrastructureError | UserError):
            raise cause from error
        raise
