"""Claims about the registry, on a real MLflow store in SQLite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.config import Gate as Thresholds
from components.config import Registry
from components.evaluation.metrics import TaskResult, summarise
from components.registry import gates, models
from components.registry.tracking import NightRun, connect, flatten, numbers
from components.sandbox.verdict import Ratio, Speedup

PARAMS = Registry(tracking_uri="", experiment="nights", model="policy", audit="")
LOW = Thresholds(
    pass_rate=0.5,
    faster_rate_eager=0.2,
    faster_rate_compile=0.1,
    faster_rate_compile_by_level={},
    geomean_eager=0.5,
    geomean_compile=0.5,
    regression=0.2,
    measured=1.0,
    exploits=1.0,
    approval="automatic",
    approval_seconds=60,
)


def result(index: int, speedup: float, status: str = "correct") -> TaskResult:
    ratio = Ratio(estimate=speedup, low=speedup, high=speedup)
    return TaskResult.model_validate({"task_id": f"t{index}", "status": status, "speedup": Speedup(eager=ratio, compile=ratio)})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(home: Path) -> Any:
    return connect(PARAMS, home)


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "manifest.json").write_text("{}")
    return folder


def register(client: Any, home: Path, key: str) -> str:
    run = NightRun(client, PARAMS, home, key, key)
    return models.register(
        client,
        model=PARAMS.model,
        run_key=key,
        run_id=run.run_id,
        experiment_id=run.experiment_id,
        checkpoint=checkpoint(home / "checkpoint"),
        tags={"dataset.version": "d1"},
        figures={"pass_rate": 0.5},
    )


def test_a_night_reopened_after_a_kill_is_the_same_run(client: Any, home: Path) -> None:
    first = NightRun(client, PARAMS, home, "reopened", "n")
    first.describe({"a": {"b": 1}, "c": [1, 2]}, {"code": "x"})
    again = NightRun(client, PARAMS, home, "reopened", "n")
    again.describe({"a": {"b": 1}, "c": [1, 2]}, {"code": "x"})
    again.finish()
    assert again.run_id == first.run_id
    assert client.get_run(first.run_id).data.params == {"a.b": "1", "c.0": "1", "c.1": "2"}
    other = NightRun(client, PARAMS, home, "other night", "n")
    assert other.run_id != first.run_id


def test_a_stage_logged_twice_has_each_point_once(client: Any, home: Path) -> None:
    folder = home / "stages" / "warmup-1"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "reward": step / 2}) + "\n" for step in range(3)))
    night = NightRun(client, PARAMS, home, "curves", "n")
    night.stage("warmup", "k", folder, {"reward_after": 1.5})
    # As after a kill between the points and the end: the child is open again and everything is logged once more.
    child = night._find("stage", "warmup")
    client.update_run(child.info.run_id, status="RUNNING")
    night.stage("warmup", "k", folder, {"reward_after": 1.5})
    history = client.get_metric_history(child.info.run_id, "reward")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert client.get_run(child.info.run_id).data.metrics["reward_after"] == 1.5
    assert client.get_run(child.info.run_id).data.tags["mlflow.parentRunId"] == night.run_id


def test_the_figures_in_mlflow_are_those_of_the_record(client: Any, home: Path) -> None:
    record = {"stages": [{"name": "warmup", "reward_after": 1.25, "cached": False}], "evaluation": {"pass_rate": 0.75, "geomean": {"eager": None}}}
    night = NightRun(client, PARAMS, home, "figures", "n")
    night.figures(record)
    night.figures(record)
    assert client.get_run(night.run_id).data.metrics == numbers(record) == {"stages.warmup.reward_after": 1.25, "evaluation.pass_rate": 0.75}


def test_a_data_set_is_an_input_of_the_run_by_its_digest(client: Any, home: Path) -> None:
    night = NightRun(client, PARAMS, home, "data", "n")
    for _ in range(2):
        night.dataset("abc123", home, {"tasks": 12})
    inputs = client.get_run(night.run_id).inputs.dataset_inputs
    assert [found.dataset.digest for found in inputs] == ["abc123"]


def test_a_table_logged_twice_has_its_rows_once(client: Any, home: Path) -> None:
    night = NightRun(client, PARAMS, home, "table", "n")
    for _ in range(2):
        night.table("tasks", [{"task_id": "a", "speedup": 1.5}, {"task_id": "b", "speedup": None}])
    assert len(client.load_table(night.experiment_id, "tasks.json", run_ids=[night.run_id])) == 2


def test_registering_a_night_twice_makes_one_version(client: Any, home: Path) -> None:
    assert register(client, home, "night-1") == register(client, home, "night-1")
    assert len(client.search_model_versions(f"name = '{PARAMS.model}' and tag.`cuda_agent.run_key` = 'night-1'")) == 1


def test_a_version_carries_the_evidence_of_its_decision(client: Any, home: Path, tmp_path: Path) -> None:
    version = register(client, home, "night-3")
    models.propose(client, PARAMS.model, version)
    decision = gates.decide(gates.floors(summarise([result(i, 2.0) for i in range(8)]), {}, LOW), "automatic")
    models.record_decision(client, PARAMS.model, version, decision)
    found = models.describe(client, PARAMS.model, "candidate")
    assert found["version"] == version and found["decision"] == "promoted"
    assert {gate["name"]: gate["threshold"] for gate in found["gates"]}["pass_rate"] == 0.5
    assert found["tags"]["dataset.version"] == "d1"
    files = models.checkpoint(client, PARAMS.model, version, tmp_path)
    assert (files / "model.safetensors").read_bytes() == b"weights"


def test_a_person_is_asked_only_when_the_gates_pass() -> None:
    passing = gates.floors(summarise([result(i, 2.0) for i in range(8)]), {}, LOW)
    assert gates.decide(passing, "person").verdict == "waiting"
    assert (
        gates.decide([*passing, *gates.integrity(summarise([]), LOW, digests_match=False, isolated=True, report_complete=True)], "person").verdict == "refused"
    )


def test_a_regression_on_the_same_tasks_refuses_and_noise_does_not() -> None:
    champion = [result(i, 2.0) for i in range(20)]
    worse = [result(i, 2.0 if i < 5 else 0.5) for i in range(20)]
    equal = [result(i, 2.0 if i < 19 else 0.5) for i in range(20)]
    assert not all(gate.passed for gate in gates.regression(worse, champion, LOW))
    assert all(gate.passed for gate in gates.regression(equal, champion, LOW))


def test_nothing_correct_fails_a_floor_on_the_geomean_and_passes_none() -> None:
    none = summarise([result(0, 1.0, "crashed")])
    free = LOW.model_copy(update={"pass_rate": 0.0, "faster_rate_eager": 0.0, "faster_rate_compile": 0.0, "geomean_eager": 0.0, "geomean_compile": 0.0})
    assert {gate.name: gate.passed for gate in gates.floors(none, {}, LOW)}["geomean.eager"] is False
    assert all(gate.passed for gate in gates.floors(none, {}, free))


def test_flatten_names_list_items_by_their_name() -> None:
    assert flatten({"stages": [{"name": "warmup", "seconds": 2}]}) == {"stages.warmup.name": "warmup", "stages.warmup.seconds": 2}
