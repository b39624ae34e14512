"""The command `cuda-agent environment`, which serves episodes to trainers that run elsewhere."""

import json
from typing import Annotated

import typer

from components.cli.common import (
    CommonOptions,
    Device,
    default_device,
    home_of,
    newest_dataset,
    print_line,
    with_common_options,
)


@with_common_options("smoke", prints_output=False)
def environment(
    options: CommonOptions,
    device: Device = "",
    port: Annotated[int, typer.Option("--port", help="port on 127.0.0.1")] = 8471,
    tasks: Annotated[
        str,
        typer.Option("--tasks", help="tasks of the episodes: shipped, held-out, a folder or a parquet file"),
    ] = "shipped",
) -> None:
    """Serve episodes in OpenEnv's wire form on this machine, until Ctrl-C or SIGTERM.

    The judge of `cuda-agent serve` is used if it runs with the same home folder and device.
    """
    suite = f"evaluation.suite={json.dumps(tasks)}"
    resolved = options.resolve_for_judging(f"device={device or default_device()}", suite)
    params, home = resolved.params, home_of(resolved)
    import uvicorn

    from components.evaluation.suites import load_suite
    from components.judge.open_pool import open_pool
    from components.judge.verdict import require_standard_labels
    from components.service.environment import Sessions, make_environment

    require_standard_labels(params.sandbox, "rewards")
    listed = load_suite(params, newest_dataset(home))
    pool = open_pool(params, home / "verdicts", use_resident=True)
    sessions = Sessions(listed, params, pool)
    pool.prepare()
    print_line(f"{len(listed)} tasks on {params.device} at http://127.0.0.1:{port}; Ctrl-C ends it")
    try:
        uvicorn.run(make_environment(sessions), host="127.0.0.1", port=port, log_level="warning")
    finally:
        sessions.close()
        pool.close()
