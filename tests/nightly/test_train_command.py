"""`cuda-agent train`: one stage on a bare node, without an orchestrator."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from train_command_fixtures import SETS, arguments, train, words
from train_command_fixtures import alone as alone
from train_command_fixtures import inputs as inputs
from training_fixtures import stage
from typer.testing import CliRunner

from components.cli.main import app
from components.core.config import resolve
from components.core.errors import UserError
from components.training import critic


def refusal(*words: str) -> str:
    """Return the sentence with which the command refuses `words`, in this process."""
    error = CliRunner().invoke(app, arguments(*words)).exception
    assert isinstance(error, UserError), error
    return str(error)


def test_a_stage_runs_without_an_orchestrator_and_as_in_the_run(
    inputs: Path, alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, result = alone
    assert (
        result["name"] == "critic"
        and result["checkpoint"] == "checkpoint"
        and result["figures"]["trajectories"] > 0
    )
    made = dataclasses.replace(
        stage(tmp_path / "here", "critic", actor=inputs / "start"),
        dataset=inputs / "data",
        trajectories=(inputs / "warmup",),
        params=resolve("ci", SETS).params,
    )
    critic.run(made)
    here, there = (
        load_file(place / "checkpoint" / "value_head.safetensors") for place in (made.out, folder / "critic")
    )
    assert all(tensor.equal(there[name]) for name, tensor in here.items())
    again = train(*words(inputs, folder))
    assert json.loads(again.stdout) == result, "a finished stage is only reported"
    for name, more, differs in (
        ("rejection", (), "stage"),
        ("critic", ("--set", "critic.lam=0.5"), r"critic\.lam"),
        ("critic", ("--set", "seed=9"), "seed"),
    ):
        other = [*words(inputs, folder, name), "--output", str(folder / "critic"), *more]
        asked = [
            word
            for word in other
            if name == "critic" or word not in ("--trajectories", str(inputs / "warmup"))
        ]
        said = rf"holds the finished stage critic of another .*{differs}.*; give another folder"
        assert re.search(said, refusal(*asked))


def test_what_a_person_got_wrong_is_one_sentence(inputs: Path, tmp_path: Path) -> None:
    assert "needs the critic of stage 3" in refusal(*words(inputs, tmp_path, "agentic"))
    without = ("--set", "agentic.advantages=group")
    given = ("--critic", str(inputs / "start"))
    assert refusal(*words(inputs, tmp_path, "agentic"), *without, *given) == (
        f"agentic.advantages: group uses no critic, but {inputs / 'start'} was given; leave the critic out, "
        "or set it to critic."
    )
    alone = ("--set", "agentic.rollouts.samples=1")
    assert "raise it to 2 or more" in refusal(*words(inputs, tmp_path, "agentic"), *without, *alone)
    assert not (tmp_path / "agentic" / "checkpoint").exists()
