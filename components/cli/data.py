"""The commands `cuda-agent data …`: making a data set, looking at one, and keeping its versions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.cli.common import CommonOptions, Json, answer, home_of, stderr_console, with_common_options

if TYPE_CHECKING:
    from components.core.config import Resolved
    from components.core.progress_view import ProgressView
    from components.judge.pool import LocalPool
    from components.synthesis.dataset_summary import DatasetSummary

data_app = typer.Typer(help="Data sets of kernel tasks.", no_args_is_help=True, rich_markup_mode=None)

Out = Annotated[Path, typer.Option("--out", help="folder to write")]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against", help="folder or parquet of evaluation programs to stay clear of; may be repeated"
    ),
]
Where = Annotated[Path, typer.Argument(help="folder with tasks.parquet, or a parquet file")]


@data_app.command("build")
@with_common_options()
def data_build(given: CommonOptions, out_folder: Out) -> None:
    """Compose and admit a data set. The nightly run does this through DVC."""
    with answer(given.as_json) as out:
        resolved = given.resolved()
        with _judged(resolved) as (pool, view):
            from components.synthesis.dataset import build_dataset

            made = build_dataset(resolved.params, out_folder, pool, view, home_of(resolved) / "seeds")
        out(_made(made, out_folder))


@data_app.command("import")
@with_common_options()
def data_import(
    given: CommonOptions,
    file: Annotated[Path, typer.Argument(help="parquet with the columns ops, data_source and code")],
    out_folder: Out,
    against: Against = None,
) -> None:
    """Hold every row of a parquet against the rubric and the judge, and write a data set of those that pass."""
    with answer(given.as_json) as out:
        resolved = _against(given.resolved(), against)
        from components.synthesis.task_import import read_public

        tasks = read_public(file, resolved.params.data.seed)
        with _judged(resolved) as (pool, view):
            from components.synthesis.dataset import admit_tasks

            made = admit_tasks(resolved.params, tasks, len(tasks), out_folder, pool, view)
        out(_made(made, out_folder))


@data_app.command("check")
@with_common_options()
def data_check(given: CommonOptions, where: Where, against: Against = None) -> None:
    """Say of each row why it is refused, without running anything; exit 1 when one is. `import` also runs them."""
    from collections import Counter

    from rich.table import Table

    with answer(given.as_json) as out:
        resolved = _against(given.resolved(), against)
        from components.core.task import dataset_version, read_tasks
        from components.synthesis.task_import import check_rows, read_public

        path = _parquet(where)
        # A data set of ours says itself which rows are held out; in any other the operators decide.
        tasks = (
            read_tasks(path)
            if (path.parent / "metrics.json").is_file()
            else read_public(path, resolved.params.data.seed)
        )
        refused = [finding for finding in check_rows(tasks, resolved.params.data) if finding.reason]
        console = stderr_console()
        table = Table("row", "operators", "reason", "detail", box=None, padding=(0, 2, 0, 0))
        for finding in refused:
            table.add_row(str(finding.row), " ".join(finding.task.ops), finding.reason, finding.detail[:100])
        if refused:
            console.print(table, markup=False)
        version = dataset_version(path)
        console.print(
            f"{path}: {len(tasks)} tasks, {len(refused)} refused, version {version}",
            highlight=False,
            soft_wrap=True,
        )
        rows = [
            {"row": finding.row, "reason": finding.reason, "detail": finding.detail} for finding in refused
        ]
        counts = dict(Counter(finding.reason for finding in refused).most_common())
        out(
            {
                "version": version,
                "candidates": len(tasks),
                "admitted": len(tasks) - len(refused),
                "rejected": counts,
                "path": str(path),
                "rows": rows,
            }
        )
    if refused:
        raise typer.Exit(1)


@data_app.command("stats")
def data_stats(where: Where, as_json: Json = False) -> None:
    """Splits, kinds, operators and eager times of a data set."""
    from collections import Counter
    from statistics import quantiles

    from rich.table import Table

    with answer(as_json) as out:
        from components.core.task import read_tasks
        from components.synthesis.core_operators import canonical

        tasks = read_tasks(_parquet(where))
        operators = Counter(canonical(name) for task in tasks for name in task.ops)
        times = sorted(task.evidence["eager_seconds"] for task in tasks if "eager_seconds" in task.evidence)
        record: dict[str, Any] = {
            "tasks": len(tasks),
            "splits": dict(Counter(task.split for task in tasks)),
            "sources": dict(sorted(Counter(task.data_source for task in tasks).items())),
            "operators": len(operators),
            "operator_sequences": len({tuple(map(canonical, task.ops)) for task in tasks}),
            "most_frequent": dict(operators.most_common(12)),
            "eager_seconds": dict(zip(("p10", "median", "p90"), quantiles(times, n=10)[::4], strict=True))
            if len(times) > 1
            else {},
        }
        table = Table("figure", "value", box=None, padding=(0, 2, 0, 0), show_header=False)
        for name, value in record.items():
            shown = (
                ", ".join(f"{key}: {number:.4g}" for key, number in value.items())
                if isinstance(value, dict)
                else str(value)
            )
            table.add_row(name.replace("_", " "), shown)
        stderr_console().print(table)
        out(record)


@data_app.command("show")
@with_common_options()
def data_show(
    given: CommonOptions,
    task: Annotated[str, typer.Argument(help="beginning of a task's id")],
    dataset: Annotated[
        Path | None, typer.Option("--dataset", help="data set; without it the newest in the home")
    ] = None,
) -> None:
    """A task's source, its evidence, and its nearest neighbours in the data set."""
    import json

    from rich.syntax import Syntax

    from components.core.errors import UserError

    with answer(given.as_json) as out:
        from components.core.task import read_tasks
        from components.synthesis.task_import import nearest_tasks

        path = _parquet(dataset or _newest(home_of(given.resolved())))
        tasks = read_tasks(path)
        found = [candidate for candidate in tasks if candidate.task_id.startswith(task)]
        if len(found) != 1:
            raise UserError(
                f"{path}: {len(found) or 'no'} tasks begin with {task}; give more of the id, or one that cuda-agent data show has printed."
            )
        near = nearest_tasks(found[0], tasks, 5)
        console = stderr_console()
        console.print(
            f"{found[0].task_id}  {found[0].data_source}  {' > '.join(found[0].ops)}  {found[0].split}",
            highlight=False,
            markup=False,
        )
        console.print(Syntax(found[0].code, "python"))
        console.print(json.dumps(found[0].evidence, indent=2), highlight=False, markup=False)
        for value, other in near:
            console.print(
                f"  {value:.3f}  {other.task_id}  {' > '.join(other.ops)}", highlight=False, markup=False
            )
        record = found[0].model_dump(mode="json") | {"task_id": found[0].task_id}
        out(
            record
            | {
                "neighbours": [
                    {"similarity": round(value, 4), "task_id": other.task_id, "ops": other.ops}
                    for value, other in near
                ]
            }
        )


@data_app.command("push")
@with_common_options()
def data_push(
    given: CommonOptions, folder: Annotated[Path, typer.Argument(help="folder of a data set")]
) -> None:
    """Keep a data set in the remote under its version; equal versions are kept once."""
    with answer(given.as_json) as out:
        from flows.dataset_remote import push

        resolved = given.resolved()
        version = push(resolved.params, home_of(resolved), folder)
        stderr_console().print(
            f"{version}: kept; cuda-agent data pull {version[:16]} restores it",
            highlight=False,
            soft_wrap=True,
        )
        out({"version": version, "path": str(folder.resolve())})


@data_app.command("pull")
@with_common_options()
def data_pull(
    given: CommonOptions,
    version: Annotated[str, typer.Argument(help="a data set's version, or at least its first 8 digits")],
) -> None:
    """Restore a version from the remote into the home's datasets."""
    with answer(given.as_json) as out:
        from flows.dataset_remote import pull

        resolved = given.resolved()
        folder = pull(resolved.params, home_of(resolved), version)
        stderr_console().print(f"{folder}", highlight=False, soft_wrap=True)
        out({"version": folder.name, "path": str(folder)})


@contextlib.contextmanager
def _judged(resolved: Resolved) -> Iterator[tuple[LocalPool, ProgressView]]:
    """The pool that admits, and the view that shows how far it is."""
    from components.core.progress_view import ProgressView
    from components.judge.pool import open_pool

    pool = open_pool(resolved.params, home_of(resolved) / "verdicts")
    try:
        with ProgressView(stderr_console()) as view:
            yield pool, view
    finally:
        pool.close()


def _made(made: DatasetSummary, folder: Path) -> dict[str, Any]:
    reasons = ", ".join(f"{reason} {count}" for reason, count in made.reasons.items()) or "none"
    console = stderr_console()
    console.print(
        f"{folder}: {len(made.admitted)} tasks of {made.candidates} candidates, version {made.version}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"refused: {reasons}", highlight=False, soft_wrap=True)
    path = str(folder.resolve())
    return {
        "version": made.version,
        "candidates": made.candidates,
        "admitted": len(made.admitted),
        "rejected": made.reasons,
        "path": path,
    }


def _against(resolved: Resolved, against: list[str] | None) -> Resolved:
    """The parameters with more programs to stay clear of."""
    data = resolved.params.data
    more = data.model_copy(update={"against": [*data.against, *(against or ())]})
    resolved.params = resolved.params.model_copy(update={"data": more})
    return resolved


def _parquet(where: Path) -> Path:
    return where / "tasks.parquet" if where.is_dir() else where


def _newest(home: Path) -> Path:
    versions = sorted(home.glob("datasets/*"), key=lambda folder: folder.stat().st_mtime)
    return versions[-1] if versions else home / "datasets"
