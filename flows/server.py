"""The process of a Prefect API server for one run, with the database in the run's home folder.

Prefect can start a temporary server by itself, but only when the first flow runs, and only after it has
imported the whole server into the flow's process. This module starts the server as a separate process before
anything else, so that the server starts while the run is still importing its modules. If PREFECT_API_URL is
set, the run uses the server at that address and starts none.

Creating the tables of a new database takes about half of the start. So a copy of the empty database is kept
in the user's cache, one for each version of Prefect.
"""

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

# Longest wait for the server's first answer, which includes the creation of a new database.
START_SECONDS = 180.0
# Longest wait at the end of a run until the server has recorded the states of the run's tasks.
RECORD_SECONDS = 60.0
# Longest wait at the end of a run until the server has received the run's log lines.
LOG_SECONDS = 10.0
# Environment variables that switch off all background services of the server except the task run recorder.
# The recorder stores the states of task runs, which clients report as events. The other services are needed
# only for deployments.
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


class Server:
    """A Prefect server process, which is started by the constructor and can be used after `wait` returns."""

    def __init__(self, home: Path):
        self.log = home / "prefect" / "server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # This is Prefect's default path. If PREFECT_SERVER_DATABASE_CONNECTION_URL is set, the server uses
        # another database.
        self.database = self.log.parent / "prefect.db"
        self.empty_database = user_cache("prefect") / f"{version('prefect')}.db"
        self.is_new = not self.database.exists()
        if self.is_new and self.empty_database.is_file():
            atomic_write(self.database, self.empty_database.read_bytes())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api"
        # Number of task runs that this process has started in its flow run.
        self.task_runs = 0
        with self.log.open("wb") as log:
            # The server gets a session of its own. Otherwise a signal to the process group of the run would
            # end the server first, and the run would retry its last calls for a minute.
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "prefect", "server", "start", "--ui"),
                    *("--host", "127.0.0.1", "--port", str(port)),
                ],
                env=os.environ | SERVER_SETTINGS | {"PREFECT_UI_API_URL": self.url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Block until the server answers.

        Raises UserError if the server ends or does not answer within START_SECONDS.
        """
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
        """Block until the server has recorded the final states of all task runs, for at most RECORD_SECONDS.

        This process sends the states as events, which the server records in the background. The wait ends
        when the newest flow run has `task_runs` task runs in a final state, or when the server has ended.
        """
        if not self.task_runs or self.process.poll() is not None:
            return
        from prefect.events.worker import EventsWorker

        EventsWorker.drain_all(timeout=RECORD_SECONDS)
        deadline = time.monotonic() + RECORD_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):  # a busy server may answer late
                if self._recorded_task_runs() >= self.task_runs:
                    break
            time.sleep(0.2)

    def _recorded_task_runs(self) -> int:
        """Return the number of task runs of the newest flow run that are recorded in a final state."""
        newest = self._call("flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})[0]["id"]
        final = {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}
        ended = {"flow_runs": {"id": {"any_": [newest]}}, "task_runs": {"state": {"type": final}}}
        return int(self._call("task_runs/count", ended))

    def caused(self, error: BaseException) -> bool:
        """Return whether the server has ended and a failed connection is among the causes of `error`."""
        import httpx

        if not any(isinstance(cause, httpx.TransportError) for cause in error_chain(error)):
            return False
        # A server that received a signal closes its port before its process ends, so wait for the process.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        return self.process.poll() is not None

    def stop(self) -> None:
        """End the server after it has received the log lines of this process, and wait for its end."""
        if "prefect" in sys.modules and self.process.poll() is None:
            from prefect.logging.handlers import APILogWorker

            # Otherwise they would be sent at the end of this process, and the failure would be printed.
            APILogWorker.drain_all(timeout=LOG_SECONDS)
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _call(self, path: str, body: Any = None) -> Any:
        """Return the JSON answer of one API call: a GET request if `body` is None, and a POST otherwise."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=5) as response:
            return json.load(response)

    def _keep_empty_database(self) -> None:
        """Copy the new database, whose tables are still empty, into the user's cache."""
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
    """Run a Prefect server for this home while the block runs, and set PREFECT_API_URL to its address.

    Yields None and starts no server if PREFECT_API_URL is already set. Prefect must be imported only inside
    the block, because the import reads the variable. Raises UserError if the block fails because the server
    has ended.
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
