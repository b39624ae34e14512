"""DVC runs the stages of dvc.yaml, shows their metrics and plots, and stops at what a stage refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from synthesis_fixtures import CI, InProcess, parameters
from typer.testing import CliRunner

from components.cli.main import app
from components.core.config import PROJECT, resolve
from components.core.progress import Quiet
from components.synthesis.dataset import build_dataset


def test_dvc_accepts_the_stages(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text((PROJECT / "dvc.yaml").read_text())
    CliRunner().invoke(
        app,
        [
            "params",
            "--profile",
            "ci",
            "--write",
            str(tmp_path / "params.yaml"),
            *(f"--set={item}" for item in CI),
        ],
    )
    assert resolve(path=tmp_path / "params.yaml").params == parameters()

    def run(*command: str) -> str:
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "DVC_NO_ANALYTICS": "1",
            "PYTHONPATH": str(PROJECT),
        }
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True, env=environment
        ).stdout

    def dvc(*arguments: str) -> str:
        return run(sys.executable, "-m", "dvc", *arguments)

    run("git", "init", "--quiet")
    dvc("init", "--quiet")
    build_dataset(parameters(), tmp_path / "data" / "tasks", InProcess(), Quiet())
    dvc("commit", "--force", "--quiet", "tasks")
    assert "up to date" in dvc("status")
    assert (
        json.loads(dvc("metrics", "show", "--json"))[""]["data"]["data/tasks/metrics.json"]["data"]["train"]
        == 12
    )
    dvc("plots", "show", "--out", "plots")
    assert "Funnel" in (tmp_path / "plots" / "index.html").read_text()
    run("git", "add", "--all")
    run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "base")
    # A window that holds nothing reaches the stage that reads it, and no other, and stops it.
    with pytest.raises(subprocess.CalledProcessError) as failed:
        dvc("exp", "run", "-S", "data.numel=[10, 20]", "-S", "data.seed=5")
    told = failed.value.stdout + failed.value.stderr
    assert "cuda-agent: data.numel: no shape between 10 and 20" in told
