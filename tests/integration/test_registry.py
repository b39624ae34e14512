"""Claims about the registry, on a real MLflow store in SQLite."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import agent_fixtures
import pytest
from agent_fixtures import verdict_of
from mlflow.exceptions import MlflowException
from sqlalchemy import create_engine

from components.agent.trajectory import ToolCall, Trajectory, Turn, save_trajectories
from components.bootstrap.cold_start import new_model
from components.core.config import resolve
from components.core.errors import UserError
from components.core.files import verify_files
from components.core.promotion_params import GateThresholds, Registry
from components.evaluation.metrics import summarise
from components.evaluation.results import TaskResult
from components.judge.verdict import Ratio, Speedup
from components.policy.checkpoint import save_checkpoint
from components.registry import gates, models
from components.registry.traces import chosen
from components.registry.tracking import MlflowRun, connect, flatten, numbers
from flows import nightly
from flows.run_context import PipelineRun, prefect_database
from flows.steps import DatasetRecord

PARAMS = Registry(tracking_uri="", experiment="nights", model="policy", audit="", key="", trusted_keys="")
LOW = GateThresholds(
    pass_rate=0.5,
    faster_rate_eager=0.2,
    faster_rate_compile=0.1,
    faster_rate_compile_by_level={},
    geomean_eager=0.5,
    geomean_compile=0.5,
    limit_score=0.0,
    regression=0.2,
    improvement=True,
    measured=1.0,
    exploits=1.0,
    approval="automatic",
    approval_seconds=60,
)


def test_a_home_with_a_question_mark_keeps_its_databases(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))  # where MLflow makes a folder `file:` for such a home
    home = tmp_path / "home?x=1 50%25#a"
    connect(PARAMS, home).search_experiments()
    engine = create_engine(prefect_database(home).replace("+aiosqlite", ""))
    (home / "prefect").mkdir()
    engine.connect().close()
    engine.dispose()
    assert [path.name for path in tmp_path.iterdir()] == [home.name]
    assert (home / "mlflow" / "mlflow.db").is_file() and (home / "prefect" / "prefect.db").is_file()


def result(index: int, speedup: float, status: str = "correct") -> TaskResult:
    ratio = Ratio(estimate=speedup, low=speedup, high=speedup)
    return TaskResult.model_validate(
        {"task_id": f"t{index}", "status": status, "speedup": Speedup(eager=ratio, compile=ratio)}
    )


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


def register(client: Any, home: Path, key: str, folder: Path | None = None) -> str:
    run = MlflowRun(client, PARAMS, home, key, key)
    return models.register(
        client,
        model=PARAMS.model,
        run_key=key,
        run_id=run.run_id,
        experiment_id=run.experiment_id,
        checkpoint=folder or checkpoint(home / "checkpoint"),
        tags={"dataset.version": "d1"},
        figures={"pass_rate": 0.5},
    )


def test_a_run_reopened_after_a_kill_is_the_same_run(client: Any, home: Path) -> None:
    first = MlflowRun(client, PARAMS, home, "reopened", "n")
    first.describe({"a": {"b": 1}, "c": [1, 2]}, {"code": "x"})
    again = MlflowRun(client, PARAMS, home, "reopened", "n")
    again.describe({"a": {"b": 1}, "c": [1, 2]}, {"code": "x"})
    again.end("FINISHED")
    assert again.run_id == first.run_id
    assert client.get_run(first.run_id).data.params == {"a.b": "1", "c.0": "1", "c.1": "2"}
    other = MlflowRun(client, PARAMS, home, "other night", "n")
    assert other.run_id != first.run_id


def test_the_machines_load_goes_on_where_a_killed_run_left_it(
    client: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    for attempt in (1, 2):
        night = MlflowRun(client, PARAMS, home, "load", "n")
        before = len(client.get_metric_history(night.run_id, "system/cpu_utilization_percentage"))
        night.watch()
        deadline = time.monotonic() + 120
        while (
            len(points := client.get_metric_history(night.run_id, "system/cpu_utilization_percentage"))
            == before
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        night.end("FINISHED")
        assert len(points) > before and len({point.step for point in points}) == len(points), (
            f"attempt {attempt}"
        )


def test_a_stage_logged_twice_has_each_point_once(client: Any, home: Path) -> None:
    folder = home / "stages" / "warmup-1"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "reward": step / 2}) + "\n" for step in range(3))
    )
    night = MlflowRun(client, PARAMS, home, "curves", "n")
    night.stage("warmup", "k", folder, {"reward_after": 1.5})
    # As after a kill between the points and the end: the child is open again and everything is logged once
    # more.
    child = night._find("stage", "warmup")
    client.update_run(child.info.run_id, status="RUNNING")
    night.stage("warmup", "k", folder, {"reward_after": 1.5})
    history = client.get_metric_history(child.info.run_id, "reward")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert client.get_run(child.info.run_id).data.metrics["stage.reward_after"] == 1.5
    assert client.get_run(child.info.run_id).data.tags["mlflow.parentRunId"] == night.run_id


def spoken(reward: float, *speeds: float) -> Trajectory:
    """A trajectory that measures a kernel of each speed in turn and ends with the last."""
    verdicts = [verdict_of({"kernels/forward.cpp": f"// {speed}"}) for speed in speeds]
    turns = [
        Turn(
            f"turn {speed}",
            (
                ToolCall("Write", {"content": "x"}, "written"),
                ToolCall("Bash", {"command": "measure"}, "ok", verdicts=1),
            ),
        )
        for speed in speeds
    ]
    return Trajectory(
        "t",
        (1, 2),
        (0, 1),
        (0.0, -1.0),
        tuple(turns),
        (*verdicts, verdicts[-1]),
        reward,
        "stop",
        "v",
        {"kernels/forward.cpp": "x"},
        task="code",
    )


def test_a_trajectory_is_a_trace_with_its_verdicts_as_feedback_however_often_it_is_logged(
    client: Any, home: Path
) -> None:
    folder = home / "stages" / "evaluation-1"
    save_trajectories(folder / "episodes" / "0000", [spoken(3.0, 0.5, 4.0), spoken(1.0, 1.0)])
    for step in range(3):
        save_trajectories(
            folder / "trajectories" / f"step-{step:04d}", [spoken(reward, 1.0) for reward in (1.0, 3.0, -1.0)]
        )
    night = MlflowRun(client, PARAMS, home, "traces", "n")
    for _ in range(2):
        night.stage("evaluation", "k", folder, {})
        child = night._find("stage", "evaluation")
        client.update_run(child.info.run_id, status="RUNNING")
    found = {
        trace.info.tags["mlflow.traceName"]: trace
        for trace in client.search_traces(locations=[night.experiment_id], run_id=child.info.run_id)
    }
    training = [f"evaluation step-000{step}/{index}" for step in range(3) for index in (1, 2)]
    assert sorted(found) == ["evaluation 0000/0", "evaluation 0000/1", *training], (
        "every episode of an evaluation, of a step the best and the worst"
    )
    trace = found["evaluation 0000/0"]
    spans = {span.span_id: span for span in trace.data.spans}
    assert [span.span_type for span in trace.data.spans].count("TOOL") == 4 and len(spans) == 7
    assert {
        (span.span_type, spans[span.parent_id].span_type) for span in spans.values() if span.parent_id
    } == {("LLM", "AGENT"), ("TOOL", "LLM")}
    last = next(span for span in spans.values() if span.name == "turn 2")
    assert last.inputs == ["written", "ok"] and last.outputs == "turn 4.0"
    said = [(item.name, item.feedback.value, spans[item.span_id].name) for item in trace.info.assessments]
    assert (
        ("measured.speedup.eager", 0.5, "Bash") in said
        and ("verdict.speedup.eager", 4.0, "episode") in said
        and ("reward", 3.0, "episode") in said
    )
    assert len(said) == 3 * 3 + 1, "status and both ratios of three verdicts, and the reward"


def test_a_step_in_which_the_judge_failed_on_all_trajectories_has_no_traces(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "trajectories" / "step-0000", [replace(spoken(1.0, 1.0), reward=None)])
    assert not list(chosen(tmp_path))


def test_the_figures_in_mlflow_are_those_of_the_record(client: Any, home: Path) -> None:
    record = {
        "stages": [{"name": "warmup", "reward_after": 1.25, "cached": False}],
        "evaluation": {"pass_rate": 0.75, "geomean": {"eager": None}},
    }
    night = MlflowRun(client, PARAMS, home, "figures", "n")
    night.figures(record)
    night.figures(record)
    assert (
        client.get_run(night.run_id).data.metrics
        == numbers(record)
        == {"stages.warmup.reward_after": 1.25, "evaluation.pass_rate": 0.75}
    )


def test_a_data_set_is_an_input_of_the_run_by_its_digest(client: Any, home: Path) -> None:
    night = MlflowRun(client, PARAMS, home, "data", "n")
    for _ in range(2):
        night.dataset("abc123", home, {"tasks": 12})
    inputs = client.get_run(night.run_id).inputs.dataset_inputs
    assert [found.dataset.digest for found in inputs] == ["abc123"]


def test_a_table_logged_twice_has_its_rows_once(client: Any, home: Path) -> None:
    night = MlflowRun(client, PARAMS, home, "table", "n")
    for _ in range(2):
        night.table("tasks", [{"task_id": "a", "speedup": 1.5}, {"task_id": "b", "speedup": None}])
    assert len(client.load_table(night.experiment_id, "tasks.json", run_ids=[night.run_id])) == 2


def test_registering_a_run_twice_makes_one_version(client: Any, home: Path) -> None:
    assert register(client, home, "night-1") == register(client, home, "night-1")
    assert (
        len(client.search_model_versions(f"name = '{PARAMS.model}' and tag.`cuda_agent.run_key` = 'night-1'"))
        == 1
    )


def test_a_checkpoint_that_a_run_has_made_again_is_a_version_of_its_own(client: Any, home: Path) -> None:
    night = MlflowRun(client, PARAMS, home, "night-2", "night-2")

    def made(weights: str) -> str:
        return models.register(
            client,
            model=PARAMS.model,
            run_key="night-2",
            run_id=night.run_id,
            experiment_id=night.experiment_id,
            checkpoint=checkpoint(home / "checkpoint"),
            tags={"checkpoint.digest": weights, "manifest.digest": "m", "evaluation.digest": "any"},
            figures={},
        )

    first, second = made("a"), made("b")
    assert first != second
    assert (made("a"), made("b")) == (first, second)


def test_a_version_carries_the_evidence_of_its_decision(client: Any, home: Path, tmp_path: Path) -> None:
    version = register(client, home, "night-3")
    client.set_registered_model_alias(PARAMS.model, models.CANDIDATE, version)
    decision = gates.decide(gates.floors(summarise([result(i, 2.0) for i in range(8)]), {}, LOW), "automatic")
    models.record_decision(client, PARAMS.model, version, decision)
    found = models.describe(client, PARAMS.model, "candidate")
    assert found["version"] == version and found["decision"] == "promoted"
    assert {gate["name"]: gate["threshold"] for gate in found["gates"]}["pass_rate"] == 0.5
    assert found["tags"]["dataset.version"] == "d1"
    files = models.checkpoint(client, PARAMS.model, version, tmp_path)
    assert (files / "model.safetensors").read_bytes() == b"weights"


def test_the_folder_of_a_version_is_the_checkpoint_as_it_was(client: Any, home: Path) -> None:
    tokenizer = agent_fixtures.tokenizer()
    params = agent_fixtures.params(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8)
    made = save_checkpoint(
        home / "policy",
        new_model(params, len(tokenizer), tokenizer),
        tokenizer,
        stage="test",
        parent=None,
        dataset="",
        code="",
        params={},
        figures={},
    )
    version = register(client, home, "night-4", home / "policy")
    assert verify_files(Path(models.location(client, PARAMS.model, version))) == made.digest


def test_a_person_is_asked_only_when_the_gates_pass() -> None:
    passing = gates.floors(summarise([result(i, 2.0) for i in range(8)]), {}, LOW)
    assert gates.decide(passing, "person").verdict == "waiting"
    assert (
        gates.decide(
            [
                *passing,
                *gates.integrity(
                    summarise([]), LOW, digests_match=False, isolated=True, report_complete=True
                ),
            ],
            "person",
        ).verdict
        == "refused"
    )


def test_a_regression_on_the_same_tasks_refuses_and_noise_does_not() -> None:
    champion = [result(i, 2.0) for i in range(20)]
    worse = [result(i, 2.0 if i < 5 else 0.5) for i in range(20)]
    equal = [result(i, 2.0 if i < 19 else 0.5) for i in range(20)]
    assert not all(gate.passed for gate in gates.regression(worse, champion, LOW))
    assert all(gate.passed for gate in gates.regression(equal, champion, LOW))


def test_nothing_correct_fails_a_floor_on_the_geomean_and_passes_none() -> None:
    none = summarise([result(0, 1.0, "crashed")])
    free = LOW.model_copy(
        update={
            "pass_rate": 0.0,
            "faster_rate_eager": 0.0,
            "faster_rate_compile": 0.0,
            "geomean_eager": 0.0,
            "geomean_compile": 0.0,
            "limit_score": 0.0,
        }
    )
    assert {gate.name: gate.passed for gate in gates.floors(none, {}, LOW)}["geomean.eager"] is False
    assert all(gate.passed for gate in gates.floors(none, {}, free))


def test_flatten_names_list_items_by_their_name() -> None:
    assert flatten({"stages": [{"name": "warmup", "seconds": 2}]}) == {
        "stages.warmup.name": "warmup",
        "stages.warmup.seconds": 2,
    }


def test_only_a_version_that_is_not_there_is_called_missing(
    client: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(client, home, "a version to be found")
    for name in ("999", "9" * 30, "no alias"):
        with pytest.raises(UserError, match=f"policy has no version {name}; cuda-agent models list"):
            models.find(client, PARAMS.model, name)

    def fail(*_: str) -> None:
        raise MlflowException("the store is down")

    monkeypatch.setattr(client, "get_model_version", fail)
    with pytest.raises(MlflowException, match="the store is down"):
        models.find(client, PARAMS.model, "1")


def test_a_night_without_judges_ends_its_run_and_the_monitor_of_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise UserError("pool: no judge; start one.")

    monkeypatch.setattr(nightly, "open_pool", fail)
    run = PipelineRun(resolve("ci", (f"home={tmp_path}",)))
    data = DatasetRecord(version="d" * 64, folder="datasets/d", figures={}, cached=True, seconds=0.0)
    progress: Any = None
    with pytest.raises(UserError, match="no judge"):
        nightly.open_context(run, progress, data)
    found = connect(run.params.registry, tmp_path)
    (experiment,) = [item for item in found.search_experiments() if item.name != "Default"]
    (night,) = found.search_runs([experiment.experiment_id])
    assert night.info.status == "FAILED"
    assert "SystemMetricsMonitor" not in {thread.name for thread in threading.enumerate()}
