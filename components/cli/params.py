"""The command `cuda-agent params`: list all parameters with value, meaning, and source of the value."""

import json
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import typer

from components.cli.common import CommonOptions, Output, print_table, with_common_options


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

    resolved = options.resolve()
    plain = resolved.params.model_dump(mode="json")
    rows: dict[str, dict[str, Any]] = {}
    for key, field in KNOWN.items():
        if not hasattr(reduce(getattr, key.split("."), resolved.params), "model_fields_set"):
            below = {source for name, source in resolved.sources.items() if name.startswith(f"{key}.")}
            rows[key] = {
                "value": reduce(lambda section, part: section[part], key.split("."), plain),
                "meaning": field.description,
                "source": resolved.sources.get(key) or ", ".join(sorted(below)),
            }
    if write is not None:
        atomic_write(write, yaml.safe_dump(plain, sort_keys=False))
    if not options.as_json:
        table = [(key, json.dumps(row["value"]), row["meaning"], row["source"]) for key, row in rows.items()]
        print_table(("parameter", "value", "meaning", "source"), table)
    return Output({"profile": resolved.profile, "params": rows})
