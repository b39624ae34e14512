"""The DVC workspace in which a data set is uploaded."""

from pathlib import Path

import pytest
from dvc.config import Config

from components.core.config import resolve
from flows import dataset_dvc

PARAMS = resolve("smoke").params


@pytest.mark.parametrize("name", ["run #2", "a, b", "it's"])
def test_the_remote_is_in_the_home_whatever_the_homes_name_is(tmp_path: Path, name: str) -> None:
    dataset_dvc.initialise_workspace(tmp_path, PARAMS, tmp_path / name)
    found = Config.load_file(tmp_path / ".dvc" / "config")
    assert found["remote"]["store"]["url"] == str(tmp_path / name / "remote")
