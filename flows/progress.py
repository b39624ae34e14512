"""Wrappers of a `Progress` that stop on a full disk, write Prometheus metrics, or rename a stage."""

import time
from pathlib import Path

from components.core import telemetry
from components.core.errors import UserError
from components.core.files import free_bytes
from components.core.progress import Progress
from components.training.metrics_file import newest_figures

# File in the home with the Prometheus metrics, which the textfile collector of node_exporter reads.
METRICS_FILE = "metrics.prom"
# Least number of seconds between two writes of the metrics file.
WRITE_SECONDS = 15.0
# Number of free bytes below which a disk is treated as full.
FULL_BYTES = 16 * 2**20


class DiskGuard:
    """A `Progress` that raises UserError if the disk of the home is full.

    Each progress report checks the disk, so that the run stops between two steps and not in the middle of a
    write. The same command then continues the run.
    """

    def __init__(self, progress: Progress, home: Path):
        self.progress = progress
        self.home = home

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        if free_bytes(self.home) < FULL_BYTES:
            raise UserError(
                f"{self.home}: the disk is full; free some space or give another folder with --home, "
                "then run the same command again."
            )


class MetricsProgress:
    """A `Progress` that sets the Prometheus metrics of each stage and writes them to METRICS_FILE."""

    def __init__(self, progress: Progress, home: Path):
        self.progress = progress
        self.home = home
        self.written = float("-inf")

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        # The metrics file of the stage has more figures than the reports, such as tokens per second and
        # gradient norms.
        telemetry.set_stage_progress(stage, step, total, newest_figures(self.home, stage) | figures)
        if step == total or time.monotonic() - self.written > WRITE_SECONDS:
            self.written = time.monotonic()
            telemetry.write(self.home / METRICS_FILE)


class RenamedProgress:
    """A `Progress` that reports every stage under the fixed name `name`."""

    def __init__(self, progress: Progress, name: str):
        self.progress = progress
        self.name = name

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(self.name, step, total, **figures)
