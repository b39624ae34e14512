"""Faults and alarms: which faults are retried and how long, events of a stage, Prometheus metrics."""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE
from prefect_fixtures import free_port
from requests.exceptions import ConnectionError as RequestsConnectionError

from components.core import telemetry
from components.core.config import PROJECT, resolve
from components.core.errors import InfrastructureError, UserError
from components.core.progress import Quiet
from components.storage import StoreUnavailable
from flows.deployments import DELAYS, retry_by_kind, retry_kind
from flows.progress import COLLAPSING, METRICS_FILE, PROGRESS, EventProgress, MetricsProgress
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


def test_collapse_is_told_once_with_its_reason_before_the_stage_stops_itself(tmp_path: Path) -> None:
    params, told = resolve("h20-pool").params, []
    signals = EventProgress(
        Quiet(), params, tmp_path, "run", emit=lambda event, **what: told.append((event, what["payload"]))
    )
    for step in range(20):
        curve(tmp_path, "agentic", step=step, entropy=0.15 * step, truncated=0.1, explained_variance=0.3)
        signals.update("agentic", step + 1, 150)
    collapsing = [payload for event, payload in told if event == COLLAPSING]
    assert (
        len(collapsing) == 1
        and "entropy 2.55 nears the limit 3" in collapsing[0]["reasons"][0]
        and collapsing[0]["step"] == 18
    )
    assert [event for event, _ in told].count(PROGRESS) == 1, "no more than one a minute"


def test_a_critic_that_explains_nothing_for_five_steps_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    signals = EventProgress(
        Quiet(), resolve("h20-pool").params, tmp_path, "run", emit=lambda event, **_: told.append(event)
    )
    for step, value in enumerate((-0.1, -0.2, 0.1, -0.1, -0.1, -0.1, -0.1)):
        curve(tmp_path, "warmup", step=step, explained_variance=value)
        for _ in range(3):
            signals.update("warmup", step, 150)
        assert COLLAPSING not in told
    curve(tmp_path, "warmup", step=7, explained_variance=-0.1)
    signals.update("warmup", 8, 150)
    assert COLLAPSING in told


def test_metrics_of_a_stage_are_in_the_text_file_and_served(tmp_path: Path) -> None:
    curve(tmp_path, "agentic", step=3, tokens_per_second_rollout=1234.5)
    MetricsProgress(Quiet(), tmp_path).update("agentic", 4, 150, reward=1.5)
    with telemetry.judging() as status:
        status.append("correct")
    text = (tmp_path / METRICS_FILE).read_text()
    assert 'cuda_agent_stage_figure{figure="tokens_per_second_rollout",stage="agentic"} 1234.5' in text
    assert 'cuda_agent_stage_step{stage="agentic"} 4.0' in text
    port = free_port()
    telemetry.serve(port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert 'cuda_agent_verdicts_total{status="correct"}' in answer.read().decode()


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
