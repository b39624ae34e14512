"""This module replays a recorded trajectory to find out whether its results can be reproduced.

The tool calls are run again from the same files, and the observations are compared with those in the record.
The lines that hold measured times are left out of the comparison, because times vary. All other differences
are reported, even in output that changes with every execution, such as a date.
"""

import re
from dataclasses import dataclass

from components.agent.episode import Episode, RolloutRequest
from components.agent.tool_parser import Request
from components.agent.tools import FAILURE
from components.agent.trajectory import Trajectory
from components.core.errors import UserError
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.pool.local_pool import JudgePool

# Pattern of the lines of an observation that hold measured times.
MEASURED = re.compile(r"^(?:Torch Baseline: .*|Speed-up: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Difference:
    """One difference between the recorded trajectory and its replay.

    `turn` and `call` are numbered from 1, and `call` begins again at 1 in every turn. A difference at the end
    of the trajectory has turn 0. If the final verdict differs, `call` is 1 and `tool` is "verdict". If a
    final file differs, `call` is 2 and `tool` is the path of the file. `recorded` and `replayed` are the two
    observations, the two verdicts (status and reason), or the two texts of the file.
    """

    turn: int
    call: int
    tool: str
    recorded: str
    replayed: str


def replay(trajectory: Trajectory, params: Params, pool: JudgePool, *, epoch: str) -> list[Difference]:
    """Run every recorded tool call again and return the differences from the record.

    Observations, the final verdict and the final files are compared. The judge of `pool` measures again if
    `epoch` is a new name. The results are comparable only if `params.device` is the device of the record.
    Raises UserError if the trajectory was recorded without the source of its task.
    """
    if not trajectory.task:
        raise UserError(
            "trajectory: the record holds no task source, it was written by an older version; "
            "it cannot be replayed."
        )
    params = params.model_copy(
        update={"policy": params.policy.model_copy(update={"context": trajectory.settings["context"]})}
    )
    task = KernelTask(code=trajectory.task)
    request = RolloutRequest(
        tasks=[task],
        params=params,
        pool=pool,
        epoch=epoch,
        seed=0,
        max_turns=2 if trajectory.settings["in_turns"] else 1,
        max_new_tokens=0,
        temperature=0.0,
    )
    episode = Episode(task, request)
    episode.workspace.files = dict(trajectory.start)
    differences = []
    try:
        for turn, recorded in enumerate(trajectory.turns, 1):
            for number, call in enumerate(recorded.calls, 1):
                # For a call that could not be parsed, only the error message was recorded.
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
    both = (trajectory, end)
    ends = [Difference(0, 1, "verdict", *(f"{one.final.status} {one.final.reason}" for one in both))]
    ends += [
        Difference(0, 2, path, *(one.files.get(path, "[no such file]") for one in both))
        for path in sorted(end.files.keys() | trajectory.files.keys())
    ]
    return differences + [one for one in ends if one.recorded != one.replayed]


def _without_times(observation: str) -> str:
    return MEASURED.sub("[measured]", observation)
