"""Progress decorators of a run: stop on a full disk, fill the Prometheus metrics, rename a stage."""

from __future__ import annotations

import time
from pathlib import Path

from components.core import telemetry
from components.core.errors import UserError
from components.core.files import free_bytes
from components.core.progress import Progress
from components.training.metrics_file import newest_figures

METRICS_FILE = "metrics.prom"
"""Name in the home of the Prometheus metrics as text, for the textfile collector of node_exporter."""
WRITE_SECONDS = 15.0
"""Least time between two writes of the metrics file."""
FULL_BYTES = 16 * 2**20
"""A disk with less free space than this counts as full."""


class DiskGuard:
    """A `Progress` that raises UserError when the home's disk is full.

    It raises before a write fails in the middle, so finished work stays whole and the same command continues
    it.
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
    """A `Progress` that sets the Prometheus metrics of each stage and writes them into the home."""

    def __init__(self, progress: Progress, home: Path):
        self.progress = progress
        self.home = home
        self.written = float("-inf")

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        # The stage's metrics file has more than people are shown, such as tokens per second and gradient
        # norms.
        telemetry.set_stage_progress(stage, step, total, newest_figures(self.home, stage) | figures)
        if step == total or time.monotonic() - self.written > WRITE_SECONDS:
            self.written = time.monotonic()
            telemetry.write(self.home / METRICS_FILE)


class RenamedProgress:
    """A `Progress` that reports every stage under one other name."""

    def __init__(self, progress: Progress, name: str):
        self.progress = progress
        self.name = name

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(self.name, step, total, **figures)
