"""What a run is: its identity, its folders, and the rule that one run works in a home at a time.

Nothing here imports Prefect, MLflow or torch, so that a finished run is answered in an instant.

    home/lock                       one run at a time
    home/dvc, home/remote           the data set's workspace and its DVC remote
    home/datasets/<version>/        tasks.parquet, metrics.json, README.md, dvc.lock
    home/stages/<name>-<key>/       one stage: checkpoint, curves, trajectories, state, stage.json, record.json
    home/verdicts                   every judgement, so that a resumed stage sees the same ones
    home/prefect, home/mlflow       their databases
    home/runs/<run_id>/             run.json (written last), manifest.json, report.html, report.json, settings.json
    home/champions, home/evaluations/<epoch>/    champions' checkpoints, evaluations by hand
    home/audit/<model>/             the audit chain of promotions, one file an entry
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.core.config import PROJECT, Params, Resolved
from components.core.errors import UserError
from components.core.files import digest_json, digest_tree, free_bytes, read_json, verify_files, write_json

STAGES = ("dataset", "coldstart", "warmup", "rejection", "critic", "agentic", "evaluation", "promotion")
"""In order; `--from` takes one of these."""
SOURCES = ("components", "flows", "agent_workdir")
RUN_FILE = "run.json"
HOME_SLOT = "cuda-agent-home"
"""Prefect's global concurrency limit of one: the deployed flow that holds it works in the home."""
MANIFEST = "manifest.json"
"""Of a run: the digest of everything that it made."""
LEAST_FREE_BYTES = 256 * 2**20
LOCK_SECONDS = 3.0
"""A killed run's children die a moment after it and may hold the lock until then."""


@functools.cache
def code_revision() -> str:
    """Digest of the sources that a result depends on: a change of any of them makes a new revision."""
    return digest_json({room: digest_sources(PROJECT / room) for room in SOURCES})


def digest_sources(folder: Path) -> dict[str, str]:
    """Digest of every source file below `folder`, compiled ones left out."""
    return {name: digest for name, digest in digest_tree(folder).items() if "__pycache__" not in name}


@dataclass(frozen=True)
class Rerun:
    """A wish to do a stage, and what follows it, once more. `number` tells one wish from the next."""

    stage: str
    number: int

    def reaches(self, stage: str) -> bool:
        return STAGES.index(stage) >= STAGES.index(self.stage)


class Busy(UserError):
    """Somebody else holds what is needed; waiting mends it."""


class PipelineRun:
    """One run: parameters, code and wish give its key, wherever its home is."""

    def __init__(self, resolved: Resolved, redo: Rerun | None = None):
        self.params: Params = resolved.params
        self.sources = resolved.sources
        self.profile = resolved.profile
        self.home = Path(resolved.params.home).expanduser().resolve()
        self.code = code_revision()
        self.redo = redo
        self.base_key = digest_json(
            {"params": self.params.model_dump(mode="json", exclude={"home"}), "code": self.code}
        )
        self.key = digest_json(
            {"base": self.base_key, "redo": None if redo is None else [redo.stage, redo.number]}
        )

    @property
    def run_id(self) -> str:
        return self.key[:12]

    @property
    def folder(self) -> Path:
        return self.home / "runs" / self.run_id

    def stage_key(self, stage: str, name: str, sections: tuple[str, ...], upstream: dict[str, str]) -> str:
        """Digest of everything that the result of `name` (a part of `stage`) depends on: sections of the parameters, inputs, code."""
        values = {
            section: value
            for section, value in self.params.model_dump(mode="json").items()
            if section in sections
        }
        number = self.redo.number if self.redo is not None and self.redo.reaches(stage) else 0
        return digest_json(
            {"name": name, "params": values, "upstream": upstream, "code": self.code, "redo": number}
        )

    def stage_folder(self, name: str, key: str) -> Path:
        return self.home / "stages" / f"{name}-{key[:12]}"


def open_run(resolved: Resolved, redo_from: str = "") -> PipelineRun:
    """The run that these parameters mean in their home.

    With `redo_from` the stage and all that follow are to be done once more. The wish is kept in the home, so that a
    killed redo is continued, by the same command or without `--from`, and a finished one makes room for the next.
    """
    first = PipelineRun(resolved)
    file = first.home / "redo.json"
    wishes: dict[str, Any] = read_json(file) if file.is_file() else {}
    found = wishes.get(first.base_key)
    redo = Rerun(**found) if found else None
    if not redo_from:
        return PipelineRun(resolved, redo)
    if redo_from not in STAGES:
        raise UserError(f"--from {redo_from}: no such stage; give one of {', '.join(STAGES)}.")
    night = PipelineRun(resolved, redo)
    if redo is not None and redo.stage == redo_from and not (night.folder / RUN_FILE).is_file():
        return night
    if redo is None and not (night.folder / RUN_FILE).is_file() and not any(first.home.glob("stages/*")):
        raise UserError(f"--from {redo_from}: nothing was run in {first.home} yet; run without --from first.")
    redo = Rerun(redo_from, redo.number + 1 if redo else 1)
    prepare_home(first.home)
    write_json(file, wishes | {first.base_key: {"stage": redo.stage, "number": redo.number}})
    return PipelineRun(resolved, redo)


def finished(night: PipelineRun) -> dict[str, Any] | None:
    """The record of this run if it is complete and its final artefacts are what they were; None if it is not complete.

    Raises UserError when a checkpoint of the finished run was damaged since.
    """
    if not (night.folder / RUN_FILE).is_file():
        return None
    from components.evaluation.results import read_record  # numpy comes with it

    record = read_record(night.folder / RUN_FILE)
    for stage in record["stages"]:
        folder = Path(stage["checkpoint"])
        if not folder.is_dir() or not folder.is_relative_to(night.home):
            return None
        verify_files(folder)
    return record


def prepare_home(home: Path) -> None:
    """Make the home folder and see that it can be written; UserError otherwise."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{home}: the disk is full; free some space or give another folder with --home, then run the same command again."
            ) from error
        raise UserError(
            f"{home}: the home folder cannot be written ({error.strerror}); give another one with --home."
        ) from error
    if free_bytes(home) < LEAST_FREE_BYTES:
        needed = f"a run needs {LEAST_FREE_BYTES / 2**20:.0f} MiB"
        raise UserError(
            f"{home}: the disk has {free_bytes(home) / 2**20:.0f} MiB left and {needed}; free some space or give another folder with --home."
        )


@contextlib.contextmanager
def home_lock(home: Path) -> Iterator[None]:
    """Hold the home for this process; UserError names the process that holds it already."""
    prepare_home(home)
    with (home / "lock").open("a+") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if time.monotonic() > deadline:
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                    raise Busy(
                        f"{home}: another run (process {holder}) works here; wait for it, stop it, or give another folder with --home."
                    ) from error
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def check_environment(night: PipelineRun) -> None:
    """See, before anything is started, that the programs a run cannot do without are installed, and that what its last steps read
    and write is named right: a night later is late to learn it. UserError otherwise."""
    from components.evaluation.suites import (  # pyarrow: a finished run is told without it
        HELD_OUT,
        load_suite,
    )
    from components.sandbox.preflight import check_isolation
    from components.storage.factory import open_store

    params = night.params
    needed = {"g++": "g++"} | ({"nvcc": "the CUDA toolkit (nvcc)"} if params.device == "cuda" else {})
    for program, package in needed.items():
        if shutil.which(program) is None:
            raise UserError(
                f"device {params.device}: {program} is not installed, so no kernel can be built; install {package}, for instance with apt-get."
            )
    check_isolation(params.sandbox, params.device)
    open_store(params.store, night.home)
    if params.evaluation.suite != HELD_OUT:
        load_suite(params, Path())


def interface_commands(night: PipelineRun) -> dict[str, str]:
    """What opens MLflow's and Prefect's own interfaces on this home."""
    programs = Path(sys.executable).parent
    tracking = night.params.registry.tracking_uri or f"sqlite:///{night.home / 'mlflow' / 'mlflow.db'}"
    return {
        "mlflow": f"{programs / 'mlflow'} ui --backend-store-uri {tracking}   then http://127.0.0.1:5000",
        "prefect": f"PREFECT_HOME={night.home / 'prefect'} {programs / 'prefect'} server start   then http://127.0.0.1:4200",
    }


def prepare_environment(home: Path) -> None:
    """Settings of the embedded defaults; call before Prefect or MLflow is imported. What a person has set is kept."""
    defaults = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "prefect" / "results"),
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
        "GIT_PYTHON_REFRESH": "quiet",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if "PREFECT_API_URL" not in os.environ:
        # The embedded server: its database and its settings belong to this home alone.
        os.environ["PREFECT_HOME"] = str(home / "prefect")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
