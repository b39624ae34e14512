"""Imports lead from a higher layer to a lower one only, and components know no orchestrator."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from components.core.config import PROJECT

ORCHESTRATORS = {"prefect", "mlflow", "dvc"}
LAYERS = (
    {"components.core"},
    {"components.storage", "components.policy", "components.sandbox", "components.planning"},
    {"components.bootstrap", "components.judge"},
    {"components.agent", "components.synthesis"},
    {"components.service"},
    {"components.training", "components.evaluation"},
    {"components.registry"},
    {"flows"},
    {"components.cli"},
)
"""From the lowest to the highest; packages of one layer do not import each other."""
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
FILES = sorted(
    path
    for top in ("components", "flows")
    for path in (PROJECT / top).rglob("*.py")
    if path != PROJECT / "components" / "__init__.py" and "shipped" not in path.parts
)


def package_of(module: str) -> str:
    """components.judge.pool.local_pool -> components.judge; flows.nightly -> flows."""
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
            whole = module in ("components", "flows")
            found |= {f"{module}.{alias.name}" for alias in node.names} if whole else {module}
    return found


def name_of(path: Path) -> str:
    """The module's dotted name."""
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_run_downward_only(path: Path) -> None:
    own = package_of(name_of(path))
    for module in imports(path):
        if module.split(".")[0] in ("components", "flows") and package_of(module) != own:
            other = package_of(module)
            assert LAYER[other] < LAYER[own], f"{name_of(path)} imports {module}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_below_flows_and_registry_imports_an_orchestrator(path: Path) -> None:
    if package_of(name_of(path)) not in ("flows", "components.registry"):
        assert not {module.split(".")[0] for module in imports(path)} & ORCHESTRATORS


def test_the_rule_would_notice(tmp_path: Path) -> None:
    file = tmp_path / "guilty.py"
    file.write_text(
        "def f():\n    from mlflow import MlflowClient\n    import components.cli\n    from components import"
        " storage\n"
    )
    assert imports(file) == {"mlflow", "components.cli", "components.storage"}
