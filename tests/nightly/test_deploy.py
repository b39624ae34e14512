"""Deployments on a real Prefect server: schedules make runs, a second deploy changes nothing."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml
from prefect_fixtures import prefect_server, wait_for

from components.core.config import PROJECT
from components.core.errors import UserError
from flows.automations import HEARTBEATS_SECONDS
from flows.deploy import Choices, base_job_template, deployments_file, read_pools


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with prefect_server(tmp_path_factory.mktemp("prefect")) as environment:
        yield environment


def deploy(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "components.cli", "deploy", "--json", *options],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def deployed(server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    options = (
        "--profile",
        "ci",
        "--pool",
        "cpu",
        "--home",
        str(home),
        "--cron",
        "30 2 * * *",
        "--timezone",
        "Europe/Berlin",
    )
    done = deploy(server, *options)
    assert done.returncode == 0, done.stderr
    again = deploy(server, *options)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == json.loads(done.stdout)
    return {"home": str(home)} | json.loads(done.stdout)


@pytest.fixture(scope="module")
def stopped(server: dict[str, str], deployed: dict[str, Any]) -> str:
    """Make a run whose heartbeats stop, as of a host that went down; its time passes in other tests.

    The deployed automation waits for HEARTBEATS_SECONDS; here it is given the shortest wait that Prefect has.
    """
    (zombie,) = ask(server, "/automations/filter", automations={"name": {"any_": ["cuda-agent-zombie"]}})
    assert zombie["trigger"]["within"] == HEARTBEATS_SECONDS
    names = ("name", "description", "enabled", "actions", "actions_on_trigger", "actions_on_resolve")
    shorter = {name: zombie[name] for name in names} | {"trigger": zombie["trigger"] | {"within": 10}}
    url = server["PREFECT_API_URL"]
    httpx.put(f"{url}/automations/{zombie['id']}", json=shorter, timeout=120).raise_for_status()

    (night,) = ask(server, "/deployments/filter", deployments={"name": {"any_": ["nightly"]}})
    run = ask(server, f"/deployments/{night['id']}/create_flow_run")["id"]
    ask(server, f"/flow_runs/{run}/set_state", state={"type": "RUNNING"}, force=True)
    about = {"prefect.resource.id": f"prefect.flow-run.{run}"}
    for _ in range(3):  # the server may take up the shorter wait after the first
        time.sleep(1)
        heartbeat = {
            "id": str(uuid4()),
            "event": "prefect.flow-run.heartbeat",
            "occurred": datetime.now(UTC).isoformat(),
            "resource": about,
        }
        httpx.post(f"{url}/events", json=[heartbeat], timeout=120).raise_for_status()
    return str(run)


def ask(server: dict[str, str], path: str, **body: Any) -> Any:
    """Return the answer to a request, which is repeated, as by Prefect's client, while SQLite is locked."""
    for _ in range(30):
        answer = httpx.post(f"{server['PREFECT_API_URL']}{path}", json=body, timeout=120)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        time.sleep(2)
    answer.raise_for_status()
    return answer.json()


def test_the_schedule_makes_scheduled_runs(
    server: dict[str, str], deployed: dict[str, Any], stopped: str
) -> None:
    def scheduled() -> list[dict[str, Any]]:
        runs = ask(
            server,
            "/flow_runs/filter",
            flow_runs={"state": {"type": {"any_": ["SCHEDULED"]}}},
            deployments={"name": {"any_": ["nightly"]}},
        )
        return [run for run in runs if run["auto_scheduled"]]

    runs = wait_for(scheduled, 240)
    times = {run["expected_start_time"][11:16] for run in runs}
    assert times <= {"00:30", "01:30"}, "half past two in Berlin, summer or winter"
    assert all(run["parameters"]["home"] == deployed["home"] and run["parameters"]["dated"] for run in runs)


def test_two_runs_never_overlap(server: dict[str, str], deployed: dict[str, Any]) -> None:
    found = ask(server, "/deployments/filter")
    assert {entry["name"] for entry in found} == {"nightly", "data", "evaluation", "promotion", "approval"}
    for entry in found:
        assert (
            entry["global_concurrency_limit"]["limit"] == 1
            and entry["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
        )
    slots = ask(server, "/v2/concurrency_limits/filter")
    assert {slot["limit"] for slot in slots if slot["name"] == "cuda-agent-home"} == {1}


def test_every_class_of_machine_has_a_pool_and_runs_send_heartbeats(
    server: dict[str, str], deployed: dict[str, Any]
) -> None:
    pools = {pool["name"]: pool for pool in ask(server, "/work_pools/filter")}
    assert {"gpu-h20", "gpu-h200", "cpu"} <= set(pools)
    for pool in pools.values():
        assert (
            pool["base_job_template"]["variables"]["properties"]["env"]["default"][
                "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
            ]
            == "30"
        )
    for entry in ask(server, "/deployments/filter"):
        assert entry["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30", (
            "a deployment's own environment takes the place of the pool's"
        )


def test_automations_stand_once(server: dict[str, str], deployed: dict[str, Any]) -> None:
    names = [entry["name"] for entry in ask(server, "/automations/filter")]
    assert sorted(names) == sorted(deployed["automations"]) and len(names) == len(set(names))
    assert {
        "cuda-agent-zombie",
        "cuda-agent-failed",
        "cuda-agent-missed",
        "cuda-agent-stalled",
        "cuda-agent-collapsing",
    } <= set(names)


@pytest.mark.timeout(900)
def test_plain_prefect_deploy_works_where_the_pools_are(
    server: dict[str, str], deployed: dict[str, Any]
) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=PROJECT, env=server, capture_output=True, text=True, check=False)
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    for name in ("nightly", "data", "evaluation", "promotion", "approval"):
        assert f"'{name}/{name}' successfully" in text


def test_a_mistake_is_one_sentence_and_leaves_the_server_as_it_was(
    server: dict[str, str], deployed: dict[str, Any]
) -> None:
    for options, words in (
        (("--alert", "slack-webhook/nobody"), "no such block"),
        (("--workers", "kubernetes"), "cannot change"),
    ):
        done = deploy(server, *options)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, (
            done.stderr
        )
    assert {entry["work_pool_name"] for entry in ask(server, "/deployments/filter")} <= {"cpu", "gpu-h20"}


def test_without_a_server_the_sentence_says_what_to_start() -> None:
    done = deploy(
        {"PATH": "/usr/bin:/bin", "PREFECT_HOME": "/tmp/none", "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    )
    assert done.returncode == 2 and "no Prefect server answers" in done.stderr


def test_kubernetes_templates_name_every_variable_and_take_the_pools_values() -> None:
    for pool in read_pools():
        template = base_job_template(pool, "kubernetes")
        text = json.dumps(template["job_configuration"])
        for name in template["variables"]["properties"]:
            assert f"{{{{ {name} }}}}" in text, f"{name} is a variable that nothing uses"
    h200 = base_job_template("gpu-h200", "kubernetes")["variables"]["properties"]
    assert (
        h200["node_selector"]["default"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
        and h200["limits"]["default"]["nvidia.com/gpu"] == 8
    )
    h20 = base_job_template("gpu-h20", "kubernetes")["variables"]["properties"]
    assert "nvidia.com/gpu" not in h20["limits"]["default"], "the GPUs are the Ray cluster's and vLLM's"


def test_what_is_deployed_is_checked_first() -> None:
    for choices, words in (
        (Choices(pool="gpu-h100"), "give one of gpu-h20, gpu-h200, cpu"),
        (Choices(profile="smok"), "smoke"),
        (Choices(sets=("warmup.step=1",)), r"warmup\.steps"),
        (Choices(variables=("RAY_ADDRESS",)), "NAME=VALUE"),
        (Choices(cron="30 2 * *"), "schedule of nightly.*Invalid cron"),
        (Choices(timezone="Mars/Base"), "Invalid timezone.*--timezone"),
    ):
        with pytest.raises(UserError, match=words):
            deployments_file(choices)


def test_variables_reach_every_flow_run_beside_those_that_all_need() -> None:
    for entry in deployments_file(Choices(variables=("RAY_ADDRESS=ray://head:10001",)))["deployments"]:
        given = entry["work_pool"]["job_variables"]["env"]
        assert (
            given["RAY_ADDRESS"] == "ray://head:10001" and given["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
        )


def test_a_home_means_the_same_place_for_every_worker() -> None:
    for entry in deployments_file(Choices(profile="ci"))["deployments"]:
        assert Path(entry["parameters"]["home"]).is_absolute()
    for entry in deployments_file(Choices(workers="kubernetes"))["deployments"]:
        assert entry["parameters"]["home"] == "/srv/cuda-agent"


def test_entry_points_exist_with_the_parameters_that_are_given() -> None:
    import importlib
    import inspect

    for entry in yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]:
        file, _, name = entry["entrypoint"].partition(":")
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert set(entry["parameters"]) <= set(inspect.signature(getattr(module, name).fn).parameters)


def test_an_unknown_pool_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import flows.deploy

    monkeypatch.setattr(
        flows.deploy, "read_pools", lambda: {"cpu": {"description": "", "kubernetes": {"gpu": 1}}}
    )
    with pytest.raises(UserError, match=r"kubernetes\.json does not know"):
        base_job_template("cpu", "kubernetes")


def test_a_run_whose_heart_stopped_is_marked_as_crashed_and_goes_back_to_a_worker(
    server: dict[str, str], stopped: str
) -> None:
    def states() -> list[tuple[str, str]]:
        found = httpx.get(
            f"{server['PREFECT_API_URL']}/flow_run_states/", params={"flow_run_id": stopped}, timeout=30
        ).json()
        return [(state["name"], state["message"]) for state in found]

    wait_for(lambda: "AwaitingRetry" in {name for name, _ in states()}, 4 * HEARTBEATS_SECONDS)
    assert ("Crashed", "no heartbeat: the run's process is gone") in states()
