"""The commands `cuda-agent data …` and `cuda-agent models …`: what a run has made, and making it by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.terminal import Home, Json, ParamsFile, Profile, Sets, answer, home_of, people, resolved_params

if TYPE_CHECKING:
    from components.config import Resolved

models_app = typer.Typer(help="Model versions: what was promoted, and on which evidence.", no_args_is_help=True, rich_markup_mode=None)
data_app = typer.Typer(help="Data sets of kernel tasks.", no_args_is_help=True, rich_markup_mode=None)


@data_app.command("build")
def data_build(
    out_folder: Annotated[Path, typer.Option("--out", help="folder to write")],
    profile: Profile = "smoke",
    sets: Sets = None,
    home: Home = "",
    params_file: ParamsFile = None,
    as_json: Json = False,
) -> None:
    """Compose and admit a data set. The nightly run does this through DVC."""
    from components.view import View

    with answer(as_json) as out:
        resolved = resolved_params(profile, sets, home, params_file)
        from components.sandbox.pool import LocalPool
        from components.synthesis.dataset import build

        pool, console = LocalPool(resolved.params, home_of(resolved) / "verdicts"), people()
        try:
            with View(console) as view:
                made = build(resolved.params, out_folder, pool, view)
        finally:
            pool.close()
        console.print(f"{out_folder}: {len(made.admitted)} tasks of {made.candidates} candidates, version {made.version}", highlight=False, soft_wrap=True)
        path = str(out_folder.resolve())
        out({"version": made.version, "candidates": made.candidates, "admitted": len(made.admitted), "rejected": made.reasons, "path": path})


@data_app.command("check")
def data_check(folder: Annotated[Path, typer.Argument(help="folder with tasks.parquet, or a parquet file")], as_json: Json = False) -> None:
    """See that a data set can be used: every task keeps the contract, none stands twice, no held-out sequence is trained on."""
    from components.config import BadInput
    from components.files import digest_file, read_json
    from components.task import check_contract, read_tasks

    with answer(as_json) as out:
        path = folder / "tasks.parquet" if folder.is_dir() else folder
        tasks = read_tasks(path)
        for row, task in enumerate(tasks):
            check_contract(task.code, f"{path}: row {row}")
        if len({task.task_id for task in tasks}) < len(tasks):
            raise BadInput(f"{path}: a task stands in it twice; build the data set again.")
        shared = {task.ops for task in tasks if task.split == "train"} & {task.ops for task in tasks if task.split == "held_out"}
        if shared:
            raise BadInput(f"{path}: {' '.join(min(shared))} is both trained on and held out; build the data set again.")
        figures = read_json(path.parent / "metrics.json") if (path.parent / "metrics.json").is_file() else {}
        version = digest_file(path)
        people().print(f"{path}: {len(tasks)} tasks, version {version}", highlight=False, soft_wrap=True)
        counts = {"candidates": figures.get("candidates", len(tasks)), "admitted": len(tasks), "rejected": figures.get("rejected", {})}
        out({"version": version, **counts, "path": str(path)})


@models_app.command("list")
def models_list(profile: Profile = "smoke", sets: Sets = None, home: Home = "", params_file: ParamsFile = None, as_json: Json = False) -> None:
    """Every version, newest first."""
    from rich.table import Table

    with answer(as_json) as out:
        resolved = resolved_params(profile, sets, home, params_file)
        client = _registry(resolved)
        from components.registry import models

        name = resolved.params.registry.model
        found = models.versions(client, name)
        table = Table("version", "aliases", "decision", "pass rate", "faster than compile", "data set", box=None, padding=(0, 2, 0, 0))
        for version in found:
            tags = version["tags"]
            figures = [tags.get("figure.pass_rate", ""), tags.get("figure.faster_rate.compile", ""), tags.get("dataset.version", "")[:12]]
            table.add_row(version["version"], ", ".join(version["aliases"]), version["decision"], *figures)
        people().print(table if found else f"{name} has no version yet.")
        out({"name": name, "aliases": models.aliases(client, name), "versions": found})


@models_app.command("show")
def models_show(
    version: Annotated[str, typer.Argument(help="number or alias: candidate, champion, previous")],
    profile: Profile = "smoke",
    sets: Sets = None,
    home: Home = "",
    params_file: ParamsFile = None,
    as_json: Json = False,
) -> None:
    """One version: its gates, its decision and its evidence."""
    from rich.table import Table

    with answer(as_json) as out:
        resolved = resolved_params(profile, sets, home, params_file)
        client = _registry(resolved)
        from components.registry import models

        found = models.describe(client, resolved.params.registry.model, version)
        console = people()
        console.print(f"{found['name']} version {found['version']} ({', '.join(found['aliases']) or 'no alias'}): {found['decision']}", highlight=False)
        table = Table("gate", "value", "threshold", "passed", box=None, padding=(0, 2, 0, 0))
        for gate in found["gates"]:
            table.add_row(gate["name"], "–" if gate["value"] is None else f"{gate['value']:.3g}", f"{gate['threshold']:.3g}", "yes" if gate["passed"] else "no")
        console.print(table)
        for key, value in sorted(found["tags"].items()):
            console.print(f"  {key}  {value}", highlight=False, markup=False, soft_wrap=True)
        out(found)


def _registry(resolved: Resolved) -> Any:
    from components.config import BadInput
    from components.registry.tracking import connect

    home = home_of(resolved)
    if not resolved.params.registry.tracking_uri and not (home / "mlflow" / "mlflow.db").is_file():
        raise BadInput(f"{home}: no run was registered here yet; run cuda-agent run first, or give its folder with --home.")
    return connect(resolved.params.registry, home)
