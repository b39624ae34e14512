"""Builds that are killed, for test_data: children of one process that has imported everything, so that each costs a second.

    python tests/build_process.py FOLDER KILLS

An undisturbed build, then one with another journal that SIGKILL ends at KILLS random moments before it may finish. The
composer, the pool and its journal are the real ones; sources are admitted in this process. Writes kills.json.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from synthesis_fixtures import Unwalled, parameters

from components.core.files import write_json
from components.core.progress import Quiet
from components.synthesis.dataset import build


def in_child(home: Path, seconds: float | None) -> int:
    """Build in a forked child, killed after so many seconds; its wait status as an exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        if seconds is not None:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        params = parameters("data.tasks=8", "data.held_out=2")
        build(params, home / "tasks", Unwalled(params, home / "verdicts"), Quiet())
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    started = time.monotonic()
    whole = in_child(folder / "undisturbed", None)
    longest = time.monotonic() - started
    moments = [random.uniform(0, 0.7 * longest) for _ in range(kills)]
    codes = [in_child(folder / "killed", moment) for moment in moments]
    write_json(
        folder / "kills.json",
        {"moments": moments, "codes": codes, "whole": [whole, in_child(folder / "killed", None)]},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
