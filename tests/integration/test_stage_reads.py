"""A stage reads no parameter that changes results and is missing from its key."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from training_fixtures import episode, stage

from components.core.config import KINDS
from components.core.params import Params
from components.core.records import FrozenModel
from components.training.run_stage import run_stage
from components.training.stage import STAGES
from flows.stage_keys import READS

# Read only to refuse bad parameters before a stage begins.
CHECKED = {
    *("warmup.steps", "warmup.rollouts.tasks", "rejection.rollouts.tasks", "agentic.advantages"),
    *("sandbox.rules", "sandbox.weights", "sandbox.tolerance", "sandbox.input_cache"),
    *("sandbox.compile_modes", "reward"),
    *("coldstart.demonstrations", "policy.source"),
}


class Reading:
    """The dotted keys of all parameters that are read from watched sections."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.sections: dict[int, tuple[str, FrozenModel]] = {}

    def watch(self, section: FrozenModel, prefix: str = "") -> None:
        self.sections[id(section)] = prefix, section
        for name in type(section).model_fields:
            if isinstance(value := object.__getattribute__(section, name), FrozenModel):
                self.watch(value, f"{prefix}{name}.")


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    reading = Reading()

    def recorded(self: FrozenModel, name: str) -> Any:
        if id(self) in reading.sections and name in type(self).model_fields:
            reading.keys.add(reading.sections[id(self)][0] + name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(FrozenModel, "__getattribute__", recorded)
    return reading


def test_every_stage_reads_only_parameters_of_its_key(reading: Reading, tmp_path: Path) -> None:
    for name in STAGES:
        made = stage(tmp_path, name, "critic.min_explained_variance=-100")
        if name == "critic":
            sampled = (tmp_path / "warmup" / "trajectories", tmp_path / "rejection" / "trajectories")
            made = dataclasses.replace(made, trajectories=sampled)
        if name == "agentic":
            made = dataclasses.replace(made, critic=tmp_path / "critic" / "checkpoint")
        # A copy, because equal sections of different stages may be one object.
        watched = Params.model_validate(made.params.model_dump())
        reading.sections.clear()
        reading.keys.clear()
        reading.watch(watched)
        run_stage(dataclasses.replace(made, params=watched), episode)
        read = {key for key in reading.keys if KINDS.get(key) == "result"}
        declared = READS[name].params
        missing = {
            key for key in read if not any(key == part or key.startswith(f"{part}.") for part in declared)
        }
        assert f"{name}.learning_rate" in read
        assert missing - CHECKED == set(), f"{name} reads {missing - CHECKED}, which its key lacks"
