"""MLflow runs: one for each run of the pipeline, with a child run for each stage, a step of the pipeline.

Every call can be repeated after the pipeline run was killed. A run is found by its tag `cuda_agent.run_key`,
so no second one is created. The child run of a finished stage is not changed. A tag of the child run of an
unfinished stage has the number of steps that were already logged, so that no step is logged twice.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from alembic.util import CommandError
from sqlalchemy import NullPool, create_engine
from sqlalchemy.exc import SQLAlchemyError

from components.core.errors import UserError
from components.core.promotion_params import DATABASE, Registry
from components.core.records import reason

# By default, MLflow sends usage data to its makers, and it logs a line for every table that it creates.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "false")

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracing.client import TracingClient
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("alembic").setLevel(logging.WARNING)

RUN_KEY = "cuda_agent.run_key"
KIND = "cuda_agent.kind"
STAGE_KEY = "cuda_agent.stage_key"
STAGE = "cuda_agent.stage"
# Tag with the number of steps whose figures a stage's child run has.
LOGGED_STEPS = "cuda_agent.logged_steps"
# The file of a stage's curves.
CURVES = "metrics.jsonl"
# Seconds between two measurements of the machine's load.
LOAD_SECONDS = 30
# Seconds between two reads of the curves of a stage that is running.
CURVE_SECONDS = 15.0
# Longest wait for the first answer of a tracking server.
ANSWER_SECONDS = 10
# Ports of database servers whose address names none.
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
# Kind of experiment for which MLflow's pages show runs and charts first, and not traces of applications.
EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}


def import_store(params: Registry) -> None:
    """Import the modules that MLflow otherwise imports at its first access to a database.

    Nothing is imported if `registry.tracking_uri` is the address of a server. The caller does this while
    another process starts, which saves time.
    """
    if not params.tracking_uri.startswith("http"):
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def connect(params: Registry, home: Path) -> MlflowClient:
    """Return a client of MLflow's tracking store, which is created if it does not exist.

    The store is that of `registry.tracking_uri`, or else a database in `home`, the folder of all runs. Raises
    UserError if this database is damaged, is no file, or was made by another version of MLflow, or if the
    server of `registry.tracking_uri`, of MLflow or of a database, does not answer within ANSWER_SECONDS or
    MLflow cannot use this address.
    The address becomes MLflow's global setting.
    """
    (home / "mlflow" / "artifacts").mkdir(parents=True, exist_ok=True)
    uri = params.uri(home)
    port = PORTS.get(uri.partition(":")[0].partition("+")[0])
    try:
        _ = (port or uri.startswith("http")) and urlsplit(uri).port
    except ValueError:  # whose text may have a part of the password
        raise UserError(
            "registry.tracking_uri: is no valid address; write characters such as / and @ in its password as "
            "%2F and %40."
        ) from None
    # Some of MLflow's own helpers (artifact resolution of logged models) read the global setting.
    mlflow.set_tracking_uri(uri)
    try:
        # Without these, MLflow would try for minutes.
        if uri.startswith("http"):
            http_request(get_default_host_creds(uri), "/health", "GET", max_retries=0, timeout=ANSWER_SECONDS)
        elif port:
            parts = urlsplit(uri)
            socket.create_connection((parts.hostname, parts.port or port), ANSWER_SECONDS).close()
            create_engine(uri, poolclass=NullPool).connect().close()
        elif not params.tracking_uri:
            (home / DATABASE).open("ab").close()
        return MlflowClient(tracking_uri=uri)
    except (OSError, ImportError, MlflowException, CommandError, SQLAlchemyError) as error:
        if params.tracking_uri:  # which may have a password
            raise UserError(
                f"registry.tracking_uri: MLflow cannot use this address ({reason(error)}); start its server, "
                "or give another address."
            ) from error
        fault = str(error).splitlines()[0].partition(". ")[0]
        raise UserError(
            f"{home / DATABASE}: MLflow {mlflow.__version__} cannot use this database ({fault}); restore it "
            f"from its backup, run mlflow db upgrade '{uri}' if it is older, or give another --home."
        ) from error


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings and lists by their dotted names.

    For example, {"a": {"b": 1}} gives {"a.b": 1}. A list item is named by its value of the key `name`, or by
    its index if it has no such key.
    """
    if isinstance(value, Mapping):
        items: Iterable[tuple[str, Any]] = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items = (
            (str(item["name"]) if isinstance(item, Mapping) and "name" in item else str(index), item)
            for index, item in enumerate(value)
        )
    else:
        return {prefix.removesuffix("."): value}
    return {name: leaf for key, item in items for name, leaf in flatten(item, f"{prefix}{key}.").items()}


def numbers(value: Any) -> dict[str, float]:
    """Return the leaves of nested mappings and lists that are finite numbers, by their dotted names.

    For example, {"a": {"b": 1, "c": "x"}} gives {"a.b": 1.0}. Characters that MLflow does not allow in a name
    are replaced by underscores.
    """
    leaves = {re.sub(r"[^\w\-. :/]", "_", key): leaf for key, leaf in flatten(value).items()}
    return {
        key: float(leaf)
        for key, leaf in leaves.items()
        if isinstance(leaf, int | float) and not isinstance(leaf, bool) and math.isfinite(leaf)
    }


class MlflowRun:
    """The MLflow run of one pipeline run, which is created, or opened again if it exists, and set to RUNNING.

    `run_key` is the key of the pipeline run, a digest of its parameters and code, and `name` the name that a
    new MLflow run gets. Artifacts are stored in `home`, the folder of all runs, if `registry.tracking_uri` is
    empty. Raises UserError if the experiment was deleted in MLflow.
    """

    def __init__(self, client: MlflowClient, params: Registry, home: Path, run_key: str, name: str):
        self.client = client
        self.run_key = run_key
        self.experiment_id = _experiment(client, params, home)
        self.load: SystemMetricsMonitor | None = None
        run = self._find("night") or client.create_run(
            self.experiment_id, tags={RUN_KEY: run_key, KIND: "night"}, run_name=name
        )
        self.run_id = run.info.run_id
        client.update_run(self.run_id, status="RUNNING")

    def watch(self) -> None:
        """Start to log the load of the machine as metrics `system/…`, until `end` is called.

        The load is measured every LOAD_SECONDS.
        """
        self.load = SystemMetricsMonitor(
            self.run_id,
            sampling_interval=LOAD_SECONDS,
            resume_logging=True,
            tracking_uri=self.client.tracking_uri,
        )
        self.load.start()

    def describe(self, parameters: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Log all resolved parameters of the run, and tags such as its id, profile and code revision.

        `parameters` are nested sections. MLflow does not change a parameter that is logged already. If the
        run continues with another value of a parameter that does not change results, it gets a tag
        `changed.<parameter>` with that value.
        """
        texts = {
            key: json.dumps(value) if isinstance(value, list | dict) else str(value)
            for key, value in flatten(parameters).items()
        }
        logged = self.client.get_run(self.run_id).data.params
        self.tags({f"changed.{key}": text for key, text in texts.items() if logged.get(key, text) != text})
        self.client.log_batch(
            self.run_id, params=[Param(key, text) for key, text in texts.items() if key not in logged]
        )
        self.tags(tags)

    def dataset(self, version: str, folder: Path, figures: Mapping[str, Any]) -> None:
        """Log the data set as an input of the run, with its version as digest, without copying its files.

        `folder` is the folder of the data set. MLflow gets the first 36 characters of `version` as digest,
        and all of it as the tag `dataset.version`. The numbers in `figures` become metrics of the run, with
        names that begin with `data.`.
        """
        meta = Dataset(
            name="tasks", digest=version[:36], source_type="local", source=json.dumps({"uri": str(folder)})
        )
        self.client.log_inputs(
            self.run_id, datasets=[DatasetInput(meta, tags=[InputTag("mlflow.data.context", "training")])]
        )
        self.tags({"dataset.version": version})
        self.figures({"data": figures})

    @contextlib.contextmanager
    def follow(self, name: str, key: str, folder: Path) -> Iterator[None]:
        """Log the curves of a stage every CURVE_SECONDS while the `with` block, which runs the stage, lasts.

        A stage is a step of the pipeline. `key` is the digest of everything on which the stage `name`
        depends, and `folder` is its folder with the file of curves, metrics.jsonl. Errors of MLflow are
        ignored, because the points that are missing are logged later.
        """
        done = threading.Event()

        def log_curves() -> None:
            while not done.wait(CURVE_SECONDS):
                if (folder / CURVES).is_file():
                    # What a fault of the tracking server leaves out is logged later.
                    with contextlib.suppress(MlflowException):
                        self._log_curves(self._stage_run(name, key, folder), folder)

        thread = threading.Thread(target=log_curves, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def stage(self, name: str, key: str, folder: Path, record: Mapping[str, Any]) -> None:
        """Log the curves, figures, folder and trajectories of one stage as a child run, and end that run.

        A stage is a step of the pipeline. `key` is the digest of everything on which the stage `name`
        depends, and `folder` has its files. The figures are the numbers in `record`, which become metrics
        `stage.NAME`. Does nothing if a finished child run with this name and `key` exists.
        """
        child = self._stage_run(name, key, folder)
        if child.info.status == "FINISHED":
            return
        self._log_curves(child, folder)
        run_id, time = child.info.run_id, int(folder.stat().st_mtime * 1000)
        # The prefix tells the figures of the whole stage from the curves.
        self.client.log_batch(
            run_id,
            [Metric(f"stage.{figure}", value, time, 0) for figure, value in numbers(record).items()],
        )
        from components.registry.traces import (
            log_traces,  # imports torch, which most commands of the registry do not need
        )

        log_traces(TracingClient(self.client.tracking_uri), self.experiment_id, run_id, name, folder)
        self.client.set_terminated(run_id, "FINISHED")

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Log a table as the artifact `name`.json, with the columns of the first of its rows.

        Does nothing if there are no rows or the artifact exists, because MLflow would append the rows.
        """
        file = f"{name}.json"
        if rows and file not in {item.path for item in self.client.list_artifacts(self.run_id)}:
            columns = {column: [row.get(column) for row in rows] for column in rows[0]}
            self.client.log_table(self.run_id, columns, file)

    def figures(self, record: Any) -> None:
        """Log every number of a nested record as a metric with its dotted name, such as evaluation.pass_rate.

        Metrics that the MLflow run already has with the same value are left out.
        """
        present = self.client.get_run(self.run_id).data.metrics
        self.client.log_batch(
            self.run_id,
            [Metric(key, value, 0, 0) for key, value in numbers(record).items() if present.get(key) != value],
        )

    def tags(self, tags: Mapping[str, str]) -> None:
        self.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def end(self, status: Literal["FINISHED", "FAILED"]) -> None:
        """Set the final status of the run, and stop logging the load of the machine.

        The load is logged only if `watch` was called.
        """
        if self.load is not None:
            self.load.finish()
        self.client.set_terminated(self.run_id, status)

    def _stage_run(self, name: str, key: str, folder: Path) -> Run:
        """Return the child run of the stage `name`, which is created if it does not exist.

        A stage is a step of the pipeline. `key` is the digest of everything on which the stage depends, and
        `folder` becomes a tag. If the child run has another `key`, its tags are replaced, so that its curves
        are logged again from the first step, and it is set to RUNNING.
        """
        child = self._find("stage", name)
        if child is not None and child.data.tags.get(STAGE_KEY) == key:
            return child
        tags = {
            RUN_KEY: self.run_key,
            KIND: "stage",
            STAGE: name,
            STAGE_KEY: key,
            LOGGED_STEPS: "0",
            "mlflow.parentRunId": self.run_id,
            "folder": str(folder),
        }
        if child is None:
            return self.client.create_run(self.experiment_id, tags=tags, run_name=name)
        self.client.log_batch(child.info.run_id, tags=[RunTag(tag, value) for tag, value in tags.items()])
        self.client.update_run(child.info.run_id, status="RUNNING")
        return self.client.get_run(child.info.run_id)

    def _log_curves(self, child: Run, folder: Path) -> None:
        """Log the points of a stage's curves from the first step that the child run does not have yet.

        `child` is the MLflow run of the stage, and `folder` its folder with metrics.jsonl. Does nothing if
        there is no such file.
        """
        path = folder / CURVES
        points = list(_curve(path, int(child.data.tags[LOGGED_STEPS]))) if path.is_file() else []
        if points:
            steps = RunTag(LOGGED_STEPS, str(max(point.step for point in points) + 1))
            # MLflow divides many points among several requests, and sends tags with the first one.
            self.client.log_batch(child.info.run_id, points)
            self.client.log_batch(child.info.run_id, tags=[steps])

    def _find(self, kind: str, stage: str = "") -> Run | None:
        """Return the oldest MLflow run of this pipeline run with `kind` and `stage`, or None if none exists.

        The key of the pipeline run, the kind and the stage are tags of an MLflow run. `kind` is `night` for
        the run of the whole pipeline and `stage` for a child run. `stage` is the name of a step of the
        pipeline; an empty `stage` stands for any.
        """
        rule = f"tags.`{RUN_KEY}` = '{self.run_key}' and tags.`{KIND}` = '{kind}'" + (
            f" and tags.`{STAGE}` = '{stage}'" if stage else ""
        )
        found = self.client.search_runs(
            [self.experiment_id], rule, order_by=["attributes.start_time ASC"], max_results=1
        )
        return found[0] if found else None


def _experiment(client: MlflowClient, params: Registry, home: Path) -> str:
    """Return the id of the MLflow experiment `registry.experiment`, which is created if it does not exist.

    Its artifacts are stored in `home`, the folder of all runs, if `registry.tracking_uri` is empty. Raises
    UserError if the experiment was deleted in MLflow.
    """
    found = client.get_experiment_by_name(params.experiment)
    if found is None:
        location = None if params.tracking_uri else (home / "mlflow" / "artifacts").as_uri()
        try:
            return str(
                client.create_experiment(params.experiment, artifact_location=location, tags=EXPERIMENT_KIND)
            )
        except MlflowException:
            # Another run may have created the experiment in between.
            if (found := client.get_experiment_by_name(params.experiment)) is None:
                raise
    if found.lifecycle_stage != "active":
        raise UserError(
            f"registry.experiment: {params.experiment} was deleted in MLflow; "
            "restore it there or give another name."
        )
    return str(found.experiment_id)


def _curve(path: Path, first_step: int) -> Iterable[Metric]:
    """Yield the points of all curves in `path`, the metrics.jsonl of a stage, from the step `first_step` on.

    A stage is a step of the pipeline, and its curves have a point for each training step. Each line of the
    file has the values of one training step by name. Each point has the modification time of the file, which
    is about the time at which the step ended.
    """
    time = int(path.stat().st_mtime * 1000)
    for index, line in enumerate(path.read_text().splitlines()):
        point = json.loads(line)
        step = int(point.pop("step", index))
        if step >= first_step:
            for key, value in numbers(point).items():
                yield Metric(key, value, time, step)
