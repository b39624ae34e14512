"""The commands `cuda-agent trajectory …`: print trajectories, write them as HTML, and replay them."""

import dataclasses
import uuid
from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import (
    CommonOptions,
    ExitCode,
    Output,
    home_of,
    judge_session,
    print_line,
    print_table,
    with_common_options,
)

trajectory_app = typer.Typer(
    help="Trajectories of a policy: read, render or replay them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Number = Annotated[
    int, typer.Argument(help="which one, counted from 1; 0 is the first of those with the highest reward")
]
Folder = Annotated[Path, typer.Argument(help="folder that a stage, an evaluation or an optimisation wrote")]


@trajectory_app.command("show")
@with_common_options()
def trajectory_show(
    folder: Folder,
    number: Annotated[int, typer.Argument(help="which one, counted from 1; by default a table of all")] = 0,
) -> Output:
    """Print a table of all trajectories in a folder, or one of the trajectories turn by turn."""
    from components.agent import trajectory_viewer
    from components.agent.trajectory import load_trajectories

    trajectories = load_trajectories(folder)
    if number or len(trajectories) == 1:
        number, trajectory = trajectory_viewer.choose(trajectories, number, folder)
        for text, style in trajectory_viewer.lines(trajectory):
            print_line(text, style)
    else:
        rows = [
            (
                *(str(index), one.task_id, str(len(one.turns))),
                *(str(sum(len(turn.calls) for turn in one.turns)), f"{one.reward:g}"),
                *(one.finish_reason, trajectory_viewer.words(one.final)),
            )
            for index, one in enumerate(trajectories, 1)
        ]
        print_table(("", "task", "turns", "calls", "reward", "ended by", "final answer"), rows)
    keys = ("task_id", "reward", "finish_reason", "policy_version", "files")
    records = [
        {key: getattr(one, key) for key in keys}
        | {"turns": len(one.turns), "final": one.final.model_dump(mode="json")}
        for one in ([trajectories[number - 1]] if number else trajectories)
    ]
    return Output({"trajectories": records})


@trajectory_app.command("html")
@with_common_options()
def trajectory_html(
    folder: Folder,
    number: Number = 0,
    out_file: Annotated[Path, typer.Option("--out", help="file to write")] = Path("trajectory.html"),
) -> Output:
    """Write a trajectory as one HTML page with speed-ups by turn, changes as diffs, and observations."""
    from components.agent import trajectory_viewer
    from components.agent.trajectory import load_trajectories
    from components.core.files import atomic_write

    number, trajectory = trajectory_viewer.choose(load_trajectories(folder), number, folder)
    atomic_write(out_file, trajectory_viewer.page(trajectory, f"Trajectory {number} of {folder.name}"))
    print_line(f"{out_file}: trajectory {number}")
    return Output({"path": str(out_file.resolve()), "trajectory": number})


@trajectory_app.command("replay")
@with_common_options()
def trajectory_replay(options: CommonOptions, folder: Folder, number: Number = 0) -> Output:
    """Run the tool calls of a trajectory again and report all differences except measured times.

    The exit code is 1 if there are differences.
    """
    from components.agent import trajectory_viewer
    from components.agent.replay import replay
    from components.agent.trajectory import load_trajectories

    number, trajectory = trajectory_viewer.choose(load_trajectories(folder), number, folder)
    resolved = options.resolve_for_judging(f"device={trajectory.settings.get('device', 'cpu')}")
    with judge_session(resolved.params, home_of(resolved)) as (pool, _):
        # The epoch is new, so that no verdict is taken from the journal of an earlier replay.
        differences = replay(trajectory, resolved.params, pool, epoch=f"replay/{uuid.uuid4().hex}")
    calls = sum(len(turn.calls) for turn in trajectory.turns)
    for difference in differences:
        position = f"turn {difference.turn}, call {difference.call}" if difference.turn else "at the end"
        print_line(f"{position}, {difference.tool}:", "bold")
        print_line(f"  recorded: {difference.recorded}\n  replayed: {difference.replayed}")
    plural = "" if len(differences) == 1 else "s"
    print_line(f"trajectory {number}: {calls} calls, {len(differences)} difference{plural}")
    return Output(
        {
            "trajectory": number,
            "calls": calls,
            "differences": [dataclasses.asdict(difference) for difference in differences],
        },
        ExitCode.FAILED if differences else ExitCode.DONE,
    )
