"""Progress that also fills the Prometheus metrics and keeps them as a text file in the home."""

from __future__ import annotations

import time
from pathlib import Path

from components.core import telemetry
from components.core.progress import Progress
from components.training.metrics_file import newest_figures

FILE = "metrics.prom"
"""node_exporter's textfile collector reads it where its folder is linked to the home."""
WRITE_SECONDS = 15.0


class Measured:
    def __init__(self, progress: Progress, home: Path):
        self.progress = progress
        self.home = home
        self.written = float("-inf")

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        # The stage's own curve has more than people are shown: tokens per second of each phase, gradient norms.
        telemetry.stage_moved(stage, step, total, newest_figures(self.home, stage) | figures)
        if step == total or time.monotonic() - self.written > WRITE_SECONDS:
            self.written = time.monotonic()
            telemetry.write(self.home / FILE)
