"""Largest use of a GPU's memory during some work, and which processes used it."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

# Seconds between two looks at the memory that is in use.
LOOK_SECONDS = 0.02
# Smallest growth of the largest use, as a share, and smallest number of seconds, after which the processes
# are asked for again, because nvidia-smi takes tenths of a second.
GROWTH, ASK_SECONDS = 0.02, 0.5
QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


@dataclass
class LargestUse:
    """Largest number of bytes that were in use at once, and their parts shortly after that.

    `judge` has the bytes that torch's tensors take in this process and the bytes that torch caches here.
    `processes` has the bytes of each process by its PID, and is empty if nvidia-smi does not tell them, as in
    most containers.
    """

    bytes: int = 0
    judge: tuple[int, int] = (0, 0)
    processes: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        allocated, cached = self.judge
        parts = [f"tensors of the judge {allocated / 1e9:.1f} GB, cached by it {cached / 1e9:.1f} GB"]
        for pid, size in sorted(self.processes.items(), key=lambda item: -item[1]):
            parts.append(f"{'judge' if pid == os.getpid() else pid} {size / 1e9:.1f} GB")
        return ", ".join(parts)


def used_by_process() -> dict[int, int]:
    """Return the bytes of GPU memory of each process by PID, or nothing if nvidia-smi does not tell them."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=10, check=True)
        rows = [line.split(",") for line in done.stdout.splitlines()]
        return {int(pid): int(size) << 20 for pid, size in rows}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


@contextlib.contextmanager
def largest_use(device: str) -> Iterator[LargestUse]:
    """Yield a record that is kept up to date while the context is open; on cpu it stays at zero."""
    found, ended = LargestUse(), threading.Event()

    def watch() -> None:
        noted, asked, tells = 0, 0.0, True
        while device == "cuda" and not ended.wait(LOOK_SECONDS):
            free, total = torch.cuda.mem_get_info()
            if total - free <= found.bytes:
                continue
            found.bytes = total - free
            allocated = torch.cuda.memory_allocated()
            found.judge = allocated, torch.cuda.memory_reserved() - allocated
            if tells and found.bytes > (1 + GROWTH) * noted and time.monotonic() > asked + ASK_SECONDS:
                noted, asked = found.bytes, time.monotonic()
                found.processes = used_by_process()
                tells = bool(found.processes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
