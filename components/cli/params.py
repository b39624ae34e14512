"""The commands `cuda-agent params` and `cuda-agent plan`: the parameters of a profile, and its GPU memory."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import (
    CommonOptions,
    ExitCode,
    Output,
    print_line,
    print_table,
    with_common_options,
)
from components.core.errors import refuse


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
    """List all parameters with their values, their meanings, and the sources of the values.

    A source is the parameter file, a profile in it, or an option such as `--set`.
    """
    import yaml

    from components.core.config import KINDS, KNOWN, flatten_values
    from components.core.files import atomic_write

    resolved = options.resolve()
    plain = resolved.params.model_dump(mode="json")
    values, sources = flatten_values(plain), resolved.sources
    rows = {
        key: {
            "value": values[key],
            "meaning": KNOWN[key].description,
            "kind": kind,
            # The fields of a mapping can have sources of their own.
            "source": sources.get(key)
            or ", ".join(sorted({sources[name] for name in sources if name.startswith(f"{key}.")})),
        }
        for key, kind in KINDS.items()
    }
    if write is not None:
        atomic_write(write, yaml.safe_dump(plain, sort_keys=False))
    if not options.as_json:
        print_table(
            ("parameter", "value", "meaning", "source"),
            [(key, json.dumps(row["value"]), row["meaning"], row["source"]) for key, row in rows.items()],
        )
    return Output({"profile": resolved.profile, "params": rows})


@with_common_options("h20-pool")
def plan(options: CommonOptions) -> Output:
    """Estimate the memory that a profile needs on the GPUs of trainers, samplers and judges.

    Nothing is run, and of the policy only config.json is read. If trainers, samplers or judges need more
    memory than their GPUs have, the last line says so and the exit code is 2.
    """
    from components.planning.model_shapes import policy_shapes
    from components.planning.role_memory import GPU_BYTES, memory_of_roles, refusal

    params = options.resolve().params
    refuse(
        (
            params.device != "cuda",
            "plan: the profile runs on the cpu, where there is nothing to plan; "
            "give one with device=cuda, for instance --profile h20-pool.",
        )
    )
    shapes = policy_shapes(params)
    roles, size = memory_of_roles(params, shapes), GPU_BYTES[params.pool.gpu]
    adapters, refused = shapes.adapter_parameters(params.policy.adapter), refusal(params, shapes)
    print_line(
        f"{shapes.name}: {shapes.parameters:,} parameters"
        f"{f', adapters of {adapters:,}' if adapters else ''}; {params.pool.gpu} of {size / 1e9:,.0f} GB"
    )
    print_table(
        ("role", "GPUs", "GB of a GPU", "host", "parts", "holds"),
        [
            (
                name,
                str(role.gpus),
                f"{role.total / 1e9:,.1f}",
                f"{role.host / 1e9:,.1f}",
                ", ".join(f"{part} {value / 1e9:,.1f}" for part, value in role.parts.items() if value),
                role.holds,
            )
            for name, role in roles.items()
        ],
    )
    if refused:
        print_line(f"refused: {refused}")
    record = {
        "model": shapes.name,
        "parameters": shapes.parameters,
        "adapter_parameters": adapters,
        "gpu": params.pool.gpu,
        "gpu_bytes": size,
        "roles": {name: asdict(role) | {"total": role.total} for name, role in roles.items()},
        "refused": refused,
    }
    return Output(record, ExitCode.BAD_INPUT if refused else ExitCode.DONE)
