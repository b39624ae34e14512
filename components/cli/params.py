"""The commands `cuda-agent params` and `cuda-agent plan`: the parameters of a profile, and what it needs."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.cli.common import (
    CommonOptions,
    ExitCode,
    Output,
    home_of,
    print_line,
    print_table,
    with_common_options,
)
from components.core.errors import UserError

if TYPE_CHECKING:
    from components.core.config import Resolved
    from components.core.stage_params import Engine
    from components.planning.capacity import Input

# Number of folders of trajectories that are read, newest first, to measure turns and tokens.
NEWEST_FOLDERS = 4
# Change that shortens each part of a step, as the beginning of a sentence.
SHORTER = {
    "generation": "more samplers, or shorter trajectories,",
    "judging": "more judges",
    "score": "more trainers",
    "update": "more trainers",
}


@with_common_options("")
def params(
    options: CommonOptions,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write", help="parameter file to write, without profiles: the form that --params and DVC read"
        ),
    ] = None,
) -> Output:
    """List all parameters with their values, their meanings, and the sources of the values."""
    import yaml

    from components.core.config import KNOWN
    from components.core.files import atomic_write
    from components.core.param_kinds import KINDS

    resolved = options.resolve()
    plain = resolved.params.model_dump(mode="json")
    rows: dict[str, dict[str, Any]] = {}
    for key, field in KNOWN.items():
        if not hasattr(reduce(getattr, key.split("."), resolved.params), "model_fields_set"):
            below = {source for name, source in resolved.sources.items() if name.startswith(f"{key}.")}
            rows[key] = {
                "value": reduce(lambda section, part: section[part], key.split("."), plain),
                "meaning": field.description,
                "kind": KINDS[key],
                "source": resolved.sources.get(key) or ", ".join(sorted(below)),
            }
    if write is not None:
        atomic_write(write, yaml.safe_dump(plain, sort_keys=False))
    if not options.as_json:
        table = [(key, json.dumps(row["value"]), row["meaning"], row["source"]) for key, row in rows.items()]
        print_table(("parameter", "value", "meaning", "source"), table, markup=False)
    return Output({"profile": resolved.profile, "params": rows})


@with_common_options("h20-pool")
def plan(
    options: CommonOptions,
    gpu: Annotated[
        str, typer.Option("--gpu", help="h20, h100 or h200; by default the profile's pool.gpu")
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            "--model", help="public model whose shapes are used instead of policy.source, such as Qwen3-8B"
        ),
    ] = "",
    assumed: Annotated[
        list[str] | None,
        typer.Option("--assume", metavar="NAME=VALUE", help="replace one input of the plan; may be repeated"),
    ] = None,
) -> Output:
    """Estimate what a profile needs: memory of each role's GPUs, time and bottleneck of a step, cost.

    Nothing is run or measured. Trajectories of the profile's finished runs in the home are used as input. If
    a role cannot fit its GPUs, the last line says so and the exit code is 2.
    """
    from components.planning import capacity, model_shapes, placement_search, role_memory

    resolved = options.resolve()
    gpu = gpu or resolved.params.pool.gpu
    if gpu not in capacity.GPUS:
        raise UserError(f"--gpu {gpu}: no such GPU; give one of {', '.join(capacity.GPUS)}.")
    policy = resolved.params.policy
    shapes = (
        model_shapes.named_shapes(model) if model else model_shapes.policy_shapes(policy, resolved.profile)
    )
    defaults = capacity.default_inputs(resolved.params, capacity.GPUS[gpu], shapes)
    inputs = capacity.assume(defaults | home_inputs(resolved), assumed or [])
    params = resolved.params
    values = {name: item.value for name, item in inputs.items()}
    record = capacity.plan(params, shapes, inputs)
    record |= {
        "pool": role_memory.pool_plan(params, values, record),
        "placements": placement_search.placements(params, shapes, inputs, record["hours"]),
        "refused": role_memory.refusal(params, shapes, values, record),
    }

    _print_memory(record, params.engine)
    _print_pool(record)
    rows = []
    for name, stage in record["stages"].items():
        seconds, tail = stage["seconds"], stage["tail"]
        update = seconds["score"] + seconds["update"]
        times = (seconds["step"], seconds["rollout"], update, tail["half_done"], tail["p99"], tail["last"])
        busy = f"{stage['queue']['busy']:.0%}"
        rows.append(
            (name, str(stage["steps"]), *(f"{value:,.0f}" for value in times), busy, stage["bottleneck"])
        )
    print_table(
        (
            *("stage", "steps", "s a step", "rollout", "update", "half done", "p99", "last"),
            *("judges busy", "bottleneck"),
        ),
        rows,
    )
    for name, stage in record["stages"].items():
        part = stage["bottleneck"]
        share = stage["seconds"][part] / stage["seconds"]["step"]
        print_line(f"{name}: {part} takes {share:.0%} of a step; {SHORTER[part]} shorten it")
    judges = record["judges"]
    print_line(f"judges: {judges['needed']} keep the trainer busy, {judges['given']} are given")
    print_line(
        f"{record['gpus']:.0f} GPUs for {record['hours']:,.1f} hours: {record['gpu_hours']:,.0f} GPU-hours, "
        f"cost {record['cost']:,.0f}"
    )
    for origin in ("measured", "assumed"):
        named = [
            f"{name} {item['value']:g}" for name, item in record["inputs"].items() if item["origin"] == origin
        ]
        print_line(f"{origin}: {', '.join(named) or 'nothing'}")
    print_line(f"left out: {record['left_out']}")
    _print_placements(record)
    if record["refused"]:
        print_line(f"refused: {record['refused']}")
    return Output(record, ExitCode.BAD_INPUT if record["refused"] else ExitCode.DONE)


def _print_pool(record: dict[str, Any]) -> None:
    """Print, for trainers, samplers and judges, the number of GPUs and the memory in use on one GPU in GB.

    For samplers the parts of that memory are listed too. `record` is the JSON record that the command prints
    with `--json`.
    """
    pool, size = record["pool"], record["inputs"]["gpu_memory"]["value"]
    trainers, samplers, judges = pool["trainers"], pool["samplers"], pool["judges"]
    rows = [("trainers", trainers, "see above")]
    if samplers is not None:
        filled = ", ".join(f"{part} {value / 1e9:,.1f}" for part, value in samplers["bytes"].items())
        servers = f"{samplers['replicas']} servers of {samplers['tensor_parallel']} GPUs"
        rows.append(("samplers", samplers, f"{filled}; {servers} hold {samplers['contexts']} full contexts"))
    if judges["gpus"]:
        rows.append(("judges", judges, "one task at a time, at most"))
    print_table(
        ("role", "GPUs", "GB of a GPU", "filled by"),
        [
            (name, str(role["gpus"]), f"{role['total'] / 1e9:,.1f} of {size / 1e9:,.0f}", filled)
            for name, role, filled in rows
        ],
    )


def _print_placements(record: dict[str, Any]) -> None:
    """Print the cheapest placement of the roles on GPUs whose memory suffices, and the fastest one.

    The fastest one takes no more GPUs than the section `pool` of the parameters gives. Nothing is printed if
    roles share GPUs. `record` is the JSON record that the command prints with `--json`.
    """
    if not (found := record["placements"]):
        return
    titles = (("cheapest", "cheapest that holds"), ("fastest", f"fastest on {found['given']} GPUs"))
    for key, title in titles:
        best = found[key]
        print_line(
            f"{title}: none"
            if best is None
            else f"{title}: --set pool.trainers={best['trainers']} --set pool.samplers={best['samplers']} "
            f"--set pool.judges={best['judges']}, {best['hours']:,.1f} hours, "
            f"{best['gpu_hours']:,.0f} GPU-hours, cost {best['cost']:,.0f}"
        )


def _print_memory(record: dict[str, Any], engine: Engine) -> None:
    """Print the memory of the first rank by part, and alternatives if the chosen settings do not fit the GPU.

    `record` is the JSON record that the command prints with `--json`, and `engine` has the chosen settings.
    """
    inputs, roles = record["inputs"], record["roles"]
    chosen = record["memory_bytes_per_gpu"][record["chosen"]]
    networks = ["actor"] + ["critic"] * roles["has_critic"] + ["reference"] * roles["has_reference"]
    adapters = f", adapters of {roles['adapter_parameters']:,}" if roles["adapter_parameters"] else ""
    print_line(
        f"{record['model']}, {inputs['parameters']['value']:,.0f} parameters{adapters}: "
        f"{', '.join(networks)}; ranks {inputs['trainer_gpus']['value']:g}, ZeRO {engine.zero_stage}, "
        f"sequence parallel {engine.sequence_parallel}, {record['tokens']:,} tokens"
    )
    host, shared = chosen["host"], chosen["shared"]
    rows = [
        ("states of the trained networks", chosen["states"], host["states"]),
        ("reference", chosen["reference"], host["reference"]),
        ("gathered parameters", chosen["gathered"], 0.0),
        ("gradients", chosen["gradients"], 0.0),
        ("activations", chosen["activations"], host["activations"]),
        ("logits (instead of the activations of a layer)", chosen["logits"], 0.0),
        ("optimizer step (instead of activations)", chosen["step"], 0.0),
        ("context", chosen["context"], 0.0),
        ("sampler, while training", shared["training"], host["sampler"]),
        ("total while training", chosen["training"], chosen["host_total"]),
        ("sampler and judge, or new weights, while sampling", shared["sampling"], 0.0),
        ("total while sampling", chosen["sampling"], chosen["host_total"]),
    ]
    print_table(
        ("first rank, GB", "GPU", "host"),
        [(part, f"{gpu / 1e9:,.1f}", f"{host / 1e9:,.1f}") for part, gpu, host in rows],
    )
    size, others = inputs["gpu_memory"]["value"], record["memory_bytes_per_gpu"]
    print_line(
        f"{'fits' if chosen['fits'] else 'does not fit'}: {chosen['total'] / 1e9:,.1f} GB "
        f"of {(size - chosen['reserved']) / 1e9:,.1f} ({record['gpu']}, {size / 1e9:,.0f} GB "
        f"less {chosen['reserved'] / size:.0%}); other ZeRO stages: "
        + ", ".join(
            f"{name} {row['total'] / 1e9:,.1f}" for name, row in others.items() if name != record["chosen"]
        )
    )
    if not chosen["fits"]:
        _print_alternatives(record, engine)


def _print_alternatives(record: dict[str, Any], engine: Engine) -> None:
    """Print a table of the GPU memory under other sequence parallelism and offloads, and a choice that fits.

    `record` is the JSON record that the command prints with `--json`; the choice is its item `smallest`.
    """
    from components.planning.memory_choices import options_of

    cells: dict[str, dict[int, str]] = {}
    for choice in record["alternatives"]:
        name = ", ".join(choice["offloads"]) or "none"
        host = f" ({choice['host_total'] / 1e9:,.0f})" if choice["host_total"] else ""
        cell = f"{choice['total'] / 1e9:,.0f}{host}{' *' if choice['fits'] else ''}"
        cells.setdefault(name, {})[choice["sequence_parallel"]] = cell
    degrees = sorted({choice["sequence_parallel"] for choice in record["alternatives"]})
    print_table(
        ("GB of GPU (host) by offloads; * fits", *(f"sequence_parallel={degree}" for degree in degrees)),
        [(name, *(row.get(degree, "–") for degree in degrees)) for name, row in cells.items()],
    )
    smallest = record["smallest"]
    if smallest is None:
        print_line(
            "none of these fits; take more ranks (pool.trainers), adapters (policy.adapter) or fewer tokens"
        )
        return
    print_line(f"smallest that fits: {options_of(smallest, engine)}")


def home_inputs(resolved: Resolved) -> dict[str, Input]:
    """Return, by name, the inputs of the plan that the newest trajectories of the stage agentic determine.

    They are the numbers of turns and of tokens in a turn (`measured_inputs`). Only finished runs in the home
    are read that have the profile, the parameters of rollouts, and the policy's source, context and prompt of
    `resolved`, because trajectories of other runs may be longer or shorter. The result is empty if there are
    no such runs.
    """
    from components.core.files import read_json

    plain = resolved.params.model_dump(mode="json")
    stages = []
    for file in home_of(resolved).glob("runs/*/run.json"):
        record, settings = read_json(file), read_json(file.with_name("settings.json"))["params"]
        is_same = record["profile"] == resolved.profile and all(
            settings["policy"][key] == plain["policy"][key] for key in ("source", "context", "prompt")
        )
        if is_same and settings["agentic"]["rollouts"] == plain["agentic"]["rollouts"]:
            stages += [
                Path(stage["checkpoint"]).parent for stage in record["stages"] if stage["name"] == "agentic"
            ]
    folders = sorted(
        (folder for stage in set(stages) for folder in stage.glob("trajectories/*/")),
        key=lambda folder: folder.stat().st_mtime,
    )
    if not folders:
        return {}
    from components.agent.trajectory import load_trajectories
    from components.planning.capacity import measured_inputs

    trajectories = [one for folder in folders[-NEWEST_FOLDERS:] for one in load_trajectories(folder)]
    tokens = [sum(one.action_mask) // max(1, len(one.turns)) for one in trajectories]
    return measured_inputs([len(one.turns) for one in trajectories], tokens)
