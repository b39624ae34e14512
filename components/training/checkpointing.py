"""Resumable states on disk: parameters, optimizer and random state of a stage's engines after a step.

A state is written to a temporary folder that is renamed when it is complete, so a killed process leaves the
previous state intact. The folder's name contains precision, ZeRO stage and number of ranks (the layout),
because DeepSpeed cannot load shards of another layout. A stage that resumes with another layout repeats its
training on its stored trajectories and does not sample them again.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.core import params
from components.core.files import sync_tree
from components.training.engine import DeepSpeedEngine, World


@dataclass(frozen=True)
class StateStore:
    """States of a stage's engines in the stage's folder; every rank must call `save` and `load`."""

    stage_folder: Path
    engines: Mapping[str, DeepSpeedEngine]
    settings: params.Engine
    world: World
    # Maximum number of states on disk; `save` deletes the oldest ones if there are more.
    kept: int

    @property
    def layout(self) -> str:
        return f"{self.settings.dtype}-zero{self.settings.zero_stage}-world{self.world.size}"

    def complete(self) -> list[tuple[int, Path]]:
        """Return (finished steps, folder) of every complete state of this layout, oldest first."""
        folders = (self.stage_folder / "state").glob(f"step-*-{self.layout}")
        return sorted((int(folder.name.split("-")[1]), folder) for folder in folders)

    def save(self, steps: int) -> None:
        """Save the engines' present state as the state after `steps` steps.

        If there are then more than `kept` states, the oldest ones are deleted.
        """
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
            sync_tree(temporary)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            for _, old in self.complete()[: -self.kept]:
                shutil.rmtree(old)
        self.world.barrier()

    def load(self, *, before: float = float("inf")) -> int:
        """Load the newest state that was saved after fewer than `before` steps, and return its step count.

        Returns 0 and changes nothing if there is no such state.
        """
        states = [state for state in self.complete() if state[0] < before]
        self.world.barrier()
        if not states:
            return 0
        steps, folder = states[-1]
        for name, engine in self.engines.items():
            engine.load(folder / name)
        return steps
