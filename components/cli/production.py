"""The commands of the platform engineer: `deploy`, `plan`, and `store …`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.cli.common import (
    CommonOptions,
    Home,
    Json,
    Sets,
    answer,
    home_of,
    stderr_console,
    with_common_options,
)
from components.cli.store import store_app

if TYPE_CHECKING:
    from components.planning.capacity import Input


def deploy(
    workers: Annotated[
        str,
        typer.Option(
            "--workers", help="process: workers run flows on their own machine; kubernetes: as jobs"
        ),
    ] = "process",
    profile: Annotated[
        str, typer.Option("--profile", help="profile of every deployment; without it the one in prefect.yaml")
    ] = "",
    sets: Sets = None,
    home: Home = "",
    pool: Annotated[
        str,
        typer.Option(
            "--pool", help="work pool of every deployment, for instance cpu; without it those in prefect.yaml"
        ),
    ] = "",
    cron: Annotated[str, typer.Option("--cron", help="schedule of the night, for instance '0 1 * * *'")] = "",
    timezone: Annotated[
        str, typer.Option("--timezone", help="time zone of every schedule, for instance Europe/Berlin")
    ] = "",
    alert: Annotated[
        str,
        typer.Option("--alert", metavar="TYPE/NAME", help="notification block that alarms are sent through"),
    ] = "",
    paused: Annotated[bool, typer.Option("--paused", help="deploy with schedules switched off")] = False,
    variables: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="environment of every flow run; may be repeated"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Bring work pools, limits, deployments and automations to the Prefect server. Safe to repeat."""
    from rich.table import Table

    from components.core.errors import UserError

    if workers not in ("process", "kubernetes"):
        raise UserError(f"--workers {workers}: give process or kubernetes.")
    with answer(as_json) as out:
        from flows.deploy import Choices, Workers, deploy

        kind: Workers = "kubernetes" if workers == "kubernetes" else "process"
        record = deploy(
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
        table = Table("deployment", "pool", "schedule", "profile", "home", box=None, padding=(0, 2, 0, 0))
        for entry in record["deployments"]:
            table.add_row(
                entry["name"],
                entry["pool"],
                ", ".join(entry["schedules"]) or "off",
                entry["parameters"]["profile"],
                entry["parameters"]["home"],
            )
        console = stderr_console()
        console.print(table)
        used = sorted({entry["pool"] for entry in record["deployments"]})
        console.print(
            "start a worker where each pool's machines are: "
            + ", ".join(f"prefect worker start --pool {name}" for name in used),
            highlight=False,
        )
        out(record)


@with_common_options("h20-pool")
def plan(
    given: CommonOptions,
    gpu: Annotated[str, typer.Option("--gpu", help="h20, h100 or h200")] = "h20",
    assumed: Annotated[
        list[str] | None,
        typer.Option("--assume", metavar="NAME=VALUE", help="replace one input of the plan; may be repeated"),
    ] = None,
) -> None:
    """What a profile needs: memory per GPU, time per step and its bottleneck, judges, GPU-hours, cost. Measures nothing, trains nothing."""
    from rich.table import Table

    from components.core.errors import UserError
    from components.planning import capacity

    with answer(given.as_json) as out:
        resolved = given.resolved()
        if gpu not in capacity.GPUS:
            raise UserError(f"--gpu {gpu}: no such GPU; give one of {', '.join(capacity.GPUS)}.")
        inputs = capacity.default_inputs(resolved.params, capacity.GPUS[gpu]) | _measured_here(
            home_of(resolved)
        )
        found = capacity.plan(resolved.params, capacity.assume(inputs, assumed or []))
        console = stderr_console()

        table = Table(
            "memory per GPU, GiB", "states", "activations", "total", "fits", box=None, padding=(0, 2, 0, 0)
        )
        for name, row in found["memory_bytes_per_gpu"].items():
            sizes = [f"{row[part] / 2**30:,.1f}" for part in ("states", "activations", "total")]
            table.add_row(
                f"{name}{' (chosen)' if name == found['chosen'] else ''}",
                *sizes,
                "yes" if row["fits"] else "no",
            )
        console.print(table)
        table = Table(
            "stage",
            "steps",
            "s a step",
            "rollout",
            "update",
            "half done",
            "p99",
            "last",
            "judges busy",
            "bottleneck",
            box=None,
            padding=(0, 2, 0, 0),
        )
        for name, stage in found["stages"].items():
            seconds, tail = stage["seconds"], stage["tail"]
            times = [
                seconds["step"],
                seconds["rollout"],
                seconds["score"] + seconds["update"],
                tail["half_done"],
                tail["p99"],
                tail["last"],
            ]
            table.add_row(
                name,
                str(stage["steps"]),
                *(f"{value:,.0f}" for value in times),
                f"{stage['queue']['busy']:.0%}",
                stage["bottleneck"],
            )
        console.print(table)
        judges = found["judges"]
        console.print(f"judges: {judges['needed']} keep the trainer busy, {judges['given']} are given")
        console.print(
            f"{found['gpus']:.0f} GPUs for {found['hours']:,.1f} hours: {found['gpu_hours']:,.0f} GPU-hours, cost {found['cost']:,.0f}"
        )
        for origin in ("measured", "assumed"):
            names = [
                f"{name} {item['value']:g}"
                for name, item in found["inputs"].items()
                if item["origin"] == origin
            ]
            console.print(f"{origin}: {', '.join(names) or 'nothing'}", highlight=False)
        console.print(f"left out: {found['left_out']}", highlight=False)
        out(found)


def _measured_here(home: Path) -> dict[str, Input]:
    """Inputs that this home's own agentic trajectories measured; none where there are none."""
    folders = sorted(home.glob("stages/agentic-*/trajectories/*/"), key=lambda folder: folder.stat().st_mtime)
    if not folders:
        return {}
    from components.agent.trajectory import load_trajectories
    from components.planning.capacity import measured_inputs

    found = [trajectory for folder in folders[-4:] for trajectory in load_trajectories(folder)]
    turns = [len(trajectory.turns) for trajectory in found]
    return measured_inputs(
        turns,
        [
            sum(trajectory.action_mask) // max(1, count)
            for trajectory, count in zip(found, turns, strict=True)
        ],
    )


def register(app: typer.Typer) -> None:
    """Add this room's commands to the program."""
    app.command()(deploy)
    app.command()(plan)
    app.add_typer(store_app, name="store")
