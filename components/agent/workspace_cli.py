"""The utilities of a workspace (compile, verification, profiling) for a person outside the agent's sandbox.

They use the same judge as the agent's tools and print the same lines.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from components.agent.utility_output import BUILD_SUCCEEDED, Utility, utility_output
from components.core.config import resolve
from components.core.errors import UserError
from components.core.files import atomic_write
from components.core.params import Params
from components.judge.candidate_folder import judge_workdir, read_workspace
from components.sandbox.build import Builder


def run_utility(utility: Utility) -> None:
    """Run a utility on the current folder, print its output and exit.

    The exit code is 0 after success, 1 if the candidate failed, and 2 after a UserError.
    """
    if utility == "compile":
        _compile()
    with _user_errors():
        params, folder = _params()
        text, code = utility_output(utility, judge_workdir(params, Path.cwd(), None, folder))
    print(text)
    sys.exit(code)


def _compile() -> None:
    """Build kernels/, write the library to cuda_extension.so in the current folder, and exit.

    The library makes it possible to import model_new.py in this folder. The exit code is 0 if the build
    succeeded and 1 otherwise.
    """
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
