"""The command `cuda-agent`: parses and prints, decides nothing.

Flows, Prefect, MLflow and torch are imported only inside the commands that need them, so that judging and the
parameters work on a bare GPU node and help is instant. With `--json` standard output holds exactly one JSON object;
everything for people goes to standard error.

Exit codes: 0 done, 1 failed, 2 bad input or environment, 3 isolation unavailable, 4 a gate refused.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from components.config import Resolved

FAILED, BAD_INPUT, NO_ISOLATION, REFUSED, INTERRUPTED = 1, 2, 3, 4, 130

app = typer.Typer(
    name="cuda-agent",
    help="A policy that writes GPU kernels, retrained every night and rewarded by measured speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(help="Model versions: what was promoted, and on which evidence.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(models_app, name="models")

Profile = Annotated[str, typer.Option("--profile", help="overlay of params.yaml, for instance smoke or h20-pool")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change one parameter; may be repeated")]
Home = Annotated[str, typer.Option("--home", help="folder that holds everything a run leaves behind")]
ParamsFile = Annotated[Path | None, typer.Option("--params", help="another parameter file than the project's params.yaml")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]


@app.command()
def run(
    profile: Profile = "smoke",
    sets: Sets = None,
    home: Home = "",
    params_file: ParamsFile = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run; this is what happens anyway")] = False,
    redo_from: Annotated[str, typer.Option("--from", metavar="STAGE", help="do this stage and all that follow once more")] = "",
    as_json: Json = False,
) -> None:
    """Run the night: data, cold start, four stages, evaluation, registration, gate.

    A finished run with the same parameters and code is only reported. An interrupted one continues where it stopped.
    """
    from components.view import View, final_table
    from flows import leash, runs
    from flows.server import prefect_server

    with answer(as_json) as out:
        resolved = _resolve(profile, sets, home, params_file)
        night = runs.open_night(resolved, redo_from)
        console = _console()
        record = runs.finished(night)
        if record is not None:
            console.print(f"This run is finished, nothing is left to do: {night.folder}", highlight=False, soft_wrap=True)
        else:
            runs.check_environment(night.params)
            runs.prepare_home(night.home)
            with runs.home_lock(night.home):
                runs.prepare_environment(night.home)
                leash.put_on()
                console.print(f"run {night.run_id}, profile {resolved.profile}, home {night.home}", highlight=False, soft_wrap=True)
                with prefect_server(night.home) as server:
                    from flows.nightly import run_night

                    if server is not None:
                        server.wait()
                    with View(console) as view:
                        record = run_night(night, view)
        final_table(record, runs.interface_commands(night), console)
        out(record)
    if record["gate"]["verdict"] == "refused":
        raise typer.Exit(REFUSED)


@app.command()
def doctor(profile: Profile = "smoke", sets: Sets = None, home: Home = "", params_file: ParamsFile = None, as_json: Json = False) -> None:
    """What is here, what is missing, and what that costs."""
    from rich.table import Table

    from components import doctor as examination

    with answer(as_json) as out:
        findings = examination.examine(_resolve(profile, sets, home, params_file).params)
        table = Table("", "what", "found", "what its absence costs", box=None, padding=(0, 2, 0, 0))
        for finding in findings:
            mark = "[green]ok[/green]" if finding.here else "[red]missing[/red]" if finding.needed else "[yellow]absent[/yellow]"
            table.add_row(mark, finding.name, finding.found, finding.cost)
        _console().print(table)
        record = examination.as_record(findings)
        out(record)
    if record["missing"]:
        raise typer.Exit(BAD_INPUT)


@app.command()
def params(profile: Profile = "", sets: Sets = None, home: Home = "", params_file: ParamsFile = None, as_json: Json = False) -> None:
    """Every resolved parameter with its meaning and where its value comes from."""
    from rich.table import Table

    from components.config import KNOWN

    with answer(as_json) as out:
        resolved = _resolve(profile, sets, home, params_file)
        rows = {}
        for key, field in KNOWN.items():
            value: Any = resolved.params
            for part in key.split("."):
                value = getattr(value, part)
            if not hasattr(value, "model_fields_set"):
                inner = sorted({source for name, source in resolved.sources.items() if name.startswith(f"{key}.")})
                source = resolved.sources.get(key) or ", ".join(inner)
                plain = resolved.params.model_dump(mode="json")
                for part in key.split("."):
                    plain = plain[part]
                rows[key] = {"value": plain, "meaning": field.description, "source": source}
        table = Table("parameter", "value", "meaning", "source", box=None, padding=(0, 2, 0, 0))
        for key, row in rows.items():
            table.add_row(key, json.dumps(row["value"]), row["meaning"], row["source"])
        if not as_json:
            _console().print(table)
        out({"profile": resolved.profile, "params": rows})


@app.command()
def judge(
    workdir: Annotated[Path, typer.Argument(help="workspace with model_new.py and kernels/")],
    task: Annotated[Path | None, typer.Option("--task", help="task file; without it the workspace's own model.py")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda; without it cuda where there is a GPU")] = "",
    precision: Annotated[str, typer.Option("--precision", help="strict-fp32 or tf32")] = "",
    profile: Profile = "",
    sets: Sets = None,
    params_file: ParamsFile = None,
    as_json: Json = False,
) -> None:
    """Build one candidate, check it and measure it against eager and torch.compile; exit 0 whatever the verdict."""
    with answer(as_json) as out:
        device = device or ("cuda" if Path("/dev/nvidia0").exists() else "cpu")
        chosen = [*(sets or []), f"device={device}", *([f"precision={precision}"] if precision else [])]
        resolved = _resolve(profile, chosen, "", params_file)
        from components.sandbox.judge import judge_workdir

        verdict = judge_workdir(resolved.params, workdir, task, Path(resolved.params.home).expanduser().resolve() / "judge")
        console = _console()
        console.print(f"{verdict.status}{f' ({verdict.reason})' if verdict.reason else ''}, milestone {verdict.milestone}", highlight=False, markup=False)
        for baseline, ratio in (("eager", verdict.speedup.eager), ("torch.compile", verdict.speedup.compile)):
            if ratio is not None:
                console.print(f"  {ratio.estimate:.3f}x {baseline} (95 % interval {ratio.low:.3f} to {ratio.high:.3f})", highlight=False)
        if verdict.log:
            console.print(verdict.log, highlight=False, markup=False)
        out(verdict.model_dump(mode="json"))
    if verdict.status == "infrastructure":
        raise typer.Exit(FAILED)


@models_app.command("list")
def models_list(profile: Profile = "smoke", sets: Sets = None, home: Home = "", params_file: ParamsFile = None, as_json: Json = False) -> None:
    """Every version, newest first."""
    from rich.table import Table

    with answer(as_json) as out:
        resolved = _resolve(profile, sets, home, params_file)
        client = _registry(resolved)
        from components.registry import models

        name = resolved.params.registry.model
        found = models.versions(client, name)
        table = Table("version", "aliases", "decision", "pass rate", "faster than compile", "data set", box=None, padding=(0, 2, 0, 0))
        for version in found:
            tags = version["tags"]
            figures = [tags.get("figure.pass_rate", ""), tags.get("figure.faster_rate.compile", ""), tags.get("dataset.version", "")[:12]]
            table.add_row(version["version"], ", ".join(version["aliases"]), version["decision"], *figures)
        _console().print(table if found else f"{name} has no version yet.")
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
        resolved = _resolve(profile, sets, home, params_file)
        client = _registry(resolved)
        from components.registry import models

        found = models.describe(client, resolved.params.registry.model, version)
        console = _console()
        console.print(f"{found['name']} version {found['version']} ({', '.join(found['aliases']) or 'no alias'}): {found['decision']}", highlight=False)
        table = Table("gate", "value", "threshold", "passed", box=None, padding=(0, 2, 0, 0))
        for gate in found["gates"]:
            table.add_row(gate["name"], "–" if gate["value"] is None else f"{gate['value']:.3g}", f"{gate['threshold']:.3g}", "yes" if gate["passed"] else "no")
        console.print(table)
        for key, value in sorted(found["tags"].items()):
            console.print(f"  {key}  {value}", highlight=False, markup=False, soft_wrap=True)
        out(found)


def _resolve(profile: str, sets: list[str] | None, home: str, path: Path | None) -> Resolved:
    from components.config import PROJECT, resolve

    return resolve(profile, (*(sets or ()), *((f"home={json.dumps(home)}",) if home else ())), path or PROJECT / "params.yaml")


def _registry(resolved: Resolved) -> Any:
    from components.config import BadInput
    from components.registry.tracking import connect

    home = Path(resolved.params.home).expanduser().resolve()
    if not resolved.params.registry.tracking_uri and not (home / "mlflow" / "mlflow.db").is_file():
        raise BadInput(f"{home}: no run was registered here yet; run cuda-agent run first, or give its folder with --home.")
    return connect(resolved.params.registry, home)


def _console() -> Console:
    from rich.console import Console

    # Where no terminal tells its width, tables are not folded into columns of ten characters.
    return Console(stderr=True, width=None if sys.stderr.isatty() else 200)


@contextlib.contextmanager
def answer(as_json: bool) -> Iterator[Any]:
    """Keep standard output for the one answer: whatever else writes to it, libraries and children too, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    given: list[Any] = []
    try:
        yield given.append
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
    if as_json:
        print(json.dumps(given[-1], ensure_ascii=False))


def environment_fault(error: BaseException) -> str:
    """The sentence for a fault of the machine that no part could have foreseen, such as a full disk; empty otherwise.

    Libraries wrap it: safetensors and torch keep only the system's text, SQLite has its own.
    """
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        full = isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in text or "database or disk is full" in text:
            place = f"{seen.filename}: " if isinstance(seen, OSError) and seen.filename else ""
            return f"{place}the disk is full; free some space or give another folder with --home, then run the same command again."
        if isinstance(seen, OSError) and seen.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and seen.filename:
            return f"{seen.filename}: cannot be written ({seen.strerror}); mend its permissions or give another folder with --home."
        seen = seen.__cause__ or seen.__context__
    return ""


def main() -> None:
    """Entry point: faults that a person can mend are one sentence on standard error."""
    from components.config import BadInput

    try:
        app()
    except BadInput as error:
        print(f"cuda-agent: {' '.join(str(error).split())}", file=sys.stderr)
        # IsolationUnavailable is a BadInput of components.sandbox.isolation; by name, so that help needs no import of it.
        sys.exit(NO_ISOLATION if type(error).__name__ == "IsolationUnavailable" else BAD_INPUT)
    except KeyboardInterrupt:
        print("cuda-agent: interrupted; the same command continues where it stopped.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        sentence = environment_fault(error)
        if not sentence:
            raise
        print(f"cuda-agent: {sentence}", file=sys.stderr)
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
