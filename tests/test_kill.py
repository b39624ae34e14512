"""A run that is killed again and again ends with the artefacts of a run that nobody disturbed."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from night import REDUCED, Survivor, manifest, run

from components.config import resolve
from components.registry.tracking import connect


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_at_random_moments_change_no_artefact(survivor: Survivor, tmp_path: Path) -> None:
    # A measured time never repeats. What does is everything made from the same verdicts, so the undisturbed run is
    # given the journal of the killed one.
    shutil.copytree(survivor.verdicts, tmp_path / "verdicts")
    undisturbed = run(tmp_path, REDUCED)
    assert undisturbed.code == 0, undisturbed.people[-4000:]
    assert manifest(tmp_path, undisturbed.record) == survivor.manifest
    assert undisturbed.record["run_id"] == survivor.record["run_id"]


@pytest.mark.timeout(1800)
def test_mlflow_shows_one_run_and_one_version_after_ten_kills(survivor: Survivor) -> None:
    client = connect(resolve("ci").params.registry, survivor.home)
    found = client.search_runs([item.experiment_id for item in client.search_experiments()])
    own = [item for item in found if item.data.tags["cuda_agent.run_key"].startswith(survivor.record["run_id"])]
    names = sorted(item.data.tags.get("cuda_agent.stage", "night") for item in own)
    assert names == sorted(["night", "coldstart", "cold start", "warmup", "rejection", "critic", "agentic", "evaluation"])
    versions = client.search_model_versions("name = 'cuda-agent'")
    assert [str(item.version) for item in versions if item.tags["cuda_agent.run_key"].startswith(survivor.record["run_id"])] == [
        survivor.record["model"]["version"]
    ]


@pytest.mark.timeout(1800)
def test_prefect_keeps_no_run_that_pretends_to_go_on(survivor: Survivor) -> None:
    with sqlite3.connect(survivor.home / "prefect" / "prefect.db") as database:
        states = {state for (state,) in database.execute("select state_type from flow_run")}
    assert "COMPLETED" in states and not states & {"RUNNING", "PENDING"}
