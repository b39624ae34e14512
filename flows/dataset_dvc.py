"""Upload data set versions to the DVC remote, restore them, and run DVC commands.

The files of a version are stored in the DVC remote, which stores equal files once. The dvc.lock file that
names them is stored in the artifact store as `datasets/<version>/dvc.lock`. So any version can be restored
without the folder that it was built in. DVC works in folders that are no git repositories.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from components.core.errors import UserError, refuse
from components.core.files import atomic_folder, write_changed
from components.core.params import Params
from components.core.task import dataset_version
from components.storage import open_store, store_folder

# Folder of the data set in a DVC workspace.
OUTPUT = Path("data") / "tasks"
# A dvc.yaml with the one stage of which a workspace needs the output, to upload or restore it.
STAGE = f"stages: {{tasks: {{cmd: cuda-agent data build, outs: [{OUTPUT.as_posix()}]}}}}\n"


def remote_url(params: Params, home: Path) -> str:
    """Return the address of the DVC remote: an s3:// URL, or the absolute path of a folder.

    DVC looks for a relative path below its workspace, and a workspace may be a temporary folder.
    """
    url = params.store.url
    if url.startswith("s3://"):
        return f"{url.rstrip('/')}/dvc"
    return str(store_folder(url) / "dvc" if url else home / "remote")


def initialise_workspace(workspace: Path, params: Params, home: Path) -> Path:
    """Write a DVC configuration with the address of the remote into `workspace`, and return that folder.

    DVC commands run in a workspace. The remote is the folder `remote` in `home`, the folder of all runs, or
    the folder `dvc` below store.url if that parameter is set.
    """
    lines = [
        "[core]",
        "    no_scm = True",
        "    analytics = false",
        "    remote = store",
        "['remote \"store\"']",
        # In quotes, because otherwise a number sign begins a comment, and a comma makes a list.
        f'    url = """{remote_url(params, home)}"""',
        *([f'    endpointurl = """{params.store.endpoint}"""'] if params.store.endpoint else []),
    ]
    write_changed(workspace / ".dvc" / "config", "\n".join(lines) + "\n")
    return workspace


def run_dvc(
    workspace: Path,
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    on_line: Callable[[str], None] = lambda _: None,
) -> tuple[int, list[str]]:
    """Run one DVC command in the folder `workspace`, and return its exit status and the lines of its output.

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
    """Upload the data set in `folder` to the DVC remote, and return its version, a digest of 64 digits.

    A version that is already stored is not uploaded again. `home` is the folder of all runs. Raises UserError
    if `folder` has no tasks.parquet, or if DVC fails, for instance because the remote cannot be reached.
    """
    tasks = folder / "tasks.parquet"
    refuse((not tasks.is_file(), f"{folder}: holds no tasks.parquet; give the folder of a data set."))
    version = dataset_version(tasks)
    if not open_store(params.store, home).exists(_lock_key(version)):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".dvc.", dir=home) as name:
            workspace = initialise_workspace(Path(name), params, home)
            (workspace / "dvc.yaml").write_text(STAGE)

            def left_out(place: str, names: list[str]) -> list[str]:
                # The home may be in the folder, where the copy would never end.
                return [one for one in names if one == "dvc.lock" or (Path(place) / one).resolve() == home]

            shutil.copytree(folder, workspace / OUTPUT, ignore=left_out)
            _dvc(workspace, ["commit", "--quiet", "--force", "tasks"])
            _dvc(workspace, ["push", "--quiet", "tasks"])
            keep_lock(params, home, version, workspace / "dvc.lock")
    return version


def keep_lock(params: Params, home: Path, version: str, lock: Path) -> None:
    """Store the dvc.lock file `lock` of a version whose files `dvc push` has already uploaded.

    The file names the version's files by their digests, and is put into the artefact store. If the store has
    a dvc.lock file of this version already, that file is kept. It names equal files, although the parameters
    in it may differ.
    """
    store = open_store(params.store, home)
    if not store.exists(_lock_key(version)):
        store.put(_lock_key(version), lock)


def pull(params: Params, home: Path, version: str) -> Path:
    """Return the folder `datasets/<version>` in `home`, and restore it from the remote if it is missing.

    `home` is the folder of all runs. `version`, the digest of a data set, has all 64 digits, or at least its
    first 8. Raises UserError if no version or more than one begins with these digits, if DVC fails, or if the
    downloaded data set has another version.
    """
    store = open_store(params.store, home)
    keys = [entry.key for entry in store.entries(f"datasets/{version}")]
    found = {key.split("/")[1] for key in keys if key.endswith("/dvc.lock")}
    refuse(
        (
            len(found) != 1 or len(version) < 8,
            f"{remote_url(params, home)}: holds no version {version}; "
            "give one that a run or cuda-agent data push has kept.",
        )
    )
    version = found.pop()
    folder = home / "datasets" / version
    if has_version(folder, version):
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".dvc.", dir=home) as name:
        workspace = initialise_workspace(Path(name), params, home)
        (workspace / "dvc.yaml").write_text(STAGE)
        store.get(_lock_key(version), workspace / "dvc.lock")
        _dvc(workspace, ["pull", "--quiet", "tasks"])
        refuse(
            (
                not has_version(workspace / OUTPUT, version),
                f"{remote_url(params, home)}: what is kept as {version} is something else; "
                "push it again from a good copy.",
            )
        )
        return keep_version(home, workspace)


def keep_version(home: Path, workspace: Path) -> Path:
    """Return the folder `datasets/<version>` in `home` with a copy of the data set in a DVC workspace.

    `home` is the folder of all runs. The copy is made unless the folder has this version and a dvc.lock
    already. `workspace` is the folder in which DVC built or restored the data set.
    """
    version = dataset_version(workspace / OUTPUT / "tasks.parquet")
    folder = home / "datasets" / version
    if not has_version(folder, version) or not (folder / "dvc.lock").is_file():
        with atomic_folder(folder) as temporary:
            shutil.copytree(workspace / OUTPUT, temporary, dirs_exist_ok=True)
            shutil.copyfile(workspace / "dvc.lock", temporary / "dvc.lock")
    return folder


def has_version(folder: Path, version: str) -> bool:
    """Return whether tasks.parquet in the folder has this version (a digest); False if it cannot be read."""
    try:
        return dataset_version(folder / "tasks.parquet") == version
    except UserError:
        return False


def _lock_key(version: str) -> str:
    return f"datasets/{version}/dvc.lock"


def _dvc(workspace: Path, arguments: Sequence[str]) -> None:
    status, lines = run_dvc(workspace, arguments)
    refuse(
        (
            status != 0,
            f"dvc {arguments[0]} failed ({' '.join(' '.join(lines).split())[-300:]}); "
            "see that the remote of store.url can be reached, then run the same command again.",
        )
    )
