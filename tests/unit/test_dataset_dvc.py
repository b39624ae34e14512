"""The DVC workspace in which a data set is uploaded."""

from pathlib import Path

import pytest
import yaml
from dvc.config import Config

from components.core.config import resolve
from components.core.task import KernelTask, write_tasks
from components.storage import FolderStore, open_store
from flows import dataset_dvc, run_context
from flows.data import prepare_workspace

PARAMS = resolve("smoke").params


@pytest.mark.parametrize("name", ["run #2", "a, b", "it's"])
def test_the_remote_is_in_the_home_whatever_the_homes_name_is(tmp_path: Path, name: str) -> None:
    dataset_dvc.initialise_workspace(tmp_path, PARAMS, tmp_path / name)
    found = Config.load_file(tmp_path / ".dvc" / "config")
    assert found["remote"]["store"]["url"] == str(tmp_path / name / "remote")


@pytest.mark.parametrize("url", ["artifacts", "./artifacts/", "~/artifacts", "file://{}/artifacts"])
def test_a_store_in_a_folder_has_the_remote_in_it_wherever_dvc_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    params = resolve("smoke", [f"store.url={url.format(tmp_path)}"]).params
    store = open_store(params.store, tmp_path)
    assert isinstance(store, FolderStore) and store.root == tmp_path / "artifacts"
    assert dataset_dvc.remote_url(params, tmp_path) == str(tmp_path / "artifacts" / "dvc")


def test_the_file_with_a_token_is_found_where_dvc_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = (f"home={tmp_path / 'home'}", "pool.service=http://host:1", "pool.service_token=token.txt")
    workspace = prepare_workspace(run_context.open_run(resolve("smoke", sets)))
    written = yaml.safe_load((workspace / "params.yaml").read_text())
    assert written["pool"]["service_token"] == str(tmp_path / "token.txt")


def test_a_home_in_the_folder_of_the_data_set_is_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(tmp_path / "tasks.parquet", [KernelTask(code="x = 1")])
    uploaded = []

    def run(workspace: Path, arguments: list[str]) -> None:
        uploaded.append(sorted(path.name for path in (workspace / dataset_dvc.OUTPUT).rglob("*")))
        (workspace / "dvc.lock").touch()

    monkeypatch.setattr(dataset_dvc, "_dvc", run)
    dataset_dvc.push(PARAMS, tmp_path / ".cuda-agent", tmp_path)
    assert uploaded == [["tasks.parquet"]] * 2
