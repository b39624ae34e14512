"""Doing a recorded trajectory again: the same calls on the same start, and what the tools say differently.

Measured times are noise and are left out of the comparison; a milestone follows from them. Whatever else differs is
reported, also what a command prints that is never the same, such as a date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from components.agent.episode import Episode
from components.agent.tool_parser import Request
from components.agent.tools import FAILURE
from components.agent.trajectory import Trajectory
from components.core.config import Params
from components.core.errors import UserError
from components.core.task import KernelTask
from components.judge.pool import JudgePool

MEASURED = re.compile(r"^(?:Torch Baseline: .*|Speed-up: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Difference:
    """`call` counts from 1 in its turn; turn 0 stands for the trajectory's end."""

    turn: int
    call: int
    tool: str
    recorded: str
    replayed: str


def replay(trajectory: Trajectory, params: Params, pool: JudgePool, *, epoch: str) -> list[Difference]:
    """Execute every recorded call again and compare. `params.device` must be that of the record."""
    if not trajectory.task:
        raise UserError(
            "trajectory: the record holds no task source, it was written by an older version; it cannot be replayed."
        )
    params = params.model_copy(
        update={"policy": params.policy.model_copy(update={"context": trajectory.settings["context"]})}
    )
    episode = Episode(
        KernelTask(code=trajectory.task), params, pool, epoch, in_turns=trajectory.settings["in_turns"]
    )
    episode.workspace.files = dict(trajectory.start)
    found = []
    try:
        for turn, recorded in enumerate(trajectory.turns, 1):
            for number, call in enumerate(recorded.calls, 1):
                # Of a call that could not be read, the record holds what was said about it and nothing to execute.
                unread = not call.valid and not call.arguments
                error = call.observation.removeprefix(f"{FAILURE}: ").removesuffix(".") if unread else ""
                again = episode.tools.run(Request(call.name, call.arguments, error))
                if comparable(again.observation) != comparable(call.observation):
                    found.append(Difference(turn, number, call.name, call.observation, again.observation))
        end = episode.finish(trajectory.policy_version)
    finally:
        episode.tools.close()
    if end.final.status != trajectory.final.status or end.final.reason != trajectory.final.reason:
        found.append(
            Difference(
                0,
                1,
                "verdict",
                f"{trajectory.final.status} {trajectory.final.reason}",
                f"{end.final.status} {end.final.reason}",
            )
        )
    for path in sorted(end.files.keys() | trajectory.files.keys()):
        if end.files.get(path) != trajectory.files.get(path):
            found.append(
                Difference(
                    0,
                    2,
                    path,
                    trajectory.files.get(path, "[no such file]"),
                    end.files.get(path, "[no such file]"),
                )
            )
    return found


def comparable(observation: str) -> str:
    return MEASURED.sub("[measured]", observation)
