"""What every command shares: its options, where its answer goes, and the sentence for a fault of the machine."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from components.core.config import Resolved

Profile = Annotated[
    str, typer.Option("--profile", help="overlay of params.yaml, for instance smoke or h20-pool")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change one parameter; may be repeated")
]
Home = Annotated[str, typer.Option("--home", help="folder that holds everything a run leaves behind")]
ParamsFile = Annotated[
    Path | None, typer.Option("--params", help="another parameter file than the project's params.yaml")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]


@dataclass(frozen=True)
class CommonOptions:
    """The options of every command that reads parameters, as a person gave them."""

    profile: Profile = "smoke"
    sets: Sets = None
    home: Home = ""
    params_file: ParamsFile = None
    as_json: Json = False

    def resolved(self, *more: str) -> Resolved:
        """The parameters; `more` are changes that a command's other options stand for. UserError names what is wrong."""
        from components.core.config import PROJECT, resolve

        home = (f"home={json.dumps(self.home)}",) if self.home else ()
        return resolve(
            self.profile, (*(self.sets or ()), *more, *home), self.params_file or PROJECT / "params.yaml"
        )

    def for_judging(self, *more: str) -> Resolved:
        """The parameters of a command that judges on this machine; raises IsolationUnavailable before torch or a policy is loaded."""
        resolved = self.resolved(*more)
        if resolved.params.sandbox.pool != "ray":
            from components.sandbox.preflight import check_isolation

            check_isolation(resolved.params.sandbox, resolved.params.device)
        return resolved


def with_common_options(profile: str = "smoke") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first parameter is `given: Given`, those options after its own; `profile` is the default of the first."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = [
            parameter.replace(default=profile if name == "profile" else parameter.default)
            for name, parameter in inspect.signature(CommonOptions, eval_str=True).parameters.items()
        ]
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def call(**values: Any) -> None:
            given = CommonOptions(
                **{parameter.name: values.pop(parameter.name, parameter.default) for parameter in shared}
            )
            command(given, **values)

        # What typer reads: the names with their defaults from the one, the options from the other.
        call.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
        return call

    return decorate


def home_of(resolved: Resolved) -> Path:
    return Path(resolved.params.home).expanduser().resolve()


def stderr_console() -> Console:
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
    except KeyboardInterrupt:
        print("cuda-agent: interrupted; the same command continues where it stopped.", file=sys.stderr)
        raise
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
    if as_json:
        print(json.dumps(given[-1], ensure_ascii=False))
