"""The data set: DVC decides what to make anew, this module asks it and keeps every version.

DVC works in a workspace of its own in the home folder, with the run's resolved parameters, and has one writer at a
time: it fails at once when another one holds its lock, so it is asked again a few times before a person is.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from prefect import task
from prefect.cache_policies import NO_CACHE

from components.core.config import PROJECT, Params
from components.core.errors import IsolationUnavailable, StageFailed, UserError
from components.core.files import atomic_folder, atomic_write, digest_file, digest_json, read_json
from components.core.progress import Progress
from components.core.task import dataset_version
from components.synthesis.dvc_stages import ERROR_PREFIX
from components.synthesis.operator_table import library_versions
from flows.dataset_remote import holds, initialised, keep_pointer
from flows.run_context import Busy, PipelineRun, digest_sources
from flows.steps import Record

OUTPUT = Path("data") / "tasks"
BUSY = ("Unable to acquire lock", "is busy, it is being blocked")
TORN = "Unable to read RWLock-file"
"""DVC notes who reads and writes in a file that it does not replace in one step, and reads it under a lock: one that cannot be read is what a
killed DVC left."""
RETRY_SECONDS = (2.0, 5.0, 15.0)
STEP = re.compile(r"^(?:data|seeds) (\d+)/(\d+)((?: \w+=\S+)*)$")
"""A progress line of components.synthesis.dvc_stages: step, total, figures."""
EXITED = re.compile(r"exited with (\d+)")
BAD_INPUT, NO_ISOLATION = 2, 3
"""Exit codes of components.synthesis.dvc_stages."""
MAKERS = ("components/synthesis", "components/core/task.py")
"""Sources that a data set is made from; the judge's part in it is in the parameters and the verdicts."""


@task(name="dataset", task_run_name="dataset", persist_result=False, cache_policy=NO_CACHE)
def dataset(night: PipelineRun, progress: Progress) -> Record:
    """Reproduce the data set, keep its version beside its lock file, and push it to the remote."""
    started = time.monotonic()
    workspace = prepare_workspace(night)
    before, wanted = _lock(workspace), made_by(night)
    # DVC sees parameters and outputs; the program that makes the data set lies outside of its workspace.
    force = before != "" and _marker(workspace, "made_by") != wanted
    dvc(workspace, ["repro", *(["--force"] if force else [])], night, progress)
    atomic_write(workspace / ".dvc" / "made_by", wanted)
    after = _lock(workspace)
    if _marker(workspace, "pushed") != after:
        dvc(workspace, ["push"], night, progress)
        atomic_write(workspace / ".dvc" / "pushed", after)
    kept = keep_version(night, workspace)
    keep_pointer(night.params, night.home, kept["version"], workspace / "dvc.lock", OUTPUT.as_posix())
    return kept | {"cached": after == before and not force, "seconds": round(time.monotonic() - started, 3)}


def made_by(night: PipelineRun) -> str:
    """What makes a data set beside its parameters: the program, and the wish to make it once more."""
    files = {
        place: digest_json(digest_sources(PROJECT / place))
        if (PROJECT / place).is_dir()
        else digest_file(PROJECT / place)
        for place in MAKERS
    }
    return digest_json(
        [
            files,
            library_versions(),
            night.redo.number if night.redo is not None and night.redo.reaches("dataset") else 0,
        ]
    )


def prepare_workspace(night: PipelineRun) -> Path:
    """The DVC project of this home: dvc.yaml as it is in the source, params.yaml as it was resolved, the remote."""
    workspace = initialised(night.home / "dvc", night.params, night.home)
    _write(workspace / "dvc.yaml", (PROJECT / "dvc.yaml").read_text())
    _write(workspace / "params.yaml", yaml.safe_dump(_absolute(night.params), sort_keys=False))
    return workspace


def _absolute(params: Params) -> dict[str, Any]:
    """The parameters with paths that mean the same from the workspace."""
    values: dict[str, Any] = params.model_dump(mode="json")
    values["data"]["against"] = [str(Path(path).resolve()) for path in params.data.against]
    if params.policy.source != "scratch":
        values["policy"]["source"] = str(Path(params.policy.source).resolve())
    return values


def keep_version(night: PipelineRun, workspace: Path) -> Record:
    """Copy the data set to `datasets/<version>`; equal versions are kept once."""
    version = dataset_version(workspace / OUTPUT / "tasks.parquet")
    folder = night.home / "datasets" / version
    if not holds(folder, version):
        with atomic_folder(folder) as temporary:
            shutil.copytree(workspace / OUTPUT, temporary, dirs_exist_ok=True)
            shutil.copyfile(workspace / "dvc.lock", temporary / "dvc.lock")
    figures: dict[str, Any] = read_json(folder / "metrics.json")
    return {"version": version, "folder": folder.relative_to(night.home).as_posix(), "figures": figures}


def dvc(workspace: Path, arguments: Sequence[str], night: PipelineRun, progress: Progress | None) -> None:
    """Run one DVC command in the workspace. UserError when its lock stays busy, or with the sentence of what it ran; StageFailed names the log of
    any other failure."""
    for wait in (*RETRY_SECONDS, None):
        lines, code = _run(workspace, arguments, night, progress)
        if code == 0:
            return
        text = "\n".join(lines)
        if TORN in text:
            (workspace / ".dvc" / "tmp" / "rwlock").unlink(missing_ok=True)
        elif not any(sign in text for sign in BUSY):
            break
        if wait is None:
            raise Busy(
                f"{workspace}: another DVC command holds the lock; wait until it ends, then run the same command again."
            )
        time.sleep(wait)
    told = next(
        (line.removeprefix(ERROR_PREFIX) for line in reversed(lines) if line.startswith(ERROR_PREFIX)), ""
    )
    code = next((int(found[1]) for found in map(EXITED.search, reversed(lines)) if found), 1)
    if code == NO_ISOLATION:
        raise IsolationUnavailable(told)
    if code == BAD_INPUT and told:
        raise UserError(told)
    if "No space left on device" in text:
        raise UserError(
            f"{workspace}: the disk is full; free some space or give another folder with --home, then run the same command again."
        )
    log = workspace / ".dvc" / "failed.log"
    atomic_write(log, text + "\n")
    said = told or next((line for line in reversed(lines) if line), "it said nothing")
    raise StageFailed(
        f"dataset: dvc {arguments[0]} failed: {said.removeprefix('ERROR: ')[:500]}; all that it printed is in {log}, and the same command goes on."
    )


def _run(
    workspace: Path, arguments: Sequence[str], night: PipelineRun, progress: Progress | None
) -> tuple[list[str], int]:
    """One attempt: its output lines, read for progress on the way, and its exit status."""
    environment = os.environ | {
        "DVC_NO_ANALYTICS": "1",
        "CUDA_AGENT_VERDICTS": str(night.home / "verdicts"),
        # dvc.yaml says `python`: the one of this environment, with this project's modules.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH", "")))),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "dvc", *arguments]
    lines: list[str] = []
    # A session of its own: DVC, what it runs, and the judge below that are stopped together.
    process = subprocess.Popen(
        command,
        cwd=workspace,
        env=environment,
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
            found = STEP.match(line)
            if found and progress is not None:
                figures = dict(pair.split("=") for pair in found[3].split())
                progress.update(
                    "dataset",
                    int(found[1]),
                    int(found[2]),
                    **{name: float(value) for name, value in figures.items()},
                )
        process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return lines, process.returncode


def _write(path: Path, text: str) -> None:
    """Leave an equal file untouched, so that DVC sees no change."""
    if not path.is_file() or path.read_text() != text:
        atomic_write(path, text)


def _lock(workspace: Path) -> str:
    path = workspace / "dvc.lock"
    return digest_file(path) if path.is_file() else ""


def _marker(workspace: Path, name: str) -> str:
    path = workspace / ".dvc" / name
    return path.read_text() if path.is_file() else ""
