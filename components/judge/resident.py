"""Resident judge, which is an HTTP server on a Unix socket that keeps judges running between commands.

A command that uses it does not have to wait until zygotes have started, nor until the reference data of a
recently judged task are made again. Only the account that runs the server can connect, because the socket
lies in a folder of mode 0700. A request carries all parameters, so that one server serves callers with
different settings. All measurements are made one after the other, whatever their settings.
"""

import contextlib
import fcntl
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from components.core.errors import UserError
from components.core.files import user_cache
from components.core.params import Params
from components.core.progress import Report
from components.judge.admission import admit
from components.judge.device_scheduler import DeviceScheduler
from components.judge.judge import Judge
from components.judge.resident_client import (
    AdmissionRequest,
    JudgementRequest,
    connect,
    socket_address,
    socket_path,
)
from components.judge.verdict import Admission, with_standard_labels
from components.judge.version import VERSION, protocol_digest

LOG = logging.getLogger(__name__)

# Seconds after which a judge that is not used is closed, because each judge has processes and task benches of
# its own.
IDLE_SECONDS = 900.0


@dataclass
class SharedJudge:
    """A judge that several threads use, and what is needed to construct and to close it.

    `judge` is None until the judge is constructed, and the lock `construction` is held meanwhile. `users` is
    the number of threads that use the judge or wait for it. `last_used` is the time at which a thread last
    stopped using the judge, in seconds of `time.monotonic`.
    """

    judge: Judge | None = None
    construction: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    last_used: float = 0.0


class Judges:
    """The judges of one device, each for one set of parameters and started at its first use.

    `folder` is where judges keep builds and caches. The judge for `params` is started at once and is closed
    only by `close`. Any other judge is closed when it was not used for `idle_seconds`.
    """

    def __init__(self, params: Params, folder: Path, *, idle_seconds: float = IDLE_SECONDS):
        self.device = params.device
        self.folder = folder
        self.idle_seconds = idle_seconds
        self.scheduler = DeviceScheduler(params.device)
        self.scheduler.release_idle_memory = self._release_idle_memory
        self.judges: dict[str, SharedJudge] = {}
        self.lock = threading.Lock()
        with self.using(params) as own:
            own.prepare()
        self.own = protocol_digest(params)
        self.closing = threading.Event()
        self.closer = threading.Thread(target=self._close_idle_judges, name="idle-judges", daemon=True)
        self.closer.start()

    @contextlib.contextmanager
    def using(self, params: Params) -> Iterator[Judge]:
        """Yield the judge for `params`, which stays open inside the context.

        It is constructed if there is none, and only callers with the same parameters wait for that. Raises
        UserError if the parameters are for another device. An error of the construction is raised and not
        kept, so the next caller constructs the judge again.
        """
        if params.device != self.device:
            raise UserError(f"device={params.device}: the resident judge measures on {self.device}.")
        protocol = protocol_digest(params)
        with self.lock:
            shared = self.judges.setdefault(protocol, SharedJudge())
            shared.users += 1
        try:
            with shared.construction:
                if shared.judge is None:
                    shared.judge = Judge(params, self.folder, scheduler=self.scheduler)
            yield shared.judge
        finally:
            with self.lock:
                shared.users -= 1
                shared.last_used = time.monotonic()
                if shared.judge is None and shared.users == 0:
                    del self.judges[protocol]

    def _close_idle_judges(self) -> None:
        """Close judges that were not used for `idle_seconds`, and repeat this until `close` is called."""
        while not self.closing.wait(self.idle_seconds / 4):
            limit = time.monotonic() - self.idle_seconds
            with self.lock:
                idle = [
                    protocol
                    for protocol, shared in self.judges.items()
                    if protocol != self.own and shared.users == 0 and shared.last_used < limit
                ]
                closed = [judge for protocol in idle if (judge := self.judges.pop(protocol).judge)]
            for judge in closed:
                try:
                    judge.close()
                except Exception:  # the others are closed nevertheless, and those that are idle later
                    LOG.exception("a judge that was not used could not be closed")

    def admit(self, params: Params, code: str, *, headroom: bool) -> Admission:
        """Return the admission of the task with source `code`.

        With `headroom`, the task must also compile and leave device memory for other tasks, and its time
        under torch.compile is measured too. A task whose eager time is not in the window `data.eager_seconds`
        of `params` is refused.
        """
        params = with_standard_labels(params)
        with self.using(params) as judge:
            return admit(params, judge.runner_factory, self.scheduler, code, headroom=headroom)

    def on_behalf_of(self, caller: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this thread's measurements count as those of `caller`.

        Callers that wait at the same time measure in turn (`DeviceScheduler.on_behalf_of`).
        """
        return self.scheduler.on_behalf_of(caller)

    def _constructed(self) -> list[Judge]:
        with self.lock:
            return [shared.judge for shared in self.judges.values() if shared.judge is not None]

    def _release_idle_memory(self) -> None:
        for judge in self._constructed():
            judge.bench_cache.close_unused()

    def close(self) -> None:
        self.closing.set()
        self.closer.join()
        for judge in self._constructed():
            judge.close()


def make_app(judges: Judges, executor: ThreadPoolExecutor) -> FastAPI:
    """Return the HTTP application of a resident judge.

    The threads of `executor` judge candidates and admit tasks, as the requests demand.

    A reply to a judgement or an admission is a stream of lines, each a JSON list of a kind and a content:
    `progress` with a text, then once `result` with the record, or `UserError` or `InfrastructureError` with
    the error's text. An example of a line is `["progress", "timing"]`.
    """
    app = FastAPI(title="CUDA Agent resident judge", version=VERSION)

    def stream(measure: Callable[[Report], Any]) -> StreamingResponse:
        messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                messages.put(("result", measure(lambda text: messages.put(("progress", text)))))
            except UserError as error:
                messages.put(("UserError", str(error)))
            except Exception as error:
                messages.put(("InfrastructureError", f"{type(error).__name__}: {error}"))

        def lines() -> Iterator[str]:
            kind = "progress"
            while kind == "progress":
                kind, content = messages.get()
                yield json.dumps([kind, content]) + "\n"

        executor.submit(run)
        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @app.get("/v1/health")
    def health() -> dict[str, str]:
        return {"version": VERSION}

    @app.post("/v1/judgements")
    def judgement(request: JudgementRequest) -> StreamingResponse:
        def measure(report: Report) -> dict[str, Any]:
            with judges.using(request.params) as judge:
                verdict = judge.verdict(
                    request.task, request.files, compare_compile=request.compare_compile, report=report
                )
            # Later candidates of the task get the same correctness sets, so their seeds stay secret.
            return verdict.model_dump(mode="json", exclude={"evidence": {"seeds"}})

        return stream(measure)

    @app.post("/v1/admissions")
    def admission(request: AdmissionRequest) -> StreamingResponse:
        return stream(
            lambda report: asdict(judges.admit(request.params, request.code, headroom=request.headroom))
        )

    return app


def serve(
    params: Params,
    folder: Path,
    started: Callable[[Path], None],
    http_server: Callable[[Judges], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Run a resident judge until SIGINT or SIGTERM.

    `folder` is the folder of the judge, in which the socket is made. `started` is called with the path of the
    socket when the server accepts requests. `http_server` is called with the judges, and returns a context in
    which a further server runs that uses them; by default there is no further server. Raises UserError if
    another resident judge runs on this folder or on this GPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if connect(params, folder) is not None:
        raise UserError(f"{folder}: a resident judge already runs there; end it first.")
    with contextlib.ExitStack() as resources:
        resources.enter_context(_only_one(folder / f"resident-{params.device}.lock", str(folder)))
        listener = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        path = socket_path(folder, params.device)
        path.unlink(missing_ok=True)
        listener.bind(socket_address(path, resources))
        resources.callback(path.unlink, missing_ok=True)
        judges = Judges(params, folder)
        resources.callback(judges.close)
        if params.device == "cuda":
            gpu = str(torch.cuda.get_device_properties(0).uuid)
            resources.enter_context(_only_one(user_cache("locks") / f"{gpu}.lock", f"the GPU {gpu}"))
        executor = resources.enter_context(ThreadPoolExecutor(params.sandbox.build_workers))
        resources.callback(executor.shutdown, cancel_futures=True)
        server = uvicorn.Server(uvicorn.Config(make_app(judges, executor), log_level="warning"))
        listener.listen()
        resources.enter_context(http_server(judges))
        started(path)
        server.run(sockets=[listener])


@contextlib.contextmanager
def _only_one(path: Path, place: str) -> Iterator[None]:
    """Hold the lock of the file `path` inside the context.

    `place` describes the folder or the GPU on which only one resident judge may run. Raises UserError with
    this description if another process holds the lock.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{place}: a resident judge already runs there; end it first.") from error
        yield
