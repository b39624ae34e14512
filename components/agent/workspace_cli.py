"""The three commands of a workspace, for a person who stands in it: compile, verification, profiling.

They ask the same judge that the agent's tools ask, and print the same lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

from components.agent.workspace import observe_build, observe_profiling, observe_verification
from components.core.config import Params, resolve
from components.core.errors import UserError
from components.core.files import atomic_write
from components.judge.candidate_folder import judge_workdir, read_workspace
from components.judge.verdict import Verdict
from components.sandbox.build import Builder


def _params() -> tuple[Params, Path]:
    device = "cuda" if Path("/dev/nvidia0").exists() else "cpu"
    params = resolve("", (f"device={device}",)).params
    return params, Path(params.home).resolve() / "judge"


def _verdict() -> Verdict:
    try:
        params, folder = _params()
        verdict = judge_workdir(params, Path.cwd(), None, folder)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    failed = observe_build(verdict)
    if failed is not None:
        print(failed)
        sys.exit(1)
    return verdict


def compile() -> None:
    """`bash utils/compile.sh`: exit 0 when kernels/ builds, 1 with the compiler's words when it does not.

    The library is left as cuda_extension.so, so that model_new.py can be imported here.
    """
    try:
        params, folder = _params()
        built = Builder(params.sandbox, params.device, folder / "builds").build(read_workspace(Path.cwd()))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if built.library is not None:
        atomic_write(Path("cuda_extension.so"), built.library.read_bytes())
    print("Build succeeded." if built.library is not None else f"Build failed: {built.log}")
    sys.exit(built.library is None)


def verification() -> None:
    """`python3 -m utils.verification`: exit 0 when the output is right on every input family."""
    verdict = _verdict()
    print(observe_verification(verdict))
    sys.exit(verdict.status != "correct")


def profiling() -> None:
    """`python3 -m utils.profiling`: one line of times as in the public workspace, then ratios and milestone."""
    verdict = _verdict()
    print(observe_profiling(verdict) if verdict.status == "correct" else observe_verification(verdict))
    sys.exit(verdict.status != "correct")
