"""Show logs, progress and tables of results on Prefect's page of a flow run.

Prefect itself records only the states of runs and tasks. This module adds one line in the log for each event,
a progress artifact for each stage, and Markdown and link artifacts with the results. If Prefect's server
fails while a run shows its progress, the run is delayed by seconds and then continues.
"""

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger, runtime
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.objects import TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from components.core.progress import Progress
from components.core.text import (
    FIGURES,
    before_name,
    duration,
    figures_row,
    figures_text,
    format_number,
)
from flows.run_context import PipelineRun, source_commit

# Least number of seconds between two log lines, or two updates of the artifact, of one stage.
EVENT_SECONDS = 5.0
# Seconds after which a request to show progress is given up, and seconds after a failure without such
# requests.
REQUEST_SECONDS = 5.0
PAUSE_SECONDS = 60.0
PAGE = APILogHandler()


def keep_logs_off_the_console() -> None:
    """Keep logs from Prefect's handler that prints to the console, because a run has its own display."""
    for name in ("prefect.flow_runs", "prefect.task_runs", "components"):
        logging.getLogger(name).propagate = False


def show_logs() -> None:
    """Show what this project's modules log, from the level INFO on, on the page of the current flow run."""
    log = logging.getLogger("components")
    log.setLevel(logging.INFO)
    log.addHandler(PAGE)


def parameters(run: PipelineRun) -> dict[str, Any]:
    """Return the values that distinguish this run from others, by the names that Prefect's page shows.

    The names are run_id, profile, sets (the `--set` words), seed, start_policy, device and home.
    """
    return {
        "run_id": run.run_id,
        "profile": run.profile or "base",
        "sets": list(run.sets),
        "seed": run.params.seed,
        "start_policy": run.params.policy.source,
        "device": run.params.device,
        "home": str(run.home),
    }


def show_run(run: PipelineRun) -> None:
    """Name and tag the current Prefect flow run after the pipeline run `run`, and show its parameters.

    The parameters are shown as an artifact and a log line of the flow run.
    """
    shown = parameters(run) | {"code": run.code[:12], "commit": source_commit()}
    with get_client(sync_client=True) as client:
        client.update_flow_run(
            UUID(runtime.flow_run.id),
            name=f"{shown['profile']}-{run.run_id}",
            tags=sorted({*runtime.flow_run.tags, run.run_id}),
        )
    rows = [(name, f"`{value}`") for name, value in shown.items()]
    create_markdown_artifact(markdown_table(("parameter", "value"), rows), "parameters", run.run_id)
    get_run_logger().info(", ".join(f"{name} {shown[name]}" for name in shown if name != "sets"))


@dataclass
class PageProgress:
    """A receiver of progress reports that forwards each to `progress` and shows it on Prefect's page.

    A report is shown in the log, and by the progress artifact of its stage. `artifacts` has the id of each
    stage's artifact, and `events` the time.monotonic() at which the stage's last report was shown. No request
    is sent to Prefect's server before the time.monotonic() `paused_until`. `context` is the task or flow run
    that began or reported last. A report from a thread of its own is shown with that run, because Prefect
    does not determine the run to which a thread belongs.
    """

    progress: Progress
    artifacts: dict[str, UUID] = field(default_factory=dict)
    events: dict[str, float] = field(default_factory=dict)
    paused_until: float = float("-inf")
    context: FlowRunContext | TaskRunContext | None = None

    def begin(self) -> None:
        """Make the current task run the one with which later reports from other threads are shown."""
        self.context = TaskRunContext.get()

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.progress.update(stage, step, total, **figures)
        self.context = TaskRunContext.get() or FlowRunContext.get() or self.context
        now = time.monotonic()
        if self.context is None or (
            step < total and now - self.events.get(stage, float("-inf")) < EVENT_SECONDS
        ):
            return
        self.events[stage] = now
        text = f"{stage} {step}/{total}  {figures_text(figures)}".rstrip()
        get_run_logger(self.context).info(text)
        if isinstance(self.context, TaskRunContext):
            self.show(self.context.task_run, stage, 100.0 * step / max(1, total), text)

    def show(self, task_run: TaskRun, stage: str, percent: float, text: str) -> None:
        """Create or update the progress artifact of a stage with a percentage (0 to 100) and a line of text.

        `task_run` is the task run to which a new artifact belongs.
        """
        if stage in self.artifacts:
            self.change(stage, ArtifactUpdate(data=percent, description=text))
            return
        new = ArtifactCreate(
            type="progress",
            key=f"progress-{re.sub(r'[^a-z0-9]+', '-', stage.lower()).strip('-')}",
            description=text,
            data=percent,
            task_run_id=task_run.id,
            flow_run_id=task_run.flow_run_id,
        )
        self.request(lambda client: self.artifacts.update({stage: client.create_artifact(new).id}))

    def finish(self, stage: str) -> None:
        """Set the progress artifact of a finished stage to 100 %, even if it ended before its last step."""
        if stage in self.artifacts:
            self.change(stage, ArtifactUpdate(data=100.0))

    def change(self, stage: str, update: ArtifactUpdate) -> None:
        self.request(lambda client: client.update_artifact(self.artifacts[stage], update))

    def request(self, send: Callable[[SyncPrefectClient], object]) -> None:
        """Call `send` with a client of Prefect's server, without retries.

        After a request that failed, all requests of the next PAUSE_SECONDS are left out.
        """
        if time.monotonic() < self.paused_until:
            return
        try:
            with (
                temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
                get_client(sync_client=True, httpx_settings={"timeout": REQUEST_SECONDS}) as client,
            ):
                send(client)
        except httpx.HTTPError:
            self.paused_until = time.monotonic() + PAUSE_SECONDS


def show_result(record: Mapping[str, Any]) -> None:
    """Show a finished run as Prefect artifacts: its stages, figures and verdict, and a link to its report.

    The verdict is on the promotion of the run's model version. `record` is the content of the run's run.json.
    If Prefect's server fails, nothing is raised.
    """
    report = Path(record["report"])
    with contextlib.suppress(httpx.HTTPError):
        create_markdown_artifact(stages_table(record), "stages", "What each stage made")
        create_markdown_artifact(f"{verdict(record)}\n\n{gates_table(record)}", "result", "Figures and gates")
        create_link_artifact(report.as_uri(), report.name, "report", f"On the machine of the run: `{report}`")


def stages_table(record: Mapping[str, Any]) -> str:
    """Return the data set and the stages of a run as a Markdown table.

    `record` is the content of the run's run.json.
    """
    data = record["dataset"]
    return markdown_table(
        ("stage", "cached", "duration", "reward before", "reward after", "checkpoint"),
        [
            ("dataset", _yes(data["cached"]), duration(data["seconds"]), "", "", data["version"][:12]),
            *(
                (
                    stage["name"],
                    _yes(stage["cached"]),
                    duration(stage["seconds"]),
                    format_number(stage["reward_before"]),
                    format_number(stage["reward_after"]),
                    f"`{stage['digest'][:12]}` in {Path(stage['checkpoint']).parent.name}",
                )
                for stage in record["stages"]
            ),
        ],
    )


def verdict(record: Mapping[str, Any]) -> str:
    """Return the gates' verdict on a run's model version, its reasons and both evaluations, as Markdown.

    The gates are conditions of promotion. The evaluations are those before and after training. `record` is
    the content of the run's run.json.
    """
    model, gate = record["model"], record["gate"]
    evaluations = ((before_name(record), record["cold_start"]), ("after", record["evaluation"]))
    return "\n".join(
        [
            f"**{model['name']} version {model['version']}: {gate['verdict'].replace('_', ' ')}**",
            "",
            *(f"- {reason}" for reason in gate["reasons"]),
            "",
            markdown_table(FIGURES, [figures_row(name, figures) for name, figures in evaluations]),
        ]
    )


def gates_table(record: Mapping[str, Any]) -> str:
    """Return a Markdown table of the gates of a run's version, with figures, intervals and thresholds.

    A gate is a condition of promotion. `record` is the content of the run's run.json.
    """
    return markdown_table(
        ("gate", "", "figure", "95 % interval", "threshold"),
        (
            (
                gate["name"],
                "passed" if gate["passed"] else "**failed**",
                format_number(gate["value"]),
                "" if gate["low"] is None else f"{gate['low']:.3g} to {gate['high']:.3g}",
                format_number(gate["threshold"]),
            )
            for gate in record["gate"]["gates"]
        ),
    )


def markdown_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
