"""Start vLLM servers on this host, with the options that sampling and replacing their weights need."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from components.core.config import PROJECT
from components.core.errors import StageFailed, UserError
from components.core.params import Params

# Class that vLLM adds to the bases of its worker class.
WORKER_EXTENSION = "components.policy.vllm.worker.Fingerprint"
# Longest time until a started server must be healthy, and time after SIGTERM at which it is killed, in
# seconds.
START_SECONDS, END_SECONDS = 1800.0, 20.0
POLL_SECONDS = 0.5
# Interval of the reports on a server that starts, in seconds.
REPORT_SECONDS = 10.0
# Number of ends in a row after which a server is not started again, and time, in seconds, for which it must
# have been healthy so that its next end is the first one again.
MAX_ENDS, STEADY_SECONDS = 3, 300.0


@dataclass(frozen=True)
class Launch:
    """One vLLM server to start: its address, command, GPUs (as in CUDA_VISIBLE_DEVICES) and log file."""

    url: str
    command: tuple[str, ...]
    gpus: tuple[str, ...]
    log: Path


class _Server:
    """A vLLM server with its process, which is started when an object of this class is made.

    `ends` is the number of times in a row that the process has ended, each without having been healthy for
    STEADY_SECONDS before. `started` is the time.monotonic() of the last start, `reported` that of the last
    report on the server, and `healthy` that at which the server was first found healthy since the last start,
    or None. `offset` is the size of the log at the last start, in bytes.
    """

    def __init__(self, launch: Launch):
        self.launch, self.ends = launch, 0
        self.start()

    def start(self) -> None:
        log = self.launch.log
        self.offset = log.stat().st_size if log.exists() else 0
        self.process = _start(self.launch)
        self.started = self.reported = time.monotonic()
        self.healthy: float | None = None

    def attend(self, report: Callable[[str], None]) -> None:
        """Find out whether the server, which is starting, is healthy, and set `healthy` if it is.

        Healthy means that its route /health answers with status 200. `report` is called when it is healthy,
        and otherwise every REPORT_SECONDS with a sentence that says for how long the server has been
        starting.
        """
        now = time.monotonic()
        name, seconds = f"The vLLM server at {self.launch.url}", f"{now - self.started:.0f} s"
        if is_healthy(self.launch.url):
            self.healthy = now
            report(f"{name} is ready after {seconds}.")
        elif now - self.reported >= REPORT_SECONDS:
            self.reported = now
            report(f"{name} has been starting for {seconds}; its log is {self.launch.log}.")

    def last_line(self) -> str:
        """Return the last line, of at most 300 characters, that the process has written to its log.

        If the process has written nothing, the text "it is empty" is returned.
        """
        lines = self.launch.log.read_bytes()[self.offset :].decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it is empty")


def launches(
    params: Params,
    model: Path,
    *,
    vllm: str,
    gpus: Sequence[str],
    tensor_parallel: int,
    host: str,
    ports: Sequence[int],
    logs: Path,
) -> list[Launch]:
    """Return the vLLM servers to start, one for each of `ports`, with `tensor_parallel` of `gpus` each.

    They serve the checkpoint `model` on the address `host`, and take the GPUs in their order. `gpus` are
    names as in CUDA_VISIBLE_DEVICES, `vllm` is the executable of vLLM's own environment, and `logs` the
    folder of the log files. Raises UserError if there are too few GPUs.
    """
    if len(gpus) < len(ports) * tensor_parallel:
        raise UserError(
            f"--gpus {','.join(gpus)}: {len(ports)} servers of {tensor_parallel} GPUs need "
            f"{len(ports) * tensor_parallel}; name that many, or lower --replicas."
        )
    settings = params.policy
    options = {
        "--dtype": params.engine.dtype,
        "--max-model-len": str(settings.context),
        "--tensor-parallel-size": str(tensor_parallel),
        "--gpu-memory-utilization": str(settings.gpu_memory_share),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--worker-extension-cls": WORKER_EXTENSION,
        "--host": host,
    }
    if settings.weight_transfer != "disk":
        options["--weight-transfer-config"] = f'{{"backend": "{settings.weight_transfer}"}}'
    common = [
        *(word for option in options.items() for word in option),
        *(["--enable-sleep-mode"] if settings.sleep else []),
        *settings.vllm_options,
    ]
    return [
        Launch(
            f"http://{host}:{port}",
            (vllm, "serve", str(model), "--port", str(port), *common),
            tuple(gpus[number * tensor_parallel : (number + 1) * tensor_parallel]),
            logs / f"server-{number}.log",
        )
        for number, port in enumerate(ports)
    ]


def find_vllm(name: str) -> str:
    """Return the path of the executable of vLLM that `name`, a value of `policy.vllm`, names.

    `name` is a command or a path. If it is empty, vllm is looked for on PATH and in .venv-vllm of this
    project. Raises UserError if there is none.
    """
    names = [os.path.expanduser(name)] if name else ["vllm", str(PROJECT / ".venv-vllm" / "bin" / "vllm")]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise UserError(
            f"policy.vllm: there is no executable {' or '.join(names)}; give that of the environment "
            "in which vLLM is installed, for instance /opt/vllm/bin/vllm."
        )
    return found


@contextlib.contextmanager
def running(
    fleet: Sequence[Launch], report: Callable[[str], None], *, max_ends: float = MAX_ENDS
) -> Iterator[Callable[[], None]]:
    """Start vLLM servers, yield a function when all of them are healthy, and end them all after the block.

    The caller runs the yielded function in a thread of its own. The function starts each server again that
    has ended, and returns after the block. It raises StageFailed when a server has ended `max_ends` times in
    a row, without having been healthy for STEADY_SECONDS before an end. `report` is called with one sentence
    every REPORT_SECONDS while a server starts, when it is ready, and when it has ended. Raises UserError if a
    server ends before it is first healthy, or is not healthy within START_SECONDS.
    """
    servers: list[_Server] = []
    ended, lock = threading.Event(), threading.Lock()
    try:
        for launch in fleet:
            servers.append(_Server(launch))
        _wait_until_healthy(servers, report)

        def watch() -> None:
            while not ended.wait(POLL_SECONDS):
                for server in servers:
                    if (code := server.process.poll()) is None:
                        if server.healthy is None:
                            server.attend(report)
                        continue
                    is_steady = (
                        server.healthy is not None and time.monotonic() - server.healthy > STEADY_SECONDS
                    )
                    server.ends = 1 if is_steady else server.ends + 1
                    said = (
                        f"{server.launch.log}: the vLLM server at {server.launch.url} has ended with code "
                        f"{code} ({server.last_line()})"
                    )
                    if server.ends >= max_ends:
                        raise StageFailed(
                            f"{said}, {server.ends} times in a row, and is not started again; mend what the "
                            "log says, and run the same command again."
                        )
                    with lock:
                        if ended.is_set():
                            return
                        report(f"{said}; it starts again, and is sampled from once it has the weights again.")
                        _end([server.process])
                        server.start()
                    ended.wait(10 * POLL_SECONDS)

        yield watch
    finally:
        ended.set()
        with lock:
            _end([server.process for server in servers])


def _start(launch: Launch) -> subprocess.Popen[bytes]:
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(launch.gpus),
        # Adds the routes for weights, sleep and workers.
        "VLLM_SERVER_DEV_MODE": "1",
        # Handles of CUDA memory come as pickles, so only the trainer may reach the server.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PYTHONPATH": paths,
    }
    with launch.log.open("ab") as log:
        try:
            # In a process group of its own, which its workers join, so that all of them can be ended.
            return subprocess.Popen(
                launch.command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            raise UserError(
                f"policy.vllm: {launch.command[0]} cannot be started ({error.strerror}); give the vllm "
                "executable of the environment in which vLLM is installed."
            ) from error


def _wait_until_healthy(servers: Sequence[_Server], report: Callable[[str], None]) -> None:
    while waiting := [server for server in servers if server.healthy is None]:
        for server in waiting:
            launch, code = server.launch, server.process.poll()
            if code is not None or time.monotonic() - server.started > START_SECONDS:
                end = (
                    f"is not healthy after {START_SECONDS:.0f} s"
                    if code is None
                    else f"ended with code {code}"
                )
                raise UserError(
                    f"{launch.log}: the server at {launch.url} {end} ({server.last_line()}); mend what the "
                    "log says and start again."
                )
            server.attend(report)
        time.sleep(POLL_SECONDS)


def is_healthy(url: str) -> bool:
    """Return whether the server with the root address `url` answers that it is healthy."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    return False


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes and their children by SIGTERM, and after at most END_SECONDS by SIGKILL."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
        deadline = time.monotonic() + END_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
