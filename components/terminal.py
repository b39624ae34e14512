"""What every command shares: its options, where its answer goes, and the sentence for a fault of the machine."""

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

Profile = Annotated[str, typer.Option("--profile", help="overlay of params.yaml, for instance smoke or h20-pool")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change one parameter; may be repeated")]
Home = Annotated[str, typer.Option("--home", help="folder that holds everything a run leaves behind")]
ParamsFile = Annotated[Path | None, typer.Option("--params", help="another parameter file than the project's params.yaml")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]


def resolved_params(profile: str, sets: list[str] | None, home: str, path: Path | None) -> Resolved:
    from components.config import PROJECT, resolve

    return resolve(profile, (*(sets or ()), *((f"home={json.dumps(home)}",) if home else ())), path or PROJECT / "params.yaml")


def home_of(resolved: Resolved) -> Path:
    return Path(resolved.params.home).expanduser().resolve()


def people() -> Console:
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
