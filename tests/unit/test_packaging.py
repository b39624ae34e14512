"""The application installs as an editable checkout only; hooks and workflow call the Makefile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.core.config import PROJECT


def test_a_wheel_is_refused_with_one_sentence_that_names_the_command(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "-w", str(tmp_path), str(PROJECT)], capture_output=True, text=True)
    sentences = [line for line in done.stderr.splitlines() if "cuda-agent" in line]
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert len(sentences) == 1 and "make environment" in sentences[0]


def test_a_source_archive_is_refused(tmp_path: Path) -> None:
    code = f"import build_backend; build_backend.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT / ".ci", capture_output=True, text=True)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr.startswith("cuda-agent runs from its checkout only") and done.stderr.count("\n") == 1


def test_hooks_and_workflow_are_sound() -> None:
    hooks = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "mypy"]
    workflow = yaml.safe_load((PROJECT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["test"]["steps"][-1] == {"run": ".ci/run"}
    assert "make test-all" in (PROJECT / ".ci" / "run").read_text()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_the_tests_of_a_file_run_on_one_worker(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@test_packaging"), "pytest-xdist did not see the group"
