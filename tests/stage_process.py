"""Stages in processes that die: what tests/test_stage_kills.py starts.

    python stage_process.py kills FOLDER          every stage undisturbed, and killed twice at random moments
    python stage_process.py rank FOLDER [STEP]    one rank of stage 1; with STEP, rank 1 kills itself when it begins that step

Only the first needs one interpreter: it forks after the imports, which cost more than the stages.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import deepspeed  # noqa: F401  before the forks
from training_fixtures import episodes, stage

from components.core.files import read_json, write_json
from components.training import ppo
from components.training.rollouts import choose_tasks
from components.training.run_stage import STAGES, run_stage
from components.training.stage import Stage

SHORT = (
    *("warmup.steps=3", "agentic.steps=3", "critic.epochs=3", "rejection.epochs=3", "rejection.batch=4"),
    *(
        "warmup.learning_rate=0.003",
        "agentic.learning_rate=0.003",
        "rejection.learning_rate=0.003",
        "critic.learning_rate=0.003",
    ),
    *(
        "warmup.critic_warmup_steps=0",
        "critic.min_explained_variance=-100",
        "warmup.rollouts.tasks=4",
        "agentic.rollouts.tasks=4",
    ),
)


class Dying:
    """Counts reports of progress; at the given one this process kills itself as `kill -9` does."""

    def __init__(self, at: int | None, updates_only: bool):
        self.at = at
        self.updates_only = updates_only
        self.events = self.updates = 0

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.events += 1
        self.updates += "episodes" not in figures
        if (self.updates if self.updates_only else self.events) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], None]) -> int:
    """The signal or exit code that a child process ended with."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def made(folder: Path, name: str, inputs: Path) -> Stage:
    """The stage `name` below `folder`; stages 3 and 4 take from `inputs` what the stages before left there."""
    built = stage(folder, name, *SHORT)
    if name == "critic":
        return dataclasses.replace(
            built, trajectories=(inputs / "warmup" / "trajectories", inputs / "rejection" / "trajectories")
        )
    return dataclasses.replace(built, critic=inputs / "critic" / "checkpoint") if name == "agentic" else built


def kills(folder: Path) -> None:
    """Writes kills.json: for each stage the counts of the undisturbed run and where the other one was killed."""
    report = {}
    for name in STAGES:
        counted = folder / f"{name}.json"

        def undisturbed(name: str = name, counted: Path = counted) -> None:
            progress = Dying(None, False)
            run_stage(
                dataclasses.replace(made(folder / "whole", name, folder / "whole"), progress=progress),
                episodes,
            )
            write_json(counted, [progress.events, progress.updates])

        assert in_child(undisturbed) == 0, name
        events, updates = read_json(counted)
        moments = [(random.randint(1, events), False), (random.randint(1, updates), True)]
        codes = []
        for moment in [*moments, None]:

            def attempt(name: str = name, moment: tuple[int, bool] | None = moment) -> None:
                progress = Dying(*moment) if moment else Dying(None, False)
                run_stage(
                    dataclasses.replace(made(folder / "killed", name, folder / "whole"), progress=progress),
                    episodes,
                )

            codes.append(in_child(attempt))
        report[name] = {"moments": moments, "codes": codes}
    write_json(folder / "kills.json", report)


def rank(folder: Path, dies_at: int | None) -> None:
    """One rank of stage 1 under a launcher."""
    if dies_at is not None and os.environ["RANK"] == "1":
        chosen = choose_tasks

        def deadly(*arguments: object, step: int, **more: object) -> object:
            if step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return chosen(*arguments, step=step, **more)

        ppo.choose_tasks = deadly
    run_stage(stage(folder, "warmup", *SHORT), episodes)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "kills":
        kills(Path(sys.argv[2]))
    else:
        rank(Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
