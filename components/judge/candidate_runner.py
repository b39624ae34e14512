"""Start of the sandboxed process in which a candidate is timed, and of two that prepare it.

A candidate is an implementation of a task's module, to be judged. One of the two processes compiles the
candidate's kernels of Triton, and the other one runs the constructor of its module, which may compute with
torch there. Their results are given to the timed process. A sandboxed process is called a runner
(sandbox/runner_process.py).
"""

import functools
import os
from dataclasses import replace

from components.core.params import JudgeParams
from components.judge.candidate import BuiltCandidate
from components.judge.task_reference import TaskReference
from components.judge.timed_runner import TimedRunner
from components.judge.verdict import LOAD_ERRORS, RUN_ERRORS, Rejected, rejecting
from components.sandbox.build import EXTENSION_SUFFIX
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.runner_factory import sealed_file
from components.sandbox.runner_process import RunnerError

# Largest size of what a process that prepares a candidate may leave for the timed one.
MAX_PREPARED_BYTES = 128 << 20


def start_candidate(
    params: JudgeParams, reference: TaskReference, built: BuiltCandidate, limits: int = 1
) -> TimedRunner:
    """Start a sandboxed process that loads the candidate `built`, and return it as a timed runner.

    `params` are the judge's settings, and `reference` has the data of the candidate's task. The process may
    exist for `limits` times `sandbox.run_seconds`. If the candidate's constructor calls an operator that
    torch may not compute in this process, the constructor is run in another process, which records the
    results of such operators, and the process that is timed is started once more with these results
    (`_prepared`). Raises Rejected if loading fails; if an extension of the candidate did not
    compile, its status is `build_failed`, and its log has the compiler's messages.
    """
    header = _header(params, reference, built)
    content = built.library + built.triton_archive
    seconds = limits * params.sandbox.run_seconds
    start = functools.partial(TimedRunner, reference, header, seconds=seconds)
    try:
        with rejecting(LOAD_ERRORS), open(sealed_file(content), "rb") as library:
            try:
                return start(library.fileno())
            except RunnerError as error:
                if error.kind != "unknown_result":
                    raise
            construct: RoleHeader = {**header, "role": "construct"}
            results = _prepared(reference, construct, library.fileno(), params.sandbox.run_seconds)
            with open(sealed_file(content + results), "rb") as library_and_results:
                return start(library_and_results.fileno())
    except Rejected as error:
        if not built.failures:
            raise
        then = f"The file then failed to load ({error.status} {error.reason}): {error.log}"
        raise Rejected("build_failed", "compiler", "\n".join([*built.failures.values(), then])) from error


def with_compiled_kernels(
    params: JudgeParams, reference: TaskReference, built: BuiltCandidate
) -> BuiltCandidate:
    """Return `built` with an archive of its compiled kernels of Triton, or `built` itself without Triton.

    A sandboxed process, which may start compilers, calls the candidate once with inputs of the task's
    `get_inputs`, and what Triton has then written to its cache is the archive. `triton.autotune` chooses in
    this call. The process ends before the candidate is measured. Raises Rejected if the call fails or takes
    longer than `sandbox.build_seconds`.
    """
    if not built.uses_triton:
        return built
    header = own_inputs_header(params, reference, built)
    with rejecting(LOAD_ERRORS), open(sealed_file(built.library), "rb") as library:
        archive = _prepared(reference, header, library.fileno(), params.sandbox.build_seconds)
    return replace(built, triton_archive=archive)


def _header(params: JudgeParams, reference: TaskReference, built: BuiltCandidate) -> RoleHeader:
    """Return the message that tells a sandboxed process to be the timed process of the candidate `built`.

    It also has what the constructor of the candidate needs on the task of `reference`. The rules are those of
    `params`, the settings of the judge that asks.
    """
    return {
        "role": "candidate",
        "files": built.files,
        "extensions": built.extensions,
        "suffix": EXTENSION_SUFFIX,
        "rules": params.sandbox.rules,
        "library_bytes": len(built.library),
        "triton_bytes": len(built.triton_archive),
        "zygote": "triton" if built.uses_triton else "plain",
        "precision": reference.params.precision,
        "device": reference.params.device,
        "init_inputs": reference.layout.description.init_inputs,
        "construction_seed": reference.construction_seed,
    }


def own_inputs_header(params: JudgeParams, reference: TaskReference, built: BuiltCandidate) -> RoleHeader:
    """Return a message with what a call of the candidate `built` with the task's own inputs needs.

    These are the sources of the task, whose data `reference` has, and of the candidate. The message gives a
    sandboxed process the role `compile_triton`.
    """
    return {**_header(params, reference, built), "role": "compile_triton", "code": reference.code}


def _prepared(reference: TaskReference, header: RoleHeader, library: int, seconds: float) -> bytes:
    """Return, as bytes, what a sandboxed process in the role `header["role"]` leaves for the timed process.

    `header` gives the process its role and the candidate, and `reference` has the data of the task. The role
    is `construct` (what torch computed in the constructor) or `compile_triton`. The process writes its result
    to a file in memory, and nothing of it is measured. `library` is the descriptor of a file that begins with
    the candidate's library, and `seconds` limits the wall time. Raises RunnerError if the process fails, and
    Rejected if the result is larger than MAX_PREPARED_BYTES.
    """
    with os.fdopen(os.memfd_create("prepared"), "rb") as file:
        runner = reference.processes.factory.spawn(header, (library, file.fileno()), seconds=seconds)
        try:
            with reference.scheduler.background_work(runner):
                runner.receive()
                if header["role"] == "compile_triton":
                    with rejecting(RUN_ERRORS):
                        runner.receive()
        finally:
            runner.close(wait=True)
        if (size := os.fstat(file.fileno()).st_size) > MAX_PREPARED_BYTES:
            raise Rejected(
                "load_failed",
                "too_large",
                f"before its measurement the candidate leaves {size} bytes of compiled kernels or values of "
                f"its constructor; at most {MAX_PREPARED_BYTES} are kept.",
            )
        file.seek(0)
        return file.read()
