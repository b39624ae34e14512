"""`cuda-agent train`: one stage on a bare node, alone or as ranks of a launcher."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from training_fixtures import episodes, stage

from components.core.config import PROJECT, resolve
from components.training import critic, warmup

SETS = (
    *("critic.epochs=2", "critic.learning_rate=0.01", "critic.min_explained_variance=-100", "critic.batch=8"),
    *("engine.tokens_per_microbatch=64", "policy.batch=64"),
)
# A node without an orchestrator: an import of one of these fails.
BARE = "import sys; sys.modules.update(dict.fromkeys(('prefect', 'mlflow', 'dvc')))\nfrom components.cli.main import main\nmain()"


def train(*words: str, program: tuple[str, ...] = ("-c", BARE)) -> subprocess.CompletedProcess[str]:
    chosen = [word for value in SETS for word in ("--set", value)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program, "train", *words, "--profile", "ci", *chosen]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    warmup.run(stage(folder, "warmup", "warmup.steps=1"), episodes)
    return folder


def words(world: Path, out: Path, name: str = "critic") -> list[str]:
    inputs = [
        "--input",
        str(world / "start"),
        "--dataset",
        str(world / "data"),
        "--trajectories",
        str(world / "warmup"),
    ]
    return [name, *inputs, "--output", str(out / name), "--home", str(out / "home"), "--json"]


@pytest.fixture(scope="module")
def alone(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The critic's stage as one process of its own: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("alone")
    ran = train(*words(world, folder))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder, json.loads(ran.stdout)


def test_a_stage_runs_without_an_orchestrator_and_as_in_the_night(
    world: Path, alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, result = alone
    assert (
        result["name"] == "critic"
        and result["checkpoint"] == "checkpoint"
        and result["figures"]["trajectories"] > 0
    )
    made = dataclasses.replace(
        stage(tmp_path / "here", "critic", actor=world / "start"),
        dataset=world / "data",
        trajectories=(world / "warmup",),
        params=resolve("ci", SETS).params,
    )
    critic.run(made)
    here, there = (
        load_file(place / "checkpoint" / "value_head.safetensors") for place in (made.out, folder / "critic")
    )
    assert all(tensor.equal(there[name]) for name, tensor in here.items())
    again = train(*words(world, folder))
    assert json.loads(again.stdout) == result, "a finished stage is only reported"
    for name, more, differs in (
        ("rejection", (), "stage"),
        ("critic", ("--set", "critic.lam=0.5"), r"critic\.lam"),
        ("critic", ("--set", "seed=9"), "seed"),
    ):
        other = [*words(world, folder, name), "--output", str(folder / "critic"), *more]
        ran = train(
            *[
                word
                for word in other
                if name == "critic" or word not in ("--trajectories", str(world / "warmup"))
            ]
        )
        said = rf"holds the finished stage critic of another .*{differs}.*; give another folder"
        assert ran.returncode == 2 and re.search(said, ran.stderr), ran.stderr[-500:]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["--ranks", "torchrun"])
def test_two_ranks_make_what_one_makes(
    launcher: str, world: Path, alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    both = words(world, tmp_path)
    if launcher == "torchrun":
        two = train(
            *both,
            program=(
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "components.cli",
            ),
        )
    else:
        two = train(*both, "--ranks", "2", program=("-m", "components.cli"))
    assert two.returncode == 0, two.stderr[-3000:]
    assert json.loads(two.stdout)["figures"]["trajectories"] == alone[1]["figures"]["trajectories"]
    heads = [
        load_file(folder / "critic" / "checkpoint" / "value_head.safetensors")
        for folder in (alone[0], tmp_path)
    ]
    for name, tensor in heads[0].items():
        assert float((tensor - heads[1][name]).abs().max()) < 1e-5, name


def test_what_a_person_got_wrong_is_one_sentence(world: Path, tmp_path: Path) -> None:
    ran = train(*words(world, tmp_path, "agentic"))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "needs the critic of stage 3" in ran.stderr and "Traceback" not in ran.stderr
    assert not (tmp_path / "agentic" / "checkpoint").exists()
