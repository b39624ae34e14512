"""A real judge over HTTP gives the verdicts that it gives locally, and refuses a second server."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import judge_fixtures as corpus
import pytest
from serve_fixtures import command, start

SIMD = corpus.files("honest", "simd")
# One exploit for each way in which a candidate is refused.
SAMPLE = ("zeros", "operators", "dlopen", "exit_at_import", "patched_time", "segfault")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    process, address = start(home)
    with httpx.Client(base_url=address, timeout=100) as client:
        yield client
    process.terminate()
    assert process.wait(60) == 143


def judged(client: httpx.Client, files: dict[str, str], code: str = corpus.CODE, **fields: Any) -> Any:
    answer = client.post("/v1/judgements?wait=60", json={"code": code, "files": files} | fields)
    while answer.status_code == 202:
        answer = client.get(f"/v1/jobs/{answer.json()['id']}?wait=60")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_honest_candidate_is_measured_once_and_anew_only_if_asked(client: httpx.Client) -> None:
    first = judged(client, SIMD)
    assert first["verdict"]["status"] == "correct" and first["verdict"]["milestone"] >= 1
    assert {"raw_seconds", "judge"} <= first["verdict"]["evidence"].keys()
    assert not {"seeds", "sets_per_round", "inputs"} & first["verdict"]["evidence"].keys()
    assert judged(client, SIMD)["verdict"] == first["verdict"]
    second = judged(client, SIMD, measurement=2)
    assert second["measurements"] == 2
    assert second["verdict"]["evidence"]["raw_seconds"] != first["verdict"]["evidence"]["raw_seconds"]


def test_a_task_with_workloads_is_judged_on_each_and_faulty_ones_are_refused(client: httpx.Client) -> None:
    code = corpus.CODE.replace("get_inputs()", "get_inputs(rows)").replace("256, 1024", "rows, 1024")
    verdict = judged(client, SIMD, code + "\nWORKLOADS = [(64,), (256,)]\n", compare_compile=None)["verdict"]
    assert [one["call"] for one in verdict["workloads"]] == ["get_inputs(64)", "get_inputs(256)"]
    assert all(one["speedup"]["eager"]["estimate"] > 0 for one in verdict["workloads"])
    measured = verdict["evidence"]["workloads"]
    assert all("raw_seconds" in one and "seeds" not in one for one in measured), "seeds are not told"
    faulty = {"code": code + "\nWORKLOADS = []\n", "files": SIMD}
    answer = client.post("/v1/judgements", json=faulty)
    assert answer.status_code == 422 and "code: WORKLOADS is not a list of 1 to 8 tuples" in answer.text


@pytest.mark.parametrize("name", SAMPLE)
def test_an_exploit_gets_the_verdict_that_it_gets_locally(client: httpx.Client, name: str) -> None:
    expected = corpus.expected(name)
    verdict = judged(client, corpus.files("exploits", name), corpus.task("exploits", name).code)["verdict"]
    assert verdict["status"] in expected["status"].split("|"), verdict
    assert verdict["reason"].startswith(expected["reason"]), verdict


def test_a_task_that_fails_is_no_fault_of_the_candidate(client: httpx.Client) -> None:
    code = corpus.CODE.replace("return [torch.randn(256, 1024)]", "return [1 / 0]")
    answer = client.post("/v1/judgements?wait=60", json={"code": code, "files": SIMD})
    assert answer.status_code == 422 and "the task itself fails" in answer.json()["error"]


def test_listed_tasks_are_the_shipped_suite(client: httpx.Client) -> None:
    tasks = client.get("/v1/tasks").json()
    assert len(tasks) >= 10
    task = client.get(f"/v1/tasks/{tasks[0]['task_id']}").json()
    assert "class Model" in task["code"]


def test_a_second_service_of_the_home_is_refused_in_one_sentence(client: httpx.Client, home: Path) -> None:
    arguments = ("--home", str(home), "--http", "0")
    done = subprocess.run(command("serve", *arguments), capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "already runs" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_client_that_goes_away_changes_nothing(client: httpx.Client) -> None:
    files = SIMD | {"kernels/forward.cpp": f"not C++ {time.time()}"}
    request = {"code": corpus.CODE, "files": files}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/judgements?wait=60", json=request, timeout=httpx.Timeout(60, read=0.02))
    assert judged(client, files)["verdict"]["status"] == "build_failed"
