"""The commands `cuda-agent run` and `cuda-agent deploy`: the pipeline here, or on a Prefect server."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from components.cli.common import (
    CommonOptions,
    ExitCode,
    Home,
    Output,
    Sets,
    print_line,
    print_table,
    stderr_console,
    with_common_options,
)
from components.core.errors import UserError


@with_common_options()
def run(
    options: CommonOptions,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue an interrupted run; this is also the default")
    ] = False,
    redo_from: Annotated[
        str, typer.Option("--from", metavar="STAGE", help="repeat this stage and all that follow")
    ] = "",
    metrics: Annotated[
        int,
        typer.Option(
            "--metrics",
            metavar="PORT",
            help="serve Prometheus metrics on this port of 127.0.0.1 during the run",
        ),
    ] = 0,
) -> Output:
    """Run the pipeline: data set, cold start, four training stages, evaluation, registration, gates.

    The stage critic, the third, is left out if agentic.advantages is not critic.
    If a run with the same parameters and code is finished, only its result is printed. An interrupted run
    continues where it stopped.
    """
    from components.core import telemetry
    from components.core.progress_view import ProgressView, final_table
    from flows import process_reaper, run_context
    from flows.server import prefect_server

    resolved, console = options.resolve(), stderr_console()
    pipeline_run = run_context.open_run(resolved, redo_from)
    record = run_context.finished(pipeline_run)
    if record is not None:
        print_line(f"This run is finished, nothing is left to do: {pipeline_run.folder}")
    else:
        run_context.check_training(pipeline_run.params)
        run_context.check_environment(pipeline_run)
        run_context.prepare_home(pipeline_run.home)
        with run_context.home_lock(pipeline_run.home):
            run_context.prepare_environment(pipeline_run.home)
            process_reaper.start_reaper()
            if metrics:
                telemetry.serve(metrics)
            print_line(f"run {pipeline_run.run_id}, profile {resolved.profile}, home {pipeline_run.home}")
            with prefect_server(pipeline_run.home) as server:
                from components.registry.tracking import import_store
                from flows.nightly import run_pipeline

                if server is not None:
                    import_store(pipeline_run.params.registry)
                    server.wait()
                    print_line(f"prefect {server.url.removesuffix('/api')} until the run ends")
                with ProgressView(console) as view:
                    record = run_pipeline(pipeline_run, view, server)
    final_table(record, run_context.interface_commands(pipeline_run, record), console)
    refused = record["gate"]["verdict"] == "refused"
    return Output(record, ExitCode.REFUSED if refused else ExitCode.DONE)


@with_common_options()
def deploy(
    workers: Annotated[
        str,
        typer.Option(
            "--workers", help="process: workers run flows on their own machine; kubernetes: as jobs"
        ),
    ] = "process",
    profile: Annotated[
        str, typer.Option("--profile", help="profile of every deployment; by default that of prefect.yaml")
    ] = "",
    sets: Sets = None,
    home: Home = "",
    pool: Annotated[
        str,
        typer.Option(
            "--pool", help="work pool of every deployment, for instance cpu; by default those of prefect.yaml"
        ),
    ] = "",
    cron: Annotated[
        str, typer.Option("--cron", help="schedule of the nightly deployment, for instance '0 1 * * *'")
    ] = "",
    timezone: Annotated[
        str, typer.Option("--timezone", help="time zone of every schedule, for instance Europe/Berlin")
    ] = "",
    alert: Annotated[
        str,
        typer.Option("--alert", metavar="TYPE/NAME", help="notification block that receives alarms"),
    ] = "",
    paused: Annotated[bool, typer.Option("--paused", help="deploy with schedules switched off")] = False,
    variables: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="environment of every flow run; may be repeated"),
    ] = None,
) -> Output:
    """Create or update work pools, limits, deployments and automations on the Prefect server.

    The command can be repeated safely.
    """
    if workers not in ("process", "kubernetes"):
        raise UserError(f"--workers {workers}: give process or kubernetes.")
    from flows.deploy import Choices
    from flows.deploy import deploy as deploy_all

    kind: Literal["process", "kubernetes"] = "kubernetes" if workers == "kubernetes" else "process"
    record = deploy_all(
        Choices(
            kind,
            profile,
            tuple(sets or ()),
            home,
            pool,
            cron,
            timezone,
            alert,
            paused,
            tuple(variables or ()),
        )
    )
    rows = [
        (
            *(entry["name"], entry["pool"], ", ".join(entry["schedules"]) or "off"),
            *(entry["parameters"]["profile"], entry["parameters"]["home"]),
        )
        for entry in record["deployments"]
    ]
    print_table(("deployment", "pool", "schedule", "profile", "home"), rows)
    pools = {entry["pool"] for entry in record["deployments"]}
    starts = ", ".join(f"prefect worker start --pool {name}" for name in sorted(pools))
    print_line(f"start a worker on the machines of each pool: {starts}")
    return Output(record)
