"""This module runs the utilities of a workspace for a person who works outside the agent's sandbox.

The utilities are compile, verification and profiling. They print the same lines as those that the agent
calls, and their verdicts come from the same judge.
"""

import sys
from pathlib import Path

from components.agent.utility_output import BUILD_SUCCEEDED, Utility, utility_output
from components.core.config import default_device, resolve
from components.core.errors import InfrastructureError, UserError
from components.core.files import atomic_write
from components.core.params import Params
from components.judge.candidate_folder import judge_workdir, read_workspace
from components.sandbox.build import Builder
from components.sandbox.preflight import check_isolation


def run_utility(utility: Utility) -> None:
    """Run a utility on the current folder, print its output and exit.

    The exit code is 0 after success, 1 if the candidate failed, and 2 or 3 if it was not judged: because of a
    bad input or of the judge itself, or without isolation.
    """
    try:
        params = resolve("", (f"device={default_device()}",)).params
        check_isolation(params.sandbox, params.device)
        folder = Path(params.home).resolve() / "judge"
        if utility == "compile":
            text, code = _compile(params, folder / "builds")
        else:
            verdict = judge_workdir(params, Path.cwd(), None, folder)
            if verdict.status == "infrastructure":
                raise InfrastructureError(verdict.log)
            text, code = utility_output(utility, verdict)
    except (UserError, InfrastructureError) as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, UserError) else 2)
    print(text)
    sys.exit(code)


def _compile(params: Params, builds: Path) -> tuple[str, int]:
    """Build kernels/, write the library to cuda_extension.so in the current folder, and return text and code.

    The library makes it possible to import model_new.py in this folder.
    """
    built = Builder(params.sandbox, params.device, builds).build(read_workspace(Path.cwd()))
    if built.library is None:
        return f"Build failed: {built.log}", 1
    atomic_write(Path("cuda_extension.so"), built.library.read_bytes())
    return BUILD_SUCCEEDED, 0
