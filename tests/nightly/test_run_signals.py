"""Signals to a whole pipeline run: one sentence, the right exit code, no process left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CLI = [sys.executable, "-m", "components.cli"]


def test_sigterm_to_all_of_a_run_is_one_sentence_and_leaves_no_process(tmp_path: Path) -> None:
    """Send SIGTERM to the whole process group, as a service manager does, with Prefect's server and DVC."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))
    } | {"PYTHONFAULTHANDLER": "1"}
    errors = tmp_path / "errors"
    with errors.open("wb") as file:
        words = [*CLI, "run", "--profile", "ci", "--home", str(tmp_path / "home")]
        night = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=file, env=environment, start_new_session=True
        )
    deadline = time.monotonic() + 300
    while "dataset" not in errors.read_text():
        assert night.poll() is None and time.monotonic() < deadline, errors.read_text()
        time.sleep(0.1)
    os.killpg(night.pid, signal.SIGTERM)
    try:
        assert night.wait(120) == 143, errors.read_text()
    except subprocess.TimeoutExpired:
        night.send_signal(signal.SIGABRT)  # Python prints the stacks of all threads
        night.wait()
        pytest.fail(errors.read_text())
    assert (
        errors.read_text().splitlines()[-1]
        == "cuda-agent: ended by SIGTERM; the same command continues where it stopped."
    )
    named = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]
    assert not psutil.wait_procs(named, timeout=60)[1]
