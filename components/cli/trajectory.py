"""The commands `cuda-agent trajectory …`: print trajectories and write them as HTML.

A trajectory is the record of one attempt of a policy at one task.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.cli.common import (
    Output,
    print_line,
    print_table,
    with_common_options,
)

if TYPE_CHECKING:
    from components.agent.trajectory import Trajectory

trajectory_app = typer.Typer(
    help="Trajectories of a policy: read or render them.",
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
    """Print a table of all trajectories in a folder, or one trajectory turn by turn.

    A trajectory is the record of one attempt of a policy at one task. If the folder has only one, it is
    printed turn by turn.
    """
    from components.agent import trajectory_viewer
    from components.agent.trajectory import load_trajectories

    trajectories = load_trajectories(folder)
    if number or len(trajectories) == 1:
        _, trajectory = trajectory_viewer.choose(trajectories, number, folder)
        for text, style in trajectory_viewer.lines(trajectory):
            print_line(text, style)
        return Output({"trajectories": [_record(trajectory)]})
    print_table(
        ("", "task", "turns", "calls", "reward", "ended by", "final answer"),
        [
            (
                str(index),
                one.task_id,
                str(len(one.turns)),
                str(sum(len(turn.calls) for turn in one.turns)),
                trajectory_viewer.reward_text(one),
                one.finish_reason,
                trajectory_viewer.words(one.final),
            )
            for index, one in enumerate(trajectories, 1)
        ],
    )
    return Output({"trajectories": [_record(one) for one in trajectories]})


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "task_id": trajectory.task_id,
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
        "policy_version": trajectory.policy_version,
        "files": trajectory.files,
        "turns": len(trajectory.turns),
        "final": trajectory.final.model_dump(mode="json"),
    }


@trajectory_app.command("html")
@with_common_options()
def trajectory_html(
    folder: Folder,
    number: Number = 0,
    out_file: Annotated[Path, typer.Option("--out", help="file to write")] = Path("trajectory.html"),
) -> Output:
    """Write one trajectory, the record of an attempt at a task, as an HTML page.

    The page has speed-ups by turn, changes as diffs, and observations.
    """
    from components.agent import trajectory_viewer
    from components.agent.trajectory import load_trajectories
    from components.core.files import atomic_write

    number, trajectory = trajectory_viewer.choose(load_trajectories(folder), number, folder)
    page = trajectory_viewer.page(trajectory, f"Trajectory {number} of {folder.name}")
    atomic_write(out_file, page.encode(errors="replace"))
    print_line(f"{out_file}: trajectory {number}")
    return Output({"path": str(out_file.resolve()), "trajectory": number})
