"""The command `cuda-agent plan`: estimate the memory, time, judges and cost that a profile needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.cli.common import (
    CommonOptions,
    Output,
    home_of,
    print_line,
    print_table,
    with_common_options,
)
from components.core.errors import UserError

if TYPE_CHECKING:
    from components.planning.capacity import Input

# Number of folders of trajectories that are read, newest first, to measure turns and tokens.
NEWEST_FOLDERS = 4


@with_common_options("h20-pool")
def plan(
    options: CommonOptions,
    gpu: Annotated[str, typer.Option("--gpu", help="h20, h100 or h200")] = "h20",
    assumed: Annotated[
        list[str] | None,
        typer.Option("--assume", metavar="NAME=VALUE", help="replace one input of the plan; may be repeated"),
    ] = None,
) -> Output:
    """Estimate what a profile needs: memory per GPU, time and bottleneck of a step, judges, GPU-hours, cost.

    Nothing is run or measured. Trajectories in the home are used as input if there are any.
    """
    from components.planning import capacity

    resolved = options.resolve()
    if gpu not in capacity.GPUS:
        raise UserError(f"--gpu {gpu}: no such GPU; give one of {', '.join(capacity.GPUS)}.")
    defaults = capacity.default_inputs(resolved.params, capacity.GPUS[gpu])
    inputs = capacity.assume(defaults | _measured_inputs(home_of(resolved)), assumed or [])
    record = capacity.plan(resolved.params, inputs)

    parts = ("states", "activations", "total")
    rows = [
        (
            f"{name} (chosen)" if name == record["chosen"] else name,
            *(f"{row[part] / 2**30:,.1f}" for part in parts),
            "yes" if row["fits"] else "no",
        )
        for name, row in record["memory_bytes_per_gpu"].items()
    ]
    print_table(("memory per GPU, GiB", *parts, "fits"), rows)
    rows = []
    for name, stage in record["stages"].items():
        seconds, tail = stage["seconds"], stage["tail"]
        update = seconds["score"] + seconds["update"]
        times = (seconds["step"], seconds["rollout"], update, tail["half_done"], tail["p99"], tail["last"])
        busy = f"{stage['queue']['busy']:.0%}"
        rows.append(
            (name, str(stage["steps"]), *(f"{value:,.0f}" for value in times), busy, stage["bottleneck"])
        )
    times_of_step = ("s a step", "rollout", "update", "half done", "p99", "last")
    print_table(("stage", "steps", *times_of_step, "judges busy", "bottleneck"), rows)
    judges = record["judges"]
    print_line(f"judges: {judges['needed']} keep the trainer busy, {judges['given']} are given")
    print_line(
        f"{record['gpus']:.0f} GPUs for {record['hours']:,.1f} hours: {record['gpu_hours']:,.0f} GPU-hours, "
        f"cost {record['cost']:,.0f}"
    )
    for origin in ("measured", "assumed"):
        items = record["inputs"].items()
        values = [f"{name} {item['value']:g}" for name, item in items if item["origin"] == origin]
        print_line(f"{origin}: {', '.join(values) or 'nothing'}")
    print_line(f"left out: {record['left_out']}")
    return Output(record)


def _measured_inputs(home: Path) -> dict[str, Input]:
    """Return the inputs of the plan that follow from the newest trajectories of the agentic stage in `home`.

    The result is empty if there are no such trajectories.
    """
    folders = sorted(home.glob("stages/agentic-*/trajectories/*/"), key=lambda folder: folder.stat().st_mtime)
    if not folders:
        return {}
    from components.agent.trajectory import load_trajectories
    from components.planning.capacity import measured_inputs

    trajectories = [one for folder in folders[-NEWEST_FOLDERS:] for one in load_trajectories(folder)]
    tokens = [sum(one.action_mask) // max(1, len(one.turns)) for one in trajectories]
    return measured_inputs([len(one.turns) for one in trajectories], tokens)
