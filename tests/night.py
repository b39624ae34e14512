"""Running the command as a person does, and the one night that the tests of flows share."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked import command

REDUCED = {
    "data.tasks": 6,
    "data.held_out": 2,
    "coldstart.demonstrations": 120,
    "coldstart.steps": 6,
    "coldstart.tokens_per_step": 2048,
    "warmup.steps": 2,
    "warmup.rollouts.tasks": 4,
    "warmup.rollouts.samples": 2,
    "warmup.rollouts.max_new_tokens": 48,
    # So small a policy babbles, which is no reason to stop here.
    "warmup.max_entropy": 100,
    "warmup.max_truncated": 1,
    "rejection.rollouts.tasks": 4,
    "rejection.rollouts.samples": 2,
    "rejection.rollouts.max_new_tokens": 48,
    "critic.epochs": 1,
    "agentic.steps": 2,
    "agentic.rollouts.tasks": 4,
    "agentic.rollouts.samples": 2,
    "agentic.rollouts.max_new_tokens": 48,
    "agentic.max_entropy": 100,
    "agentic.max_truncated": 1,
    "evaluation.attempts": 1,
    "evaluation.max_turns": 1,
    "evaluation.max_new_tokens": 48,
}
"""Every part of the night in about half a minute: for tests of order and resumption, not of learning."""


@dataclass(frozen=True)
class Done:
    """How the command ended: its exit code (negative: the signal), its one object, and what people saw."""

    code: int
    record: dict[str, Any]
    stderr_console: str


def words(home: Path, sets: dict[str, Any], *more: str) -> list[str]:
    chosen = [part for key, value in sets.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return ["run", "--profile", "ci", "--home", str(home), "--json", *chosen, *more]


def run(home: Path, sets: dict[str, Any], *more: str) -> Done:
    with command(words(home, sets, *more), _environment()) as started:
        assert started.ended(1200), "no end after 20 minutes"
        code, output, errors = started.result()
    return Done(code, json.loads(output) if output else {}, errors)


def run_and_kill(home: Path, sets: dict[str, Any], seconds: float) -> bool:
    """Start the command and kill it with SIGKILL after `seconds`; whether it was still running."""
    with command(words(home, sets), _environment()) as started:
        return not started.ended(seconds)


def run_killed(
    home: Path, sets: dict[str, Any], *, kills: int, longest: float, seed: int
) -> tuple[Done, int]:
    """Start the run `kills` times and kill it at a random moment up to `longest` seconds later, then let it end; also how often it was killed."""
    chance = random.Random(seed)
    killed = sum(run_and_kill(home, sets, chance.uniform(0, longest)) for _ in range(kills))
    return run(home, sets), killed


def manifest(home: Path, record: dict[str, Any]) -> dict[str, str]:
    content: dict[str, str] = json.loads((home / "runs" / record["run_id"] / "manifest.json").read_text())
    return content


def _environment() -> dict[str, str]:
    """What a person has in a new shell: nothing that other tests' libraries have set in this process."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))
    }
    return clean | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


KILLS = 10
LONGEST_SECONDS = 20.0
"""About half of what the reduced night takes undisturbed: kills fall anywhere in it, as each start continues the one before."""


@dataclass(frozen=True)
class Survivor:
    """The night that was killed: its home (tests may change it later), how it ended, and what it had made by then."""

    home: Path
    done: Done
    manifest: dict[str, str]
    verdicts: Path
    """A copy of its journal."""

    @property
    def record(self) -> dict[str, Any]:
        return self.done.record


@pytest.fixture(scope="session")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    folder = tmp_path_factory.mktemp("night")
    home = folder / "home"
    done, killed = run_killed(home, REDUCED, kills=KILLS, longest=LONGEST_SECONDS, seed=0)
    assert done.code == 0, f"{done.code}: {done.people[-4000:]}"
    assert killed >= KILLS // 2, "on a faster machine kills have to come earlier"
    shutil.copytree(home / "verdicts", folder / "verdicts")
    return Survivor(home, done, manifest(home, done.record), folder / "verdicts")
