"""Several ranks of one command on this host, as one: when a rank dies the others end too, and one sentence says so.

torchrun and DeepSpeed's launcher do the same across hosts; the command itself only reads their environment variables.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from components.core.errors import StageFailed

LAUNCHED = "CUDA_AGENT_RANKS"
"""Set in the environment of ranks that were started here: what ends one of them, this process tells."""
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a rank that saved its state because of SIGTERM."""
GRACE_SECONDS = 5.0
"""A rank that lost another ends by itself, often before the one that died is noticed."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def launch(command: Sequence[str], ranks: int, logs: Path) -> int:
    """Run `command` as `ranks` ranks; returns 0, or TERMINATED when SIGTERM ended them. StageFailed names a rank that ended badly.

    Rank 0 has this process's outputs, the others write to `logs`/rank-N.log. SIGTERM is handed on.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    previous = signal.signal(signal.SIGTERM, hand_on)
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
            }
            with open(logs / f"rank-{rank}.log", "wb") as log:
                output = None if rank == 0 else log
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=output, preexec_fn=_die_with_parent
                    )
                )
        return _watch(processes, logs)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, previous)


def _watch(processes: Sequence[subprocess.Popen[bytes]], logs: Path) -> int:
    """Wait until all have ended, and soon after the first that ended badly; see `launch`."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = [(rank, process.poll()) for rank, process in enumerate(processes)]
    bad = [(rank, code) for rank, code in ended if code]
    if all(code == TERMINATED for _, code in bad):
        return TERMINATED if bad else 0
    # A signal is a cause; an ordinary failure beside it is a consequence.
    rank, code = min(bad, key=lambda item: (item[1] > 0, item[0]))
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    where = "" if rank == 0 else f" (see {logs / f'rank-{rank}.log'})"
    raise StageFailed(
        f"rank {rank} of {len(processes)} died by {how}{where}; the last good state is kept, and the same command continues from it."
    )


def _die_with_parent() -> None:
    """A launcher that is killed takes its ranks along."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
