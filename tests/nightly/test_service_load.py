"""Many clients at once, a third of them hostile: no job is lost or judged twice, and memory stays flat."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import judge_fixtures as corpus
import pytest

SCRIPT = corpus.HERE / "bench" / "load_service.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = {"clients": 12, "jobs": 72, "measured": 0.05, "flood": 30, "singles": 1}
    arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    home = tmp_path_factory.mktemp("home")
    command = [sys.executable, str(SCRIPT), "--home", str(home), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout) | {"home": home}


def test_no_job_is_lost_or_judged_twice_and_memory_stays_flat(report: Any) -> None:
    assert report["faults"] == [] and report["jobs"] == report["judged"] == 73
    journal: Path = report["home"] / "service" / "cpu" / "verdicts"
    assert len(list(journal.glob("*/*.json"))) >= report["jobs"]


def test_a_single_job_is_not_kept_waiting_by_a_flood(report: Any) -> None:
    """The jobs that end before it were running when it came, or began beside it on the other workers."""
    flood = report["flood"]
    assert flood["flood_still_queued"] > 20
    assert max(flood["measured_between"]) <= 6


def test_an_honest_caller_is_served_beside_clients_that_send_nothing() -> None:
    command = [sys.executable, str(corpus.HERE / "bench" / "crowded_service.py"), "--calls", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["idle_closed"] >= 4000
    for kind in ("health", "verdict"):
        assert seen["beside"][kind]["median"] < 3 * seen["alone"][kind]["median"] + 0.2, seen
