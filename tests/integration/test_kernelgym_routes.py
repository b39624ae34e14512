"""A client of KernelGYM evaluates on the service, with its own fields and names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from service_fixtures import TASK, TextJudges, service, token

from components.service.app import make_app
from components.service.tokens import TokenFile, create_token


def evaluation(name: str, text: str, **fields: Any) -> dict[str, Any]:
    """Return a request as Dr. Kernel's client sends it."""
    return {
        "task_id": name,
        "reference_code": TASK.code,
        "kernel_code": text,
        "toolkit": "kernelbench",
        "backend": "cuda",
        "entry_point": "Model",
        "num_correct_trials": 5,
        "num_perf_trials": 100,
        "timeout": 300,
        "priority": "normal",
        "enable_profiling": True,
        "force_refresh": True,
    } | fields


@pytest.fixture
def judges() -> TextJudges:
    return TextJudges()


@pytest.fixture
def client(tmp_path: Path, judges: TextJudges) -> Iterator[TestClient]:
    with service(tmp_path, judges) as jobs, TestClient(make_app(jobs, None), "http://127.0.0.1") as made:
        yield made


def test_an_evaluation_has_the_fields_that_the_reward_is_made_of(client: TestClient) -> None:
    answer = client.post("/evaluate", json=evaluation("a_000001", "correct"))
    result = answer.json()
    assert answer.status_code == 200 and client.get("/status/a_000001").json()["status"] == "completed"
    assert client.get("/results/a_000001").json() == result
    assert (result["task_id"], result["status"], result["error_message"]) == ("a_000001", "completed", None)
    assert (result["compiled"], result["correctness"], result["decoy_kernel"]) == (True, True, False)
    assert (result["reference_runtime"], result["kernel_runtime"], result["speedup"]) == (2.0, 1.0, 2.0)
    assert result["metadata"]["verdict"]["speedup"]["eager"]["low"] == 1.9
    wrong = client.post("/evaluate", json=evaluation("a_000002", "wrong")).json()
    assert (wrong["status"], wrong["compiled"], wrong["correctness"]) == ("completed", True, False)
    assert wrong["speedup"] == 0 and wrong["error_message"].startswith("wrong_output")


def test_equal_sources_are_one_measurement_under_all_names(client: TestClient, judges: TextJudges) -> None:
    results = [client.post("/evaluate", json=evaluation(name, "same")).json() for name in ("a", "b", "a")]
    assert judges.measured == [("local", "same")] and results[0] | {"task_id": "b"} == results[1]


def test_a_fault_of_the_judge_is_answered_so_that_the_client_asks_again(
    client: TestClient, judges: TextJudges
) -> None:
    for attempt in (1, 2):
        assert client.post("/evaluate", json=evaluation("a", "fail")).status_code == 503
        assert client.get("/status/a").json()["status"] == "failed"
        assert len(judges.measured) == attempt * 3


def test_a_batch_is_answered_as_a_whole(client: TestClient) -> None:
    tasks = [evaluation(name, text) for name, text in (("a", "correct"), ("b", "wrong"), ("c", "fail"))]
    batch = client.post("/evaluate/batch", json={"batch_id": "one", "tasks": tasks}).json()
    assert (batch["total_tasks"], batch["completed_tasks"], batch["failed_tasks"]) == (3, 2, 1)
    assert [result["correctness"] for result in batch["results"]] == [True, False, None]
    assert batch["batch_status"] == "completed"
    assert client.post("/evaluate/batch", json={"batch_id": "two", "tasks": []}).status_code == 422


def test_what_is_not_judged_is_refused_in_a_sentence(client: TestClient) -> None:
    for request, sentence in (
        (evaluation("a", "x", entry_point="Block"), "entry_point"),
        (evaluation("a", "x", reference_code="x = 1"), "a task needs class Model"),
        (evaluation("a", "x", reference_code=""), "reference_code"),
        (evaluation("", "x"), "task_id"),
        ({"task_id": "a", "kernel_code": "x"}, "reference_code"),
    ):
        answer = client.post("/evaluate", json=request)
        assert answer.status_code == 422 and sentence in answer.json()["error"]
    for path in ("/status/none", "/results/none"):
        assert client.get(path).status_code == 404
    assert client.delete("/tasks/none").status_code == 404


def test_a_token_keeps_its_last_names(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.service.job_store.NAMES", 3)
    for name in ("a", "b", "c", "a", "d"):
        assert client.post("/evaluate", json=evaluation(name, "same")).status_code == 200
    found = {name: client.get(f"/status/{name}").status_code for name in "abcd"}
    assert found == {"a": 200, "b": 404, "c": 200, "d": 200}


def test_names_are_the_callers_own_and_survive_a_restart(tmp_path: Path, judges: TextJudges) -> None:
    path = tmp_path / "tokens.json"
    headers = {
        name: {"Authorization": f"Bearer {create_token(path, token(name), None)}"} for name in ("bob", "eve")
    }
    for workers in (0, None):
        with (
            service(tmp_path, judges, workers=workers) as jobs,
            TestClient(make_app(jobs, TokenFile(path))) as client,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr("components.service.kernelgym.WAIT_SECONDS", 0.01 if workers == 0 else 10)
            sent = client.post("/evaluate", json=evaluation("mine", "wrong"), headers=headers["bob"]).json()
            status = client.get("/status/mine", headers=headers["bob"]).json()
            if workers == 0:
                assert (sent["status"], status["status"], status["queue_position"]) == (
                    "pending",
                    "pending",
                    1,
                )
                assert client.get("/results/mine", headers=headers["bob"]).status_code == 202
                other = client.post("/evaluate", json=evaluation("other", "x"), headers=headers["bob"])
                assert client.delete("/tasks/other", headers=headers["bob"]).json()["status"] == "cancelled"
                assert other.json()["status"] == "pending"
            else:
                assert (sent["status"], status["status"]) == ("completed", "completed")
            assert client.get("/status/mine", headers=headers["eve"]).status_code == 404
            assert client.post("/evaluate", json=evaluation("mine", "wrong")).status_code == 401
    assert judges.measured == [("bob", "wrong")]
