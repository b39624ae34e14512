"""A run that is killed again and again ends with the artefacts of a run that nobody disturbed."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from night import REDUCED, manifest, run, run_killed

from components.config import resolve
from components.registry.tracking import connect

KILLS = 10
LONGEST_SECONDS = 40.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    killed, calm = tmp_path / "killed", tmp_path / "calm"
    survived = run_killed(killed, REDUCED, kills=KILLS, longest=LONGEST_SECONDS, seed=0)
    assert survived.code == 0, survived.people[-4000:]

    client = connect(resolve("ci").params.registry, killed)
    found = client.search_runs([item.experiment_id for item in client.search_experiments()])
    names = sorted(item.data.tags.get("cuda_agent.stage", "night") for item in found)
    assert names == sorted(["night", "coldstart", "cold start", "warmup", "rejection", "critic", "agentic", "evaluation"])
    assert len(client.search_model_versions("name = 'cuda-agent'")) == 1
    with sqlite3.connect(killed / "prefect" / "prefect.db") as database:
        assert not {state for (state,) in database.execute("select state_type from flow_run")} & {"RUNNING", "PENDING"}

    # A measured time never repeats. What does is everything made from the same verdicts, so the undisturbed run is
    # given the journal of the killed one.
    calm.mkdir()
    shutil.copytree(killed / "verdicts", calm / "verdicts")
    undisturbed = run(calm, REDUCED)
    assert undisturbed.code == 0, undisturbed.people[-4000:]
    assert manifest(killed, survived.record) == manifest(calm, undisturbed.record)
