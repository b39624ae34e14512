"""Task runs and log lines that Prefect's server records, and the wait for them at the end of a run."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

FLOW = """
import sys
from pathlib import Path

from flows.processes import prefect_server

with prefect_server(Path(sys.argv[1])) as server:
    from prefect import flow, task

    from flows.steps import count_task_runs, counted

    @task
    @counted
    def stage() -> None:
        pass

    @flow
    def stages() -> None:
        for _ in range(3):
            stage()
        server.task_runs = count_task_runs()
        assert server.task_runs == 3

    server.wait()
    stages()
"""


def test_a_server_that_records_late_is_waited_for(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    # The server keeps states for some seconds before it writes them.
    recorder = "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER"
    late = {f"{recorder}_BATCH_SIZE": "1000", f"{recorder}_FLUSH_INTERVAL": "4"}
    home = {"PREFECT_HOME": str(tmp_path / "prefect")}
    subprocess.run(
        [sys.executable, "-c", FLOW, str(tmp_path)], env=environment | late | home, check=True, timeout=300
    )
    with sqlite3.connect(tmp_path / "prefect" / "prefect.db") as database:
        states = [state for (state,) in database.execute("select state_name from task_run")]
    assert states == ["Completed"] * 3


PROGRESS = """
import os
import sys
import time
from pathlib import Path

from flows.processes import prefect_server

with prefect_server(Path(sys.argv[1])) as server:
    from prefect import flow, task

    from components.core.progress import Quiet
    from flows.run_page import EVENT_SECONDS, PageProgress

    @task
    def stage() -> None:
        page = PageProgress(Quiet())
        page.update("stage", 1, 3)
        assert page.artifacts, "the server shows the progress"
        server.process.kill()
        server.process.wait()
        started = time.monotonic()
        for step in (2, 3):
            page.events.clear()
            page.update("stage", step, 3)
        assert page.paused_until > time.monotonic() and time.monotonic() - started < 2 * EVENT_SECONDS
        os._exit(0)

    server.wait()
    flow(lambda: stage(), name="stages")()
"""


def test_a_server_that_is_gone_ends_no_stage(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    home = {"PREFECT_HOME": str(tmp_path / "prefect")}
    subprocess.run(
        [sys.executable, "-c", PROGRESS, str(tmp_path)], env=environment | home, check=True, timeout=300
    )


LOGS = """
import contextvars
import logging
import sys
import threading
from pathlib import Path

from components.cli.main import show_logs
from flows.processes import prefect_server
from flows.run_context import prepare_environment

show_logs()
prepare_environment(Path(sys.argv[1]))
with prefect_server(Path(sys.argv[1])) as server:
    from prefect import flow, task

    from flows import run_page

    log = logging.getLogger("components.policy.vllm.own_servers")

    @task
    def stage() -> None:
        log.info("a server starts")
        thread = threading.Thread(target=contextvars.copy_context().run, args=(log.info, "it is ready"))
        thread.start()
        thread.join()

    @flow
    def stages() -> None:
        stage()

    run_page.keep_logs_off_the_console()
    run_page.show_logs()
    server.wait()
    stages()
"""


def test_what_the_project_logs_is_on_the_page_of_the_run_and_once_on_the_console(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", LOGS, str(tmp_path)],
        env=environment,
        check=True,
        timeout=300,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = ["a server starts", "it is ready"]
    assert [line for line in done.stderr.splitlines() if any(text in line for text in said)] == said
    with sqlite3.connect(tmp_path / "prefect" / "prefect.db") as database:
        query = "select message from log where name like 'components.%' order by timestamp"
        assert [message for (message,) in database.execute(query)] == said
