"""Nights with a time budget end in time with a version, also after a kill, and the next ones go on."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import REDUCED, Done, run, run_and_kill_when

from components.core.files import digest_tree

SETS: dict[str, Any] = REDUCED | {
    "data.tasks": 3,
    "data.held_out": 1,
    "policy.source": "champion",
    "night.stages": ["agentic"],
    "agentic.advantages": "group",
    "agentic.steps": 2000,
    "agentic.rollouts.tasks": 2,
}


def stage_of(night: Done) -> Path:
    return Path(night.record["stages"][-1]["checkpoint"]).parent


def updates(night: Done) -> int:
    """Return the number of updates at which the night's budget ended the stage."""
    done: int = night.record["night"]["unfinished"]["progress"][0]
    return done


def metrics(stage: Path) -> list[dict[str, Any]]:
    file = stage / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.timeout(2400)
def test_nights_end_in_time_and_one_that_was_killed_ends_with_what_it_had_trained(tmp_path: Path) -> None:
    # A run without a budget makes the data set and the first champion, and shows how long a night takes
    # besides its training on this machine at present.
    whole = run(tmp_path, SETS | {"agentic.steps": 1})
    assert whole.code == 0 and whole.record["gate"]["verdict"] == "promoted", whole.stderr_console[-4000:]
    once = whole.record["dataset"]["seconds"] + sum(stage["seconds"] for stage in whole.record["stages"])
    seconds = 30.0 + 1.5 * (whole.record["seconds"] - once)

    first = run(tmp_path, SETS | {"night.hours": seconds / 3600})
    while first.code == 1 and "ended before the first update" in first.stderr_console:
        seconds *= 2  # the machine has become slower meanwhile
        first = run(tmp_path, SETS | {"night.hours": seconds / 3600})
    assert first.code == 0, first.stderr_console[-4000:]
    assert first.record["seconds"] < seconds and first.record["model"]["version"] == "2"
    assert first.record["night"]["start"] == "version 1"
    left, stage = first.record["night"]["unfinished"], stage_of(first)
    assert left["stage"] == "agentic" and updates(first) > 0
    before = digest_tree(stage / "trajectories")

    # The second night is killed when the state after its first update is saved, which is before the second
    # one is written down, and started again when its budget is spent.
    budget = 2.0 * seconds
    sets = SETS | {"night.hours": budget / 3600}
    done = metrics(stage)
    began = time.monotonic()
    run_and_kill_when(tmp_path, sets, lambda: len(metrics(stage)) > updates(first) + 1)
    trained = len(metrics(stage))
    time.sleep(max(0.0, budget - (time.monotonic() - began)))
    second = run(tmp_path, sets)
    assert second.code == 0, second.stderr_console[-4000:]
    assert second.record["run_id"] != first.record["run_id"]
    assert second.record["model"]["version"] == "3" and second.record["night"]["continues"] == left
    assert second.record["night"]["start"] == "version 1" and stage_of(second) == stage
    assert updates(first) < updates(second) <= trained, "it keeps what it had trained and trains no more"
    assert before.items() <= digest_tree(stage / "trajectories").items()
    steps = metrics(stage)
    assert steps[: updates(first)] == done and [step["step"] for step in steps] == [*range(len(steps))]
