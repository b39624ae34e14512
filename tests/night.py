"""Running the command as a person does, and the one night that the tests of flows share."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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
    people: str


def command(home: Path, sets: dict[str, Any], *more: str) -> list[str]:
    chosen = [part for key, value in sets.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return [sys.executable, "-m", "components.cli", "run", "--profile", "ci", "--home", str(home), "--json", *chosen, *more]


def run(home: Path, sets: dict[str, Any], *more: str) -> Done:
    done = subprocess.run(command(home, sets, *more), capture_output=True, text=True, env=_environment(), timeout=1200, check=False)
    return Done(done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr)


def run_and_kill(home: Path, sets: dict[str, Any], seconds: float) -> bool:
    """Start the command and kill it with SIGKILL after `seconds`; whether it was still running."""
    with subprocess.Popen(command(home, sets), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()) as process:
        try:
            process.wait(timeout=seconds)
            return False
        except subprocess.TimeoutExpired:
            process.kill()
            return True


def run_killed(home: Path, sets: dict[str, Any], *, kills: int, longest: float, seed: int) -> Done:
    """Kill the run `kills` times, each at a random moment up to `longest` seconds after its start, then let it end."""
    chance = random.Random(seed)
    for _ in range(kills):
        if not run_and_kill(home, sets, chance.uniform(0, longest)):
            break
    return run(home, sets)


def manifest(home: Path, record: dict[str, Any]) -> dict[str, str]:
    content: dict[str, str] = json.loads((home / "runs" / record["run_id"] / "manifest.json").read_text())
    return content


def _environment() -> dict[str, str]:
    """What a person has in a new shell: nothing that other tests' libraries have set in this process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return clean | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


KILLS = 10
LONGEST_SECONDS = 40.0
"""About what the reduced night takes undisturbed, so that kills fall anywhere in it."""


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
    done = run_killed(home, REDUCED, kills=KILLS, longest=LONGEST_SECONDS, seed=0)
    assert done.code == 0, f"{done.code}: {done.people[-4000:]}"
    shutil.copytree(home / "verdicts", folder / "verdicts")
    return Survivor(home, done, manifest(home, done.record), folder / "verdicts")
