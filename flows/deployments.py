"""The flows of the deployments `nightly` and `data` in prefect.yaml: the pipeline, and the data set alone.

Each flow works in the home that its deployment names, a folder in which runs keep everything. To ensure that
only one flow at a time writes in a home, a flow takes a slot of a global concurrency limit of Prefect and
then the lock file of the home. The slot has a short lease, so Prefect frees the slot of a killed flow within
a minute. Prefect's limits on tags are not used, because their slots stay occupied for minutes after a flow is
killed.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
import requests
from mlflow.exceptions import MlflowException
from prefect import flow, get_run_logger
from prefect.concurrency.sync import concurrency
from prefect.runtime import flow_run
from sqlalchemy.exc import OperationalError

from components.core.errors import InfrastructureError, error_chain, refuse
from components.core.progress import LineProgress, Progress
from components.core.reaper import start_reaper
from flows import run_context, run_page
from flows.approval import ask, settings
from flows.data import dataset
from flows.nightly import nightly_pipeline
from flows.progress import DiskGuard, EventProgress
from flows.run_context import Busy, PipelineRun

# Seconds after which Prefect frees the concurrency slot of a flow that was killed.
LEASE_SECONDS = 60.0
# Largest number of attempts of one flow run. Without a limit, a flow that crashes for a permanent reason,
# such as too little memory, would be resumed for ever.
LAST_ATTEMPT = 4
# Seconds to wait before each further try, by the kind of a temporary fault. boto3, MLflow and Prefect
# themselves retry for up to a minute, so a fault that they report has lasted longer. A permanent error (bad
# input, a failed stage, a mistake in the code) is not retried, because it would occur again.
DELAYS = {
    # A server or the network does not answer. The delays cover the restart of a server, which takes seconds,
    # and the replacement of a node, which takes minutes.
    "service": (5.0, 30.0, 120.0, 600.0),
    # Another process works in the home or holds DVC's lock. The delays cover the length of a short run.
    "busy": (60.0, 300.0, 900.0, 1800.0),
    # The judge itself failed in all of its own attempts to judge a candidate.
    "judge": (30.0, 300.0),
}

T = TypeVar("T")
FlowResult = dict[str, Any]


def work_in_home(run: PipelineRun, work: Callable[[Progress], FlowResult]) -> FlowResult:
    """Call `work` while no other flow works in the run's home, the folder of all runs, and return the result.

    `work` gets the `Progress` to which it reports its progress. After a temporary fault, such as a server
    that does not answer, `work` is called again, with pauses (`retry_by_kind`). Raises UserError if Prefect
    has already attempted this flow run LAST_ATTEMPT times, and UserError or IsolationUnavailable if something
    that the run needs is missing on this machine. An error of `work` is raised if it is permanent, or if it
    still occurs after all pauses.
    """
    refuse(
        (
            (flow_run.run_count or 1) > LAST_ATTEMPT,
            f"{run.folder}: this flow run crashed {LAST_ATTEMPT} times; see why, "
            "then start the deployment again: it continues where it was.",
        )
    )
    run_context.check_environment(run)
    run_page.show_logs()
    # If this process is killed, the reaper kills DVC, the judge and their children, which would otherwise
    # go on and hold locks.
    start_reaper()

    lines = LineProgress(lambda line: print(line, file=sys.stderr, flush=True))

    def attempt() -> FlowResult:
        with (
            concurrency(run_context.HOME_SLOT, occupy=1, lease_duration=LEASE_SECONDS),
            run_context.home_lock(run.home),
        ):
            return work(EventProgress(lines, str(flow_run.id)))

    return retry_by_kind(attempt, get_run_logger().warning)


@flow(name="nightly", persist_result=False)
def nightly(
    profile: str = "h20-pool",
    sets: str = "",
    home: str = "",
    dated: bool = True,
    redo_from: str = "",
) -> dict[str, Any]:
    """Run the pipeline, and ask a person to approve or refuse the new model version if it waits for approval.

    The pipeline is that of `cuda-agent run` with the parameters that `profile`, `sets` (words such as
    "seed=1") and `home` (the folder of all runs) give. If `dated` is true, the day for which the run was
    scheduled is the seed, so that every day has a run of its own and a retry on a later day continues the
    same run. If night.new_tasks is true, the day is data.seed too. If the time budget of an earlier run with
    these parameters ended in a stage that no run has continued, the seed of that run takes the place of the
    day, so that this run continues that stage. `redo_from` names a stage from which on all stages run again,
    or is empty. Returns the run's record, the content of its run.json; a finished run is not repeated.
    """

    def open_run(seed: str) -> PipelineRun:
        names = [] if not dated else ["seed", "data.seed"] if plain.night.new_tasks else ["seed"]
        return run_context.open_run(
            settings(profile, sets, home, *(f"{name}={seed}" for name in names)), redo_from
        )

    plain = settings(profile, sets, home).params
    # The day that the flow run was scheduled for, or today without a schedule.
    run = open_run(f"{flow_run.scheduled_start_time or datetime.now(UTC):%Y%m%d}")
    runs = run_context.newest_runs(Path(plain.home).expanduser().resolve()) if dated else []
    for left in filter(None, map(run_context.left_unfinished, runs)):
        # Records of earlier releases have no seed, and the run may have had other parameters.
        earlier = open_run(str(left["seed"])) if "seed" in left else run
        if earlier.continues and run_context.finished(earlier) is None:
            run = earlier
            break

    def work(progress: Progress) -> FlowResult:
        # Of a finished run too a person is asked, because a process may have been killed before it asked.
        record = run_context.finished(run) or nightly_pipeline(run, progress)
        version = record["model"]["version"]
        if record["gate"]["verdict"] == "waiting" and not ask(version, profile, sets, home):
            get_run_logger().warning(
                f"cuda-agent models approve {version}, or refuse, decides: the approval flow is not deployed."
            )
        return record

    return work_in_home(run, work)


@flow(name="data", persist_result=False)
def data(profile: str = "h20-pool", sets: str = "", home: str = "") -> dict[str, Any]:
    """Build the data set that the next run will use, unless the data set in the home is up to date.

    The home is the folder of all runs. `profile`, `sets` (words such as "data.seed=1") and `home` give the
    parameters. Returns the fields of DatasetRecord as a dictionary: `version`, `folder`, `figures`, `cached`
    and `seconds`.
    """
    run = PipelineRun(settings(profile, sets, home))
    return work_in_home(run, lambda progress: dataset(run, DiskGuard(progress, run.home)).model_dump())


def retry_kind(error: BaseException) -> str | None:
    """Return the kind of a temporary fault, "service", "busy" or "judge", or None if it is permanent.

    "service" means that a server does not answer, "busy" that another process holds a lock, and "judge" that
    the judge itself failed. The error and then its causes are searched, and the first one that is a temporary
    fault decides.
    """
    for seen in error_chain(error):
        match seen:
            case Busy():
                return "busy"
            case InfrastructureError():
                return "judge"
            case (
                ConnectionError()
                | TimeoutError()
                | httpx.TransportError()
                | requests.ConnectionError()
                | requests.Timeout()
                | OperationalError()
                | MlflowException(error_code="TEMPORARILY_UNAVAILABLE" | "REQUEST_LIMIT_EXCEEDED" | "ABORTED")
            ):
                return "service"
    return None


def retry_by_kind(
    call: Callable[[], T], report: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> T:
    """Return the result of `call`, which is repeated after temporary faults with the delays of their kind.

    `call` must be safe to repeat. `retry_kind` gives the kind of a fault, and DELAYS the seconds to wait
    before each repetition. `report` is called with one line for each fault, and `sleep` with the seconds.
    Raises the last error if it is permanent, or if all delays of its kind are used up.
    """
    used: Counter[str] = Counter()
    while True:
        try:
            return call()
        except Exception as error:
            kind = retry_kind(error)
            if kind is None or used[kind] == len(DELAYS[kind]):
                raise
            delay = DELAYS[kind][used[kind]]
            used[kind] += 1
            report(
                f"{kind} fault, try {used[kind] + 1} of {len(DELAYS[kind]) + 1} in {delay:g} s: "
                f"{' '.join(str(error).split())[:300]}"
            )
        sleep(delay)
