"""Start of the timed runner of a candidate, and of the process in which torch may compute in its constructor.

A runner is a sandboxed process (sandbox/runner_process.py).
"""

import functools
import os

from components.core.params import JudgeParams
from components.judge.candidate import BuiltCandidate
from components.judge.task_reference import TaskReference
from components.judge.timed_runner import TimedRunner
from components.judge.verdict import LOAD_ERRORS, Rejected, rejecting
from components.sandbox.build import EXTENSION_SUFFIX
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.runner_factory import sealed_file
from components.sandbox.runner_process import RunnerError


def start_candidate(
    params: JudgeParams, reference: TaskReference, built: BuiltCandidate, limits: int = 1
) -> TimedRunner:
    """Start a runner that loads the candidate `built`, and return it; raise Rejected if loading fails.

    `params` are the judge's settings, and `reference` has the data of the candidate's task. The runner may
    exist for `limits` times `sandbox.run_seconds`. If the constructor needs results that torch may not
    compute in the timed process, the constructor is run in another process first (`_constructor_results`).
    """
    header: RoleHeader = {
        "role": "candidate",
        "files": built.files,
        "extensions": built.extensions,
        "suffix": EXTENSION_SUFFIX,
        "rules": params.sandbox.rules,
        "library_bytes": len(built.library),
    }
    seconds = limits * params.sandbox.run_seconds
    start = functools.partial(TimedRunner, reference, header, seconds=seconds)
    try:
        with rejecting(LOAD_ERRORS), open(sealed_file(built.library), "rb") as library:
            try:
                return start(library.fileno())
            except RunnerError as error:
                if error.kind != "unknown_result":
                    raise
            results = _constructor_results(params, reference, header, library.fileno())
            with open(sealed_file(built.library + results), "rb") as library_and_results:
                return start(library_and_results.fileno())
    except Rejected as error:
        if not built.failures:
            raise
        then = f"The file then failed to load ({error.status} {error.reason}): {error.log}"
        raise Rejected("build_failed", "compiler", "\n".join([*built.failures.values(), then])) from error


def _constructor_results(
    params: JudgeParams, reference: TaskReference, header: RoleHeader, library: int
) -> bytes:
    """Return what torch computed in a candidate's constructor, in a process that does nothing else.

    The process writes the results to a file in memory (sandbox/inside/constructor_mode.py). `header` is the
    message that gives the candidate's runner its role, and `library` the descriptor of a file with the
    library. Raises RunnerError if the constructor fails.
    """
    header = {
        **header,
        "role": "construct",
        "precision": params.precision,
        "device": params.device,
        "init_inputs": reference.layout.description.init_inputs,
        "construction_seed": reference.construction_seed,
    }
    with os.fdopen(os.memfd_create("results"), "rb") as results:
        runner = reference.processes.factory.spawn(
            header, (library, results.fileno()), seconds=params.sandbox.run_seconds
        )
        try:
            runner.receive()
        finally:
            runner.close(wait=True)
        results.seek(0)
        return results.read()
