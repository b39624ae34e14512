"""Tasks exported for Harbor have what its test needs; their script tells a verdict from a failed judge."""

import contextlib
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from service_fixtures import PARAMS, TASK, TextJudges, token

from components.core.errors import UserError
from components.service.harbor import export_tasks
from components.service.harbor_task import judge as script
from components.service.http_server import bind, serving
from components.service.jobs import JobService
from components.service.tokens import LOCAL, TokenFile, create_token


@contextlib.contextmanager
def served(
    folder: Path, judges: TextJudges, tokens: TokenFile | None = None
) -> Iterator[tuple[JobService, str]]:
    with (
        bind("127.0.0.1:0", has_tokens=tokens is not None) as listener,
        serving(judges, PARAMS, folder / "service", [TASK], listener, tokens) as service,
    ):
        yield service, f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with served(tmp_path, TextJudges()) as (_, found):
        yield found


def export(folder: Path) -> Path:
    [written] = export_tasks([TASK], folder, device="cpu", service="http://judge:8470", image="python:3")
    return written


def run(
    task: Path, script: str, address: str, secret: str, *options: str | Path
) -> "subprocess.CompletedProcess[str]":
    """Run an exported script as its container does, with the token that task.toml gives it as `secret`."""
    return subprocess.run(
        [sys.executable, "-I", task / script, *options],
        cwd=task / "environment",
        env=os.environ | {"CUDA_AGENT_JUDGE": address, "CUDA_AGENT_TOKEN": secret},
        capture_output=True,
        text=True,
    )


def ask(task: Path, data: bytes, address: str, secret: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the exported test on a candidate, with rewards beside the task."""
    (task / "environment" / "model_new.py").write_bytes(data)
    return run(task, "tests/judge.py", address, secret, "--reward", task / "reward")


def test_a_task_has_instruction_settings_and_a_test_and_keeps_a_solution(tmp_path: Path) -> None:
    task = export(tmp_path / "tasks")
    (task / "solution").mkdir()
    (task / "solution" / "solve.sh").write_text("true\n")
    assert export(tmp_path / "tasks") == task
    assert (task / "solution" / "solve.sh").exists()
    settings = tomllib.loads((task / "task.toml").read_text())
    assert settings["verifier"]["environment_mode"] == "separate"
    assert settings["verifier"]["env"]["CUDA_AGENT_JUDGE"] == "${CUDA_AGENT_JUDGE:-http://judge:8470}"
    assert settings["verifier"]["env"]["CUDA_AGENT_TOKEN"] == "${CUDA_AGENT_TEST_TOKEN:-}"
    assert settings["environment"]["env"]["CUDA_AGENT_TOKEN"] == "${CUDA_AGENT_TOKEN:-}"
    instruction = (task / "instruction.md").read_text()
    assert TASK.code.strip() in instruction and "`python3 judge.py`" in instruction
    assert "utils" not in instruction, "the containers have no utilities of a workspace"
    assert os.access(task / "tests" / "test.sh", os.X_OK)
    assert not (task / "environment" / "tests").exists()


def test_the_reward_is_the_milestone_of_the_verdict(tmp_path: Path, address: str) -> None:
    task = export(tmp_path / "tasks")
    done = ask(task, b"anything", address)
    assert done.returncode == 0 and done.stdout.startswith("[FAIL] wrong_output: max_error:given"), done
    assert json.loads((task / "reward" / "reward.json").read_text()) == {"reward": -1}
    assert json.loads((task / "reward" / "verdict.json").read_text())["status"] == "wrong_output"


@pytest.mark.parametrize("data", [b"a" * (9 << 20), b"\xed\xa0\x80"], ids=["too large", "no text"])
def test_a_candidate_that_cannot_be_sent_is_wrong_and_no_failure_of_the_judge(
    tmp_path: Path, address: str, data: bytes
) -> None:
    task = export(tmp_path / "tasks")
    assert ask(task, data, address).returncode == 0
    assert json.loads((task / "reward" / "reward.json").read_text()) == {"reward": -1}


def test_no_reward_is_written_when_the_judge_fails(tmp_path: Path, address: str) -> None:
    task = export(tmp_path / "tasks")
    done = ask(task, b"fail", address)
    assert done.returncode == 1 and "The judge gave no verdict" in done.stderr
    assert not (task / "reward").exists()


def test_the_test_waits_for_longer_than_one_request(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "WAIT_SECONDS", 0.05)
    monkeypatch.setenv("CUDA_AGENT_JUDGE", address)
    found = script.verdict(TASK.code, {"model_new.py": "sleep 0.5"}, script.REWARD)
    assert found["reason"] == "max_error:given"


def test_a_cancelled_judgement_ends_the_test_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "WAIT_SECONDS", 0.05)
    judges = TextJudges()
    with served(tmp_path, judges) as (service, address), ThreadPoolExecutor(8) as threads:
        monkeypatch.setenv("CUDA_AGENT_JUDGE", address)
        most = max(1, service.workers - 1)  # of one token that run
        with judges.lock:  # nothing is measured
            asked = [
                threads.submit(script.verdict, TASK.code, {"model_new.py": f"{number}"}, script.REWARD)
                for number in range(most + 1)
            ]
            while service.running[LOCAL.name] < most or not (queued := service.store.waiting()):
                assert not any(future.done() for future in asked)
                time.sleep(0.002)
            service.cancel(LOCAL, queued[LOCAL.name].id)
        ends = [future.exception(30) for future in asked]
    assert [str(end) for end in ends if end] == [
        "The judge gave no verdict: the judgement was cancelled; ask for it again."
    ]


def test_the_reward_is_of_a_measurement_that_the_agent_did_not_see(tmp_path: Path) -> None:
    task, judges = export(tmp_path / "tasks"), TextJudges()
    with served(tmp_path, judges) as (_, address):
        (task / "environment" / "model_new.py").write_text("correct")
        for _ in range(2):
            seen = run(task, "environment/judge.py", address, "")
            assert seen.returncode == 0 and "Milestone: 2 of 3" in seen.stdout, seen
        assert len(judges.measured) == 1
        assert ask(task, b"correct", address).returncode == 0
    assert len(judges.measured) == 2


def test_the_test_has_a_token_of_its_own_and_says_when_it_is_missing(tmp_path: Path) -> None:
    task, judges, path = export(tmp_path / "tasks"), TextJudges(), tmp_path / "tokens.json"
    agent, test = (create_token(path, token(name), None) for name in ("agent", "test"))
    with served(tmp_path, judges, TokenFile(path)) as (_, address):
        (task / "environment" / "model_new.py").write_text("correct")
        assert run(task, "environment/judge.py", address, agent).returncode == 0
        missing = ask(task, b"correct", address)
        assert missing.returncode == 1 and "CUDA_AGENT_TEST_TOKEN" in missing.stderr
        assert ask(task, b"correct", address, test).returncode == 0
    assert judges.measured == [("agent", "correct"), ("test", "correct")]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks").write_text("")
    with pytest.raises(UserError, match="not a folder"):
        export(tmp_path / "tasks")
