"""The HTTP service's queue, tokens and routes, with judges that need no sandbox."""

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from service_fixtures import PARAMS, TASK, TextJudges, body, service, token

from components.core.errors import UserError
from components.service import jobs as service_jobs
from components.service.app import BODY_BYTES, make_app
from components.service.job_store import JobStore, StoredJob
from components.service.jobs import JobService
from components.service.requests import JudgementBody, ServiceError
from components.service.tokens import LOCAL, OWNER, Token, TokenFile, create_token, read_tokens, write_tokens

BOB, EVE = token("bob"), token("eve")


def request(text: str = "", **fields: Any) -> JudgementBody:
    return JudgementBody.model_validate(body(text, **fields))


def wait_until_idle(jobs: JobService) -> None:
    while jobs.store.active()[0]:
        time.sleep(0.002)


@pytest.fixture
def judges() -> TextJudges:
    return TextJudges()


@pytest.fixture
def client(tmp_path: Path, judges: TextJudges) -> Iterator[TestClient]:
    with (
        service(tmp_path, judges) as jobs,
        TestClient(make_app(jobs, LOCAL), base_url="http://127.0.0.1", raise_server_exceptions=False) as made,
    ):
        yield made


def test_a_repeated_request_is_the_same_job_and_measures_nothing(
    client: TestClient, judges: TextJudges
) -> None:
    first = client.post("/v1/judgements", json=body("a"))
    assert first.status_code in (200, 202)
    done = client.get(f"/v1/jobs/{first.json()['id']}?wait=10")
    assert done.status_code == 200 and done.json()["verdict"]["status"] == "wrong_output"
    again = client.post("/v1/judgements", json=body("a"))
    assert again.status_code == 200 and again.json() == done.json()
    assert judges.measured == [("local", "a")]


def test_another_measurement_is_counted_and_shown(client: TestClient, judges: TextJudges) -> None:
    for number in (1, 2, 3, 3):
        job = client.post("/v1/judgements?wait=10", json=body("a", measurement=number)).json()
        assert (job["measurement"], job["measurements"]) == (number, number)
    assert len(judges.measured) == 3
    refused = client.post("/v1/judgements", json=body("a", measurement=LOCAL.measurements + 1))
    assert refused.status_code == 403 and "measurement" in refused.json()["error"]
    assert client.post("/v1/judgements", json=body("a", epoch="lucky")).status_code == 422


def test_nothing_that_tells_verification_from_timing_is_answered(client: TestClient) -> None:
    job = client.post("/v1/judgements?wait=10", json=body("a")).json()
    assert job["verdict"]["evidence"] == {"judge": "text"}
    answer = client.get(f"/v1/jobs/{job['id']}").text
    assert "wrong_output" in answer and "seeds" not in answer and "sets_per_round" not in answer


def test_a_fault_of_the_judge_is_no_verdict_and_is_tried_again(
    client: TestClient, judges: TextJudges
) -> None:
    for attempt in (1, 2):
        job = client.post("/v1/judgements?wait=10", json=body("fail"))
        assert job.status_code == 503 and job.json()["verdict"] is None
        assert "fell off" in job.json()["error"] and job.json()["reason"] == "judge"
        assert len(judges.measured) == attempt * PARAMS.sandbox.attempts


def test_a_fault_of_the_task_is_answered_with_its_reason(client: TestClient) -> None:
    job = client.post("/v1/judgements?wait=10", json=body("too_large"))
    assert (job.status_code, job.json()["reason"]) == (422, "too_large")
    assert job.json()["error"] == "the task takes 9 GB"


def test_an_admission_is_checked_with_the_callers_window(client: TestClient) -> None:
    request = {"code": TASK.code, "eager_seconds": [0.5, 2]}
    job = client.post("/v1/admissions?wait=10", json=request).json()
    assert job["admission"] == {"admitted": True, "reason": "", "evidence": {"window": [0.5, 2]}}


@pytest.mark.parametrize(
    ("content", "status", "sentence"),
    [
        ("{", 422, "not valid JSON"),
        ("[" * 100_000, 400, "parsing the body"),
        ("{}", 422, "files: Field required"),
        (json.dumps(body(precision="fp8")), 422, "precision"),
        (json.dumps({"files": {}}), 422, "give either task"),
        (json.dumps({"files": {}, "task": "0" * 16}), 404, "no task '0000000000000000'"),
        (json.dumps({"files": {}, "code": "def f(:"}), 422, "not valid Python"),
        (json.dumps({"files": {}, "code": "x = 1"}), 422, "a task needs class Model"),
        (json.dumps({"files": {}, "code": "-" * 200_000 + "1"}), 422, "not valid Python"),
        (json.dumps(body("\ud800")), 422, "lone surrogate"),
        (json.dumps(body() | {"files": {"model_new.py": 3}}), 422, "valid string"),
        (json.dumps(body("a" * BODY_BYTES)), 413, "larger than"),
        (json.dumps(body() | {"files": dict.fromkeys(map(str, range(200_000)), 3)}), 422, "10000 entries"),
        (json.dumps(dict.fromkeys(map(str, range(200_000)), 3)), 422, "10000 entries"),
    ],
)
def test_bad_input_is_one_sentence(client: TestClient, content: str, status: int, sentence: str) -> None:
    answer = client.post("/v1/judgements", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert sentence in answer.json()["error"] and "\n" not in answer.json()["error"]


def test_a_body_without_a_length_is_cut_off_too(client: TestClient) -> None:
    chunks = (b" " * 100_000 for _ in range(BODY_BYTES // 100_000 + 2))
    answer = client.post("/v1/judgements", content=chunks, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413 and "larger than" in answer.json()["error"]


def test_paths_of_requests_do_not_climb(client: TestClient) -> None:
    for path in ("/v1/jobs/..%2f..%2fjobs.sqlite", "/v1/jobs/%2e%2e", "/v1/tasks/../../etc/passwd", "/nope"):
        answer = client.get(path)
        assert answer.status_code == 404 and list(answer.json()) == ["error"]


def test_a_redirected_web_page_cannot_use_a_service_without_tokens(client: TestClient) -> None:
    for path in ("/health", "/openapi.json", "/nope"):
        for host in ("evil.example", "evil.example:8470", "127.0.0.1.evil.example", "", "a, 127.0.0.1"):
            answer = client.get(path, headers={"Host": host})
            assert answer.status_code == 400 and answer.json()["error"].startswith("Host: "), host
    assert client.get("/health", headers={"Host": "LOCALHOST:8470"}).status_code == 200
    for kind in ({}, {"Content-Type": "text/plain"}):  # what a page may send to another address unasked
        answer = client.post("/v1/judgements", content=json.dumps(body("a")).encode(), headers=kind)
        assert answer.status_code == 422


def test_tokens_are_told_apart_by_their_digest_and_expire(tmp_path: Path, judges: TextJudges) -> None:
    path = tmp_path / "tokens.json"
    secrets = {name: create_token(path, token(name), days) for name, days in (("bob", None), ("eve", 1))}
    assert all(secret not in path.read_text() for secret in secrets.values())
    with pytest.raises(UserError, match="exists"):
        create_token(path, BOB, None)
    with pytest.raises(UserError, match="choose another name"):
        create_token(path, OWNER, None)
    write_tokens(tmp_path / "owner.json", [OWNER])
    with pytest.raises(UserError, match="rename it"):
        read_tokens(tmp_path / "owner.json")
    with service(tmp_path, judges) as jobs, TestClient(make_app(jobs, TokenFile(path))) as client:

        def get(place: str, secret: str) -> tuple[int, str]:
            answer = client.get(place, headers={"Authorization": f"Bearer {secret}"})
            return answer.status_code, answer.text

        assert client.get("/v1/tasks").status_code == 401
        assert get("/v1/tasks", "guess")[0] == 401
        # Nothing of a body is parsed before the token is known.
        for credentials in ({}, {"Authorization": "Bearer guess"}):
            headers = {"Content-Type": "application/json", **credentials}
            assert client.post("/v1/judgements", content="{", headers=headers).status_code == 401
        assert get("/v1/tasks", secrets["eve"])[0] == 200
        assert get("/metrics", secrets["eve"])[0] == 403
        job = client.post(
            "/v1/judgements", json=body("b"), headers={"Authorization": f"Bearer {secrets['bob']}"}
        ).json()
        assert get(f"/v1/jobs/{job['id']}", secrets["bob"])[0] == 200
        assert get(f"/v1/jobs/{job['id']}", secrets["eve"])[0] == 404, "it is another caller's"
        bob, eve = read_tokens(path)
        late = eve.model_copy(update={"expires": datetime.now(UTC) - timedelta(seconds=1)})
        write_tokens(path, [bob, late])
        status, text = get("/v1/tasks", secrets["eve"])
        assert status == 401 and "expired" in text and "clock says" in text
        write_tokens(path, [bob])
        assert "unknown token" in get("/v1/tasks", secrets["eve"])[1]
        path.write_text("{")
        assert get("/v1/tasks", secrets["bob"])[0] == 503


def test_rights_of_a_token_are_enforced(tmp_path: Path, judges: TextJudges) -> None:
    with service(tmp_path, judges, workers=0, capacity=3) as jobs:

        def status(rights: dict[str, Any], **fields: Any) -> int:
            with TestClient(make_app(jobs, token("t", **rights)), base_url="http://127.0.0.1") as client:
                answer = client.post("/v1/judgements", json=body(**fields))
            if answer.status_code == 429:
                assert int(answer.headers["Retry-After"]) >= 1
            return answer.status_code

        other = {"task": "", "code": TASK.code.replace("0.3", "0.4")}
        assert status({"own_tasks": False}, **other) == 403
        assert status({"own_tasks": False}) == 202
        assert status({"queued": 1}, text="b") == 429
        assert status({"queued": 1}) == 202, "it waits already"
        assert status({}, text="b") == 202
        assert status({}, text="c") == 202
        assert status({}, text="d") == 429, "the service is full"


def test_queued_jobs_survive_and_are_judged_once(tmp_path: Path, judges: TextJudges) -> None:
    with service(tmp_path, judges, workers=0) as jobs:
        ids = [jobs.submit(BOB, request(str(number))).id for number in range(5)]
        assert [jobs.view(BOB, job).position for job in ids] == [1, 2, 3, 4, 5]
        assert jobs.cancel(BOB, ids[4]).state == "cancelled"
        jobs.store.move(ids[0], "running", "queued")  # as when the process is killed
    with service(tmp_path, judges) as jobs:
        wait_until_idle(jobs)
        assert [jobs.view(BOB, job).state for job in ids] == ["done"] * 4 + ["cancelled"]
        assert sorted(judges.measured) == [("bob", str(number)) for number in range(4)]
        with pytest.raises(Exception, match="only a queued job"):
            jobs.cancel(BOB, ids[0])


def test_a_queue_whose_database_fails_for_a_while_loses_no_job(
    tmp_path: Path, judges: TextJudges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.service.jobs.RETRY_SECONDS", 0.01)
    with service(tmp_path, judges) as jobs:
        honest, faults = jobs.store.finish, [3]

        def finish(*values: Any) -> None:
            if faults[0]:
                faults[0] -= 1
                raise sqlite3.OperationalError("database or disk is full")
            honest(*values)

        monkeypatch.setattr(jobs.store, "finish", finish)
        made = [jobs.submit(BOB, request(str(number))).id for number in range(5)]
        wait_until_idle(jobs)
        assert [jobs.view(BOB, job).state for job in made] == ["done"] * 5 and not faults[0]


def test_a_job_that_ends_the_service_three_times_fails(tmp_path: Path) -> None:
    job = StoredJob("a", "t", "s", "judgement", "task", "body")
    JobStore(tmp_path / "jobs.db").put(job)
    states = []
    for _ in range(4):
        store = JobStore(tmp_path / "jobs.db")
        found = store.get("a")
        assert found is not None
        states.append(found.state)
        store.move("a", "running", "queued")
        store.close()
    assert states == ["queued", "queued", "queued", "failed"]


def test_a_queue_of_a_service_that_stored_no_reasons_is_continued(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs.db")
    store.put(StoredJob("a", "t", "s", "judgement", "task", "body"))
    store.database.execute("ALTER TABLE jobs DROP COLUMN reason")
    store.close()
    for reason in ("task", "too_large"):
        store = JobStore(tmp_path / "jobs.db")
        store.finish("a", "failed", "it fails", 422, reason)
        found = store.get("a")
        assert found is not None and found.reason == reason
        store.close()


def test_a_journal_without_its_queue_is_not_measured_again(tmp_path: Path, judges: TextJudges) -> None:
    for _ in range(2):
        with service(tmp_path, judges) as jobs:
            jobs.submit(BOB, request("a"))
            wait_until_idle(jobs)
        (tmp_path / "jobs.sqlite").unlink()
    assert judges.measured == [("bob", "a")]


def test_a_caller_with_many_jobs_delays_another_by_the_running_jobs_at_most(
    tmp_path: Path, judges: TextJudges
) -> None:
    with service(tmp_path, judges) as jobs:
        for number in range(200):
            jobs.submit(BOB, request(f"sleep 0.01{number}"))
        while len(judges.measured) < 10:
            time.sleep(0.001)
        before = len(judges.measured)
        jobs.submit(EVE, request("eve"))
        while ("eve", "eve") not in judges.measured:
            time.sleep(0.001)
        between = judges.measured.index(("eve", "eve")) - before
        jobs.stop()
    # Those whose measurement had begun or was waiting for the device, which these judges grant unfairly.
    assert between <= jobs.workers


def test_equal_requests_at_once_are_one_measurement(tmp_path: Path, judges: TextJudges) -> None:
    with service(tmp_path, judges) as jobs:
        threads = [threading.Thread(target=jobs.submit, args=(BOB, request("a"))) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until_idle(jobs)
    assert judges.measured == [("bob", "a")]


def test_the_bytes_that_a_token_and_all_tokens_may_queue_are_limited(
    tmp_path: Path, judges: TextJudges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_jobs, "OWN_BYTES", 50_000)
    monkeypatch.setattr(service_jobs, "ALL_BYTES", 80_000)
    large = "x = 1\n" * 5000
    with service(tmp_path, judges, workers=0) as jobs:
        held = jobs.submit(BOB, request(large))
        with pytest.raises(ServiceError, match="jobs of 0 MB waiting") as error:
            jobs.submit(BOB, request(large + "y = 1"))
        assert error.value.status == 429
        jobs.submit(EVE, request(large))
        with pytest.raises(ServiceError, match="no place"):
            jobs.submit(token("carol"), request(large))
        jobs.cancel(BOB, held.id)
        jobs.submit(BOB, request(large + "y = 1"))


def test_a_caller_learns_nothing_of_the_jobs_of_others(tmp_path: Path, judges: TextJudges) -> None:
    with service(tmp_path, judges, workers=0) as jobs:
        before = jobs.submit(EVE, request("a"))
        others = [jobs.submit(BOB, request(text)).id for text in ("a", "b", "c")]
        jobs.store.move(others[0], "running", "queued")
        assert jobs.submit(EVE, request("a")) == before == jobs.view(EVE, before.id)

        def refusal(ask: Callable[[Token, str], object], job_id: str) -> str:
            with pytest.raises(ServiceError) as error:
                ask(EVE, job_id)
            return f"{error.value.status} {error.value}".replace(job_id, "JOB")

        for ask in (jobs.view, jobs.find, jobs.cancel):
            assert refusal(ask, others[0]) == refusal(ask, others[1]) == refusal(ask, "0" * 64)
        assert jobs.store.active()[0] == 4


def test_no_wording_of_a_request_measures_an_equal_candidate_more_often(
    tmp_path: Path, judges: TextJudges
) -> None:
    """Who measures often enough is lucky once, so every measurement counts for the token's limit."""
    eve = token("eve", measurements=3)
    wordings: list[dict[str, Any]] = [
        {"measurement": number, "compare_compile": compare, "labels": labels, "precision": precision} | task
        for number in (3, 2, 1, 4)
        for compare in (False, True)
        for labels in (None, {"rules": "kernel-only", "weights": "state_dict", "tolerance": "strict"})
        for precision in (None, PARAMS.precision)
        for task in ({}, {"task": "", "code": f"# mine\n{TASK.code}\n\n"})
    ]
    with service(tmp_path, judges) as jobs:
        answered, refused = 0, 0
        for wording in wordings:
            try:
                jobs.submit(eve, request("a", **wording))
                answered += 1
            except ServiceError as error:
                assert error.status == 403 and "3 times" in str(error)
                refused += 1
        wait_until_idle(jobs)
    assert judges.measured == [("eve", "a")] * 3 and answered > 3 and refused > 3


def test_only_the_account_of_the_service_chooses_all_parameters(tmp_path: Path, judges: TextJudges) -> None:
    sandbox = PARAMS.sandbox.model_copy(update={"rounds": 7, "attempts": PARAMS.sandbox.attempts + 1})
    params = PARAMS.model_copy(update={"sandbox": sandbox}).model_dump(mode="json")
    named_alike = OWNER.model_copy()
    with service(tmp_path, judges) as jobs:
        for caller in (LOCAL, BOB, named_alike):
            with pytest.raises(ServiceError, match="params: only the account") as refused:
                jobs.submit(caller, request("a", params=params))
            assert refused.value.status == 403
        usual, other = jobs.submit(OWNER, request("a")), jobs.submit(OWNER, request("a", params=params))
        assert usual.id != other.id and other.measurements == 1
        wait_until_idle(jobs)
        assert judges.settings == {5, 7}
        judges.measured.clear()
        jobs.submit(OWNER, request("fail", params=params))
        wait_until_idle(jobs)
        assert len(judges.measured) == sandbox.attempts


def test_the_account_of_the_service_may_use_all_workers(tmp_path: Path, judges: TextJudges) -> None:
    with service(tmp_path, judges, workers=0) as jobs:
        jobs.workers = 2
        for caller in (OWNER, BOB):
            for text in "ab":
                jobs.submit(caller, request(text))
        jobs.running.update({"owner": 1, "bob": 1})
        chosen = jobs._choose()
        assert chosen is not None and chosen.token == "owner"
