"""The house rules of DESIGN §3, held over every file: import arrows run downward only, and components know no orchestrator."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from components.config import PROJECT

ORCHESTRATORS = {"prefect", "mlflow", "dvc"}
FLOORS = {
    "components.config": 1,
    "components.files": 1,
    "components.task": 1,
    "components.progress": 1,
    "components.telemetry": 1,
    "components.planner": 2,
    "components.queueing": 1,
    "components.policy": 2,
    "components.sandbox": 2,
    "components.storage": 2,
    "components.agent": 3,
    "components.synthesis": 3,
    "components.training": 4,
    "components.evaluation": 4,
    "components.registry": 5,
    "flows": 6,
    "components.doctor": 7,
    "components.view": 7,
    "components.terminal": 7,
    "components.cli_agent": 7,
    "components.cli_train": 7,
    "components.cli_evaluation": 7,
    "components.cli_models": 7,
    "components.cli_production": 7,
    "components.cli_store": 7,
    "components.cli_data": 7,
    "components.cli": 7,
}
MAY_LOOK_IN = {"flows": {"components.view"}}
"""The deployed flow shows the same progress lines as the command; it imports them when it runs."""
FILES = sorted([*(PROJECT / "components").rglob("*.py"), *(PROJECT / "flows").rglob("*.py")])


def room(module: str) -> str:
    """components.sandbox.judge -> components.sandbox; flows.nightly -> flows."""
    parts = module.split(".")
    return parts[0] if parts[0] == "flows" else ".".join(parts[:2])


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, those for type checking alone left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module in ("components", "flows") else {module}
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: name_of(path))
def test_imports_run_downward_only(path: Path) -> None:
    own = room(name_of(path))
    assert own in FLOORS, f"{own} stands on no floor"
    for module in imports(path):
        if module.split(".")[0] not in ("components", "flows"):
            continue
        other = room(module)
        if other == own or other in MAY_LOOK_IN.get(own, set()):
            continue
        assert other in FLOORS, f"{module} stands on no floor"
        same_floor = FLOORS[other] == FLOORS[own]
        assert FLOORS[other] < FLOORS[own] or (same_floor and FLOORS[own] in (1, 7)), f"{name_of(path)} imports {module}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: name_of(path))
def test_nothing_below_flows_and_registry_imports_an_orchestrator(path: Path) -> None:
    if room(name_of(path)) not in ("flows", "components.registry"):
        assert not {module.split(".")[0] for module in imports(path)} & ORCHESTRATORS


def test_the_rule_would_notice(tmp_path: Path) -> None:
    file = tmp_path / "guilty.py"
    file.write_text("def f():\n    from mlflow import MlflowClient\n    import components.cli\n    from components import storage\n")
    assert imports(file) == {"mlflow", "components.cli", "components.storage"}
