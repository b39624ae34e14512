"""Replay of a recorded trajectory: the same calls from the same files, and which observations differ.

Measured times are left out of the comparison, since they vary. Everything else that differs is reported, also
output that is never the same, such as a date.
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
"""Lines of an observation that hold measured times."""


@dataclass(frozen=True)
class Difference:
    """One difference between record and replay.

    `call` counts from 1 in its turn. Turn 0 is the end of the trajectory: call 1 its verdict, call 2 its
    files.
    """

    turn: int
    call: int
    tool: str
    recorded: str
    replayed: str


def replay(trajectory: Trajectory, params: Params, pool: JudgePool, *, epoch: str) -> list[Difference]:
    """Run every recorded call again and return what differs; `params.device` must be that of the record."""
    if not trajectory.task:
        raise UserError(
            "trajectory: the record holds no task source, it was written by an older version; "
            "it cannot be replayed."
        )
    params = params.model_copy(
        update={"policy": params.policy.model_copy(update={"context": trajectory.settings["context"]})}
    )
    episode = Episode(
        KernelTask(code=trajectory.task), params, pool, epoch, in_turns=trajectory.settings["in_turns"]
    )
    episode.workspace.files = dict(trajectory.start)
    differences = []
    try:
        for turn, recorded in enumerate(trajectory.turns, 1):
            for number, call in enumerate(recorded.calls, 1):
                # The record of a call that could not be parsed holds only the error.
                unparsed = not call.valid and not call.arguments
                error = call.observation.removeprefix(f"{FAILURE}: ").removesuffix(".") if unparsed else ""
                again = episode.tools.run(Request(call.name, call.arguments, error))
                if _without_times(again.observation) != _without_times(call.observation):
                    differences.append(
                        Difference(turn, number, call.name, call.observation, again.observation)
                    )
        end = episode.finish(trajectory.policy_version)
    finally:
        episode.tools.close()
    before, after = (f"{one.final.status} {one.final.reason}" for one in (trajectory, end))
    if before != after:
        differences.append(Difference(0, 1, "verdict", before, after))
    for path in sorted(end.files.keys() | trajectory.files.keys()):
        before, after = (one.files.get(path, "[no such file]") for one in (trajectory, end))
        if before != after:
            differences.append(Difference(0, 2, path, before, after))
    return differences


def _without_times(observation: str) -> str:
    return MEASURED.sub("[measured]", observation)
