"""The commands `cuda-agent evaluate` and `cuda-agent runs …`: evaluate a policy, and compare two runs.

Two evaluations can also be compared, each named by its folder or the beginning of its id.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.cli.common import (
    CommonOptions,
    Output,
    Policy,
    ServerModel,
    home_of,
    judge_session,
    newest_dataset,
    print_line,
    stderr_console,
    with_common_options,
)

if TYPE_CHECKING:
    from components.core.params import Params
    from components.core.task import KernelTask

runs_app = typer.Typer(
    help="Finished runs and evaluations, side by side.", no_args_is_help=True, rich_markup_mode=None
)


@with_common_options()
def evaluate(
    options: CommonOptions,
    policy: Policy = "champion",
    model: ServerModel = "",
    suite: Annotated[
        str,
        typer.Option(
            "--suite", help="held-out, shipped, a folder, task file or parquet; by default evaluation.suite"
        ),
    ] = "",
    levels: Annotated[
        str, typer.Option("--levels", metavar="1,2,…", help="of the suite; by default evaluation.levels")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="float16 or bfloat16 casts modules and inputs; by default evaluation.dtype"
        ),
    ] = "",
    attempts: Annotated[
        int,
        typer.Option(
            "--attempts",
            min=0,
            max=100_000,
            help="trajectories for each task; by default evaluation.attempts",
        ),
    ] = 0,
    dataset: Annotated[
        Path | None,
        typer.Option("--dataset", help="data set with the held-out tasks; by default the newest in the home"),
    ] = None,
) -> Output:
    """Evaluate a policy on a suite of tasks: run episodes in the agent loop, then measure answers again.

    In an episode the policy writes a kernel for a task. Final kernels are measured again, unless they were
    wrong or did not build. The same command continues an interrupted evaluation.
    """
    chosen = {
        "suite": json.dumps(suite) if suite else "",
        "levels": f"[{levels}]" if levels else "",
        "dtype": dtype,
        "attempts": attempts,
    }
    resolved = options.resolve_for_judging(
        *(f"evaluation.{name}={value}" for name, value in chosen.items() if value)
    )
    home, console = home_of(resolved), stderr_console()
    from components.cli.models import find_policy
    from components.cli.progress_view import evaluation_table
    from components.evaluation.evaluate import evaluate as evaluate_policy
    from components.evaluation.report import write_evaluation_report
    from components.evaluation.suites import load_suite
    from components.judge.pool.local_pool import with_any_duration

    tasks = load_suite(resolved.params, dataset or newest_dataset(home))
    examined = find_policy(policy, model, resolved)
    params = examined.params
    epoch = evaluation_epoch(examined.digest, tasks, params)
    folder = home / "evaluations" / epoch
    with judge_session(with_any_duration(params), home) as (pool, view):
        results = evaluate_policy(examined, tasks, pool, folder, epoch=epoch, progress=view, seed=params.seed)
    report = write_evaluation_report(folder, results)
    evaluation_table(results.overall, console)
    for level, summary in results.levels.items():
        evaluation_table(summary, console, f"level {level}")
    for task in results.not_measurable:
        console.print(f"not measurable: {task.name or task.task_id}, {task.reason}")
    if results.errors:
        print_line(f"neither passed nor failed, because the judge failed: {results.errors} tasks")
    if results.dtype != "float32":
        print_line(f"modules and inputs were cast to {results.dtype}")
    print_line(f"report   {report}")
    return Output(results.model_dump(mode="json") | {"report": str(report)})


def evaluation_epoch(policy: str, tasks: list[KernelTask], params: Params) -> str:
    """Return the name of an evaluation of the policy with the digest `policy` on `tasks`.

    The name has 12 hexadecimal digits, the beginning of a digest of the policy, the tasks, the parameters
    that change an evaluation's results, and the judge's sources. The evaluation's folder has this name, and
    the judge reuses results that it stored under the same name. Parameters that only change throughput are
    left out, so that an evaluation continues with another policy.batch, for instance.
    """
    from components.core.config import result_values
    from components.core.files import digest_json
    from components.judge.verdict import VERSION
    from flows.stage_keys import READS

    return digest_json(
        [policy, [task.task_id for task in tasks], result_values(params, READS["evaluation"].params), VERSION]
    )[:12]


@runs_app.command("compare")
@with_common_options()
def runs_compare(
    options: CommonOptions,
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="run (the beginning of its id is enough), or the folder of an evaluation"
        ),
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", help="the same; the report says how B differs from A")
    ],
) -> Output:
    """Compare two runs: data, code, parameters, tasks won and lost, and statistical significance."""
    home = home_of(options.resolve())
    from components.cli.progress_view import comparison_tables
    from components.evaluation.compare import compare, open_side

    comparison = compare(open_side(home, first), open_side(home, second))
    comparison_tables(comparison, stderr_console())
    return Output(comparison.model_dump(mode="json"))
