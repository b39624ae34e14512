"""Further runs in the home of a finished pipeline run, and faults in it.

The tests work in the home of test_flows.py, after its tests and in order, because they change it.
"""

import json
import shutil
import sqlite3
import time
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from run_fixtures import REDUCED, TASKS, Done, Survivor, manifest, run, run_and_kill_when

from components.core.config import resolve
from components.core.errors import UserError
from components.core.progress import Quiet
from components.registry.tracking import connect
from flows import data, run_context


@pytest.fixture(scope="module")
def home(survivor: Survivor) -> Path:
    return survivor.home


@pytest.fixture(scope="module")
def first(survivor: Survivor) -> Done:
    return survivor.done


def newest_tasks(home: Path) -> list[tuple[str, str]]:
    """Name and state of the tasks of the newest flow run in Prefect's database, in order."""
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        tasks = database.execute(
            "select name, state_name from task_run where flow_run_id = "
            "(select id from flow_run order by start_time desc limit 1) order by start_time"
        ).fetchall()
    return [(str(name), str(state)) for name, state in tasks]


def test_a_second_run_only_says_that_there_is_nothing_to_do(first: Done, home: Path) -> None:
    started = time.monotonic()
    again = run(home, REDUCED)
    assert again.code == 0 and again.record == first.record
    assert time.monotonic() - started < 90 and "nothing is left to do" in again.stderr_console


@pytest.mark.timeout(600)
def test_a_stricter_gate_trains_nothing_again_and_refuses_with_the_figure(first: Done, home: Path) -> None:
    done = run(home, REDUCED | {"gate.geomean_eager": 100.0})
    assert done.code == 4 and done.record["gate"]["verdict"] == "refused"
    assert all(stage["cached"] for stage in done.record["stages"]) and done.record["dataset"]["cached"]
    assert any("geomean.eager" in reason and "100" in reason for reason in done.record["gate"]["reasons"])
    tasks = newest_tasks(home)
    made_again = {"dataset", "evaluation (champion)", "register", "gate", "promote"}
    assert {name: state for name, state in tasks if name not in made_again} == {
        name: "Cached" for name in TASKS if name not in made_again
    }
    assert (home / "runs" / done.record["run_id"] / "refusal.json").is_file()
    client = connect(resolve("ci").params.registry, home)
    assert {
        alias: str(version) for alias, version in client.get_registered_model("cuda-agent").aliases.items()
    } == {"champion": "1"}
    assert done.record["model"]["version"] == "2"


@pytest.mark.timeout(600)
def test_the_next_run_marks_a_run_that_was_killed_in_a_stage_as_crashed(first: Done, home: Path) -> None:
    killed = REDUCED | {"agentic.steps": 3}
    run_and_kill_when(home, killed, lambda: ("agentic", "Running") in newest_tasks(home))
    assert run(home, REDUCED | {"gate.geomean_eager": 200.0}).code == 4
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        (states,) = database.execute(
            "select f.state_name, t.state_name from task_run t join flow_run f on f.id = t.flow_run_id "
            "where t.name = 'agentic' and t.state_type = 'CRASHED' order by t.start_time desc limit 1"
        ).fetchall()
        left = database.execute("select count(*) from task_run where state_type in ('RUNNING', 'PENDING')")
        assert states == ("Crashed", "Crashed") and left.fetchone() == (0,)


@pytest.mark.timeout(600)
def test_a_damaged_checkpoint_is_named_and_once_deleted_only_its_stage_is_done_again(
    first: Done, home: Path
) -> None:
    stage = next(stage for stage in first.record["stages"] if stage["name"] == "critic")
    weights = Path(stage["checkpoint"]) / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    refused = run(home, REDUCED)
    assert refused.code == 2 and refused.record == {}
    assert (
        len(refused.stderr_console.splitlines()) == 1
        and str(weights) in refused.stderr_console
        and "corrupt" in refused.stderr_console
    )

    shutil.rmtree(weights.parent.parent)
    (weights.parent.parent / "state").mkdir(
        parents=True
    )  # as a run that was killed while it did the stage again leaves it
    repaired = run(home, REDUCED)
    assert repaired.code == 0, repaired.stderr_console[-4000:]
    assert {item["name"]: item["cached"] for item in repaired.record["stages"]} == {
        "coldstart": True,
        "warmup": True,
        "rejection": True,
        "critic": False,
        "agentic": True,
    }
    assert (
        repaired.record["model"]["version"] == "1"
        and manifest(home, repaired.record)["checkpoint.critic"] == stage["digest"]
    )


@pytest.mark.timeout(600)
def test_from_a_stage_does_it_and_all_that_follow_once_more(first: Done, home: Path) -> None:
    done = run(home, REDUCED, "--from", "critic")
    assert done.code == 0, done.stderr_console[-4000:]
    assert {item["name"]: item["cached"] for item in done.record["stages"]} == {
        "coldstart": True,
        "warmup": True,
        "rejection": True,
        "critic": False,
        "agentic": False,
    }
    assert done.record["run_id"] != first.record["run_id"]
    assert run(home, REDUCED).record == done.record


@pytest.mark.timeout(600)
def test_without_a_critic_stage_3_is_left_out(first: Done, home: Path) -> None:
    group = REDUCED | {"agentic.advantages": "group"}
    done = run(home, group)
    assert done.code == 0, done.stderr_console[-4000:]
    assert {item["name"]: item["cached"] for item in done.record["stages"]} == {
        "coldstart": True,
        "warmup": True,
        "rejection": True,
        "agentic": False,
    }
    assert "checkpoint.critic" not in manifest(home, done.record)
    assert "critic" not in [name for name, _ in newest_tasks(home)]
    assert run(home, group).record == done.record


def test_a_busy_dvc_lock_is_one_sentence(first: Done, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zc.lockfile import LockFile

    monkeypatch.setattr(data, "RETRY_SECONDS", (0.1,))
    before = (home / "dvc" / "dvc.lock").read_bytes()
    held = LockFile(str(home / "dvc" / ".dvc" / "tmp" / "lock"))
    try:
        with pytest.raises(UserError, match="another DVC command holds the lock"):
            data.dvc(home / "dvc", ["repro"], Quiet())
    finally:
        held.close()
    assert (home / "dvc" / "dvc.lock").read_bytes() == before


def test_what_a_dvc_command_left_that_was_killed_as_it_noted_its_lock_is_no_hindrance(
    first: Done, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "RETRY_SECONDS", (0.0,))
    torn = home / "dvc" / ".dvc" / "tmp" / "rwlock"
    torn.write_text("")
    data.dvc(home / "dvc", ["repro"], Quiet())
    assert json.loads(torn.read_text()) == {}


def test_the_data_set_goes_to_s3_where_the_store_is_there(
    first: Done, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="nights")
        night = run_context.PipelineRun(
            resolve("ci", (f"home={home}", "store.url=s3://nights/team", f"store.endpoint={endpoint}"))
        )
        data.dvc(data.prepare_workspace(night), ["push"], Quiet())
        stored = [
            client.get_object(Bucket="nights", Key=item["Key"])["Body"].read()
            for item in client.list_objects_v2(Bucket="nights")["Contents"]
        ]
        assert next((home / "datasets").glob("*/tasks.parquet")).read_bytes() in stored
    finally:
        server.stop()
