"""The commands `cuda-agent data …`: create, inspect, store and restore data sets of kernel tasks.

A kernel task is a PyTorch module that a policy has to make faster.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.cli.common import (
    CommonOptions,
    ExitCode,
    Output,
    home_of,
    judge_session,
    newest_dataset,
    print_line,
    print_table,
    stderr_console,
    with_common_options,
)
from components.core.errors import UserError

if TYPE_CHECKING:
    from components.core.task import KernelTask
    from components.synthesis.dataset_summary import DatasetSummary

data_app = typer.Typer(help="Data sets of kernel tasks.", no_args_is_help=True, rich_markup_mode=None)

Out = Annotated[Path, typer.Option("--out", help="folder to write")]
Dataset = Annotated[
    Path, typer.Argument(metavar="WHERE", help="folder with tasks.parquet, or a parquet file")
]


@data_app.command("build")
@with_common_options()
def data_build(options: CommonOptions, out_folder: Out) -> Output:
    """Compose tasks from operators, and write those that the judge admits as a data set.

    The judge admits a task if it can measure kernels for it. A pipeline run builds its data set in the same
    way, through DVC.
    """
    resolved = options.resolve()
    from components.synthesis.dataset import build_dataset

    home = home_of(resolved)
    with judge_session(resolved.params, home) as (pool, view):
        summary = build_dataset(resolved.params, out_folder, pool, view, home / "seeds")
    return _summary_output(summary, out_folder)


@data_app.command("import")
@with_common_options()
def data_import(
    options: CommonOptions,
    file: Annotated[Path, typer.Argument(help="parquet with the columns ops, data_source and code")],
    out_folder: Out,
) -> Output:
    """Write a data set of those tasks in a parquet file that pass the filters and the judge's admission.

    The filters are those of `cuda-agent data check`. The judge admits a task if it can measure kernels for
    it.
    """
    resolved = options.resolve()
    from components.synthesis.dataset import admit_tasks, read_public

    tasks = read_public(file, resolved.params.data.held_out_seed)
    with judge_session(resolved.params, home_of(resolved)) as (pool, view):
        summary = admit_tasks(resolved.params, tasks, len(tasks), out_folder, pool, view)
    return _summary_output(summary, out_folder)


@data_app.command("convert")
@with_common_options()
def data_convert(
    folder: Annotated[Path, typer.Argument(help="folder with definitions and workloads")], out_folder: Out
) -> Output:
    """Write the definitions of FlashInfer-Bench or SOL-ExecBench as task files, which are a suite.

    A definition that does not fit a kernel task is left out, and the reason printed. Each file takes up to 8
    of the definition's workloads.
    """
    from components.evaluation.definitions import convert

    converted = convert(folder, out_folder)
    if converted.left_out:
        print_table(("left out", "reason"), sorted(converted.left_out.items()))
    print_line(f"{out_folder}: {len(converted.files)} tasks, {len(converted.left_out)} left out")
    return Output({"files": [str(file) for file in converted.files], "left_out": converted.left_out})


@data_app.command("check")
@with_common_options()
def data_check(options: CommonOptions, dataset: Dataset) -> Output:
    """Report which tasks of a data set the filters refuse, and why, without running the tasks.

    The filters refuse a task that lacks a part of a kernel task (such as its class `Model`), contains
    forbidden code, has wrong operator names, duplicates an earlier task, resembles an evaluation program (a
    benchmark's task) too closely, or is held out for evaluation although its operator sequence is trained on.
    The exit code is 1 if a task is refused. `cuda-agent data import` applies the filters too, and also has
    the judge run the tasks.
    """
    from components.core.task import dataset_version, read_tasks
    from components.synthesis.dataset import check_rows, read_public

    data = options.resolve().params.data
    path = _parquet(dataset)
    # A data set of this project records the split of each row. For other files, the operators determine it.
    own = (path.parent / "metrics.json").is_file()
    tasks = read_tasks(path) if own else read_public(path, data.held_out_seed)
    version = dataset_version(path)
    refused = check_rows(tasks, data)
    if refused:
        print_table(
            ("row", "operators", "reason", "detail"),
            [
                (str(row), " ".join(finding.task.ops), finding.reason, finding.detail[:100])
                for row, finding in refused.items()
            ],
        )
    print_line(f"{path}: {len(tasks)} tasks, {len(refused)} refused, version {version}")
    return Output(
        {
            "version": version,
            "candidates": len(tasks),
            "admitted": len(tasks) - len(refused),
            "rejected": dict(Counter(finding.reason for finding in refused.values()).most_common()),
            "path": str(path),
            "rows": [
                {"row": row, "reason": finding.reason, "detail": finding.detail}
                for row, finding in refused.items()
            ],
        },
        ExitCode.FAILED if refused else ExitCode.DONE,
    )


@data_app.command("stats")
@with_common_options()
def data_stats(dataset: Dataset) -> Output:
    """Print statistics of a data set: splits, sources, operators, and quantiles of the eager times (s)."""
    from statistics import quantiles

    from components.bootstrap.operator_chain import canonical
    from components.core.task import read_tasks

    tasks = read_tasks(_parquet(dataset))
    operators = Counter(canonical(name) for task in tasks for name in task.ops)
    times = sorted(task.evidence["eager_seconds"] for task in tasks if "eager_seconds" in task.evidence)
    deciles = quantiles(times, n=10)[::4] if len(times) > 1 else []
    record: dict[str, Any] = {
        "tasks": len(tasks),
        "splits": dict(Counter(task.split for task in tasks)),
        "sources": dict(sorted(Counter(task.data_source for task in tasks).items())),
        "operators": len(operators),
        "operator_sequences": len({tuple(map(canonical, task.ops)) for task in tasks}),
        "most_frequent": dict(operators.most_common(12)),
        "eager_seconds": dict(zip(("p10", "median", "p90"), deciles, strict=False)),
    }
    rows = [
        (
            name.replace("_", " "),
            ", ".join(f"{key}: {number:.4g}" for key, number in value.items())
            if isinstance(value, dict)
            else str(value),
        )
        for name, value in record.items()
    ]
    print_table(("figure", "value"), rows, show_header=False)
    return Output(record)


@data_app.command("show")
@with_common_options()
def data_show(
    options: CommonOptions,
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="beginning of a task's id")],
    dataset: Annotated[
        Path | None, typer.Option("--dataset", help="data set; by default the newest in the home")
    ] = None,
) -> Output:
    """Print the source of a task and its evidence: what was recorded when the task was admitted."""
    from rich.syntax import Syntax

    from components.core.task import read_tasks

    path = _parquet(dataset or newest_dataset(home_of(options.resolve())))
    found: dict[str, KernelTask] = {}  # A file that was not made here may have a task twice.
    for task in read_tasks(path):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # of a faulty source
            found.setdefault(task.task_id, task)
    matches = [task for name, task in found.items() if name.startswith(task_id)]
    if len(matches) != 1:
        raise UserError(
            f"{path}: {len(matches) or 'no'} tasks begin with {task_id}; give more of the id, or one that "
            "cuda-agent data show has printed."
        )
    task = matches[0]
    print_line(f"{task.task_id}  {task.data_source}  {' > '.join(task.ops)}  {task.split}")
    stderr_console().print(Syntax(task.code, "python"))
    print_line(json.dumps(task.evidence, indent=2))
    return Output(task.model_dump(mode="json") | {"task_id": task.task_id})


@data_app.command("push")
@with_common_options()
def data_push(
    options: CommonOptions, folder: Annotated[Path, typer.Argument(help="folder of a data set")]
) -> Output:
    """Store a data set in the DVC remote, under its version. An equal data set is stored only once."""
    from flows.dataset_dvc import push

    resolved = options.resolve()
    version = push(resolved.params, home_of(resolved), folder)
    print_line(f"{version}: stored; cuda-agent data pull {version[:16]} restores it")
    return Output({"version": version, "path": str(folder.resolve())})


@data_app.command("pull")
@with_common_options()
def data_pull(
    options: CommonOptions,
    version: Annotated[str, typer.Argument(help="version of a data set, or at least its first 8 digits")],
) -> Output:
    """Restore a version of a data set from the DVC remote into the folder datasets of the home folder."""
    from flows.dataset_dvc import pull

    resolved = options.resolve()
    folder = pull(resolved.params, home_of(resolved), version)
    print_line(folder)
    return Output({"version": folder.name, "path": str(folder)})


def _summary_output(summary: DatasetSummary, out: Path) -> Output:
    """Print how many tasks of the data set in `out`, a folder, were admitted and refused.

    The numbers are also returned, as the record that `--json` prints.
    """
    reasons = ", ".join(f"{reason} {count}" for reason, count in summary.reasons.items()) or "none"
    admitted = len(summary.admitted)
    print_line(f"{out}: {admitted} tasks of {summary.candidates} candidates, version {summary.version}")
    print_line(f"refused: {reasons}")
    return Output(
        {
            "version": summary.version,
            "candidates": summary.candidates,
            "admitted": admitted,
            "rejected": summary.reasons,
            "path": str(out.resolve()),
        }
    )


def _parquet(dataset: Path) -> Path:
    return dataset / "tasks.parquet" if dataset.is_dir() else dataset
