"""Versions of data sets in the remote: pushed and restored by their digest, by DVC alone.

A version's pointer (what DVC calls a .dvc file) lies in the artifact store as `datasets/<version>/data.dvc`; its bytes lie
in the DVC remote, equal files once. So any version of any night comes back without a repository and without its lock.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from components.core.config import Params
from components.core.errors import UserError
from components.core.files import atomic_folder, atomic_write
from components.core.task import dataset_version
from components.storage import Store, open_store

POINTER = "data.dvc"


def remote_url(params: Params, home: Path) -> str:
    return f"{params.store.url.rstrip('/')}/dvc" if params.store.url else str(home / "remote")


def initialised(workspace: Path, params: Params, home: Path) -> Path:
    """The folder as a workspace of DVC, without a repository; an equal setting is left untouched, so that DVC sees no change."""
    config, text = workspace / ".dvc" / "config", _settings(params, home)
    if not config.is_file() or config.read_text() != text:
        atomic_write(config, text)
    return workspace


def _settings(params: Params, home: Path) -> str:
    lines = [
        "[core]",
        "    no_scm = True",
        "    analytics = false",
        "    remote = store",
        "['remote \"store\"']",
        f"    url = {remote_url(params, home)}",
    ]
    return (
        "\n".join(
            [*lines, *([f"    endpointurl = {params.store.endpoint}"] if params.store.endpoint else [])]
        )
        + "\n"
    )


def push(params: Params, home: Path, folder: Path) -> str:
    """Keep the data set in `folder`; its version. UserError when there is none in it."""
    tasks = folder / "tasks.parquet"
    if not tasks.is_file():
        raise UserError(f"{folder}: holds no tasks.parquet; give the folder of a data set.")
    version = dataset_version(tasks)
    store = open_store(params.store, home)
    if not store.exists(_key(version)):
        with tempfile.TemporaryDirectory(dir=_workspaces(home)) as name:
            workspace = initialised(Path(name), params, home)
            shutil.copytree(folder, workspace / "data", ignore=shutil.ignore_patterns("dvc.lock"))
            _dvc(workspace, ["add", "--quiet", "data"])
            _dvc(workspace, ["push", "--quiet"])
            # Last: a version is kept when its pointer is there.
            store.put(_key(version), workspace / POINTER)
    _put_text(store, home, f"datasets/by-prefix/{version[:8]}", version)
    return version


def keep_pointer(params: Params, home: Path, version: str, lock: Path, output: str) -> None:
    """Keep the pointer of a version that `dvc push` has brought to the remote already: it stands in the lock."""
    values = yaml.safe_load(lock.read_text())
    outs = [
        out for stage in values["stages"].values() for out in stage.get("outs", ()) if out["path"] == output
    ]
    store = open_store(params.store, home)
    _put_text(
        store, home, _key(version), yaml.safe_dump({"outs": [outs[0] | {"path": "data"}]}, sort_keys=False)
    )
    _put_text(store, home, f"datasets/by-prefix/{version[:8]}", version)


def pull(params: Params, home: Path, version: str) -> Path:
    """The folder `datasets/<version>` in the home, restored from the remote where it is not there or not whole.

    Raises UserError when no such version was kept, or when what comes back is not it."""
    store = open_store(params.store, home)
    with tempfile.TemporaryDirectory(dir=_workspaces(home)) as name:
        workspace = initialised(Path(name), params, home)
        try:
            if len(version) < 64:
                store.get(f"datasets/by-prefix/{version[:8]}", workspace / "version")
                version = (workspace / "version").read_text()
            folder = home / "datasets" / version
            if holds(folder, version):
                return folder
            store.get(_key(version), workspace / POINTER)
        except KeyError as error:
            raise UserError(
                f"{remote_url(params, home)}: holds no version {version}; give one that a run or cuda-agent data push has kept."
            ) from error
        _dvc(workspace, ["pull", "--quiet"])
        if not holds(workspace / "data", version):
            raise UserError(
                f"{remote_url(params, home)}: what is kept as {version} is something else; push it again from a good copy."
            )
        with atomic_folder(folder) as temporary:
            shutil.copytree(workspace / "data", temporary, dirs_exist_ok=True)
    return folder


def holds(folder: Path, version: str) -> bool:
    """Whether this version lies in the folder, whole."""
    try:
        return dataset_version(folder / "tasks.parquet") == version
    except UserError:
        return False


def _key(version: str) -> str:
    return f"datasets/{version}/{POINTER}"


def _workspaces(home: Path) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    return home


def _put_text(store: Store, home: Path, key: str, text: str) -> None:
    if not store.exists(key):
        with tempfile.TemporaryDirectory(dir=_workspaces(home)) as name:
            (Path(name) / "text").write_text(text)
            store.put(key, Path(name) / "text")


def _dvc(workspace: Path, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(
        command,
        cwd=workspace,
        env=os.environ | {"DVC_NO_ANALYTICS": "1"},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        told = " ".join((done.stderr or done.stdout).split())[-300:]
        raise UserError(
            f"dvc {arguments[0]} failed ({told}); see that the remote of store.url can be reached, then run the same command again."
        )
