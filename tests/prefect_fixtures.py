"""A real Prefect server for tests: its own folder, port and services, as `prefect server start` brings it up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx

START_SECONDS = 240.0

T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: Callable[[], T], seconds: float) -> T:
    """What `what` gives as soon as it gives something true; a server that is too busy to answer is asked again."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(httpx.TransportError):
            if found := what():
                return found
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain"
        time.sleep(0.5)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def prefect_server(folder: Path, **more: str) -> Iterator[dict[str, str]]:
    """The environment of a client of a server with all its services; `more` goes into the server's own environment."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "DO_NOT_TRACK": "1",
    }
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-ui",
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment | more,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}/api"
    try:
        wait_for(lambda: answers(f"{url}/health") or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
        yield environment | {"PREFECT_API_URL": url}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
