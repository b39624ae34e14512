"""The command `cuda-agent`: parses and prints, decides nothing.

Flows, Prefect, MLflow and torch are imported only inside the commands that need them, so that judging and the
parameters work on a bare GPU node and help is instant. With `--json` standard output holds exactly one JSON object;
everything for people goes to standard error.

Exit codes: 0 done, 1 failed, 2 bad input or environment, 3 isolation unavailable, 4 a gate refused, 130 interrupted,
143 ended by SIGTERM.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from components.cli import production
from components.cli.agent import optimize, trajectory_app
from components.cli.common import CommonOptions, answer, home_of, stderr_console, with_common_options
from components.cli.data import data_app
from components.cli.evaluation import evaluate, runs_app
from components.cli.models import models_app
from components.cli.train import train
from components.core.files import environment_fault
from components.training.launcher import TERMINATED

FAILED, BAD_INPUT, NO_ISOLATION, REFUSED = 1, 2, 3, 4

app = typer.Typer(
    name="cuda-agent",
    help="A policy that writes GPU kernels, retrained every night and rewarded by measured speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(models_app, name="models")
app.add_typer(data_app, name="data")
app.command()(train)
app.add_typer(runs_app, name="runs")
app.command()(evaluate)
app.add_typer(trajectory_app, name="trajectory")
app.command()(optimize)
production.register(app)


@app.command()
@with_common_options()
def run(
    given: CommonOptions,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue an interrupted run; this is what happens anyway")
    ] = False,
    redo_from: Annotated[
        str, typer.Option("--from", metavar="STAGE", help="do this stage and all that follow once more")
    ] = "",
    metrics: Annotated[
        int,
        typer.Option(
            "--metrics",
            metavar="PORT",
            help="serve Prometheus metrics on this port of 127.0.0.1 while it runs",
        ),
    ] = 0,
) -> None:
    """Run the night: data, cold start, four stages, evaluation, registration, gate.

    A finished run with the same parameters and code is only reported. An interrupted one continues where it stopped.
    """
    from components.core import telemetry
    from components.core.progress_view import ProgressView, final_table
    from flows import process_reaper, run_context
    from flows.server import prefect_server

    with answer(given.as_json) as out:
        resolved = given.resolved()
        night = run_context.open_run(resolved, redo_from)
        console = stderr_console()
        record = run_context.finished(night)
        if record is not None:
            console.print(
                f"This run is finished, nothing is left to do: {night.folder}",
                highlight=False,
                soft_wrap=True,
            )
        else:
            run_context.check_environment(night)
            run_context.prepare_home(night.home)
            with run_context.home_lock(night.home):
                run_context.prepare_environment(night.home)
                process_reaper.start_reaper()
                if metrics:
                    telemetry.serve(metrics)
                console.print(
                    f"run {night.run_id}, profile {resolved.profile}, home {night.home}",
                    highlight=False,
                    soft_wrap=True,
                )
                with prefect_server(night.home) as server:
                    from components.core.errors import StageFailed
                    from components.registry.tracking import import_store
                    from flows.nightly import run_pipeline

                    if server is not None:
                        import_store(night.params.registry)
                        server.wait()
                    try:
                        with ProgressView(console) as view:
                            record = run_pipeline(night, view)
                    except StageFailed as error:
                        from components.training.collapse_detection import Terminated

                        console.print(f"cuda-agent: {error}", highlight=False, soft_wrap=True, markup=False)
                        raise typer.Exit(TERMINATED if isinstance(error, Terminated) else FAILED) from error
        final_table(record, run_context.interface_commands(night), console)
        out(record)
    if record["gate"]["verdict"] == "refused":
        raise typer.Exit(REFUSED)


@app.command()
@with_common_options()
def doctor(given: CommonOptions) -> None:
    """What is here, what is missing, and what that costs."""
    from rich.table import Table

    from components.cli import doctor as examination

    with answer(given.as_json) as out:
        findings = examination.examine(given.resolved().params)
        table = Table("", "what", "found", "what its absence costs", box=None, padding=(0, 2, 0, 0))
        for finding in findings:
            mark = (
                "[green]ok[/green]"
                if finding.here
                else "[red]missing[/red]"
                if finding.needed
                else "[yellow]absent[/yellow]"
            )
            table.add_row(mark, finding.name, finding.found, finding.cost)
        stderr_console().print(table)
        record = examination.as_record(findings)
        out(record)
    if record["missing"]:
        raise typer.Exit(NO_ISOLATION if record["missing"] == [examination.ISOLATION] else BAD_INPUT)


@app.command()
@with_common_options("")
def params(
    given: CommonOptions,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="parameter file to write, without profiles: what --params and DVC read"),
    ] = None,
) -> None:
    """Every resolved parameter with its meaning and where its value comes from."""
    import yaml
    from rich.table import Table

    from components.core.config import KNOWN
    from components.core.files import atomic_write

    with answer(given.as_json) as out:
        resolved = given.resolved()
        rows = {}
        for key, field in KNOWN.items():
            value: Any = resolved.params
            for part in key.split("."):
                value = getattr(value, part)
            if not hasattr(value, "model_fields_set"):
                inner = sorted(
                    {source for name, source in resolved.sources.items() if name.startswith(f"{key}.")}
                )
                source = resolved.sources.get(key) or ", ".join(inner)
                plain = resolved.params.model_dump(mode="json")
                for part in key.split("."):
                    plain = plain[part]
                rows[key] = {"value": plain, "meaning": field.description, "source": source}
        table = Table("parameter", "value", "meaning", "source", box=None, padding=(0, 2, 0, 0))
        for key, row in rows.items():
            table.add_row(key, json.dumps(row["value"]), row["meaning"], row["source"])
        if write is not None:
            atomic_write(write, yaml.safe_dump(resolved.params.model_dump(mode="json"), sort_keys=False))
        if not given.as_json:
            stderr_console().print(table)
        out({"profile": resolved.profile, "params": rows})


@app.command()
@with_common_options("")
def judge(
    given: CommonOptions,
    workdir: Annotated[Path, typer.Argument(help="workspace with model_new.py and kernels/")],
    task: Annotated[
        Path | None, typer.Option("--task", help="task file; without it the workspace's own model.py")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="cpu or cuda; without it cuda where there is a GPU")
    ] = "",
    precision: Annotated[str, typer.Option("--precision", help="strict-fp32 or tf32")] = "",
) -> None:
    """Build one candidate, check it and measure it against eager and torch.compile; exit 0 whatever the verdict."""
    with answer(given.as_json) as out:
        device = device or ("cuda" if Path("/dev/nvidia0").exists() else "cpu")
        resolved = given.for_judging(f"device={device}", *([f"precision={precision}"] if precision else []))
        from components.judge.candidate_folder import judge_workdir

        verdict = judge_workdir(resolved.params, workdir, task, home_of(resolved) / "judge")
        console = stderr_console()
        console.print(
            f"{verdict.status}{f' ({verdict.reason})' if verdict.reason else ''}, milestone {verdict.milestone}",
            highlight=False,
            markup=False,
        )
        for baseline, ratio in (("eager", verdict.speedup.eager), ("torch.compile", verdict.speedup.compile)):
            if ratio is not None:
                console.print(
                    f"  {ratio.estimate:.3f}x {baseline} (95 % interval {ratio.low:.3f} to {ratio.high:.3f})",
                    highlight=False,
                )
        if verdict.log:
            console.print(verdict.log, highlight=False, markup=False)
        out(verdict.model_dump(mode="json"))
    if verdict.status == "infrastructure":
        raise typer.Exit(FAILED)


class _Terminated(SystemExit):
    """SIGTERM ends a command as Ctrl-C does, what it has started too. Said by `main`: a handler may have interrupted a print."""


def _terminated(number: int, frame: object) -> None:
    raise _Terminated(TERMINATED)


def main() -> None:
    """Entry point: faults that a person can mend are one sentence on standard error."""
    from components.core.errors import IsolationUnavailable, UserError

    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if (
            getattr(sys, name) is None
        ):  # closed by the caller: the next file that is opened would take its place
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    signal.signal(signal.SIGTERM, _terminated)
    # Nothing is ever downloaded, and bars of loading weights are no news to anyone.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # This machine's own servers are not reached through a proxy, whatever one is set for the rest.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
    try:
        app()
    except UserError as error:
        print(f"cuda-agent: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(NO_ISOLATION if isinstance(error, IsolationUnavailable) else BAD_INPUT)
    except _Terminated:
        print("cuda-agent: ended by SIGTERM; the same command continues where it stopped.", file=sys.stderr)
        raise
    except Exception as error:
        sentence = environment_fault(error)
        if not sentence:
            raise
        print(f"cuda-agent: {sentence}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    finally:
        gc.freeze()  # the interpreter looks through everything once more as it ends: 1.3 s with MLflow and Prefect imported
