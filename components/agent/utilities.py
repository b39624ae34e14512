"""Run the utilities of a workspace (compile, verification, profiling), for an agent and for a person.

A workspace is the folder with a task and the files of a candidate, which is an implementation of the task. A
command in the agent's sandboxed shell gets verdicts on the candidate through a Unix socket. Its request is
the name of a utility and a newline, and the reply is the exit code of the command, a newline, and the text
that it prints. A request contains no files and no result, because the candidate's files are read from the
workspace when the request arrives. A person who works outside the sandbox gets the same lines from the same
judge by `run_utility`, except that a failed compile prints the whole log of the build. Policies are trained
on the exact lines of `utility_output`, so their wording must not change.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from components.agent import untrusted_folder
from components.agent.in_flight import BusyMeter
from components.core.config import default_device, resolve
from components.core.errors import InfrastructureError, UserError
from components.core.files import atomic_write
from components.judge.candidate import read_workspace
from components.judge.pool.open_pool import judge_workdir
from components.judge.verdict import Verdict, counter_lines, rates_line, workload_line
from components.sandbox.build import Builder
from components.sandbox.preflight import check_isolation

Utility = Literal["compile", "verification", "profiling"]
# Names of the utilities, by the command line that runs each utility.
COMMANDS: dict[str, Utility] = {
    "bash utils/compile.sh": "compile",
    "python3 -m utils.verification": "verification",
    "python3 -m utils.profiling": "profiling",
}
BUILD_SUCCEEDED = "Build succeeded."
# Largest number of requests of one trajectory; it is limited because all trajectories share the judge.
MAX_REQUESTS = 500


def utility_output(utility: Utility, verdict: Verdict) -> tuple[str, int]:
    """Return the text that a utility prints for the verdict on a candidate, and its exit code.

    A candidate is an implementation of a task, and the verdict is the judge's result for it. `utility` is
    compile, verification or profiling. The exit code is 0 after success, and 1 if the candidate failed to
    build or, for verification and profiling, is not correct.
    """
    if verdict.status == "build_failed" or (verdict.status, verdict.reason) == ("timed_out", "build_limit"):
        lines = verdict.log.splitlines()
        errors = [line for line in lines if "error" in line] or lines
        return "Build failed: " + "\n".join(line[:200] for line in errors[:3]), 1
    if utility == "compile":
        return BUILD_SUCCEEDED, 0
    if verdict.status != "correct":
        where = f" with {verdict.workloads[0].call}" if verdict.workloads else ""
        return f"[FAIL] {verdict.status}: {verdict.reason}{where}", 1
    return ("[PASS] verify success" if utility == "verification" else _times(verdict)), 0


def _times(verdict: Verdict) -> str:
    """Return the lines that profiling prints for a correct candidate, an implementation of a task.

    The first line has the times of eager PyTorch, torch.compile and the candidate in microseconds, in the
    format that the workspace of the CUDA Agent paper prints. The second has the speed-ups and the milestone,
    which is 1, or 2 if the candidate is faster than eager mode, or 3 if it is also faster than torch.compile.
    The third has the memory and arithmetic rates that the candidate attains, if they are known
    (`rates_line`). If the task names workloads (several calls of its `get_inputs`), times and speed-ups are
    geometric means over them, and instead of the rates a line for each workload follows. With
    sandbox.counters a line for each kernel follows (`counter_lines`).
    """
    seconds = verdict.seconds
    ratios = [f"{ratio.estimate:.2f}x {name}" for name, ratio in verdict.speedup if ratio is not None]
    return (
        f"Torch Baseline: {_microseconds(seconds.eager)}, Torch Compile: {_microseconds(seconds.compile)}, "
        f"CUDA Extension: {_microseconds(seconds.candidate)}\n"
        f"Speed-up: {', '.join(ratios)}. Milestone: {verdict.milestone} of 3."
        + "".join(
            f"\n{line}"
            for line in (rates_line(verdict), *map(workload_line, verdict.workloads), *counter_lines(verdict))
            if line
        )
    )


def _microseconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e6:.1f} us"


class JudgeSocket:
    """Server that answers the requests on a Unix socket, one after the other, in a thread until `close`.

    `path` is the file of the socket, which the constructor creates. A request names a utility: compile,
    verification or profiling. `handle` is called with this name, and returns the text that the utility prints
    and its exit code. If `handle` raises an exception, the exit code is 2, and the attribute `failure` has
    the exception. The exit code is also 2 for a request that names no utility, and after `MAX_REQUESTS`
    requests.
    """

    def __init__(self, path: Path, handle: Callable[[Utility], tuple[str, int]]):
        self.handle = handle
        self.requests = 0
        # Exception that `handle` raised, which the thread that runs the shell command raises again.
        self.failure: Exception | None = None
        # Meter of the time that `handle` takes.
        self.judging = BusyMeter()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The path of a socket is limited to 107 bytes, so it is given relative to a descriptor of its folder.
        with untrusted_folder.opened(path.parent, os.O_RDONLY | os.O_DIRECTORY) as folder:
            self.socket.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.chmod(path, 0o666)
        self.socket.listen(8)
        threading.Thread(target=self._serve, name="judge-socket", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                command = connection.recv(64).decode(errors="replace").strip()
                self.requests += 1
                text, code = self._reply(command)
                connection.sendall(f"{code}\n{text}\n".encode(errors="replace"))

    def _reply(self, command: str) -> tuple[str, int]:
        utility = next((utility for utility in COMMANDS.values() if utility == command), None)
        if utility is None:
            return "ask for compile, verification or profiling", 2
        if self.requests > MAX_REQUESTS:
            return f"no more than {MAX_REQUESTS} questions in one trajectory", 2
        try:
            with self.judging.busy():
                return self.handle(utility)
        except Exception as error:
            self.failure = error
            return "the judge could not answer", 2

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the waiting call of `accept`
        self.socket.close()


def run_utility(utility: Utility) -> None:
    """Run a utility on the current folder, print its output and exit.

    The folder is a workspace with the files of a candidate, which is an implementation of a task. `compile`
    also writes the built library to cuda_extension.so there. The exit code is 0 after success and 1 if the
    candidate failed. If the candidate was not judged, the exit code is 3 if this machine cannot isolate
    candidates, and 2 because of a bad input or a failure of the judge itself.
    """
    try:
        params = resolve("", (f"device={default_device()}",)).params
        check_isolation(params.sandbox, params.device)
        folder = Path(params.home).resolve() / "judge"
        if utility == "compile":
            # The library makes it possible to import model_new.py in this folder.
            built = Builder(params.sandbox, params.device, folder / "builds").build(
                read_workspace(Path.cwd())
            )
            text, code = f"Build failed: {built.log}", 1
            if built.library is not None:
                atomic_write(Path("cuda_extension.so"), built.library)
                text, code = BUILD_SUCCEEDED, 0
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
