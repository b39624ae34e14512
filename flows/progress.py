"""Wrappers of a `Progress` (receiver of progress reports) that forward every report and do something more.

DiskGuard stops the run on a full disk, MetricsProgress writes Prometheus metrics, RenamedProgress replaces
the stage's name, and EventProgress emits a Prefect event. The event is needed because Prefect itself records
only the states of runs and tasks, and a stage can take many hours. infra/prefect/automations.yaml defines the
alert that is sent if no further event arrives.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from prefect.events import emit_event

from components.core import telemetry
from components.core.errors import refuse
from components.core.files import DISK_FULL
from components.core.progress import Progress
from components.training.metrics import newest_figures

# File in the home with the Prometheus metrics, which the textfile collector of node_exporter reads.
METRICS_FILE = "metrics.prom"
# Least number of seconds between two writes of the metrics file.
WRITE_SECONDS = 15.0
# Number of free bytes below which a disk is treated as full.
FULL_BYTES = 16 * 2**20
# Name of the event of EventProgress.
PROGRESS = "cuda-agent.progress"
# Least number of seconds between two progress events.
PROGRESS_SECONDS = 60.0


@dataclass
class DiskGuard:
    """A receiver of progress reports that raises UserError if the disk of the folder `home` is full.

    `home` is the folder of all runs. A disk is full if less than FULL_BYTES are free. Every report is first
    forwarded to `progress`. Each report checks the disk, so that the run stops between two steps and not in
    the middle of a write. The same command then continues the run.
    """

    progress: Progress
    home: Path

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        refuse((shutil.disk_usage(self.home).free < FULL_BYTES, f"{self.home}: {DISK_FULL}"))


@dataclass
class MetricsProgress:
    """A receiver of progress reports that writes each stage's Prometheus metrics to `home`/metrics.prom.

    They are written at the last step of a stage, and otherwise at most every WRITE_SECONDS. Every report is
    also forwarded to `progress`. `home` is the folder of all runs, and `written` the time.monotonic() of the
    last write.
    """

    progress: Progress
    home: Path
    written: float = float("-inf")

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        # The metrics file of the stage has more figures than the reports, such as tokens per second and
        # gradient norms.
        telemetry.set_stage_progress(stage, step, total, newest_figures(self.home, stage) | figures)
        if step == total or time.monotonic() - self.written > WRITE_SECONDS:
            self.written = time.monotonic()
            telemetry.write(self.home / METRICS_FILE)


@dataclass
class RenamedProgress:
    """A receiver of progress reports that forwards each to `progress` with `name` as the stage's name."""

    progress: Progress
    name: str

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(self.name, step, total, **figures)


@dataclass
class EventProgress:
    """A receiver of progress reports that forwards each to `progress` and emits a Prefect event.

    The event, cuda-agent.progress, is for the flow run with the id `run_id`. It is emitted at most every
    PROGRESS_SECONDS, and `emitted` is the time.monotonic() of the last one.
    """

    progress: Progress
    run_id: str
    emitted: float = float("-inf")

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        if time.monotonic() - self.emitted > PROGRESS_SECONDS:
            self.emitted = time.monotonic()
            emit_event(
                PROGRESS,
                resource={
                    "prefect.resource.id": f"prefect.flow-run.{self.run_id}",
                    "prefect.resource.name": self.run_id,
                },
                payload={"stage": stage, "step": step, "total": total, "figures": figures},
            )
