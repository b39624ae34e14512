"""The Prefect task that builds the data set with DVC and keeps every version of the data set.

DVC decides which of its stages have to run again. It works in the folder `dvc` of the home, the folder of all
runs, with the resolved parameters of the run. DVC allows one writer at a time and fails at once if its lock
is held, so this module tries a command four times before the run fails.
"""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from components.core.config import PROJECT
from components.core.errors import IsolationUnavailable, StageFailed, UserError
from components.core.files import (
    DISK_FULL,
    atomic_write,
    digest_json,
    read_json,
    write_changed,
)
from components.core.progress import Progress
from components.core.sources import project_digests
from components.synthesis.operator_table import library_versions
from flows.dataset_dvc import initialise_workspace, keep_lock, keep_version, run_dvc
from flows.run_context import Busy, PipelineRun
from flows.steps import DatasetRecord, counted

# Parts of DVC's messages about a lock that another process holds.
LOCK_HELD = ("Unable to acquire lock", "is busy, it is being blocked")
# DVC's message about a damaged lock file, which this module deletes before it tries the command again. DVC
# holds a lock while it reads or writes that file, but it does not replace the file atomically. So a damaged
# file was left by a DVC process that was killed.
LOCK_DAMAGED = "Unable to read RWLock-file"
# Seconds to wait before each further try of a DVC command whose lock is held.
RETRY_SECONDS = (2.0, 5.0, 15.0)
# Pattern of a line of progress that `cuda-agent data build` prints, with groups step, total and figures, and
# pattern of one of the figures, with groups name and value.
PROGRESS_LINE = re.compile(r"^(?:data|seeds) +(\d+)/(\d+)(.*)$")
FIGURE = re.compile(r"  ([a-z]\w*) (\S+)")
# Pattern of DVC's message about a failed stage, with the stage's exit code as its group.
EXITED = re.compile(r"exited with (\d+)")
# Exit codes of `cuda-agent data build`, and the prefix of the line in which it says why it failed.
BAD_INPUT, NO_ISOLATION = 2, 3
ERROR_PREFIX = "cuda-agent: "
# Source paths whose change causes the data set to be built again. The judge's sources are not listed, because
# the data set depends on the judge only through the parameters and the verdicts.
MAKERS = ("components/synthesis/", "components/bootstrap/operator_chain.py", "components/core/task.py")


@task(name="dataset", task_run_name="dataset", persist_result=False, cache_policy=NO_CACHE)
@counted
def dataset(run: PipelineRun, progress: Progress) -> DatasetRecord:
    """Build the data set if its inputs changed, push it to the DVC remote, and copy it into the home.

    The inputs are parameters, sources and library versions. The copy is the folder `datasets/<version>` of
    the home, the folder of all runs. Returns the record of the data set, in which `cached` is true if nothing
    was built. Raises Busy if another process keeps DVC's lock, UserError for bad input or a full disk,
    IsolationUnavailable if this machine cannot run the sandbox, and StageFailed if DVC fails for another
    reason.
    """
    started = time.monotonic()
    workspace = prepare_workspace(run)
    before, maker = _text(workspace / "dvc.lock"), maker_digest(run)
    # DVC detects changes of parameters and outputs. The sources that build the data set lie outside of its
    # workspace, so a change of them is detected here and forces DVC to run every stage.
    force = before != "" and _text(workspace / ".dvc" / "made_by") != maker
    dvc(workspace, ["repro", *(["--force"] if force else [])], progress)
    atomic_write(workspace / ".dvc" / "made_by", maker)
    after = _text(workspace / "dvc.lock")
    # With the address of the remote, because another store.url is another remote, which has nothing yet.
    pushed = digest_json([_text(workspace / ".dvc" / "config"), after])
    if _text(workspace / ".dvc" / "pushed") != pushed:
        dvc(workspace, ["push"], progress)
        atomic_write(workspace / ".dvc" / "pushed", pushed)
    folder = keep_version(run.home, workspace)
    keep_lock(run.params, run.home, folder.name, workspace / "dvc.lock")
    cached = after == before and not force
    get_run_logger().info(f"version {folder.name[:12]}, {'up to date' if cached else 'built'}")
    return DatasetRecord(
        version=folder.name,
        folder=folder.relative_to(run.home).as_posix(),
        figures=read_json(folder / "metrics.json"),
        cached=cached,
        seconds=round(time.monotonic() - started, 3),
    )


def prepare_workspace(run: PipelineRun) -> Path:
    """Create or update the folder in which DVC works, and return its path.

    It is the folder `dvc` in the home, the folder of all runs. It contains the project's dvc.yaml, a
    params.yaml with the run's parameters, in which all paths are absolute, and the address of the DVC remote.
    """
    workspace = initialise_workspace(run.home / "dvc", run.params, run.home)
    write_changed(workspace / "dvc.yaml", (PROJECT / "dvc.yaml").read_text())
    # DVC runs in the folder of its workspace, where relative paths would name other files.
    values = run.params.model_dump(mode="json") | {"home": str(run.home)}
    values["data"]["against"] = [str(Path(path).resolve()) for path in run.params.data.against]
    if token := run.params.pool.service_token:
        values["pool"]["service_token"] = str(Path(os.path.expanduser(token)).resolve())
    write_changed(workspace / "params.yaml", yaml.safe_dump(values, sort_keys=False))
    return workspace


def dvc(workspace: Path, arguments: Sequence[str], progress: Progress) -> None:
    """Run a DVC command in the folder `workspace`, and try it again while another process holds DVC's lock.

    `arguments` are the words after `dvc`. Steps of the data set that the command prints are reported to
    `progress`. Raises Busy if another process still holds the lock after the last try. If the command that
    builds the data set fails because of bad input or without a sandbox, raises UserError or
    IsolationUnavailable with that command's message. Raises UserError if the disk is full, and StageFailed,
    which names a log file, after any other failure.
    """

    def report(line: str) -> None:
        if step := PROGRESS_LINE.match(line):
            figures = {name: float(value) for name, value in FIGURE.findall(step[3])}
            progress.update("dataset", int(step[1]), int(step[2]), **figures)

    environment = {
        # The commands in dvc.yaml start `python`, which must be the interpreter of this environment and must
        # import the modules of this project.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH", "")))),
        "PYTHONUNBUFFERED": "1",
    }
    for wait in (*RETRY_SECONDS, None):
        status, lines = run_dvc(workspace, arguments, environment=environment, on_line=report)
        if status == 0:
            return
        text = "\n".join(lines)
        if LOCK_DAMAGED in text:
            (workspace / ".dvc" / "tmp" / "rwlock").unlink(missing_ok=True)
        elif not any(sign in text for sign in LOCK_HELD):
            break
        if wait is None:
            raise Busy(
                f"{workspace}: another DVC command holds the lock; "
                "wait until it ends, then run the same command again."
            )
        time.sleep(wait)
    raise _failure(workspace, arguments[0], lines)


def _failure(workspace: Path, command: str, lines: Sequence[str]) -> Exception:
    """Return the exception that describes why a DVC command such as `repro` failed.

    `lines` are the lines of the command's output, which decide the type of the exception: UserError,
    IsolationUnavailable or, for every other reason, StageFailed. Before a StageFailed is returned, the output
    is written to `.dvc/failed.log` in the workspace.
    """
    newest = lines[::-1]
    sentence = next((line.removeprefix(ERROR_PREFIX) for line in newest if line.startswith(ERROR_PREFIX)), "")
    status = next((int(match[1]) for match in map(EXITED.search, newest) if match), 0)
    if status:
        newest = [line for line in newest if not line.startswith("ERROR: ")]  # DVC only says that it failed
    if status == NO_ISOLATION:
        return IsolationUnavailable(sentence)
    if status == BAD_INPUT and sentence:
        return UserError(sentence)
    if any("No space left on device" in line for line in lines):
        return UserError(f"{workspace}: {DISK_FULL}")
    log = workspace / ".dvc" / "failed.log"
    atomic_write(log, "\n".join(lines) + "\n")
    reason = sentence or next(filter(None, newest), "it printed nothing")
    return StageFailed(
        f"dataset: dvc {command} failed: {reason.removeprefix('ERROR: ')[:500]}; "
        f"all that it printed is in {log}, and the same command continues."
    )


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def maker_digest(run: PipelineRun) -> str:
    """Return the digest of everything that makes the data set, apart from the parameters.

    The digest covers the sources in MAKERS, the library versions, and the number of the run's newest `--from`
    request (to run stages again), or 0 if that request does not build the data set again.
    """
    files = {name: digest for name, digest in project_digests().items() if name.startswith(MAKERS)}
    return digest_json([files, library_versions(), run.rerun_number("dataset")])
