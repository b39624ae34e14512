"""Prefect's API server for one run, on the database of the run's home folder.

Prefect can start a temporary server by itself, but only when the first flow runs, and only after importing
the whole server into the flow's process. Started here, as a process of its own and before anything else, the
server comes up while the run is still importing what it needs. A run with PREFECT_API_URL in its environment
uses that server instead.

Making the tables of a new database takes as long as the rest of the start, so a copy of the empty database is
kept in the user's cache, one for each version of Prefect.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from components.core.errors import UserError, error_chain
from components.core.files import atomic_write, user_cache

START_SECONDS = 180.0
"""Longest wait for the server's first answer, which includes making the tables of a new database."""
RECORD_SECONDS = 10.0
"""Longest wait at the end of a run for the states of its tasks to be recorded."""
SERVER_SETTINGS = {
    f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false"
    for service in (
        "CANCELLATION_CLEANUP",
        "CLEANUP_RECONCILER",
        "EVENT_PERSISTER",
        "FOREMAN",
        "LATE_RUNS",
        "PAUSE_EXPIRATIONS",
        "REPOSSESSOR",
        "SCHEDULER",
        "TRIGGERS",
    )
} | {"PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "", "PREFECT_SERVER_EVENTS_STREAM_OUT_ENABLED": "false"}
"""Switches off every background service except the task run recorder, which writes the task runs that clients
report as events; the others serve deployments."""


class Server:
    """A Prefect server process; `wait` returns once it answers."""

    def __init__(self, home: Path):
        self.log = home / "prefect" / "server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Prefect's default; another one when PREFECT_SERVER_DATABASE_CONNECTION_URL is set.
        self.database = self.log.parent / "prefect.db"
        self.empty_database = user_cache("prefect") / f"{version('prefect')}.db"
        self.is_new = not self.database.exists()
        if self.is_new and self.empty_database.is_file():
            atomic_write(self.database, self.empty_database.read_bytes())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api"
        command = [sys.executable, "-m", "prefect", "server", "start", "--no-ui"]
        with self.log.open("wb") as log:
            # A session of its own: a signal to the run's whole process group would end the server first,
            # and the
            # run would then retry its last calls for a minute.
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                env=os.environ | SERVER_SETTINGS,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Block until the server answers; UserError when it ended or did not answer in START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._call("health")
                break
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise UserError(
                        f"{self.log}: Prefect's server did not start, its last messages are there; "
                        "run the same command again."
                    ) from None
            time.sleep(0.05)
        if self.is_new and self.database.is_file() and not self.empty_database.exists():
            self._keep_empty_database()

    def wait_for_task_runs(self) -> None:
        """Block until the states of all finished flow runs' tasks are recorded, at most RECORD_SECONDS.

        Tasks report their states as events, which this process sends and the server records in the
        background. The server is done when every task run is in a final state and nothing changes between two
        looks.
        """
        if "prefect" not in sys.modules or self.process.poll() is not None:
            return  # no flow was run, or nothing records its tasks any more
        from prefect.events.worker import EventsWorker

        EventsWorker.drain_all(timeout=RECORD_SECONDS)
        finished = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED"]}}}, "limit": 200}
        deadline, before = time.monotonic() + RECORD_SECONDS, None
        with contextlib.suppress(OSError):  # the server may end meanwhile
            while time.monotonic() < deadline:
                now = {run["id"]: run["state_type"] for run in self._call("task_runs/filter", finished)}
                if now == before and not {"PENDING", "RUNNING"} & set(now.values()):
                    break
                before = now
                time.sleep(0.2)

    def caused(self, error: BaseException) -> bool:
        """Return whether `error` is a failed connection to this server, and the server has ended."""
        import httpx

        if not any(isinstance(cause, httpx.TransportError) for cause in error_chain(error)):
            return False
        # A server that was asked to end stops listening before its process ends.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        return self.process.poll() is not None

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _call(self, path: str, body: Any = None) -> Any:
        """Return the JSON answer of one API call: GET, or POST with a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=5) as response:
            return json.load(response)

    def _keep_empty_database(self) -> None:
        """Copy the database, which has tables and no rows yet, into the cache."""
        self.empty_database.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.empty_database.parent) as folder:
            copy = Path(folder, "copy.db")
            with (
                contextlib.closing(sqlite3.connect(self.database)) as source,
                contextlib.closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)
            copy.replace(self.empty_database)


@contextlib.contextmanager
def prefect_server(home: Path) -> Iterator[Server | None]:
    """Start a server on this home and name it in PREFECT_API_URL; yield None when one is named already.

    Enter before Prefect is imported, which reads the variable.
    """
    if "PREFECT_API_URL" in os.environ:
        yield None
        return
    server = Server(home)
    os.environ["PREFECT_API_URL"] = server.url
    try:
        yield server
        server.wait_for_task_runs()
    except Exception as error:
        if server.caused(error):
            raise UserError(
                f"{server.log}: Prefect's server ended under the run, for instance by a signal to all "
                "processes; "
                "nothing is lost: run the same command again."
            ) from error
        server.wait_for_task_runs()
        raise
    finally:
        del os.environ["PREFECT_API_URL"]
        server.stop()
