"""The Prefect API server that a run starts for itself.

Prefect can start a temporary server by itself, but only when the first flow runs, and only after it has
imported the whole server into the flow's process; that server does not end with a run that is killed.
`prefect_server` starts the server as a separate process before anything else, so that the server starts while
the run is still importing its modules. Its database is in the run's home folder. If PREFECT_API_URL is set,
the run uses the server at that address and starts none.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from components.core.errors import UserError, error_chain, refuse

# Longest wait for the server's first answer, which includes the creation of a new database.
START_SECONDS = 180.0
# Longest wait at the end of a run until the server has recorded the states of the run's tasks.
RECORD_SECONDS = 60.0
# Longest wait for the first answer of a server that PREFECT_API_URL names.
ANSWER_SECONDS = 30.0
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
    """A Prefect server process, which is started by the constructor and can be used after `wait` returns.

    Its log is `prefect/server.log` in `home`, the folder of all runs. `url` is the address of its API. The
    caller sets `task_runs` to the number of task runs that it has started in its flow run.
    """

    def __init__(self, home: Path):
        self.log = home / "prefect" / "server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
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
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            refuse(
                (
                    self.process.poll() is not None or time.monotonic() > deadline,
                    f"{self.log}: Prefect's server did not start, its last messages are there; "
                    "run the same command again.",
                )
            )
            time.sleep(0.05)

    def wait_for_task_runs(self) -> None:
        """Block until the server has recorded the final states of all task runs, for at most RECORD_SECONDS.

        This process sends the states as events, which the server records in the background. The wait ends
        when the newest flow run has `task_runs` task runs in a final state, or when the server has ended. If
        `task_runs` is 0, nothing is awaited.
        """
        if not self.task_runs or self.process.poll() is not None:
            return
        from prefect.events.worker import EventsWorker

        EventsWorker.drain_all(timeout=RECORD_SECONDS)
        deadline = time.monotonic() + RECORD_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):  # a busy server may answer late
                if self._recorded_task_runs() >= self.task_runs:
                    break
            time.sleep(0.2)

    def _recorded_task_runs(self) -> int:
        """Return the number of task runs of the newest flow run that are recorded in a final state."""
        with httpx.Client(base_url=self.url, timeout=5) as client:
            newest = client.post("/flow_runs/filter", json={"sort": "START_TIME_DESC", "limit": 1})
            ended = {
                "flow_runs": {"id": {"any_": [newest.raise_for_status().json()[0]["id"]]}},
                "task_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}},
            }
            return int(client.post("/task_runs/count", json=ended).raise_for_status().json())

    def caused(self, error: BaseException) -> bool:
        """Return whether the server has ended and a failed connection is among the causes of `error`."""
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


@contextlib.contextmanager
def prefect_server(home: Path) -> Iterator[Server | None]:
    """Run a Prefect server for this home while the block runs, and set PREFECT_API_URL to its address.

    The home is the folder of all runs, in which the server writes its log. Yields None and starts no server
    if PREFECT_API_URL is already set. Prefect must be imported only inside the block, because the import
    reads the variable. Raises UserError if the server of the variable does not answer, or if the block fails
    because the server has ended.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        try:
            # Nothing is sent or believed, so any certificate will do; Prefect's client has its own settings.
            httpx.get(f"{url.rstrip('/')}/health", timeout=ANSWER_SECONDS, verify=False)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise UserError(
                f"PREFECT_API_URL: no server answers at {url} ({error}); start it, or unset the variable."
            ) from error
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
                "processes; nothing is lost: run the same command again."
            ) from error
        server.wait_for_task_runs()
        raise
    finally:
        del os.environ["PREFECT_API_URL"]
        server.stop()
