"""The measuring commands of a workspace, for a person in a shell without the agent's sandbox.

They ask the same judge as the agent's tools and print the same lines.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from components.agent.utility_output import BUILD_SUCCEEDED, Utility, utility_output
from components.core.config import Params, resolve
from components.core.errors import UserError
from components.core.files import atomic_write
from components.judge.candidate_folder import judge_workdir, read_workspace
from components.sandbox.build import Builder


def run_utility(utility: Utility) -> None:
    """Run a utility on the current folder and exit: 0 success, 1 failure, 2 a mistake of the user."""
    if utility == "compile":
        _compile()
    with _user_errors():
        params, folder = _params()
        text, code = utility_output(utility, judge_workdir(params, Path.cwd(), None, folder))
    print(text)
    sys.exit(code)


def _compile() -> None:
    """Build kernels/ and leave cuda_extension.so, so that model_new.py can be imported here; then exit."""
    with _user_errors():
        params, folder = _params()
        built = Builder(params.sandbox, params.device, folder / "builds").build(read_workspace(Path.cwd()))
    if built.library is not None:
        atomic_write(Path("cuda_extension.so"), built.library.read_bytes())
    print(BUILD_SUCCEEDED if built.library is not None else f"Build failed: {built.log}")
    sys.exit(built.library is None)


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _params() -> tuple[Params, Path]:
    device = "cuda" if Path("/dev/nvidia0").exists() else "cpu"
    params = resolve("", (f"device={device}",)).params
    return params, Path(params.home).resolve() / "judge"
