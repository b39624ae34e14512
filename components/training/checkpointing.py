"""Resumable states: parameters, optimizer and random state of a stage's engines after so many updates.

A state is written beside and renamed, so a kill leaves the previous one. Its name carries precision, ZeRO stage and
number of ranks: DeepSpeed's shards of one layout must never meet those of another. A stage that resumes under another
layout starts again from its stored trajectories, without sampling anew.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from components.core import config
from components.training.engine import Engine, World

KEPT = 2
"""The newest state may hold weights that turn out collapsed when they sample; the one before it is good."""


def _layout(settings: config.Engine, world: World) -> str:
    return f"{settings.dtype}-zero{settings.zero_stage}-world{world.size}"


def states(out: Path, settings: config.Engine, world: World) -> list[tuple[int, Path]]:
    """(updates, folder) of every complete state of this layout, oldest first."""
    pattern = re.compile(rf"step-(\d+)-{re.escape(_layout(settings, world))}")
    folders = sorted((out / "state").glob("step-*"))
    return sorted((int(match[1]), folder) for folder in folders if (match := pattern.fullmatch(folder.name)))


def save_state(
    out: Path,
    updates: int,
    engines: Mapping[str, Engine],
    settings: config.Engine,
    world: World,
    *,
    kept: int = KEPT,
) -> None:
    """Write the state after `updates` updates, collectively, and delete all but the newest `kept`."""
    folder = out / "state" / f"step-{updates:04d}-{_layout(settings, world)}"
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
        for _, old in states(out, settings, world)[:-kept]:
            shutil.rmtree(old)
    world.barrier()


def load_state(
    out: Path,
    engines: Mapping[str, Engine],
    settings: config.Engine,
    world: World,
    *,
    before: int | None = None,
) -> int:
    """Load the newest state, or the newest of fewer than `before` updates; returns its updates, 0 when there is none."""
    known = [
        (updates, folder)
        for updates, folder in states(out, settings, world)
        if before is None or updates < before
    ]
    world.barrier()
    if not known:
        return 0
    updates, folder = known[-1]
    for name, engine in engines.items():
        engine.load(folder / name)
    return updates
