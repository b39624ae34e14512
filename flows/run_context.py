"""The identity and the folders of a pipeline run, and the lock that admits one run at a time to a home.

A home is a folder in which runs keep everything. This module does not import Prefect, MLflow or torch, so
that a finished run is reported without delay.

    home/lock                       held by the run that works in the home
    home/dvc, home/remote           the data set's workspace and its DVC remote
    home/datasets/<version>/        tasks.parquet, metrics.json, README.md, dvc.lock
    home/stages/<name>-<key>/       one stage: checkpoint, curves, trajectories, stage.json, record.json,
                                    key.json (what its key was made of)
    home/verdicts                   the journal of all results of the judge, which a resumed stage reads
    home/prefect, home/mlflow       the databases of Prefect and MLflow
    home/runs/<run_id>/             night.json (its start), stages.txt (stages that it uses), settings.json,
                                    report.html, report.json, manifest.json; run.json last
    home/champions                  checkpoints of champions, the promoted model versions
    home/evaluations/<digest>/      evaluations outside of a pipeline run, by policy, tasks and parameters
    home/audit/<model>/             the audit chain (log) of promotions, one file for each entry
"""

import contextlib
import errno
import fcntl
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from components.core.config import PROJECT, Resolved, check_policy_source, result_values
from components.core.errors import UserError, refuse
from components.core.files import (
    DISK_FULL,
    digest_json,
    read_json,
    sqlalchemy_path,
    verify_files,
    write_json,
)
from components.core.params import Params
from components.core.records import TrainingStage, read_as
from components.core.sources import project_digests
from components.registry.audit import AuditChain
from flows.stage_keys import reward_digests

# Names of the stages in their order, which are the permitted values of `--from`.
STAGES = ("dataset", "coldstart", "warmup", "rejection", "critic", "agentic", "evaluation", "promotion")
# File in a run's folder with the run's record. It exists only if the run is finished.
RUN_FILE = "run.json"
# File in the home with the requests to run stages again.
REQUESTS = "redo.json"
# Name of Prefect's global concurrency limit, whose only slot a deployed flow takes to work in the home.
HOME_SLOT = "cuda-agent-home"
# Free disk space in bytes that is needed to start a run.
LEAST_FREE_BYTES = 256 * 2**20
# Longest wait for the lock of the home. If a run was killed, its children are killed a moment later and may
# hold the lock until then.
LOCK_SECONDS = 3.0


@functools.cache
def source_commit() -> str:
    """Return the Git commit of the project, with `-dirty` if files differ from the commit.

    The result is "" if the project is no Git repository or Git is not installed.
    """
    command = ["git", "-C", str(PROJECT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Rerun:
    """A request (`--from`) to run the stage `stage`, one of STAGES, and all later stages of a run again.

    `number` counts the requests for one run from 1, so that each request gives the stages new keys.
    """

    stage: str
    number: int


class Busy(UserError):
    """Error raised if another process holds a lock, so that the same command can succeed later."""


class PipelineRun:
    """One run of the pipeline, identified by a key.

    The key is a digest of the parameters, the code, `rerun` and `continues`. It does not depend on the home,
    on parameters that only change throughput, or on comments in the code. `resolved` are the parameters with
    their profile. `rerun` is the request to run some stages again, or None. `continues` is the id of the run
    with the same parameters whose time budget ended its training, and whose stages this run continues. It is
    empty for the first run with its parameters. The run's folder is `runs/<run_id>` in the home, the folder
    of all runs, and `run_id` is the beginning of the key.
    """

    def __init__(self, resolved: Resolved, rerun: Rerun | None = None, continues: str = ""):
        self.params: Params = resolved.params
        self.profile = resolved.profile
        self.home = Path(resolved.params.home).expanduser().resolve()
        self.code = digest_json(project_digests() | reward_digests(resolved.params.reward))
        # The `--set` options, for people. The home is not one of them, because it is shown for itself.
        options = (origin for origin in resolved.sources.values() if origin.startswith("--set "))
        sets = dict.fromkeys(option.removeprefix("--set ") for option in options)
        self.sets = tuple(item for item in sets if not item.startswith("home="))
        self.rerun = rerun
        self.continues = continues
        self.base_key = digest_json({"params": result_values(self.params), "code": self.code})
        parts = {"base": self.base_key, "redo": [rerun.stage, rerun.number] if rerun else None}
        self.key = digest_json(parts | ({"continues": continues} if continues else {}))
        self.run_id = self.key[:12]
        self.folder = self.home / "runs" / self.run_id

    def rerun_number(self, stage: str) -> int:
        """Return the number of the run's request (`--from`) to run `stage` again, or 0 if there is none.

        `stage` is one of STAGES. A request is for the stage that it names and all later ones.
        """
        if self.rerun is None or STAGES.index(stage) < STAGES.index(self.rerun.stage):
            return 0
        return self.rerun.number


def open_run(resolved: Resolved, rerun_from: str = "") -> PipelineRun:
    """Return the run with these parameters, with the request to run stages again that its home stores for it.

    The home is the folder of all runs. If `rerun_from` names a stage, a new request is made that this stage
    and all later stages run again. The run stores it when it begins (`keep_request`), so if the rerun is
    killed, the same command continues it, with or without `--from`. As long as a rerun from this stage is
    unfinished, no new request is made. If `rerun_from` is "" and the time budget ended the training of the
    run, another run with the same parameters, which continues the unfinished stage, is returned. If
    `rerun_from` is not "", UserError is raised if it is not a stage of the run, or if nothing was run in the
    home yet.
    """
    first = PipelineRun(resolved)
    request = _requests(first.home).get(first.base_key)
    run = PipelineRun(resolved, request) if request else first
    if not rerun_from:
        # The time budget of each run before the last one ended in a stage, which the next run continues.
        while left_unfinished(run.folder):
            run = PipelineRun(resolved, run.rerun, run.run_id)
        return run
    is_finished = (run.folder / RUN_FILE).is_file()
    advantages = run.params.agentic.advantages
    refuse(
        (
            rerun_from not in STAGES,
            f"--from {rerun_from}: no such stage; give one of {', '.join(STAGES)}.",
        ),
        (
            rerun_from in get_args(TrainingStage) and rerun_from not in run.params.night.stages,
            f"--from {rerun_from}: night.stages leaves this stage out; give one that runs.",
        ),
        (
            rerun_from == "critic" and advantages != "critic",
            f"--from critic: agentic.advantages is {advantages}, so this run trains no critic; give agentic.",
        ),
        (
            run.rerun is None and not is_finished and not any(first.home.glob("stages/*")),
            f"--from {rerun_from}: nothing was run in {first.home} yet; run without --from first.",
        ),
    )
    if run.rerun is not None and run.rerun.stage == rerun_from and not is_finished:
        return run
    rerun = Rerun(rerun_from, run.rerun.number + 1 if run.rerun else 1)
    return PipelineRun(resolved, rerun)


def keep_request(run: PipelineRun) -> None:
    """Store the request of `run` to run stages again, if it has one, in redo.json in the home.

    The caller holds the lock of the home, the folder of all runs.
    """
    if run.rerun is not None:
        requests = _requests(run.home) | {run.base_key: run.rerun}
        write_json(run.home / REQUESTS, {key: asdict(item) for key, item in requests.items()})


def _requests(home: Path) -> dict[str, Rerun]:
    """Return the requests to run stages again in `home`, the folder of all runs, by the key of the run."""
    file = home / REQUESTS
    remedy = "delete it, and name the stage with --from again"
    return read_as(dict[str, Rerun], file, remedy) if file.is_file() else {}


def left_unfinished(folder: Path) -> dict[str, Any] | None:
    """Return the record of the stage at which the time budget of the run in `folder` ended training, or None.

    The keys of the record are `run_id`, `seed`, `stage` (a name) and `progress` (updates that are done and
    updates in all, or None if the stage was not begun). The result is None if all stages were finished, if
    the run is not finished, or if its run.json cannot be read.
    """
    found: dict[str, Any] | None = record_of(folder).get("night", {}).get("unfinished")
    return found


def record_of(folder: Path, name: str = RUN_FILE) -> dict[str, Any]:
    """Return the content of the file `name` in the folder of a run or stage, by default that of run.json.

    The result is empty if there is no such file, for example because the run is not finished, or if it is
    damaged. A damaged run.json is reported by the function `finished` when that run is continued.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(read_json(folder / name))
    return {}


def newest_runs(home: Path) -> list[Path]:
    """Return the folders of the finished runs in `home`, the folder of all runs, the newest first."""
    files = (home / "runs").glob(f"*/{RUN_FILE}")
    return [file.parent for file in sorted(files, key=lambda file: -file.stat().st_mtime)]


def finished(run: PipelineRun) -> dict[str, Any] | None:
    """Return the content of the run's run.json if the run is finished and its checkpoints exist, or None.

    Raises UserError if run.json or a checkpoint of the finished run is damaged.
    """
    if not (run.folder / RUN_FILE).is_file():
        return None
    from components.evaluation.compare import read_record  # imports numpy

    record = read_record(run.folder / RUN_FILE)
    for stage in record["stages"]:
        folder = Path(stage["checkpoint"])
        if not folder.is_dir() or not folder.is_relative_to(run.home):
            return None
        verify_files(folder)
    return record


def prepare_home(home: Path) -> None:
    """Create the folder `home`, in which runs keep everything, if it is missing.

    Raises UserError if the folder cannot be written, or if less than LEAST_FREE_BYTES of its disk are free.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        reason = f"the home folder cannot be written ({error.strerror}); give another one with --home."
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(f"{home}: {DISK_FULL if is_full else reason}") from error
    free = shutil.disk_usage(home).free
    refuse(
        (
            free < LEAST_FREE_BYTES,
            f"{home}: the disk has {free / 2**20:.0f} MiB left and a run needs "
            f"{LEAST_FREE_BYTES / 2**20:.0f} MiB; free some space or give another folder with --home.",
        )
    )


@contextlib.contextmanager
def home_lock(home: Path) -> Iterator[None]:
    """Hold the lock of `home`, the folder of all runs, while the block runs.

    The lock admits one process at a time, and the folder is created if it is missing. Raises Busy, which
    names the process that holds the lock, if the lock is not free within LOCK_SECONDS, and UserError if the
    folder cannot be written or its disk is almost full.
    """
    prepare_home(home)
    with (home / "lock").open("a+") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise Busy(
                        f"{home}: another run (process {file.read().strip() or 'unknown'}) works here; "
                        "wait for it, stop it, or give another folder with --home."
                    ) from error
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def check_training(params: Params) -> None:
    """Raise UserError unless the policy has a chat template and the section `pool` has the means to train it.

    Trainers, samplers and judges must fit the memory of their GPUs, and a Ray cluster must have the resources
    of the trainers and judges if they are to run on one. A policy from scratch needs no chat template. This
    is checked before a run starts, because the run itself would fail only after hours.
    """
    from components.planning.role_memory import check_fits  # imports numpy
    from components.policy.checkpoint import load_tokenizer

    check_policy_source(params)
    check_fits(params)
    source = params.policy.base if params.policy.source == "champion" else params.policy.source
    if source != "scratch":
        load_tokenizer(Path(source))
    if params.pool.trainers or params.pool.judges:
        try:
            from components.planning.ray_cluster import check_capacity
        except ModuleNotFoundError as error:
            raise UserError(
                f"pool: {params.pool.trainers} trainers and {params.pool.judges} judges need Ray; install "
                "the extra ray, or set pool.trainers and pool.judges to 0 for one process."
            ) from error
        check_capacity(params)


def check_environment(run: PipelineRun) -> None:
    """Raise UserError if something that a run needs is missing on this machine or cannot be read.

    That is a compiler, the artefact store, the signing key, the audit chain (the log of decisions), the suite
    of evaluation tasks, and the programs in data.against. Raises IsolationUnavailable if the machine cannot
    run the sandbox. This is checked before a run starts, because the run itself would fail only after hours.
    """
    from components.evaluation.suites import HELD_OUT, load_suite  # imports pyarrow
    from components.sandbox.preflight import check_isolation
    from components.storage import open_store
    from components.synthesis.contamination import EvaluationPrograms

    params = run.params
    needed = {"g++": "g++"} | ({"nvcc": "the CUDA toolkit (nvcc)"} if params.device == "cuda" else {})
    refuse(
        *(
            (
                shutil.which(program) is None,
                f"device {params.device}: {program} is not installed, so no kernel can be built; "
                f"install {package}, for instance with apt-get.",
            )
            for program, package in needed.items()
        )
    )
    check_isolation(params.sandbox, params.device)
    open_store(params.store, run.home)
    chain = AuditChain.of(params.registry, run.home)
    chain.signer.sign({})
    chain.entries()
    if params.evaluation.suite != HELD_OUT:
        load_suite(params, Path())
    EvaluationPrograms(params.data.against)


def undecidable_gates(params: Params) -> list[str]:
    """Return a sentence for each gate that no version can pass because the suite has too few tasks.

    A gate is a condition of promotion. The number of tasks is data.held_out, or that of the suite that
    `evaluation.suite` names.
    """
    from components.evaluation.suites import HELD_OUT, load_suite  # imports pyarrow
    from components.registry.gates import too_few_tasks

    held_out = params.evaluation.suite == HELD_OUT
    return too_few_tasks(params.gate, params.data.held_out if held_out else len(load_suite(params, Path())))


def interface_commands(run: PipelineRun, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the commands that serve the web pages of MLflow and Prefect for this home, by program name.

    The names are "mlflow" and "prefect", and the home is the folder of all runs. Each text is a command line
    and the address to open in a browser after it was started. `record` is the run's record, which has the id
    of the MLflow experiment. Without `workflowType` in the address, MLflow shows the traces of applications
    first.
    """
    programs = Path(sys.executable).parent
    home = f"PREFECT_HOME={shlex.quote(str(run.home / 'prefect'))}"
    if "?" in home:
        home += f" PREFECT_SERVER_DATABASE_CONNECTION_URL={shlex.quote(prefect_database(run.home))}"
    address = re.sub(r"(://[^/?#:]*:)[^/?#]*@", r"\1***@", run.params.registry.uri(run.home))  # no password
    return {
        "mlflow": f"{programs / 'mlflow'} ui --backend-store-uri "
        f"{shlex.quote(address)}   then http://127.0.0.1:5000/#/experiments/"
        f"{record['experiment']}/runs?workflowType=machine_learning&compareRunsMode=CHART",
        "prefect": f"{home} {programs / 'prefect'} server start   then http://127.0.0.1:4200",
    }


def prefect_database(home: Path) -> str:
    """Return the SQLAlchemy URL of the database of Prefect's server in `home`, the folder of all runs."""
    return f"sqlite+aiosqlite:///{sqlalchemy_path(home / 'prefect' / 'prefect.db')}"


def prepare_environment(home: Path) -> None:
    """Set the environment variables that Prefect and MLflow read on import, unless they are set already.

    Prefect keeps results below `home`, the folder of all runs. If PREFECT_API_URL is not set, the run starts
    a Prefect server of its own, and PREFECT_HOME is replaced in any case by a folder there.
    """
    defaults = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "prefect" / "results"),
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
        "GIT_PYTHON_REFRESH": "quiet",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not os.environ.get("PREFECT_API_URL"):
        os.environ["PREFECT_HOME"] = str(home / "prefect")
        defaults["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = prefect_database(home)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
