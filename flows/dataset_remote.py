"""Upload data set versions to the DVC remote, restore them, and run DVC commands.

The files of a version are stored in the DVC remote, which stores equal files once. The .dvc file that refers
to them is stored in the artifact store as `datasets/<version>/data.dvc`. So any version can be restored
without the repository and the dvc.lock file that it was built with. DVC works in folders that are no git
repositories.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from components.core.errors import UserError
from components.core.files import atomic_folder, write_changed
from components.core.params import Params
from components.core.task import dataset_version
from components.storage import Store, open_store

# Name of the .dvc file, which refers to the files of a version in the DVC remote.
POINTER = "data.dvc"


def remote_url(params: Params, home: Path) -> str:
    return f"{params.store.url.rstrip('/')}/dvc" if params.store.url else str(home / "remote")


def initialise_workspace(workspace: Path, params: Params, home: Path) -> Path:
    """Write a DVC configuration with the address of the remote into `workspace`, and return that folder.

    The remote is a folder in `home`, or the one below store.url if that parameter is set.
    """
    lines = [
        "[core]",
        "    no_scm = True",
        "    analytics = false",
        "    remote = store",
        "['remote \"store\"']",
        f"    url = {remote_url(params, home)}",
    ]
    if params.store.endpoint:
        lines.append(f"    endpointurl = {params.store.endpoint}")
    write_changed(workspace / ".dvc" / "config", "\n".join(lines) + "\n")
    return workspace


def run_dvc(
    workspace: Path,
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    on_line: Callable[[str], None] = lambda _: None,
) -> tuple[int, list[str]]:
    """Run one DVC command, and return its exit status and the lines of its output.

    `arguments` are the words after `dvc`, and `environment` has variables that are added to those of this
    process. The output includes standard error. `on_line` is called with each line as soon as DVC prints it.
    If an exception is raised before DVC ends, DVC and all processes that it started are killed.
    """
    lines: list[str] = []
    # DVC gets a session of its own, so that DVC and every process that it starts can be killed together.
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=workspace,
        env=os.environ | {"DVC_NO_ANALYTICS": "1"} | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            on_line(lines[-1])
        return process.wait(), lines
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def push(params: Params, home: Path, folder: Path) -> str:
    """Upload the data set in `folder` to the DVC remote, and return its version.

    A version that is already stored is not uploaded again. Raises UserError if the folder has no
    tasks.parquet, or if DVC fails, for instance because the remote cannot be reached.
    """
    tasks = folder / "tasks.parquet"
    if not tasks.is_file():
        raise UserError(f"{folder}: holds no tasks.parquet; give the folder of a data set.")
    version = dataset_version(tasks)
    store = open_store(params.store, home)
    home.mkdir(parents=True, exist_ok=True)
    if not store.exists(_pointer_key(version)):
        with tempfile.TemporaryDirectory(dir=home) as name:
            workspace = initialise_workspace(Path(name), params, home)
            shutil.copytree(folder, workspace / "data", ignore=shutil.ignore_patterns("dvc.lock"))
            _dvc(workspace, ["add", "--quiet", "data"])
            _dvc(workspace, ["push", "--quiet"])
            # The .dvc file is stored last, because its presence means that the version is pushed completely.
            store.put(_pointer_key(version), workspace / POINTER)
    _put_text(store, home, _prefix_key(version), version)
    return version


def keep_pointer(params: Params, home: Path, version: str, lock: Path, output: str) -> None:
    """Store the .dvc file of a version whose files `dvc push` has already uploaded.

    The .dvc file is made from the entry for the path `output` in the dvc.lock file `lock`. The path is
    replaced by `data`, the folder into which `pull` restores the files.
    """
    stages = yaml.safe_load(lock.read_text())["stages"].values()
    out = next(out for stage in stages for out in stage.get("outs", ()) if out["path"] == output)
    store = open_store(params.store, home)
    _put_text(
        store,
        home,
        _pointer_key(version),
        yaml.safe_dump({"outs": [out | {"path": "data"}]}, sort_keys=False),
    )
    _put_text(store, home, _prefix_key(version), version)


def pull(params: Params, home: Path, version: str) -> Path:
    """Return the folder `datasets/<version>` in the home, and restore it from the remote if it is missing.

    `version` has all 64 digits, or at least its first 8. Raises UserError if no such version was pushed, if
    DVC fails, or if the downloaded data set has another version.
    """
    store = open_store(params.store, home)
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as name:
        workspace = initialise_workspace(Path(name), params, home)
        try:
            if len(version) < 64:
                store.get(_prefix_key(version), workspace / "version")
                version = (workspace / "version").read_text()
            folder = home / "datasets" / version
            if has_version(folder, version):
                return folder
            store.get(_pointer_key(version), workspace / POINTER)
        except KeyError as error:
            raise UserError(
                f"{remote_url(params, home)}: holds no version {version}; "
                "give one that a run or cuda-agent data push has kept."
            ) from error
        _dvc(workspace, ["pull", "--quiet"])
        if not has_version(workspace / "data", version):
            raise UserError(
                f"{remote_url(params, home)}: what is kept as {version} is something else; "
                "push it again from a good copy."
            )
        with atomic_folder(folder) as temporary:
            shutil.copytree(workspace / "data", temporary, dirs_exist_ok=True)
    return folder


def has_version(folder: Path, version: str) -> bool:
    """Return whether tasks.parquet in the folder has this version. Return False if it cannot be read."""
    try:
        return dataset_version(folder / "tasks.parquet") == version
    except UserError:
        return False


def _pointer_key(version: str) -> str:
    return f"datasets/{version}/{POINTER}"


def _prefix_key(version: str) -> str:
    return f"datasets/by-prefix/{version[:8]}"


def _put_text(store: Store, home: Path, key: str, text: str) -> None:
    if not store.exists(key):
        with tempfile.TemporaryDirectory(dir=home) as name:
            (Path(name) / "text").write_text(text)
            store.put(key, Path(name) / "text")


def _dvc(workspace: Path, arguments: Sequence[str]) -> None:
    status, lines = run_dvc(workspace, arguments)
    if status != 0:
        output = " ".join(" ".join(lines).split())[-300:]
        raise UserError(
            f"dvc {arguments[0]} failed ({output}); "
            "see that the remote of store.url can be reached, then run the same command again."
        )
