"""Launcher that runs one command as several ranks on this host, with the elastic agent of torchrun.

The elastic agent starts the ranks and watches them. If a rank fails, it ends the other ranks, and one error
states the cause. A rank writes its error to the file that the environment variable TORCHELASTIC_ERROR_FILE
names.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from components.core.errors import StageFailed, UserError

# Environment variable that marks a rank started by `launch`; its value is the number of ranks. Such a rank
# does not print its error, because `launch` reports it.
LAUNCHED = "CUDA_AGENT_RANKS"
# Environment variable that names the file to which a rank writes its error.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Exit code of a rank that saved its state and ended because of SIGTERM.
TERMINATED = 128 + signal.SIGTERM
# Seconds in which ranks must finish their update and save its state after SIGTERM. torch before 2.13 does not
# read this environment variable and kills them after 30 seconds.
SHUTDOWN = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"}
# Maximum number of lines of a failed rank's log that are quoted in the error message.
TAIL_LINES = 10
CONTINUES = "the last good state is kept, and the same command continues from it."
# Errors of ranks that only follow from the loss of another rank or from SIGTERM.
CONSEQUENCES = ("RankLost", "Terminated")
_PR_SET_PDEATHSIG = 1


def raise_first_error(logs: Path, ranks: int) -> None:
    """Raise the earliest error that a rank recorded below `logs`.

    A rank records its error in error.json, in a folder that is named after the rank's number. `ranks` is the
    number of ranks, for the message. Errors that only follow from the loss of another rank or from SIGTERM
    are ignored. A UserError of a rank is raised as UserError, any other error as StageFailed with the rank's
    number. Returns if no such error was recorded.
    """
    for path in sorted(logs.rglob("error.json"), key=lambda path: path.stat().st_mtime_ns):
        kind, _, text = json.loads(path.read_text())["message"]["message"].partition(": ")
        sentence = " ".join(text.split())
        if kind == "UserError":
            raise UserError(sentence)
        if kind not in CONSEQUENCES:
            sentence = sentence if kind == "StageFailed" else f"{kind}: {sentence}"
            log = path.with_name("stderr.log")
            raise StageFailed(
                f"rank {path.parent.name} of {ranks} failed: {sentence} "
                f"(see {log if log.is_file() else path}); {CONTINUES}"
            )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which child processes inherit, for the duration of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def launch(command: Sequence[str], ranks: int, logs: Path) -> int:
    """Run `command` as `ranks` ranks; return 0, or TERMINATED (143) if ranks ended because of SIGTERM.

    Rank 0 writes to the standard output and error of this process, and each other rank to files in a folder
    below `logs` that is named after the rank's number. SIGTERM is forwarded to all ranks. If a rank fails,
    the other ranks are ended. Raises UserError if the earliest error that a rank recorded is a UserError, and
    StageFailed for any other failure.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    shutil.rmtree(logs, ignore_errors=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        # SIGINT stays KeyboardInterrupt, after which the agent ends the ranks like after SIGTERM. If another
        # SIGINT ends the wait for them, they end with this process (`end_with_launcher`).
        signals_to_handle="SIGTERM",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
    )
    try:
        with _environment(SHUTDOWN | {LAUNCHED: str(ranks)}):
            elastic_launch(config, command[0])(*command[1:])
    except SignalException:
        raise_first_error(logs, ranks)
        return TERMINATED
    except ChildFailedError as error:
        failures = error.failures
        codes = {failure.exitcode for failure in failures.values()}
        # The agent ends the others when one has ended, if need be before they handle SIGTERM themselves.
        if TERMINATED in codes <= {TERMINATED, -signal.SIGTERM}:
            return TERMINATED
        raise_first_error(logs, ranks)
        # Ranks with a recorded error, or ended by the agent afterwards, follow from the loss of another rank.
        lost = {rank: found for rank, found in failures.items() if not Path(found.error_file).is_file()}
        rank = min(lost or failures, key=lambda rank: failures[rank].timestamp)
        code = failures[rank].exitcode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        where, tail = "its output is above", ""
        if rank > 0:
            (log,) = logs.glob(f"*/attempt_0/{rank}/stderr.log")
            where, lines = f"see {log}", log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            tail = "\n".join(["\nIts log ends with:", *lines]) if lines else ""
        raise StageFailed(f"rank {rank} of {ranks} died by {how} ({where}); {CONTINUES}{tail}") from error
    return 0


def end_with_launcher() -> None:
    """Make Linux kill this process, a rank, with SIGKILL when the process that called `launch` ends.

    This also happens if that process is killed. A rank must call this itself.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
