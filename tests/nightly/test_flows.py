"""A whole reduced pipeline run that is killed ten times, and what it leaves in MLflow, Prefect and the home.

A run that is killed again and again ends with the artefacts of an undisturbed one. The tests share the home
with those of test_flows_repeated.py, which run afterwards and change it.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect_fixtures import prefect_server
from run_fixtures import REDUCED, TASKS, Done, Survivor, manifest, run

from components.core.config import resolve
from components.core.task import read_tasks
from components.registry.promotion import Promotion
from components.registry.tracking import connect, numbers
from flows import run_context


@pytest.fixture(scope="module")
def home(survivor: Survivor) -> Path:
    return survivor.home


@pytest.fixture(scope="module")
def first(survivor: Survivor) -> Done:
    return survivor.done


@dataclass(frozen=True)
class Page:
    """What Prefect's API has about a home, and the task runs and logs of the newest flow run."""

    flow_runs: list[dict[str, Any]]
    task_runs: list[dict[str, Any]]
    artifacts: list[dict[str, Any]]
    newest_task_runs: list[dict[str, Any]]
    newest_logs: list[dict[str, Any]]


@pytest.fixture(scope="module")
def page(home: Path, first: Done) -> Page:
    """Ask a server on the home's database."""
    with prefect_server(home / "prefect") as environment:

        def ask(kind: str, sort: str, **more: Any) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            while True:
                body = {"sort": sort, "limit": 200, "offset": len(found)} | more
                url = f"{environment['PREFECT_API_URL']}/{kind}/filter"
                answer = httpx.post(url, json=body, timeout=120).raise_for_status().json()
                found += answer
                if len(answer) < 200:
                    return found

        # A run that was killed before it started has the time at which it was marked as its time of start.
        flow_runs = sorted(ask("flow_runs", "START_TIME_ASC"), key=lambda run: str(run["created"]))
        newest = {"any_": [flow_runs[-1]["id"]]}
        return Page(
            flow_runs,
            ask("task_runs", "EXPECTED_START_TIME_ASC"),
            ask("artifacts", "KEY_ASC"),
            ask("task_runs", "EXPECTED_START_TIME_ASC", flow_runs={"id": newest}),
            ask("logs", "TIMESTAMP_ASC", logs={"flow_run_id": newest}),
        )


@pytest.mark.timeout(1800)
def test_the_record_has_all_that_the_contract_names(first: Done, home: Path) -> None:
    record = first.record
    assert set(record) >= {
        "run_id",
        "profile",
        "device",
        "dataset",
        "stages",
        "evaluation",
        "model",
        "gate",
        "report",
        "seconds",
    }
    assert record["dataset"].items() >= {"tasks": 6, "held_out": 2}.items()
    assert [stage["name"] for stage in record["stages"]] == [
        "coldstart",
        "warmup",
        "rejection",
        "critic",
        "agentic",
    ]
    for stage in record["stages"]:
        assert set(stage) >= {"name", "checkpoint", "reward_before", "reward_after", "seconds", "cached"}
        assert run_context.verify_files(Path(stage["checkpoint"])) == stage["digest"]
    for found in (record["evaluation"], record["cold_start"]):
        assert set(found) >= {"pass_rate", "faster_rate", "geomean", "tasks"} and set(
            found["faster_rate"]
        ) == {"eager", "compile"}
    assert record["model"] == {"name": "cuda-agent", "version": "1"}
    assert record["gate"]["verdict"] == "promoted" and record["gate"]["reasons"]
    assert json.loads((home / "runs" / record["run_id"] / "run.json").read_text()) == record


def test_a_person_sees_stages_verdict_report_and_how_to_open_the_interfaces(first: Done) -> None:
    for text in (
        "data set",
        "coldstart",
        "warmup",
        "rejection",
        "critic",
        "agentic",
        "promoted",
        "report.html",
        "mlflow ui",
        "prefect server start",
    ):
        assert text in first.stderr_console
    assert f"data set {first.record['dataset']['version'][:12]}" in first.stderr_console


def test_mlflow_shows_one_finished_run_with_the_same_figures(first: Done, home: Path) -> None:
    params = resolve("ci").params.registry
    client = connect(params, home)
    found = client.search_runs([item.experiment_id for item in client.search_experiments()])
    nights = [item for item in found if item.data.tags["cuda_agent.kind"] == "night"]
    assert len(nights) == 1 and nights[0].info.status == "FINISHED"
    expected = numbers({key: value for key, value in first.record.items() if key != "gate"})
    assert {key: nights[0].data.metrics.get(key) for key in expected} == expected
    children = {
        item.data.tags["cuda_agent.stage"]: item.info
        for item in found
        if item.data.tags["cuda_agent.kind"] == "stage"
    }
    evaluated = client.search_traces(
        locations=[children["evaluation"].experiment_id],
        run_id=children["evaluation"].run_id,
        include_spans=False,
    )
    assert len(evaluated) == first.record["evaluation"]["tasks"], "every episode of the evaluation is a trace"
    assert set(children) == set(TASKS) - {"dataset", "register", "gate", "promote"}
    assert {item.path for item in client.list_artifacts(nights[0].info.run_id)} >= {
        "report.html",
        "evaluation.json",
        "cold_start.json",
    }
    assert [item.dataset.digest for item in nights[0].inputs.dataset_inputs] == [
        first.record["dataset"]["version"][:36]
    ]
    tags = nights[0].data.tags
    assert f"version {first.record['model']['version']}: promoted" in tags["mlflow.note.content"]
    assert "| after |" in tags["mlflow.note.content"]
    assert tags["mlflow.source.name"] == "cuda-agent run --profile ci" and "mlflow.source.git.commit" in tags
    experiment = client.get_experiment(first.record["experiment"])
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    for stage, steps in (("warmup", REDUCED["warmup.steps"]), ("agentic", REDUCED["agentic.steps"])):
        curve = client.get_metric_history(children[stage].run_id, "reward")
        assert [point.step for point in curve] == list(range(steps)), "one point for each update"


def test_the_promotion_stands_in_the_audit_chain_once_with_its_evidence(first: Done, home: Path) -> None:
    params = resolve("ci").params.registry
    promotion = Promotion(connect(params, home), params, home)
    registered, *entries = promotion.chain.entries()
    assert registered.action == "registered"
    assert [(entry.action, entry.version, entry.aliases) for entry in entries] == [
        ("promoted", "1", {"champion": "1"})
    ]
    assert entries[0].evidence["checkpoint.digest"] == first.record["stages"][-1]["digest"]
    assert {gate["name"] for gate in entries[0].evidence["gates"]} >= {
        "pass_rate",
        "integrity.exploits",
        "integrity.digests",
    }
    assert promotion.verify() == []


def test_held_out_tasks_are_kept_apart(first: Done, home: Path) -> None:
    tasks = read_tasks(home / "datasets" / first.record["dataset"]["version"] / "tasks.parquet")
    sequences = {
        split: {task.ops for task in tasks if task.split == split} for split in ("train", "held_out")
    }
    assert len(sequences["held_out"]) == 2 and not sequences["train"] & sequences["held_out"]


def test_the_report_is_complete_and_stored_with_checkpoint_and_data_lock(first: Done, home: Path) -> None:
    text = Path(first.record["report"]).read_text()
    assert "<svg" in text and "promoted" in text and text.rstrip().endswith("</html>")
    stored = Path(first.record["artifacts"])
    assert (stored / "report.html").read_text() == text
    assert (stored / "dvc.lock").is_file() and (stored / "manifest.json").is_file()
    digest = first.record["stages"][-1]["digest"]
    assert run_context.verify_files(home / "store" / "checkpoints" / digest) == digest


def test_the_data_sets_version_can_be_restored_from_the_remote(first: Done, home: Path) -> None:
    parquet = next((home / "datasets").glob("*/tasks.parquet")).read_bytes()
    remote = [path.read_bytes() for path in (home / "remote").rglob("*") if path.is_file()]
    assert parquet in remote


@pytest.mark.timeout(1800)
def test_ten_kills_at_random_moments_change_no_artefact(survivor: Survivor, tmp_path: Path) -> None:
    # A measured time never repeats. What does is everything made from the same verdicts, so the undisturbed
    # run is given the journal of the killed one.
    shutil.copytree(survivor.verdicts, tmp_path / "verdicts")
    undisturbed = run(tmp_path, REDUCED)
    assert undisturbed.code == 0, undisturbed.stderr_console[-4000:]
    assert manifest(tmp_path, undisturbed.record) == survivor.manifest
    assert undisturbed.record["run_id"] == survivor.record["run_id"]


@pytest.mark.timeout(1800)
def test_mlflow_shows_one_run_and_one_version_after_ten_kills(survivor: Survivor) -> None:
    client = connect(resolve("ci").params.registry, survivor.home)
    found = client.search_runs([item.experiment_id for item in client.search_experiments()])
    own = [
        item for item in found if item.data.tags["cuda_agent.run_key"].startswith(survivor.record["run_id"])
    ]
    names = sorted(item.data.tags.get("cuda_agent.stage", "night") for item in own)
    assert names == sorted([*TASKS[1:8], "night"])
    versions = client.search_model_versions("name = 'cuda-agent'")
    assert [
        str(item.version)
        for item in versions
        if item.tags["cuda_agent.run_key"].startswith(survivor.record["run_id"])
    ] == [survivor.record["model"]["version"]]


@pytest.mark.timeout(1800)
def test_prefect_keeps_no_run_that_pretends_to_go_on(page: Page) -> None:
    assert [run["state_type"] for run in page.flow_runs].count("COMPLETED") == 1
    # On a busy machine the kills may all come before there is a flow run.
    assert {run["state_type"] for run in page.flow_runs[:-1]} <= {"CRASHED"}
    assert {run["state_type"] for run in page.task_runs} <= {"COMPLETED", "CRASHED"}
    names = [run["name"] for run in page.newest_task_runs]
    assert len(names) == len(set(names)), "no step twice"


def test_prefect_shows_the_parameters_and_the_state_of_every_stage(
    first: Done, home: Path, page: Page
) -> None:
    newest, run_id = page.flow_runs[-1], first.record["run_id"]
    sets = newest["parameters"].pop("sets")
    assert {item.partition("=")[0] for item in sets} == set(REDUCED)
    assert newest["parameters"] == {
        "run_id": run_id,
        "profile": "ci",
        "seed": 0,
        "start_policy": "scratch",
        "device": "cpu",
        "home": str(home),
    }
    assert newest["name"] == f"ci-{run_id}" and newest["tags"] == [run_id]
    tasks = sorted(page.newest_task_runs, key=lambda run: str(run["start_time"]))
    assert [run["name"] for run in tasks] == TASKS
    assert {run["state_name"] for run in tasks} <= {"Completed", "Cached"}


def test_prefect_shows_the_events_of_every_step_with_its_ids(first: Done, page: Page) -> None:
    lines = {run["name"]: "" for run in page.newest_task_runs} | {"": ""}
    names = {run["id"]: run["name"] for run in page.newest_task_runs}
    for line in page.newest_logs:
        lines[names.get(line["task_run_id"], "")] += line["message"] + "\n"
    assert f"run_id {first.record['run_id']}, profile ci" in lines[""]
    for stage in first.record["stages"]:
        folder = Path(stage["checkpoint"]).parent.name
        made = f"{stage['digest'][:12]} in stages/{folder}"
        assert f"made {made}" in lines[stage["name"]] or f"{stage['name']} is cached: {made}" in lines[""]
    assert f"version {first.record['dataset']['version'][:12]}" in lines["dataset"]
    assert f"cuda-agent version {first.record['model']['version']}" in lines["register"]
    assert "integrity.exploits is 1" in lines["gate"] and "promoted" in lines["promote"]


def test_prefect_shows_stages_figures_report_and_progress(first: Done, page: Page) -> None:
    newest = page.flow_runs[-1]["id"]
    shown = {item["key"]: item["data"] for item in page.artifacts if item["flow_run_id"] == newest}
    assert set(shown) >= {"parameters", "stages", "result", "report"}
    for stage in first.record["stages"]:
        assert f"| {stage['name']} |" in shown["stages"] and stage["digest"][:12] in shown["stages"]
    assert "version 1: promoted" in shown["result"] and "| pass_rate | passed |" in shown["result"]
    assert Path(first.record["report"]).as_uri() in shown["report"]
    progress = {item["key"]: item for item in page.artifacts if item["type"] == "progress"}
    assert all(0 <= item["data"] <= 100 for item in progress.values())
    names = {run["id"]: run["name"] for run in page.task_runs}
    for stage in first.record["stages"]:
        task_run = progress[f"progress-{stage['name']}"]["task_run_id"]
        assert names[task_run] == stage["name"], "also if the first report comes from a thread"
