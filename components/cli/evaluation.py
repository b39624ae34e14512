"""The commands `cuda-agent evaluate` and `cuda-agent runs …`: what a policy is worth, and why one run beat another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import CommonOptions, answer, home_of, stderr_console, with_common_options

runs_app = typer.Typer(
    help="Finished runs and evaluations, side by side.", no_args_is_help=True, rich_markup_mode=None
)


@with_common_options()
def evaluate(
    given: CommonOptions,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", help="champion, a version, a folder, or the address of an OpenAI-compatible server"
        ),
    ] = "champion",
    model: Annotated[
        str, typer.Option("--model", help="which of the server's models; without it the first")
    ] = "",
    suite: Annotated[
        str,
        typer.Option(
            "--suite", help="held-out, shipped, a folder, task file or parquet; without it evaluation.suite"
        ),
    ] = "",
    levels: Annotated[
        str,
        typer.Option("--levels", metavar="1,2,…", help="levels of the suite; without it evaluation.levels"),
    ] = "",
    attempts: Annotated[
        int,
        typer.Option("--attempts", min=0, help="trajectories for each task; without it evaluation.attempts"),
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="only continue one that was begun; without it the command begins or continues"
        ),
    ] = False,
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset", help="data set whose held-out tasks are meant; without it the newest in the home"
        ),
    ] = None,
) -> None:
    """Evaluate a policy: episodes in the agent loop, then each final answer measured anew; the same command continues a killed one."""
    from components.core.errors import UserError
    from components.core.progress_view import ProgressView, evaluation_table

    with answer(given.as_json) as out:
        chosen = [f"evaluation.suite={json.dumps(suite)}"] if suite else []
        if levels and not levels.replace(",", "").isdigit():
            raise UserError(
                f"--levels {levels}: numbers with commas between them are expected, for instance 1,2."
            )
        chosen += [f"evaluation.levels=[{levels}]"] if levels else []
        chosen += [f"evaluation.attempts={attempts}"] if attempts else []
        resolved = given.for_judging(*chosen)
        place, console = home_of(resolved), stderr_console()
        from components.cli.agent import policy_of
        from components.core.files import digest_json
        from components.evaluation.evaluate import evaluate as evaluate_policy
        from components.evaluation.evaluate import for_admission
        from components.evaluation.report import write_evaluation_report
        from components.evaluation.suites import load_suite
        from components.judge.pool import open_pool

        tasks = load_suite(resolved.params, dataset or _newest_dataset(place))
        examined = policy_of(policy, model, resolved)
        params = examined.params
        settings = params.model_dump(mode="json", exclude={"home", "gate", "store", "registry"})
        epoch = digest_json([examined.digest, [task.task_id for task in tasks], settings])[:12]
        target = place / "evaluations" / epoch
        if resume and not target.is_dir():
            raise UserError(
                f"--resume: {target} is not there, no such evaluation was begun; give the command's former options, or leave --resume out."
            )
        pool = open_pool(for_admission(params), place / "verdicts")
        try:
            with ProgressView(console) as view:
                found = evaluate_policy(
                    examined,
                    tasks,
                    pool,
                    target,
                    epoch=epoch,
                    progress=view,
                    seed=params.seed,
                    admit=pool.admit,
                )
        finally:
            pool.close()
        report = write_evaluation_report(target, found)
        evaluation_table(found.overall, console)
        for level, summary in found.levels.items():
            console.print(f"level {level}")
            evaluation_table(summary, console)
        console.print(f"report   {report}", highlight=False, soft_wrap=True)
        out(found.model_dump(mode="json") | {"report": str(report)})


def _newest_dataset(home: Path) -> Path:
    """The data set that was made last; a suite of its own needs none, so its absence is reported by the suite."""
    versions = sorted(home.glob("datasets/*"), key=lambda folder: folder.stat().st_mtime)
    return versions[-1] if versions else home / "datasets"


@runs_app.command("compare")
@with_common_options()
def runs_compare(
    given: CommonOptions,
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="run (the beginning of its id is enough), or the folder of an evaluation"
        ),
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", help="the same; what is said is how B differs from A")
    ],
) -> None:
    """What differed in data, code and parameters, which tasks were won and lost, and whether that is more than chance."""
    with answer(given.as_json) as out:
        resolved = given.resolved()
        from components.core.progress_view import comparison_tables
        from components.evaluation.compare import compare, open_side

        place = home_of(resolved)
        found = compare(open_side(place, first), open_side(place, second))
        comparison_tables(found, stderr_console())
        out(found.model_dump(mode="json"))
