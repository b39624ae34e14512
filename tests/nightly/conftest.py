"""Fixtures that several nightly tests share."""

from pathlib import Path

import pytest
from filelock import FileLock

from components.core.progress import Quiet
from components.synthesis.mined_operators import OperatorTable
from components.synthesis.operator_table import load_operator_table


@pytest.fixture(scope="session")
def seeds(pytestconfig: pytest.Config) -> Path:
    """Folder of the mined table, which is kept between runs, since mining takes most of a minute."""
    folder = pytestconfig.cache.mkdir("seeds")
    with FileLock(folder / "lock"):
        load_operator_table(folder, Quiet())
    return folder


@pytest.fixture(scope="session")
def table(seeds: Path) -> OperatorTable:
    return load_operator_table(seeds, Quiet())
