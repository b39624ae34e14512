"""Start of the sandboxed process in which a candidate is timed, and of one in which it is only constructed.

A candidate is an implementation of a task's module, to be judged. The constructor of its module may compute
with torch, but only in the second process, whose results are then given to the timed one. A sandboxed process
is called a runner (sandbox/runner_process.py).
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
    """Start a sandboxed process that loads the candidate `built`, and return it as a timed runner.

    `params` are the judge's settings, and `reference` has the data of the candidate's task. The process may
    exist for `limits` times `sandbox.run_seconds`. If the candidate's constructor calls an operator that
    torch may not compute in this process, the constructor is run in another process, which records the
    results of such operators, and the process that is timed is started once more with these results
    (`_constructor_results`). Raises Rejected if loading fails; if an extension of the candidate did not
    compile, its status is `build_failed`, and its log has the compiler's messages.
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
    """Return, as bytes, what torch computed in a candidate's constructor, which runs in a process of its own.

    The process is sandboxed and writes the results to a file in memory (sandbox/inside/constructor_mode.py).
    `header` is the message that gives the candidate's timed process its work, and `library` is the descriptor
    of a file with the compiled library of the candidate. Raises RunnerError if the constructor fails.
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
