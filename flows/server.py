"""Prefect's own server for one run, on this home's database.

Prefect can start such a server by itself, but only once a flow runs and only after importing the whole server into the
flow's process as well. Started here, first of all, it comes up while the run imports what it needs: several seconds
less at every start and every resumption. A run that is told of a server (PREFECT_API_URL) uses that one.

Making the tables of a new database takes as long as the rest of the start (12 s of CPU time), so an empty database is kept
for the next home of the same user and version of Prefect.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from components.core.errors import UserError
from components.core.files import atomic_write, user_cache

START_SECONDS = 180.0
"""The first start on a home makes the database; on a busy machine that took a minute."""


class Server:
    """A server that is starting; `wait` returns once it answers."""

    def __init__(self, home: Path):
        self.log = home / "prefect" / "server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.database = self.log.parent / "prefect.db"  # unless a person has named another one
        self.empty = user_cache("prefect") / f"{version('prefect')}.db"
        self.new = not self.database.exists()
        if self.new and self.empty.is_file():
            atomic_write(self.database, self.empty.read_bytes())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
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
            "--no-services",
            "--no-ui",
        ]
        with self.log.open("wb") as log:
            # A session of its own: a signal to the run's whole group would end it first, and the run's last words to it take a minute of retries.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.url = f"http://127.0.0.1:{port}/api"

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        self._keep_empty()
                        return
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise UserError(
                        f"{self.log}: Prefect's server did not start, its last words are there; run the same command again."
                    ) from None
            time.sleep(0.05)

    def _keep_empty(self) -> None:
        """Keep a copy of a database that has tables and nothing else yet."""
        if self.new and self.database.is_file() and not self.empty.exists():
            self.empty.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.empty.parent) as folder:
                copy = Path(folder, "copy.db")
                with (
                    contextlib.closing(sqlite3.connect(self.database)) as source,
                    contextlib.closing(sqlite3.connect(copy)) as target,
                ):
                    source.backup(target)
                copy.replace(self.empty)

    def gone(self, error: BaseException | None) -> bool:
        """Whether `error` comes of this server having ended."""
        import httpx

        while error is not None and not isinstance(error, httpx.TransportError):
            error = error.__cause__ or error.__context__
        if error is None:
            return False
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # one that was asked to end stops listening first
            self.process.wait(timeout=5)
        return self.process.poll() is not None

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def prefect_server(home: Path) -> Iterator[Server | None]:
    """A server of this home, named in PREFECT_API_URL before Prefect is imported; none when one is named already."""
    if "PREFECT_API_URL" in os.environ:
        yield None
        return
    server = Server(home)
    os.environ["PREFECT_API_URL"] = server.url
    try:
        yield server
    except Exception as error:
        if server.gone(error):
            raise UserError(
                f"{server.log}: Prefect's server ended under the run, as with a signal to them all; nothing is lost: run the same command again."
            ) from error
        raise
    finally:
        del os.environ["PREFECT_API_URL"]
        server.stop()
