"""Options and output that the commands of `cuda-agent` share.

With `--json`, a command writes one JSON object to standard output. All text for people goes to standard
error.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from components.cli.progress_view import ProgressView
    from components.core.config import Resolved
    from components.core.params import Params
    from components.judge.pool.local_pool import LocalPool

Device = Annotated[str, typer.Option("--device", help="cpu or cuda; by default cuda where there is a GPU")]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        help="champion, a version, a folder, the address of an OpenAI-compatible server, or rules, which "
        "searches without a model",
    ),
]
ServerModel = Annotated[
    str, typer.Option("--model", help="name of one of the server's models; by default the first")
]


class ExitCode(IntEnum):
    """Exit codes of the commands of `cuda-agent`.

    NO_ISOLATION means that this machine cannot isolate untrusted code, and REFUSED that a gate (a condition
    of promotion) refused a model version, or that the version's approval came after the deadline. Further
    codes are 130 after SIGINT and 143 after SIGTERM.
    """

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    NO_ISOLATION = 3
    REFUSED = 4


@dataclass(frozen=True)
class Output:
    """Result of a command: the object that `--json` prints, and the exit code."""

    record: Mapping[str, Any]
    exit_code: int = ExitCode.DONE


@dataclass(frozen=True)
class CommonOptions:
    """Values of the options that are common to all commands that read parameters.

    `profile` names a section of the parameter file that overrides its base values, `sets` has KEY=VALUE texts
    that override single parameters, `home` is the folder for all files of runs ("" is that of the
    parameters), and `params_file` the parameter file (None is the project's params.yaml). With `as_json`, the
    command prints its result as JSON.
    """

    profile: Annotated[
        str, typer.Option("--profile", help="overlay of params.yaml, for instance smoke or h20-pool")
    ] = "smoke"
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="change one parameter; may be repeated"),
    ] = None
    home: Annotated[str, typer.Option("--home", help="folder for everything that a run writes")] = ""
    params_file: Annotated[
        Path | None,
        typer.Option("--params", help="parameter file to read instead of the project's params.yaml"),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")] = False

    def resolve(self, *overrides: str, defaults: tuple[str, ...] = (), device: str | None = None) -> Resolved:
        """Return the parameters that result from the parameter file and the options.

        `overrides` are KEY=VALUE texts from other options of the command, and `defaults` are KEY=VALUE texts
        that the option `--set` may override. `device` is the value of the option `--device` of a command that
        has this option, and None for others. If it is "", the device is cuda if this machine has an NVIDIA
        GPU and cpu otherwise, unless `--set` overrides that. Raises UserError if a parameter or the file is
        not valid.
        """
        from components.core.config import PROJECT, default_device, resolve

        if device:
            overrides = (*overrides, f"device={device}")
        elif device is not None:
            defaults = (f"device={default_device()}", *defaults)
        home = (f"home={json.dumps(self.home)}",) if self.home else ()
        return resolve(
            self.profile,
            (*defaults, *(self.sets or ()), *overrides, *home),
            self.params_file or PROJECT / "params.yaml",
        )

    def resolve_for_judging(
        self, *overrides: str, defaults: tuple[str, ...] = (), device: str | None = None
    ) -> Resolved:
        """Return the parameters after checking that this machine can isolate the kernels to be judged.

        The arguments are those of `resolve`. Raises IsolationUnavailable if the machine cannot run untrusted
        code in the sandbox, and UserError as `resolve` does. Commands call this method before they load torch
        or a policy. Isolation is not checked if the judges run on a Ray cluster or behind a service, because
        these judges check it themselves.
        """
        resolved = self.resolve(*overrides, defaults=defaults, device=device)
        if not resolved.params.pool.judges and not resolved.params.pool.service:
            from components.sandbox.preflight import check_isolation

            check_isolation(resolved.params.sandbox, resolved.params.device)
        return resolved


def with_common_options(
    profile: str = "smoke", *, prints_output: bool = True
) -> Callable[[Callable[..., Output | None]], Callable[..., None]]:
    """Return a decorator that adds the options of CommonOptions to a command, and prints its result.

    A command that has a parameter `options: CommonOptions` gets all options of that class, and `profile` is
    the default of its `--profile`. Any other command gets only the option `--json`. The decorated command
    prints the record of the Output that the function returns, and ends with its exit code. If `prints_output`
    is False, the function itself does both.
    """

    def decorate(command: Callable[..., Output | None]) -> Callable[..., None]:
        own = dict(inspect.signature(command, eval_str=True).parameters)
        takes_options = own.pop("options", None) is not None
        added = [
            parameter.replace(default=profile) if name == "profile" else parameter
            for name, parameter in inspect.signature(CommonOptions, eval_str=True).parameters.items()
            if takes_options or name == "as_json"
        ]

        @functools.wraps(command)
        def call(**values: Any) -> None:
            options = CommonOptions(
                **{option.name: values.pop(option.name, option.default) for option in added}
            )
            if takes_options:
                values["options"] = options
            if not prints_output:
                command(**values)
                return
            with json_stdout(options.as_json) as print_json:
                output = command(**values) or Output({})
                print_json(output.record)
            if output.exit_code:
                raise typer.Exit(output.exit_code)

        # typer reads the signature and the annotations; the type of a function does not declare the former.
        signature = inspect.Signature([*own.values(), *added])
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {name: option.annotation for name, option in signature.parameters.items()}
        return call

    return decorate


@contextlib.contextmanager
def json_stdout(as_json: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Reserve standard output for one JSON object, by redirecting all other output to standard error.

    The redirection also applies to libraries and child processes. If `as_json` is True, the last object that
    the yielded function receives is printed at the end.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    records: list[Mapping[str, Any]] = []
    try:
        yield records.append
    except KeyboardInterrupt:
        print("cuda-agent: interrupted; the same command continues where it stopped.", file=sys.stderr)
        raise
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
    if as_json:
        print(json.dumps(records[-1]))  # in ASCII, because a model can write what UTF-8 cannot represent


def home_of(resolved: Resolved) -> Path:
    return Path(resolved.params.home).expanduser().resolve()


def newest_dataset(home: Path) -> Path:
    """Return the folder of the data set in `home`, the folder of all runs, that was modified last.

    If there is no data set, the folder `datasets` in `home` is returned, which may not exist. Folders whose
    names begin with a dot are no data sets, because another process writes them or was killed meanwhile.
    """
    folders = (file.parent for file in home.glob("datasets/[!.]*/tasks.parquet"))
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=home / "datasets")


@contextlib.contextmanager
def judge_session(
    params: Params, home: Path, *, use_service: bool = False
) -> Iterator[tuple[LocalPool, ProgressView]]:
    """Open a pool of judges and a progress view on standard error, yield both, and close them at the end.

    The pool keeps each result of a judge as a file in the folder `verdicts` of `home`, the folder of all
    runs. With `use_service`, the judge that `cuda-agent serve` keeps ready for the same folder is used if it
    runs. Raises IsolationUnavailable if kernels are judged on this machine and it cannot isolate them.
    """
    from components.cli.progress_view import ProgressView
    from components.judge.pool.open_pool import open_pool

    with (
        contextlib.closing(open_pool(params, home / "verdicts", use_service=use_service)) as pool,
        ProgressView(stderr_console()) as view,
    ):
        yield pool, view


@functools.cache
def stderr_console() -> Console:
    from rich.console import Console

    # Text from elsewhere may have square brackets and colons, which rich would take for tags and emoji.
    # Without a terminal, rich would assume 80 columns and wrap the text in wide tables.
    return Console(stderr=True, markup=False, emoji=False, width=None if sys.stderr.isatty() else 200)


def print_line(text: object, style: str = "") -> None:
    """Print text on standard error, without line wrapping and without terminal escapes."""
    from components.core.text import readable

    shown = readable(str(text), len(str(text)))
    stderr_console().print(shown, style=style, highlight=False, soft_wrap=True)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Iterable[str | Text]],
    *,
    empty: str = "",
    show_header: bool = True,
) -> None:
    """Print a table on standard error, or the text `empty` if it is given and there are no rows."""
    from components.cli.progress_view import plain_table

    stderr_console().print(
        empty if empty and not rows else plain_table(columns, rows, show_header=show_header)
    )
