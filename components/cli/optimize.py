"""The command `cuda-agent optimize`: search for a faster kernel for one PyTorch module."""

from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import (
    CommonOptions,
    Device,
    Output,
    Policy,
    ServerModel,
    home_of,
    judge_session,
    print_line,
    with_common_options,
)


@with_common_options()
def optimize(
    options: CommonOptions,
    module: Annotated[
        Path,
        typer.Argument(help="file with the class Model, get_inputs and get_init_inputs"),
    ],
    policy: Policy = "champion",
    model: ServerModel = "",
    device: Device = "",
    attempts: Annotated[
        int, typer.Option("--attempts", min=0, help="trajectories; 0 is the policy's default")
    ] = 0,
    turns: Annotated[
        int, typer.Option("--turns", min=0, help="turns of one trajectory; 0 is the policy's default")
    ] = 0,
    budget: Annotated[
        float, typer.Option("--budget", min=0, help="seconds after which no turn begins; 0 is no limit")
    ] = 0,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="folder to write; by default optimized-NAME in the current folder"),
    ] = None,
) -> Output:
    """Search for a kernel that makes a PyTorch module faster, and write it with its measurements to a folder.

    If no faster kernel is found, the report says so. The exit code is 0 in both cases.
    """
    resolved = options.resolve_for_judging(device=device)
    from components.agent.optimize.export import check_output_folder, export, headline
    from components.agent.optimize.search import find_kernel
    from components.cli.models import find_policy
    from components.core.task import load_task
    from components.judge.pool.local_pool import with_any_duration

    task = load_task(module)
    folder = out_folder or Path(f"optimized-{module.stem}")
    check_output_folder(folder)
    chosen = find_policy(policy, model, resolved)
    params, home = with_any_duration(chosen.params), home_of(resolved)
    with judge_session(params, home, use_service=True) as (pool, view):
        pool.prepare()
        outcome = find_kernel(
            chosen,
            task,
            pool,
            attempts=attempts,
            turns=turns,
            seconds=budget,
            origin=str(module),
            progress=view,
        )
    record = export(outcome, params, folder, home / "judge" / "builds", f"{policy} ({chosen.version})")
    for line in (headline(outcome), *(f"  {note}" for note in outcome.notes), f"{folder}/report.md"):
        print_line(line)
    return Output(record)
