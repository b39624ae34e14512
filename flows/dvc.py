"""Functions that run DVC commands in a workspace that is not a git repository."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from components.core.files import write_changed
from components.core.params import Params


def remote_url(params: Params, home: Path) -> str:
    return f"{params.store.url.rstrip('/')}/dvc" if params.store.url else str(home / "remote")


def initialise_workspace(workspace: Path, params: Params, home: Path) -> Path:
    """Write a DVC configuration with the address of the remote into the folder, and return the folder."""
    lines = [
        "[core]",
        "    no_scm = True",
        "    analytics = false",
        "    remote = store",
        "['remote \"store\"']",
        f"    url = {remote_url(params, home)}",
    ]
    if params.store.endpoint:
        lines.append(f"    endpointurl = {params.store.endpoint}")
    write_changed(workspace / ".dvc" / "config", "\n".join(lines) + "\n")
    return workspace


def run_dvc(
    workspace: Path,
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    on_line: Callable[[str], None] = lambda _: None,
) -> tuple[int, list[str]]:
    """Run one DVC command, and return its exit status and the lines of its output.

    `on_line` is called with each line as soon as DVC prints it. If an exception is raised meanwhile, DVC and
    all processes that it started are killed.
    """
    lines: list[str] = []
    # DVC gets a session of its own, so that DVC and every process that it starts can be killed together.
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=workspace,
        env=os.environ | {"DVC_NO_ANALYTICS": "1"} | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            on_line(lines[-1])
        return process.wait(), lines
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
