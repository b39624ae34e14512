"""Judges that a running service keeps warm, with their processes, baselines and reference data.

A judge measures candidates (implementations of a task's module) under one set of settings. All measurements
are made one after the other, also those of different judges.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from components.core.errors import UserError
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.device_scheduler import DeviceScheduler
from components.judge.judge import Judge
from components.judge.pool.local_pool import admit_with_retries, judge_with_retries
from components.judge.verdict import Admission, Verdict, protocol_digest, with_standard_labels
from components.sandbox.runner_factory import RunnerFactory
from components.service.requests import AdmissionBody, JudgementBody

LOG = logging.getLogger(__name__)

# Largest number of judges that stay warm, because each has task benches of its own. More are open only while
# more are in use.
MOST_WARM = 4


@dataclass
class WarmJudge:
    """A judge that several threads use, and what is needed to construct and to close it.

    `judge` is None until the judge is constructed, and the lock `construction` is held meanwhile. `users` is
    the number of threads that use the judge or wait for it. `last_used` is the time at which a thread last
    stopped using the judge, in seconds of `time.monotonic`.
    """

    judge: Judge | None = None
    construction: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    last_used: float = 0.0


class WarmJudges:
    """The judges of one device, each for one set of settings and constructed at its first use.

    `folder` is where judges keep builds and caches. The judge for `params`, the service's own settings, is
    constructed at once and is closed only by `close`. If MOST_WARM judges are open and another one is needed,
    a judge that no thread uses is closed first, the least recently used one; if there is none, more than
    MOST_WARM are open. A judge whose isolation, time limit and memory limit for runners (the sandboxed
    processes that execute candidates, which are implementations of a PyTorch module, to be judged) equal
    those of `params` forks its runners from the same processes as the judge for `params`.
    """

    def __init__(self, params: Params, folder: Path):
        self.device = params.device
        self.folder = folder
        self.scheduler = DeviceScheduler(params.device)
        self.scheduler.release_idle_memory = self._release_idle_memory
        self.judges: dict[str, WarmJudge] = {}
        self.lock = threading.Lock()
        self.own = protocol_digest(params)
        self.runner_settings = _runner_settings(params)
        self.runner_factory: RunnerFactory | None = None
        with self.using(params) as own:
            own.prepare()
            self.runner_factory = own.runner_factory

    @contextlib.contextmanager
    def using(self, params: Params) -> Iterator[Judge]:
        """Return a context that yields the judge for `params`, which stays open inside the context.

        The judge is constructed if there is none with these parameters, and only callers with the same
        parameters wait for that. Raises UserError if the parameters are for another device. An error of the
        construction is raised and not kept, so the next caller constructs the judge again.
        """
        if params.device != self.device:
            raise UserError(f"device={params.device}: the running judge measures on {self.device}.")
        protocol = protocol_digest(params)
        with self.lock:
            closed = [] if protocol in self.judges else self._remove_unused()
            warm = self.judges.setdefault(protocol, WarmJudge())
            warm.users += 1
        try:
            self._close_judges(closed)
            with warm.construction:
                if warm.judge is None:
                    shares = _runner_settings(params) == self.runner_settings
                    factory = self.runner_factory if shares else None
                    warm.judge = Judge(params, self.folder, factory=factory, scheduler=self.scheduler)
            yield warm.judge
        finally:
            with self.lock:
                warm.users -= 1
                warm.last_used = time.monotonic()
                if warm.judge is None and warm.users == 0:
                    del self.judges[protocol]

    def _remove_unused(self) -> list[Judge]:
        """Remove from `judges`, and return, the judges to close before another judge is constructed.

        Judges that no thread uses are removed, the least recently used first, until at most MOST_WARM are
        open with the new one; the judge of the service's own parameters is never removed. The caller holds
        the lock, and closes the returned judges after it has released the lock.
        """
        unused = [key for key, warm in self.judges.items() if key != self.own and warm.users == 0]
        unused.sort(key=lambda key: self.judges[key].last_used)
        excess = max(0, len(self.judges) + 1 - MOST_WARM)
        removed = [self.judges.pop(key).judge for key in unused[:excess]]
        return [judge for judge in removed if judge is not None]

    def _close_judges(self, judges: list[Judge]) -> None:
        for judge in judges:
            try:
                if judge.runner_factory is self.runner_factory:
                    with self.scheduler.measuring():
                        judge.bench_cache.close()
                else:
                    judge.close()
            except Exception:  # the others are closed nevertheless
                LOG.exception("a judge that was not used could not be closed")

    def _constructed(self) -> list[Judge]:
        with self.lock:
            return [warm.judge for warm in self.judges.values() if warm.judge is not None]

    def _release_idle_memory(self) -> None:
        for judge in self._constructed():
            judge.bench_cache.close_unused()

    def close(self) -> None:
        own = self.judges[self.own].judge
        self._close_judges([judge for judge in self._constructed() if judge is not own])
        if own is not None:
            own.close()


def _runner_settings(params: Params) -> tuple[object, ...]:
    """Return the settings on which a factory of sandboxed processes depends.

    Judges can share one factory if these settings are equal: isolation, time limit (seconds) and memory limit
    (bytes).
    """
    sandbox = params.sandbox
    return sandbox.isolation, sandbox.run_seconds, sandbox.memory_bytes


def admit_request(judges: WarmJudges, body: AdmissionBody, defaults: Params) -> Admission:
    """Return the result of the check of a task that the request `body` asks for, made by one of `judges`.

    The settings are those of the request, or `defaults` if it has none. If the judge fails, the check is
    repeated (`admit_with_retries`). Raises UserError if the settings are for another device.
    """
    params = with_standard_labels(body.settings(defaults))
    with judges.using(params) as judge:
        return admit_with_retries(
            params,
            lambda: judge.admit(
                body.code, body.eager_seconds, headroom=body.headroom, memory_only=body.memory_only
            ),
        )


def judge_request(
    judges: WarmJudges, body: JudgementBody, defaults: Params, report: Callable[[str], None]
) -> Verdict:
    """Return the verdict on the candidate of the request `body`, and call `report` with each step's name.

    A candidate is an implementation of a task's module. The settings are those of the request, or
    `defaults` if it has none. If the judge fails, the measurement is repeated (`judge_with_retries`).
    Raises UserError if the settings are for another device.
    """
    params = body.settings(defaults)
    with judges.using(params) as judge:
        return judge_with_retries(
            params,
            lambda: judge.verdict(
                KernelTask(code=body.code),
                body.files,
                compare_compile=body.compare_compile,
                against=body.against,
                report=report,
            ),
        )
