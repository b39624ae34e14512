"""Resumable states on disk: parameters, optimizer and random state of a stage's engines after so many steps.

A state is written to a temporary folder and renamed, so a kill leaves the previous one. The folder's name holds
precision, ZeRO stage and number of ranks, because DeepSpeed's shards of one layout cannot be loaded under another. A
stage that resumes under another layout trains again from its stored trajectories, without sampling anew.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from components.core import config
from components.training.engine import Engine, World


def _layout(settings: config.Engine, world: World) -> str:
    return f"{settings.dtype}-zero{settings.zero_stage}-world{world.size}"


def list_states(out: Path, settings: config.Engine, world: World) -> list[tuple[int, Path]]:
    """Return (steps done, folder) of every complete state of this layout, oldest first."""
    pattern = re.compile(rf"step-(\d+)-{re.escape(_layout(settings, world))}")
    matches = [(pattern.fullmatch(folder.name), folder) for folder in (out / "state").glob("step-*")]
    return sorted((int(match[1]), folder) for match, folder in matches if match)


def save_state(
    out: Path, steps: int, engines: Mapping[str, Engine], settings: config.Engine, world: World, *, kept: int
) -> None:
    """Write the state after `steps` steps, on all ranks at once, and delete all but the newest `kept` states."""
    folder = out / "state" / f"step-{steps:04d}-{_layout(settings, world)}"
    temporary = folder.with_name(f".{folder.name}.writing")
    if world.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    for name, engine in engines.items():
        engine.save(temporary / name)
    world.barrier()
    if world.rank == 0:
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        for _, old in list_states(out, settings, world)[:-kept]:
            shutil.rmtree(old)
    world.barrier()


def load_state(
    out: Path,
    engines: Mapping[str, Engine],
    settings: config.Engine,
    world: World,
    *,
    before: float = float("inf"),
) -> int:
    """Load the newest state of fewer than `before` steps and return its steps; 0 when there is none."""
    states = [state for state in list_states(out, settings, world) if state[0] < before]
    world.barrier()
    if not states:
        return 0
    steps, folder = states[-1]
    for name, engine in engines.items():
        engine.load(folder / name)
    return steps
