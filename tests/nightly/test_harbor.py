"""Exported Harbor tasks, run by Harbor itself on the service."""

import json
import os
import subprocess
from pathlib import Path

import judge_fixtures as corpus
from library_environments import interpreter_of, python_with
from serve_fixtures import start

from components.core.config import PROJECT
from components.core.task import load_task
from components.service.harbor import export_tasks

# Harbor's agent `oracle` runs solution/solve.sh of a task.
SOLUTION = "cp -r /solution/model_new.py /solution/kernels /app/ && cd /app && python3 judge.py\n"


def test_harbor_gives_the_milestone_of_the_judge_as_the_reward(tmp_path: Path) -> None:
    python = python_with(tmp_path / "harbor", "harbor==0.25.0", python=interpreter_of("3.12"))
    listed = [corpus.TASK, load_task(PROJECT / "docs" / "examples" / "gated_gelu.py")]
    service = "http://127.0.0.1:1"
    solved, idle = export_tasks(
        listed, tmp_path / "tasks", device="cpu", service=service, image="python:3.12-slim"
    )
    for path, text in (corpus.files("honest", "simd") | {"solve.sh": SOLUTION}).items():
        (solved / "solution" / path).parent.mkdir(parents=True, exist_ok=True)
        (solved / "solution" / path).write_text(text)
    (idle / "solution").mkdir()
    (idle / "solution" / "solve.sh").write_text("true\n")
    server, address = start(tmp_path / "home")
    environment = os.environ | {
        "CUDA_AGENT_JUDGE": address,
        "PYTHONPATH": str(PROJECT / "tests" / "environments"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it is fetched, for half a minute
    }
    try:
        options = ["-a", "oracle", "--env", "harbor_bubblewrap:Bubblewrap", "-n", "1", "--yes"]
        done = subprocess.run(
            [
                Path(python).with_name("harbor"),
                "run",
                "-p",
                tmp_path / "tasks",
                "-o",
                tmp_path / "jobs",
                *options,
            ],
            capture_output=True,
            text=True,
            env=environment,
        )
    finally:
        server.terminate()
        server.wait(60)
    assert done.returncode == 0, done.stderr[-2000:]
    trials = {path.parent.name: path.parent for path in (tmp_path / "jobs").glob("*/*/result.json")}
    results = {}
    for name, folder in trials.items():
        record = json.loads((folder / "result.json").read_text())
        assert record["exception_info"] is None, record["exception_info"]
        results[name.partition("__")[0]] = record["verifier_result"]["rewards"]
    [reward] = {
        key: value["reward"] for key, value in results.items() if solved.name.startswith(key)
    }.values()
    assert reward in (1, 2, 3), results
    [nothing] = [value for key, value in results.items() if idle.name.startswith(key)]
    assert nothing == {"reward": -1}
    [log] = (tmp_path / "jobs").glob(f"*/{solved.name[:8]}*/agent/oracle.txt")
    assert "Milestone: " in log.read_text(), "the agent can have its candidate judged"
    verdicts = [json.loads(path.read_text()) for path in (tmp_path / "home").glob("service/cpu/verdicts/*/*")]
    assert sum(verdict["status"] == "correct" for verdict in verdicts) == 2, "measured anew for the reward"
