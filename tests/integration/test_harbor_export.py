"""Tasks exported for Harbor have what its test needs; their script tells a verdict from a failed judge."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_fixtures import PARAMS, TASK, TextJudges

from components.core.errors import UserError
from components.service.harbor import export_tasks
from components.service.http_server import bind, serving


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with (
        bind("127.0.0.1:0", has_tokens=False) as listener,
        serving(TextJudges(), PARAMS, tmp_path / "service", [TASK], listener, None),
    ):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def export(folder: Path) -> Path:
    [written] = export_tasks([TASK], folder, device="cpu", service="http://judge:8470", image="python:3")
    return written


def ask(task: Path, data: bytes, address: str) -> "subprocess.CompletedProcess[str]":
    """Run the exported test on a candidate, as its container does, with rewards beside the task."""
    (task / "environment" / "model_new.py").write_bytes(data)
    return subprocess.run(
        [sys.executable, "-I", task / "tests" / "judge.py", "--reward", task / "reward"],
        cwd=task / "environment",
        env=os.environ | {"CUDA_AGENT_JUDGE": address},
        capture_output=True,
        text=True,
    )


def test_a_task_has_instruction_settings_and_a_test_and_keeps_a_solution(tmp_path: Path) -> None:
    task = export(tmp_path / "tasks")
    (task / "solution").mkdir()
    (task / "solution" / "solve.sh").write_text("true\n")
    assert export(tmp_path / "tasks") == task
    assert (task / "solution" / "solve.sh").exists()
    settings = tomllib.loads((task / "task.toml").read_text())
    assert settings["verifier"]["environment_mode"] == "separate"
    assert settings["verifier"]["env"]["CUDA_AGENT_JUDGE"] == "${CUDA_AGENT_JUDGE:-http://judge:8470}"
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


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks").write_text("")
    with pytest.raises(UserError, match="not a folder"):
        export(tmp_path / "tasks")
