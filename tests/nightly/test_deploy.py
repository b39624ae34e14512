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
from prefect_fixtures import job_templates, prefect_server, wait_for

from components.core.config import PROJECT
from flows.approval import settings

AUTOMATIONS = yaml.safe_load((PROJECT / "infra" / "prefect" / "automations.yaml").read_text())["automations"]
# Seconds without a heartbeat after which a run is marked as crashed.
HEARTBEATS_SECONDS = AUTOMATIONS[0]["trigger"]["within"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with prefect_server(tmp_path_factory.mktemp("prefect")) as environment:
        yield environment


def deploy(environment: dict[str, str], *sets: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROJECT / "infra" / "prefect" / "deploy.sh", *sets],
        env=environment | {"PYTHON": sys.executable} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def deployed(server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Deploy twice, and return the home."""
    home = tmp_path_factory.mktemp("home")
    variables = {
        "CUDA_AGENT_PROFILE": "ci",
        "CUDA_AGENT_POOL": "cpu",
        "CUDA_AGENT_HOME": str(home),
        "CUDA_AGENT_CRON": "30 2 * * *",
        "CUDA_AGENT_TIMEZONE": "Europe/Berlin",
        "RAY_ADDRESS": "ray://head:10001",
    }
    refused = deploy(server, "home=/elsewhere", **variables)
    assert refused.returncode == 2 and "CUDA_AGENT_HOME" in refused.stderr
    bare = deploy(server, **variables)
    assert bare.returncode == 0, bare.stdout + bare.stderr
    (night,) = ask(server, "/deployments/filter", deployments={"name": {"any_": ["nightly"]}})
    assert settings("ci", night["parameters"]["sets"], str(home)).params.night.hours == 0
    states = []
    for _ in range(2):
        done = deploy(server, "night.hours=3", "data.against=[/srv/a b]", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        states.append(
            [
                sorted(found["name"] for found in ask(server, f"/{what}/filter"))
                for what in ("work_pools", "deployments", "automations", "v2/concurrency_limits")
            ]
        )
    assert states[0] == states[1]
    return str(home)


@pytest.fixture(scope="module")
def stopped(server: dict[str, str], deployed: str) -> str:
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


def test_the_schedule_makes_scheduled_runs(server: dict[str, str], deployed: str, stopped: str) -> None:
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
    assert all(run["parameters"]["home"] == deployed and run["parameters"]["dated"] for run in runs)


def test_two_runs_never_overlap(server: dict[str, str], deployed: str) -> None:
    found = ask(server, "/deployments/filter")
    assert {entry["name"] for entry in found} == {"nightly", "data", "approval"}
    for entry in found:
        assert (
            entry["global_concurrency_limit"]["limit"] == 1
            and entry["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
        )
    slots = ask(server, "/v2/concurrency_limits/filter")
    assert {slot["limit"] for slot in slots if slot["name"] == "cuda-agent-home"} == {1}


def test_every_class_of_machine_has_a_pool_and_runs_send_heartbeats(
    server: dict[str, str], deployed: str
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
    variables = pools["cpu"]["base_job_template"]["variables"]["properties"]["env"]["default"]
    assert variables["PREFECT_RESULTS_LOCAL_STORAGE_PATH"] == f"{deployed}/prefect/results"
    assert variables["RAY_ADDRESS"] == "ray://head:10001" and pools["cpu"]["description"]
    for entry in ask(server, "/deployments/filter"):
        assert not entry["job_variables"].get("env"), "it would take the place of the pool's environment"
        assert entry["work_pool_name"] == "cpu" and Path(entry["parameters"]["home"]).is_absolute()


def test_automations_stand_once(server: dict[str, str], deployed: str) -> None:
    names = [entry["name"] for entry in ask(server, "/automations/filter")]
    assert sorted(names) == sorted(automation["name"] for automation in AUTOMATIONS)


def test_parameters_of_the_command_line_reach_the_flow(server: dict[str, str], deployed: str) -> None:
    (night,) = ask(server, "/deployments/filter", deployments={"name": {"any_": ["nightly"]}})
    given = night["parameters"]
    params = settings(given["profile"], given["sets"], given["home"]).params
    assert params.night.hours == 3 and params.data.against == ["/srv/a b"] and params.home == deployed


def test_a_mistake_is_named_and_leaves_the_server_as_it_was(server: dict[str, str], deployed: str) -> None:
    def deployments() -> list[dict[str, Any]]:
        """Return the deployments without what the server itself changes: polls, and slots in use."""
        changing = ("status", "last_polled", "updated", "global_concurrency_limit")
        return [
            {name: value for name, value in found.items() if name not in changing}
            | {"limit": (found["global_concurrency_limit"] or {}).get("limit")}
            for found in ask(server, "/deployments/filter")
        ]

    before = deployments()
    for variables, sets, words in (
        ({"CUDA_AGENT_ALERT": "slack-webhook/nobody"}, (), "no block slack-webhook/nobody"),
        ({"CUDA_AGENT_WORKERS": "kubernetes"}, (), "cannot change"),
        ({"CUDA_AGENT_POOL": "gpu-h100"}, (), "no work pool gpu-h100"),
        ({"CUDA_AGENT_PROFILE": "smok"}, (), "smoke"),
        ({}, ("warmup.step=1",), "warmup.steps"),
    ):
        done = deploy(server, *sets, **({"CUDA_AGENT_PROFILE": "ci"} | variables))
        assert done.returncode != 0 and words in done.stdout + done.stderr, done.stdout + done.stderr
    assert deployments() == before


def test_a_deployment_that_prefect_does_not_accept_is_an_error(server: dict[str, str], deployed: str) -> None:
    done = deploy(server, CUDA_AGENT_PROFILE="ci", CUDA_AGENT_CRON="30 2 * *")
    assert done.returncode != 0 and "cron" in (done.stdout + done.stderr).lower()


def test_without_a_server_the_sentence_says_what_to_start() -> None:
    done = deploy({"PATH": "/usr/bin:/bin"})
    assert done.returncode != 0 and "prefect server start" in done.stderr


def test_kubernetes_templates_name_every_variable_and_take_the_pools_values() -> None:
    templates = job_templates("kubernetes")
    for template in templates.values():
        text = json.dumps(template["job_configuration"])
        for name in template["variables"]["properties"]:
            assert f"{{{{ {name} }}}}" in text, f"{name} is a variable that nothing uses"
    h200 = templates["gpu-h200"]["variables"]["properties"]
    assert (
        h200["node_selector"]["default"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
        and h200["limits"]["default"]["nvidia.com/gpu"] == 8
    )
    h20 = templates["gpu-h20"]["variables"]["properties"]
    assert "nvidia.com/gpu" not in h20["limits"]["default"], "the GPUs are the Ray cluster's and vLLM's"


def test_entry_points_exist_with_the_parameters_that_are_given() -> None:
    import importlib
    import inspect

    for entry in yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]:
        file, _, name = entry["entrypoint"].partition(":")
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert set(entry["parameters"]) <= set(inspect.signature(getattr(module, name).fn).parameters)


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
