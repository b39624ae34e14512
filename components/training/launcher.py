"""Launcher that runs one command as several ranks on this host.

If a rank fails, the launcher ends the other ranks and raises one error that states the cause. torchrun is not
used, because after SIGTERM it kills the ranks within 30 seconds (`shutdown_timeout`), while a stage may need
longer to finish its update and save its state. As with torchrun, a rank writes its error to the file that the
environment variable TORCHELASTIC_ERROR_FILE names.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from components.core.errors import StageFailed, UserError

# Environment variable that marks a rank started by `launch`; its value is the number of ranks. Such a rank
# does not print its error, because `launch` reports it.
LAUNCHED = "CUDA_AGENT_RANKS"
# Environment variable that names the file to which a rank writes its error.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Exit code of a rank that saved its state and ended because of SIGTERM.
TERMINATED = 128 + signal.SIGTERM
# Seconds to wait for the other ranks after one failed, because most of them then end by themselves.
GRACE_SECONDS = 5.0
# Maximum number of lines of a failed rank's log that are quoted in the error message.
TAIL_LINES = 10
CONTINUES = "the last good state is kept, and the same command continues from it."
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def error_file(logs: Path, rank: int) -> Path:
    """Return the file in which a rank records the exception that ends it."""
    return logs / f"rank-{rank}.error.json"


def clear_errors(logs: Path) -> None:
    """Make the folder `logs` and delete the errors of an earlier run in it."""
    logs.mkdir(parents=True, exist_ok=True)
    for path in logs.glob("rank-*.error.json"):
        path.unlink()


def raise_first_error(logs: Path, ranks: int) -> None:
    """Raise the earliest error that a rank recorded in `logs`.

    A recorded RankLost is ignored, because it is only a consequence of the loss of another rank. A UserError
    of a rank is raised as UserError, any other error as StageFailed with the rank's number. Returns if no
    such error was recorded.
    """
    for path in sorted(logs.glob("rank-*.error.json"), key=lambda path: path.stat().st_mtime_ns):
        kind, _, text = json.loads(path.read_text())["message"]["message"].partition(": ")
        sentence = " ".join(text.split())
        if kind == "UserError":
            raise UserError(sentence)
        if kind != "RankLost":
            rank = path.name.split(".")[0].removeprefix("rank-")
            sentence = sentence if kind == "StageFailed" else f"{kind}: {sentence}"
            log = path.with_name(f"rank-{rank}.log")
            where = log if log.is_file() else path
            raise StageFailed(f"rank {rank} of {ranks} failed: {sentence} (see {where}); {CONTINUES}")


def launch(command: Sequence[str], ranks: int, logs: Path) -> int:
    """Run `command` as `ranks` ranks; return 0, or TERMINATED if ranks ended because of SIGTERM.

    Rank 0 writes to the outputs of this process, each other rank N to `logs`/rank-N.log. SIGTERM is forwarded
    to all ranks. If a rank fails, the other ranks are ended. Raises UserError if the earliest error that a
    rank recorded is a UserError, and StageFailed for any other failure.
    """
    clear_errors(logs)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                LAUNCHED: str(ranks),
                ERROR_FILE: str(error_file(logs, rank)),
            }
            with open(os.devnull if rank == 0 else logs / f"rank-{rank}.log", "wb") as log:
                output = None if rank == 0 else log
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=output, preexec_fn=_die_with_parent
                    )
                )
        return _wait(processes, logs)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, previous)


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Path) -> int:
    """Wait until all ranks have ended, or until GRACE_SECONDS after one failed.

    Returns 0, or TERMINATED if ranks ended because of SIGTERM. Raises UserError if the earliest error that a
    rank recorded in `logs` is a UserError, and StageFailed for any other failure.
    """
    first: list[int] = []
    while not first and any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        first = [rank for rank, code in enumerate(codes) if code not in (None, 0, TERMINATED)]
        time.sleep(0.1)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    bad = {rank: code for rank, process in enumerate(processes) if (code := process.poll())}
    if all(code == TERMINATED for code in bad.values()):
        return TERMINATED if bad else 0
    raise_first_error(logs, len(processes))
    # The loss of a rank makes the others fail. So a rank that a signal ended is reported before ranks with an
    # error code, and a rank that ended first before ranks that ended later.
    rank = min(bad, key=lambda rank: (bad[rank] > 0, rank not in first, rank))
    how = f"signal {signal.Signals(-bad[rank]).name}" if bad[rank] < 0 else f"exit code {bad[rank]}"
    where, tail = "its output is above", ""
    if rank > 0:
        log = logs / f"rank-{rank}.log"
        where, lines = f"see {log}", log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        tail = "\n".join(["\nIts log ends with:", *lines]) if lines else ""
    raise StageFailed(f"rank {rank} of {len(processes)} died by {how} ({where}); {CONTINUES}{tail}")


def _die_with_parent() -> None:
    """Make the kernel kill this rank when the launcher ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
