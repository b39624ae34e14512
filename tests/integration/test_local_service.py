"""The service on its Unix socket answers as a new judge does, serves one account, leaves nothing behind."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from judge_fixtures import CODE, HERE, MODEL_NEW, TASK

from components.core.config import resolve
from components.core.errors import InfrastructureError, UserError
from components.judge.pool import service_client
from components.judge.pool.local_pool import Candidate, Job, LocalPool
from components.judge.pool.service_client import ServiceClient, connect, socket_path

SETTINGS = ("--profile", "ci", "--device", "cpu")
PARAMS = resolve("ci").params


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "components.cli", name, *arguments, *SETTINGS]


def start(home: Path) -> subprocess.Popen[str]:
    """Start a service, and return when it can be asked."""
    process = subprocess.Popen(command("serve", "--home", str(home)), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert str(socket_path(home / "judge", "cpu")) in process.stderr.readline()
    return process


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # The path is longer than the 107 bytes that a socket's address may have.
    home = tmp_path_factory.mktemp("service") / ("h" * 100)
    process = start(home)
    yield home
    process.terminate()
    assert process.wait(60) == 143
    assert not socket_path(home / "judge", "cpu").exists()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "model.py").write_text(CODE)
    (tmp_path / "model_new.py").write_text(MODEL_NEW)
    for path in (HERE / "honest" / "simd" / "kernels").iterdir():
        (tmp_path / "kernels" / path.name).write_text(path.read_text())
    return tmp_path


def judge(workspace: Path, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("judge", str(workspace), "--home", str(home), "--json"),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_asks_the_service_and_starts_no_judge(home: Path, workspace: Path) -> None:
    done = judge(workspace, home)
    verdict = json.loads(done.stdout)
    assert done.returncode == 0 and verdict["status"] == "correct", done.stderr
    assert verdict["speedup"]["eager"] and verdict["speedup"]["compile"]
    assert "raw_seconds" in verdict["evidence"] and "seeds" not in verdict["evidence"]
    assert "baselines" in done.stderr and "starting a judge" not in done.stderr
    (workspace / "kernels" / "forward.cpp").write_text("not C++")
    assert json.loads(judge(workspace, home).stdout)["status"] == "build_failed"


def test_without_one_a_judge_is_started_and_serve_is_named(tmp_path: Path, workspace: Path) -> None:
    done = judge(workspace, tmp_path / "other")
    assert json.loads(done.stdout)["status"] == "correct", done.stderr
    assert "cuda-agent serve" in done.stderr.splitlines()[0]


def test_a_pool_uses_it_only_if_asked(home: Path, tmp_path: Path, workspace: Path) -> None:
    files = {"model_new.py": MODEL_NEW, "kernels/forward.cpp": "not C++"}
    asking = LocalPool(PARAMS, tmp_path / "verdicts", home / "judge", use_service=True)
    own = LocalPool(PARAMS, tmp_path / "other", tmp_path / "judge")
    try:
        verdicts = [pool.submit(Job(TASK, Candidate.of(files), epoch="0")).result() for pool in (asking, own)]
        assert [verdict.status for verdict in verdicts] == ["build_failed"] * 2
        assert isinstance(asking.judge, ServiceClient)
        assert not isinstance(own.judge, ServiceClient)
        assert asking.admit("x = 1").result() == own.admit("x = 1").result()
    finally:
        asking.close()
        own.close()


def test_callers_with_other_settings_are_served_with_their_own(home: Path) -> None:
    sandbox = PARAMS.sandbox.model_copy(update={"rounds": 7, "most_rounds": 7})
    service = connect(PARAMS.model_copy(update={"sandbox": sandbox}), home / "judge")
    assert service is not None
    files = {"model_new.py": MODEL_NEW} | {
        f"kernels/{path.name}": path.read_text() for path in (HERE / "honest" / "simd" / "kernels").iterdir()
    }
    verdict = service.verdict(TASK, files)
    service.close()
    assert verdict.status == "correct", verdict.log
    assert len(verdict.evidence["raw_seconds"]["candidate"]) == 7


@pytest.mark.parametrize(
    ("status", "answer", "outcome"),
    [
        (422, {"state": "failed", "error": "1 / 0"}, "task"),
        (422, {"state": "failed", "error": "it takes 9 GB", "reason": "too_large"}, "too_large"),
        (503, {"state": "failed", "error": "fell off"}, "judge"),
        (422, {"error": "files: Field required"}, UserError),
        (401, {"error": "unknown token"}, UserError),
        (400, {"state": "failed", "error": "precision: tf32 needs cuda"}, UserError),
        (503, {"error": "the file with the tokens is damaged"}, InfrastructureError),
        (500, {}, UserError),
    ],
)
def test_failed_jobs_and_refused_requests_are_told_apart(
    tmp_path: Path, status: int, answer: dict[str, object], outcome: str | type[Exception]
) -> None:
    client = ServiceClient(PARAMS, socket=socket_path(tmp_path, "cpu"))
    client.client.close()
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json=answer))
    client.client = httpx.Client(transport=transport, base_url="http://localhost")
    try:
        if isinstance(outcome, str):
            verdict = client.verdict(TASK, {})
            assert (verdict.status, verdict.reason, verdict.log) == (
                "infrastructure",
                outcome,
                answer["error"],
            )
        else:
            with pytest.raises(outcome, match=str(answer.get("error", "HTTP status 500"))):
                client.verdict(TASK, {})
    finally:
        client.close()


def test_only_the_own_account_can_connect(home: Path) -> None:
    assert stat.S_IMODE((home / "judge").stat().st_mode) == 0o700


def test_a_second_one_and_another_version_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        command("serve", "--home", str(home)), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 2 and "already runs" in done.stderr and len(done.stderr.splitlines()) == 1
    monkeypatch.setattr(service_client, "VERSION", "0123456789abcdef")
    with pytest.raises(UserError, match=r"other sources .* start it again"):
        connect(PARAMS, home / "judge")


def test_a_socket_without_a_server_does_no_harm(tmp_path: Path) -> None:
    path = socket_path(tmp_path, "cpu")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.exists() and connect(PARAMS, tmp_path) is None


def test_a_judge_that_is_killed_is_a_fault_of_the_infrastructure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_client, "RESTART_SECONDS", 0.0)
    process = start(tmp_path)
    service = connect(PARAMS, tmp_path / "judge")
    assert service is not None
    kill = threading.Timer(1.0, os.kill, (process.pid, signal.SIGKILL))
    kill.start()
    with pytest.raises(InfrastructureError, match="did not answer"):
        while True:  # judgements, until the judge is gone
            service.verdict(TASK, {"model_new.py": MODEL_NEW, "kernels/forward.cpp": f"{time.time()}"})
    kill.join()
    process.wait()
    assert connect(PARAMS, tmp_path / "judge") is None
    again = start(tmp_path)
    again.terminate()
    try:
        assert again.wait(60) == 143
    except subprocess.TimeoutExpired:
        again.send_signal(signal.SIGUSR1)  # it prints the stacks of its threads
        time.sleep(5)
        again.kill()
        pytest.fail(again.communicate()[1])
