"""Start vLLM servers on this host, with the options that sampling and pushes of weights need."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.params import Params

# Class that vLLM adds to the bases of its worker class.
WORKER_EXTENSION = "components.policy.vllm.worker.Fingerprint"
# Longest time until a started server must be healthy, and time after SIGTERM at which it is killed, in
# seconds.
START_SECONDS, END_SECONDS = 1800.0, 20.0
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Launch:
    """One server to start: its address, command, GPUs and log file."""

    url: str
    command: tuple[str, ...]
    gpus: tuple[str, ...]
    log: Path


def launches(
    params: Params,
    model: Path,
    *,
    vllm: Path,
    gpus: Sequence[str],
    replicas: int,
    tensor_parallel: int,
    host: str,
    port: int,
    logs: Path,
) -> list[Launch]:
    """Return the servers of a fleet, each with the next `tensor_parallel` of `gpus` and the next port.

    There are `replicas` servers of the checkpoint `model`, from the port `port` on. `vllm` is the executable
    of vLLM's own environment, and `logs` the folder of the log files. Raises UserError if there are too few
    GPUs.
    """
    if len(gpus) < replicas * tensor_parallel:
        raise UserError(
            f"--gpus {','.join(gpus)}: {replicas} servers of {tensor_parallel} GPUs need "
            f"{replicas * tensor_parallel}; name that many, or lower --replicas."
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
    common = [word for option in options.items() for word in option]
    common += ["--enable-sleep-mode"] if settings.sleep else []
    return [
        Launch(
            f"http://{host}:{port + number}",
            (str(vllm), "serve", str(model), *common, "--port", str(port + number)),
            tuple(gpus[number * tensor_parallel : (number + 1) * tensor_parallel]),
            logs / f"server-{number}.log",
        )
        for number in range(replicas)
    ]


@contextlib.contextmanager
def running(fleet: Sequence[Launch], report: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Start the servers, yield when all of them are healthy, and end them all after the block.

    A function is yielded that never returns and starts each server again that has ended. It calls `report`
    with one sentence each time. Raises UserError if a server ends before it is healthy, or is not healthy
    within START_SECONDS.
    """
    processes: dict[Launch, subprocess.Popen[bytes]] = {}
    try:
        for launch in fleet:
            processes[launch] = _start(launch)
        _wait_until_healthy(processes)

        def watch() -> None:
            while True:
                for launch, process in list(processes.items()):
                    if (code := process.poll()) is not None:
                        report(
                            f"{launch.url} has ended with code {code} (its log is {launch.log}); it starts "
                            "again, and is sampled from after the next push of weights."
                        )
                        _end([process])
                        processes[launch] = _start(launch)
                        time.sleep(10 * POLL_SECONDS)
                time.sleep(POLL_SECONDS)

        yield watch
    finally:
        _end(list(processes.values()))


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
                f"--vllm {launch.command[0]}: it cannot be started ({error.strerror}); give the vllm "
                "executable of the environment in which vLLM is installed."
            ) from error


def _wait_until_healthy(processes: dict[Launch, subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_SECONDS
    waiting = dict(processes)
    while waiting:
        for launch, process in list(waiting.items()):
            if (code := process.poll()) is not None or time.monotonic() > deadline:
                end = f"ended with code {code}" if code is not None else "is not healthy after half an hour"
                raise UserError(
                    f"{launch.log}: the server at {launch.url} {end}; mend what the log says and start again."
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{launch.url}/health", timeout=5.0).status_code == 200:
                    del waiting[launch]
        time.sleep(POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes and their children by SIGTERM, and by SIGKILL after END_SECONDS."""
    for kind, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
        deadline = time.monotonic() + seconds
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
