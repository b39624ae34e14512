"""Wrappers of a `Progress`, each of which forwards every report and does something more.

DiskGuard stops the run on a full disk, MetricsProgress writes Prometheus metrics, RenamedProgress replaces
the stage's name, and EventProgress emits Prefect events. The events are needed because Prefect itself records
only the states of runs and tasks, and a stage can take many hours. infra/prefect/automations.yaml defines the
alerts that the events cause.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prefect.events import emit_event

from components.core import telemetry
from components.core.errors import UserError
from components.core.files import DISK_FULL
from components.core.params import Params
from components.core.progress import Progress
from components.core.stage_params import Ppo
from components.training.metrics import newest_figures

# File in the home with the Prometheus metrics, which the textfile collector of node_exporter reads.
METRICS_FILE = "metrics.prom"
# Least number of seconds between two writes of the metrics file.
WRITE_SECONDS = 15.0
# Number of free bytes below which a disk is treated as full.
FULL_BYTES = 16 * 2**20
# Names of the events of EventProgress.
PROGRESS = "cuda-agent.progress"
COLLAPSING = "cuda-agent.training.collapsing"
# Least number of seconds between two progress events.
PROGRESS_SECONDS = 60.0
# Share of a limit (max_entropy, max_truncated) above which the event COLLAPSING is emitted. The stage stops
# at the limit itself.
WARN_AT = 0.8
# Number of successive steps with an explained variance below 0 that are a sign of collapse.
CRITIC_STEPS = 5


@dataclass
class DiskGuard:
    """A `Progress` that raises UserError if the disk of the home is full.

    Each progress report checks the disk, so that the run stops between two steps and not in the middle of a
    write. The same command then continues the run.
    """

    progress: Progress
    home: Path

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        if shutil.disk_usage(self.home).free < FULL_BYTES:
            raise UserError(f"{self.home}: {DISK_FULL}")


@dataclass
class MetricsProgress:
    """A `Progress` that sets the Prometheus metrics of each stage and writes them to METRICS_FILE."""

    progress: Progress
    home: Path
    # The time.monotonic() of the last write.
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
    """A `Progress` that reports every stage under the fixed name `name`."""

    progress: Progress
    name: str

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(self.name, step, total, **figures)


class EventProgress:
    """A `Progress` that also emits the events PROGRESS and COLLAPSING for the flow run with the id `run_id`.

    PROGRESS is emitted at most every PROGRESS_SECONDS, and COLLAPSING once for each stage.
    """

    def __init__(
        self,
        progress: Progress,
        params: Params,
        home: Path,
        run_id: str,
        *,
        emit: Callable[..., object] = emit_event,
    ):
        self.progress = progress
        self.params = params
        self.home = home
        self.resource = {"prefect.resource.id": f"prefect.flow-run.{run_id}", "prefect.resource.name": run_id}
        self.emit = emit
        self.emitted = float("-inf")
        self.warned: set[str] = set()
        self.explained: dict[tuple[str, float], float] = {}

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        if time.monotonic() - self.emitted > PROGRESS_SECONDS:
            self.emitted = time.monotonic()
            self.emit(
                PROGRESS,
                resource=self.resource,
                payload={"stage": stage, "step": step, "total": total, "figures": figures},
            )
        ppo = {"warmup": self.params.warmup, "agentic": self.params.agentic}.get(stage)
        if ppo is not None and stage not in self.warned:
            reasons = self.collapsing(stage, ppo, newest_figures(self.home, stage))
            if reasons:
                self.warned.add(stage)
                self.emit(
                    COLLAPSING,
                    resource=self.resource,
                    payload={"stage": stage, "step": step, "reasons": reasons},
                )

    def collapsing(self, stage: str, ppo: Ppo, figures: Mapping[str, float]) -> list[str]:
        """Return a phrase for each sign of collapse in the figures of a stage's newest step.

        The signs are an entropy or a share of truncated trajectories near its limit in `ppo`, and an
        explained variance below 0 in each of the last CRITIC_STEPS steps.
        """
        reasons = [
            f"{name} {figures[name]:.2f} nears the limit {limit:g}"
            for name, limit in (("entropy", ppo.max_entropy), ("truncated", ppo.max_truncated))
            if figures.get(name, 0.0) > WARN_AT * limit
        ]
        if "explained_variance" in figures:
            # `update` is called several times during a step, so the value is stored by step.
            self.explained[stage, figures["step"]] = figures["explained_variance"]
            last = [value for (name, _), value in sorted(self.explained.items()) if name == stage][
                -CRITIC_STEPS:
            ]
            if len(last) == CRITIC_STEPS and max(last) < 0:
                reasons.append(f"explained variance below 0 for {CRITIC_STEPS} steps, last {last[-1]:.2f}")
        return reasons
