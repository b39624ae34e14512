"""Jobs that ended long ago are deleted with their verdicts, and only those."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service_fixtures import TextJudges, body, service, token

from components.service.job_store import BATCH, StoredJob
from components.service.jobs import DAY, JobService
from components.service.requests import JudgementBody, ServiceError
from components.service.server import retaining

BOB = token("bob", measurements=2)


def request(text: str, **fields: Any) -> JudgementBody:
    return JudgementBody.model_validate(body(text, **fields))


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def judged(jobs: JobService, text: str, **fields: Any) -> str:
    """Have a candidate judged, and return the job's id."""
    job = jobs.submit(BOB, request(text, **fields)).id
    wait_for(lambda: jobs.view(BOB, job).has_ended)
    return job


def make_older(path: Path, seconds: float, where: str = "true") -> None:
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE jobs SET changed = changed - ? WHERE {where}", [seconds])
    database.close()


def verdicts(folder: Path) -> int:
    return len(list((folder / "verdicts").rglob("*.json")))


def test_old_jobs_are_deleted_with_their_verdicts_and_judged_anew_later(tmp_path: Path) -> None:
    judges = TextJudges()
    with service(tmp_path, judges) as jobs:
        old, failed = judged(jobs, "old"), judged(jobs, "fail")
        make_older(tmp_path / "jobs.sqlite", 10)
        new = judged(jobs, "new")
        jobs.delete_old(time.time() - 5)
        assert verdicts(tmp_path) == 1
        assert jobs.view(BOB, new).state == "done"
        for gone in (old, failed):
            with pytest.raises(ServiceError, match="no job"):
                jobs.view(BOB, gone)
        assert judged(jobs, "old") == old and judged(jobs, "new") == new
        assert [text for _, text in judges.measured if text != "fail"] == ["old", "new", "old"]


def test_queued_and_running_jobs_are_never_deleted(tmp_path: Path) -> None:
    with service(tmp_path, TextJudges(), workers=0) as jobs:
        running, queued, cancelled = (jobs.submit(BOB, request(text)).id for text in "abc")
        jobs.store.move(running, "running", "queued")
        jobs.cancel(BOB, cancelled)
        jobs.delete_old(time.time() + DAY)
        assert jobs.store.get(cancelled) is None
        assert [jobs.view(BOB, job).state for job in (running, queued)] == ["running", "queued"]


def test_the_age_of_a_job_counts_from_its_end(tmp_path: Path) -> None:
    with service(tmp_path, TextJudges(), workers=0) as jobs:
        job = jobs.submit(BOB, request("a")).id
    make_older(tmp_path / "jobs.sqlite", 100 * DAY)
    with service(tmp_path, TextJudges()) as jobs:
        wait_for(lambda: jobs.view(BOB, job).has_ended)
        jobs.delete_old(time.time() - DAY)
        assert jobs.view(BOB, job).state == "done"


def test_many_jobs_are_deleted_in_small_numbers(tmp_path: Path) -> None:
    with service(tmp_path, TextJudges(), workers=0) as jobs:
        for number in range(2 * BATCH + 1):
            jobs.store.put(
                StoredJob(f"{number:064}", "bob", "s", "judgement", "task", "", "done", changed=0.0)
            )
        sizes = []
        while deleted := jobs.store.delete_ended(1.0):
            sizes.append(len(deleted))
        assert sizes == [BATCH, BATCH, 1]


def test_a_deleted_measurement_is_no_longer_counted(tmp_path: Path) -> None:
    with service(tmp_path, TextJudges()) as jobs:
        for number in (1, 2):
            judged(jobs, "a", measurement=number)
        make_older(tmp_path / "jobs.sqlite", 10, "measurement = 1")
        assert jobs.view(BOB, judged(jobs, "a", measurement=2)).measurements == 2
        jobs.delete_old(time.time() - 5)
        assert jobs.view(BOB, judged(jobs, "a", measurement=2)).measurements == 1


def test_a_job_whose_verdict_was_lost_is_judged_again(tmp_path: Path) -> None:
    judges = TextJudges()
    with service(tmp_path, judges) as jobs:
        job = judged(jobs, "a")
        next((tmp_path / "verdicts").rglob(f"{job}.json")).unlink()
        with pytest.raises(ServiceError, match="was deleted"):
            jobs.view(BOB, job)
        assert judged(jobs, "a") == job and judges.measured == [("bob", "a")] * 2


def test_a_server_deletes_old_jobs_when_it_starts(tmp_path: Path) -> None:
    with service(tmp_path, TextJudges()) as jobs:
        old, new = judged(jobs, "old"), judged(jobs, "new")
    make_older(tmp_path / "jobs.sqlite", 3 * DAY, f"id = '{old}'")
    with service(tmp_path, TextJudges()) as jobs, retaining(jobs, days=2):
        wait_for(lambda: verdicts(tmp_path) == 1)
        assert jobs.store.get(old) is None and jobs.store.get(new) is not None
