"""Nights with a time budget: each ends in time with a version, and the next continues what it left."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import REDUCED, run

from components.core.files import digest_tree

SETS: dict[str, Any] = REDUCED | {
    "policy.source": "champion",
    "night.stages": ["agentic"],
    "agentic.advantages": "group",
    "agentic.steps": 2000,
}


@pytest.mark.timeout(1800)
def test_a_night_ends_in_time_with_a_version_and_the_next_ones_continue_it(tmp_path: Path) -> None:
    first = run(tmp_path, SETS | {"night.hours": 0.05})
    assert first.code == 0, first.stderr_console[-4000:]
    assert first.record["seconds"] < 0.05 * 3600 and first.record["model"]["version"] == "1"
    assert first.record["night"]["start"] == "scratch" and first.record["gate"]["verdict"] == "promoted"
    left = first.record["night"]["unfinished"]
    assert left["stage"] == "agentic" and left["progress"][0] > 0
    stage = Path(first.record["stages"][-1]["checkpoint"]).parent
    before = digest_tree(stage / "trajectories")

    second = run(tmp_path, SETS | {"night.hours": 0.025})
    assert second.code == 0, second.stderr_console[-4000:]
    assert second.record["run_id"] != first.record["run_id"] and second.record["model"]["version"] == "2"
    assert second.record["night"]["continues"] == left and second.record["night"]["parent"] == "1"
    assert Path(second.record["stages"][-1]["checkpoint"]).parent == stage, "the same seeds: the same stage"
    assert before.items() <= digest_tree(stage / "trajectories").items()
    kept = second.record["night"]["unfinished"]["progress"][0]
    assert kept > left["progress"][0]

    third = run(tmp_path, SETS | {"night.hours": 0.025, "seed": 3})
    assert third.code == 0, third.stderr_console[-4000:]
    carried = Path(third.record["stages"][-1]["checkpoint"]).parent
    assert carried != stage and third.record["night"]["unfinished"]["progress"][0] > kept
    steps = [json.loads(line) for line in (carried / "metrics.jsonl").read_text().splitlines()]
    earlier = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    assert steps[:kept] == earlier[:kept] and [step["step"] for step in steps] == list(range(len(steps)))
