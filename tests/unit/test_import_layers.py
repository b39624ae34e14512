"""Imports lead from a higher layer to a lower one only, and components know no orchestrator.

The contracts are those of import-linter in pyproject.toml.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from components.core.config import PROJECT


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_contracts_are_kept() -> None:
    done = lint_imports(PROJECT)
    assert done.returncode == 0 and "KEPT" in done.stdout, done.stdout + done.stderr


def test_the_contracts_notice_an_import_upward_and_one_of_an_orchestrator(tmp_path: Path) -> None:
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    for path in (PROJECT / "components", PROJECT / "flows"):
        for module in path.rglob("*.py"):
            empty = tmp_path / module.relative_to(PROJECT)
            empty.parent.mkdir(parents=True, exist_ok=True)
            empty.touch()
    assert lint_imports(tmp_path).returncode == 0
    (tmp_path / "components" / "core" / "text.py").write_text(
        "def f():\n    from mlflow import MlflowClient\n    import components.cli\n"
    )
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "components.core.text -> mlflow" in done.stdout
    assert "components.core.text -> components.cli" in done.stdout
