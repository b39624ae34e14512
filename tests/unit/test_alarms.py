"""Faults and alarms: which faults are retried and how long, events of a stage, Prometheus metrics."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE
from requests.exceptions import ConnectionError as RequestsConnectionError

from components.core import telemetry
from components.core.config import PROJECT
from components.core.errors import InfrastructureError, UserError
from components.core.progress import Quiet
from components.storage import StoreUnavailable
from flows import progress
from flows.deployments import DELAYS, retry_by_kind, retry_kind
from flows.progress import METRICS_FILE, PROGRESS, EventProgress, MetricsProgress
from flows.run_context import Busy


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Busy("home"), "busy"),
        (InfrastructureError("zygote"), "judge"),
        (StoreUnavailable("away"), "service"),
        (httpx.ConnectError("refused"), "service"),
        (RequestsConnectionError("refused"), "service"),
        (MlflowException("later", error_code=TEMPORARILY_UNAVAILABLE), "service"),
        (UserError("params.yaml: a mistake"), None),
        (ValueError("a mistake in the code"), None),
        (PermissionError(13, "denied"), None),
    ],
    ids=repr,
)
def test_faults_that_pass_are_told_from_mistakes(error: Exception, kind: Any) -> None:
    assert retry_kind(error) == kind


def test_the_cause_counts_however_it_was_wrapped() -> None:
    try:
        try:
            raise ConnectionResetError("peer")
        except ConnectionResetError as error:
            raise RuntimeError("the step failed") from error
    except RuntimeError as wrapped:
        assert retry_kind(wrapped) == "service"


def test_each_kind_has_its_own_back_off_and_an_end() -> None:
    faults: list[Exception] = [ConnectionError("a"), Busy("b"), ConnectionError("c")]
    slept: list[float] = []

    def work() -> str:
        if faults:
            raise faults.pop(0)
        return "done"

    assert retry_by_kind(work, lambda _: None, slept.append) == "done"
    assert slept == [DELAYS["service"][0], DELAYS["busy"][0], DELAYS["service"][1]]

    def never() -> None:
        raise ConnectionError("away for good")

    slept.clear()
    with pytest.raises(ConnectionError):
        retry_by_kind(never, lambda _: None, slept.append)
    assert tuple(slept) == DELAYS["service"]


def test_a_mistake_is_raised_at_once() -> None:
    slept: list[float] = []
    with pytest.raises(UserError):
        retry_by_kind(lambda: (_ for _ in ()).throw(UserError("no")), lambda _: None, slept.append)
    assert slept == []


def curve(home: Path, stage: str, **figures: float) -> None:
    folder = home / "stages" / f"{stage}-0"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(figures) + "\n")


def test_progress_is_told_at_most_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(progress, "emit_event", lambda event, **_: told.append(event))
    signals = EventProgress(Quiet(), "run")
    for step in range(20):
        signals.update("agentic", step + 1, 150)
    assert told == [PROGRESS]


def test_metrics_of_a_stage_and_of_verdicts_are_in_the_text_file(tmp_path: Path) -> None:
    curve(tmp_path, "agentic", step=3, tokens_per_second_rollout=1234.5)
    with telemetry.judging() as status:
        status.append("correct")
    MetricsProgress(Quiet(), tmp_path).update("agentic", 4, 150, reward=1.5)
    text = (tmp_path / METRICS_FILE).read_text()
    assert 'cuda_agent_stage_figure{figure="tokens_per_second_rollout",stage="agentic"} 1234.5' in text
    assert 'cuda_agent_stage_step{stage="agentic"} 4.0' in text
    assert 'cuda_agent_verdicts_total{status="correct"}' in text


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist() -> None:
    known = {sample.name for metric in telemetry.REGISTRY.collect() for sample in metric.samples} | {
        metric.name for metric in telemetry.REGISTRY.collect()
    }
    known |= {f"{name}_total" for name in known} | {f"{name}_bucket" for name in known}
    for file in ("grafana/cuda-agent.json", "prometheus/alerts.yaml"):
        asked = set(re.findall(r"\bcuda_agent_\w+", (PROJECT / "infra" / file).read_text()))
        assert asked and asked <= known, asked - known
    board = json.loads((PROJECT / "infra" / "grafana" / "cuda-agent.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) and all(panel["targets"] for panel in board["panels"])
