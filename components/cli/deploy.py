"""The command `cuda-agent deploy`: set up the deployments and what they need on a Prefect server."""

from typing import Annotated, Literal

import typer

from components.cli.common import (
    Home,
    Output,
    Sets,
    print_line,
    print_table,
    with_json_option,
)
from components.core.errors import UserError


@with_json_option
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
    pools = sorted({entry["pool"] for entry in record["deployments"]})
    starts = ", ".join(f"prefect worker start --pool {name}" for name in pools)
    print_line(f"start a worker on the machines of each pool: {starts}")
    return Output(record)
