"""Resumable states on disk: parameters, optimizer and random state of a stage's engines after so many steps.

A state is written to a temporary folder and renamed, so a kill leaves the previous one. The folder's name
holds precision, ZeRO stage and number of ranks, because DeepSpeed's shards of one layout cannot be loaded
under another. A stage that resumes under another layout trains again from its stored trajectories, without
sampling anew.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.core import config
from components.training.engine import DeepSpeedEngine, World


@dataclass(frozen=True)
class StateStore:
    """States of a stage's engines in its folder; `save` and `load` are collective."""

    stage_folder: Path
    engines: Mapping[str, DeepSpeedEngine]
    settings: config.Engine
    world: World
    kept: int
    """Number of states on disk; `save` deletes the oldest ones beyond it."""

    @property
    def layout(self) -> str:
        return f"{self.settings.dtype}-zero{self.settings.zero_stage}-world{self.world.size}"

    def complete(self) -> list[tuple[int, Path]]:
        """Return (steps done, folder) of every complete state of this layout, oldest first."""
        pattern = re.compile(rf"step-(\d+)-{re.escape(self.layout)}")
        folders = (self.stage_folder / "state").glob("step-*")
        matches = [(pattern.fullmatch(folder.name), folder) for folder in folders]
        return sorted((int(match[1]), folder) for match, folder in matches if match)

    def save(self, steps: int) -> None:
        """Write the state after `steps` steps."""
        folder = self.stage_folder / "state" / f"step-{steps:04d}-{self.layout}"
        temporary = folder.with_name(f".{folder.name}.writing")
        if self.world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.world.barrier()
        for name, engine in self.engines.items():
            engine.save(temporary / name)
        self.world.barrier()
        if self.world.rank == 0:
            for file in temporary.rglob("*"):
                if file.is_file():
                    with file.open("rb") as opened:
                        os.fsync(opened.fileno())
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            for _, old in self.complete()[: -self.kept]:
                shutil.rmtree(old)
        self.world.barrier()

    def load(self, *, before: float = float("inf")) -> int:
        """Load the newest state of fewer than `before` steps and return its steps; 0 when there is none."""
        states = [state for state in self.complete() if state[0] < before]
        self.world.barrier()
        if not states:
            return 0
        steps, folder = states[-1]
        for name, engine in self.engines.items():
            engine.load(folder / name)
        return steps
