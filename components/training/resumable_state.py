"""Resumable states of a stage on disk, and how a killed stage continues from the newest of them.

A state holds the parameters, optimizer states and random state of the stage's engines after a step. It is
written to a temporary folder that is renamed when it is complete, so a killed process leaves the previous
state intact. The folder's name contains precision and ZeRO stage (the layout) and the number of ranks.
DeepSpeed cannot load shards of another layout: a stage that resumes with another one repeats its training on
its stored trajectories and does not sample them again. A state of another number of ranks is converted
(universal_checkpoint.py).
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.core import stage_params
from components.core.files import sync_tree
from components.training.engine import DeepSpeedEngine
from components.training.metrics_file import MetricsFile
from components.training.ranks import World
from components.training.stage import Stage

# Number of states kept on disk. It is 2 because the newest weights may turn out to be collapsed in the next
# step, which then needs older ones.
KEPT_STATES = 2


@dataclass(frozen=True)
class StateStore:
    """States of a stage's engines in the stage's folder; every rank must call `save` and `load`."""

    stage_folder: Path
    engines: Mapping[str, DeepSpeedEngine]
    settings: stage_params.Engine
    world: World
    # Maximum number of states on disk; `save` deletes the oldest ones if there are more.
    kept: int
    # Folders of finished stages, whose states `save` deletes.
    finished: tuple[Path, ...] = ()

    @property
    def layout(self) -> str:
        return f"{self.settings.dtype}-zero{self.settings.zero_stage}"

    def complete(self) -> list[tuple[int, Path]]:
        """Return (finished steps, folder) of every complete state that can be loaded, oldest first.

        A state can be loaded if it has this layout and, with sequence parallelism, this number of ranks. Of
        two states after the same step, the one of this number of ranks comes last.
        """
        pattern = re.compile(rf"step-(\d+)-{self.layout}-world(\d+)")
        found = [
            (int(match[1]), int(match[2]) == self.world.size, folder)
            for folder in (self.stage_folder / "state").glob("step-*")
            if (match := pattern.fullmatch(folder.name))
        ]
        can_convert = self.settings.sequence_parallel == 1
        return [(steps, folder) for steps, is_own, folder in sorted(found) if is_own or can_convert]

    def newest(self) -> int:
        """Return the number of finished steps of the newest complete state, or 0 if there is none."""
        return max((steps for steps, _ in self.complete()), default=0)

    def save(self, steps: int) -> None:
        """Save the engines' present state as the state after `steps` steps.

        If there are then more than `kept` states, the oldest ones are deleted. The states of the stages in
        `finished` are deleted too, because their checkpoints are all that this stage needs.
        """
        folder = self.stage_folder / "state" / f"step-{steps:04d}-{self.layout}-world{self.world.size}"
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
            for earlier in self.finished:
                shutil.rmtree(earlier / "state", ignore_errors=True)
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
            engine.load(folder / name, ranks=int(folder.name.rpartition("world")[2]))
        return steps


@dataclass(frozen=True)
class TrainState:
    """A stage in training, with its stored states, its metrics and the step at which this process began."""

    stage: Stage
    world: World
    saved: StateStore
    # Number of steps that were done when this process began.
    start: int
    metrics: MetricsFile
    # Whether the stage ends with earlier weights, instead of failing, when its policy has collapsed.
    rolls_back: bool


def resume(
    stage: Stage,
    engines: Mapping[str, DeepSpeedEngine],
    *,
    kept_states: int = KEPT_STATES,
    rolls_back: bool = False,
) -> TrainState:
    """Load the newest state in the stage's folder into the engines, and return the stage's TrainState.

    If there is no state, training starts at step 0. At most `kept_states` states are kept on disk. With
    `rolls_back`, the state before the first step is saved too, so that a stage whose policy collapses in its
    first steps can go back to that state.
    """
    world = next(iter(engines.values())).world
    saved = StateStore(stage.out, engines, stage.params.engine, world, kept_states, stage.earlier)
    start = saved.load()
    if rolls_back and start == 0:
        saved.save(0)
    metrics = MetricsFile(stage.out, start=start, writes=world.rank == 0)
    return TrainState(stage, world, saved, start, metrics, rolls_back)
