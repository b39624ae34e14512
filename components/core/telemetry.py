"""Prometheus metrics of the judge (which builds, checks and times kernels), the rollouts and the training.

Each process has one registry of metrics. A run writes its registry as a text file into the home (the folder
of a run's files), where the textfile collector of node_exporter reads it. The service (`cuda-agent serve
--http`) answers HTTP requests with its registry. The names follow the conventions of Prometheus: base units,
and the ending `_total` for counters.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    write_to_textfile,
)

REGISTRY = CollectorRegistry()
VERDICTS = Counter("cuda_agent_verdicts", "Judgements by status", ["status"], registry=REGISTRY)
JUDGING = Histogram(
    "cuda_agent_judging_seconds",
    "Seconds from taking a job to its verdict",
    buckets=(0.3, 1, 3, 10, 30, 100, 300),
    registry=REGISTRY,
)
WAITING = Gauge("cuda_agent_judge_jobs", "Jobs that are waiting or being judged", registry=REGISTRY)
SERVICE_JOBS = Gauge(
    "cuda_agent_service_jobs", "Jobs of the service that are queued or running", registry=REGISTRY
)
STEP = Gauge("cuda_agent_stage_step", "Steps done of a stage", ["stage"], registry=REGISTRY)
STEPS = Gauge("cuda_agent_stage_steps", "Steps of a stage in all", ["stage"], registry=REGISTRY)
FIGURE = Gauge(
    "cuda_agent_stage_figure",
    "Figures of a stage's last step, such as reward and entropy",
    ["stage", "figure"],
    registry=REGISTRY,
)
MOVED = Gauge(
    "cuda_agent_stage_moved_timestamp_seconds", "When a stage last reported", ["stage"], registry=REGISTRY
)


@contextmanager
def judging() -> Iterator[list[str]]:
    """Add the duration in seconds and the status of one judgement to the metrics when the `with` block ends.

    The judgement of a kernel is made inside the block, which appends the status, such as `correct`, to the
    yielded list. If the block appends nothing, for example because it raises an exception, the status
    `raised` is counted. The exception is not suppressed.
    """
    started, status = time.monotonic(), ["raised"]
    try:
        yield status
    finally:
        VERDICTS.labels(status[-1]).inc()
        JUDGING.observe(time.monotonic() - started)


def set_stage_progress(stage: str, step: int, total: int, figures: dict[str, float]) -> None:
    STEP.labels(stage).set(step)
    STEPS.labels(stage).set(total)
    MOVED.labels(stage).set_to_current_time()
    for name, value in figures.items():
        FIGURE.labels(stage, name).set(value)


def write(path: Path) -> None:
    """Write all metrics of this process to `path` in Prometheus' text format.

    The folder of `path` is made if it does not exist, and an existing file is replaced in one step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_to_textfile(str(path), REGISTRY)
