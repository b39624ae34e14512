"""Prefect and MLflow on a real PostgreSQL: tables are made, and a backup restores their content."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient
from prefect_fixtures import free_port, prefect_server

from components.core.config import PROJECT

PROGRAMS = ("initdb", "postgres", "psql", "pg_dump", "pg_restore", "createdb", "dropdb")


def programs() -> Path | None:
    """The folder of one release's programs: Debian keeps them off the path."""
    places = [
        *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
        *(Path(place) for place in os.environ.get("PATH", "").split(os.pathsep)),
    ]
    return next((place for place in places if all((place / name).exists() for name in PROGRAMS)), None)


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a client of a server with the project's two databases."""
    pytest.importorskip(
        "psycopg2", reason="psycopg2-binary (MLflow's driver for PostgreSQL) is not installed"
    )
    place = programs()
    if place is None:
        pytest.skip(
            f"PostgreSQL's programs are not installed ({', '.join(PROGRAMS)}): apt-get install postgresql"
        )
    # PostgreSQL refuses to run as root.
    user = (
        next(
            (name for name in ("postgres", "nobody") if name in {entry.pw_name for entry in pwd.getpwall()}),
            None,
        )
        if os.geteuid() == 0
        else None
    )
    folder = Path(
        tempfile.mkdtemp(prefix="pg-")
    )  # its socket's path must be short, and reachable by another user
    if user is not None:
        shutil.chown(folder, user)
    data, port = folder / "data", str(free_port())
    environment = {**os.environ, "PATH": f"{place}{os.pathsep}{os.environ['PATH']}", "LC_ALL": "C"}
    environment |= {"PGHOST": "127.0.0.1", "PGPORT": port, "PGUSER": "cuda_agent"}
    quick = ["-c", "fsync=off", "-c", f"unix_socket_directories={folder}", "-p", port, "-h", "127.0.0.1"]
    subprocess.run(
        [place / "initdb", "-D", data, "-U", "cuda_agent", "-A", "trust"],
        user=user,
        env=environment,
        check=True,
        capture_output=True,
    )
    server = subprocess.Popen(
        [place / "postgres", "-D", data, *quick],
        user=user,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(120):
            if (
                subprocess.run(
                    [place / "psql", "-d", "postgres", "-c", "select 1"],
                    env=environment,
                    capture_output=True,
                    check=False,
                ).returncode
                == 0
            ):
                break
            assert server.poll() is None
            time.sleep(0.5)
        databases = PROJECT / "infra" / "postgres" / "databases.sql"
        subprocess.run(
            [place / "psql", "-d", "postgres", "-v", "ON_ERROR_STOP=1", "-f", databases],
            env=environment,
            check=True,
            capture_output=True,
        )
        yield environment
    finally:
        server.send_signal(signal.SIGINT)  # fast: SIGTERM would wait for clients that keep their connection
        server.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def backup(environment: dict[str, str], act: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [PROJECT / "infra" / "postgres" / "backup.sh", act, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def mlflow_at(environment: dict[str, str]) -> MlflowClient:
    return MlflowClient(
        tracking_uri=f"postgresql+psycopg2://cuda_agent@127.0.0.1:{environment['PGPORT']}/mlflow"
    )


def prefect_variables(environment: dict[str, str], folder: Path, write: bool) -> Any:
    """Prefect's server on PostgreSQL: what it holds under the name `kept`, written first where asked."""
    folder.mkdir()
    url = f"postgresql+asyncpg://cuda_agent@127.0.0.1:{environment['PGPORT']}/prefect"
    with prefect_server(folder, PREFECT_SERVER_DATABASE_CONNECTION_URL=url) as client:
        if write:
            httpx.post(
                f"{client['PREFECT_API_URL']}/variables/", json={"name": "kept", "value": "so"}, timeout=30
            ).raise_for_status()
        answer = httpx.get(f"{client['PREFECT_API_URL']}/variables/name/kept", timeout=30)
        answer.raise_for_status()
        return answer.json()["value"]


@pytest.mark.timeout(600)
def test_both_make_their_tables_and_a_back_up_brings_everything_back(
    postgres: dict[str, str], tmp_path: Path
) -> None:
    client = mlflow_at(postgres)
    experiment = client.create_experiment("nights", artifact_location=(tmp_path / "artifacts").as_uri())
    run = client.create_run(experiment).info.run_id
    client.log_metric(run, "reward", 1.5)
    client.create_registered_model("cuda-agent")
    assert prefect_variables(postgres, tmp_path / "first", write=True) == "so"

    done = backup(postgres, "backup", tmp_path / "kept")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["mlflow.dump", "prefect.dump"]
    full = backup(postgres, "restore", tmp_path / "kept")
    assert full.returncode == 2 and "restore into an empty database" in full.stderr

    client._tracking_client.store.engine.dispose()
    for database in ("prefect", "mlflow"):
        subprocess.run(["dropdb", "--force", database], env=postgres, check=True)
        subprocess.run(["createdb", database], env=postgres, check=True)
    done = backup(postgres, "restore", tmp_path / "kept")
    assert done.returncode == 0, done.stderr

    assert client.get_run(run).data.metrics["reward"] == 1.5
    assert client.get_registered_model("cuda-agent").name == "cuda-agent"
    assert prefect_variables(postgres, tmp_path / "second", write=False) == "so"


def test_a_folder_without_a_back_up_is_named(postgres: dict[str, str], tmp_path: Path) -> None:
    done = backup(postgres, "restore", tmp_path / "nothing")
    assert done.returncode == 2 and "no such back-up" in done.stderr
