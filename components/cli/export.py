"""The command `cuda-agent export harbor`, which writes kernel tasks as tasks of the program Harbor."""

import json
from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import (
    CommonOptions,
    Device,
    Output,
    default_device,
    home_of,
    newest_dataset,
    print_line,
    with_common_options,
)
from components.cli.mcp import SERVICE

export_app = typer.Typer(help="Write tasks in the formats of other programs.", no_args_is_help=True)


@export_app.callback()
def export() -> None:
    """Write tasks in the formats of other programs."""


@export_app.command()
@with_common_options("smoke")
def harbor(
    options: CommonOptions,
    folder: Annotated[Path, typer.Argument(help="folder for the tasks, one folder each")],
    tasks: Annotated[
        str, typer.Option("--tasks", help="shipped, held-out, a folder, a task file or a parquet file")
    ] = "shipped",
    device: Device = "",
    service: Annotated[
        str, typer.Option("--service", help="address of cuda-agent serve --http, as containers reach it")
    ] = SERVICE,
    image: Annotated[
        str, typer.Option("--image", help="image of the containers, with Python and bash")
    ] = "python:3.12-slim",
) -> Output:
    """Write one Harbor task for each task; its test gets the reward from the judge's service."""
    suite = f"evaluation.suite={json.dumps(tasks)}"
    resolved = options.resolve(f"device={device or default_device()}", suite)
    from components.evaluation.suites import load_suite
    from components.service.harbor import export_tasks

    params = resolved.params
    listed = load_suite(params, newest_dataset(home_of(resolved)))
    written = export_tasks(listed, folder, device=params.device, service=service, image=image)
    print_line(f"{len(written)} tasks in {folder}")
    return Output({"tasks": [str(path) for path in written]})
