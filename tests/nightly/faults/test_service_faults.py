"""Faults of the services: a killed flow goes on under a worker, a killed MLflow leaves one run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect_fixtures import answers, free_port, prefect_server, wait_for

from components.core.config import PROJECT, resolve
from components.registry.tracking import MlflowRun, connect
from flows.deployments import retry_kind

FLOW = """
import os, time
from pathlib import Path
from prefect import flow

@flow(name="nightly", persist_result=False)
def nightly():
    here = Path(os.environ["WORLD"])
    attempt = len(list(here.glob("attempt-*")))
    (here / f"attempt-{attempt}").write_text(str(os.getpid()))
    if attempt == 0:
        time.sleep(600)
"""
DEPLOY = """
import sys
from prefect import flow
source = flow.from_source(source=sys.argv[1], entrypoint="world.py:nightly")
source.deploy(name="nightly", work_pool_name="cpu", print_next_steps=False)
"""


@pytest.mark.timeout(900)
def test_a_run_whose_process_is_killed_goes_back_to_a_worker(tmp_path: Path) -> None:
    """The pool and the automations are the project's; the flow is a small one of the same name."""
    (tmp_path / "world.py").write_text(FLOW)
    (tmp_path / "prefect").mkdir()
    with prefect_server(tmp_path / "prefect") as environment:
        environment |= {"WORLD": str(tmp_path), "PREFECT_WORKER_QUERY_SECONDS": "2"}
        subprocess.run(
            [PROJECT / "infra" / "prefect" / "deploy.sh"],
            env=environment | {"PYTHON": sys.executable, "CUDA_AGENT_PROFILE": "ci"},
            check=True,
            capture_output=True,
        )
        subprocess.run(
            [sys.executable, "-c", DEPLOY, str(tmp_path)],
            cwd=PROJECT,
            env=environment,
            check=True,
            capture_output=True,
        )
        url = environment["PREFECT_API_URL"]
        run = subprocess.run(
            [sys.executable, "-m", "prefect", "deployment", "run", "nightly/nightly"],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        assert "Created flow run" in run.stdout
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "cpu"]
        with (tmp_path / "worker.log").open("wb") as log:
            worker = subprocess.Popen(
                command, cwd=PROJECT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            first = tmp_path / "attempt-0"
            wait_for(lambda: first.is_file() and first.read_text(), 400)
            os.kill(int(first.read_text()), signal.SIGKILL)

            def finished() -> list[dict[str, Any]]:
                found = httpx.post(f"{url}/flow_runs/filter", json={}, timeout=120).json()
                return [item for item in found if item["state_type"] == "COMPLETED"]

            (done,) = wait_for(finished, 400)
            assert done["run_count"] == 2 and (tmp_path / "attempt-1").is_file()
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = dict(os.environ) | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    with (folder / "mlflow.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"), 400)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(0.2)


@pytest.mark.timeout(900)
def test_a_tracking_server_that_is_killed_leaves_one_run_with_every_figure_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    port = free_port()
    registry = resolve("ci").params.registry.model_copy(update={"tracking_uri": f"http://127.0.0.1:{port}"})

    def log(reward: float) -> MlflowRun:
        night = MlflowRun(connect(registry, tmp_path), registry, tmp_path, "key", "night")
        night.figures({"reward": reward})
        return night

    with mlflow_server(tmp_path, port):
        log(1.5)
    with pytest.raises(Exception, match=r"Max retries|refused|Failed to establish") as raised:
        log(1.5)
    assert retry_kind(raised.value) == "service"
    with mlflow_server(tmp_path, port):
        night = log(1.5)
        night.end("FINISHED")
        found = night.client.search_runs([night.experiment_id])
        assert [run.info.status for run in found] == ["FINISHED"]
        assert [metric.value for metric in night.client.get_metric_history(night.run_id, "reward")] == [1.5]
