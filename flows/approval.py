"""The Prefect flow that pauses with a form for a person and applies the person's answer to a model version.

The commands `cuda-agent models approve` and `cuda-agent models refuse` do the same without Prefect. Whichever
answer is given first decides the version; a later answer raises UserError.
"""

import json
import math
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow, pause_flow_run
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import FlowPauseTimeout, ObjectNotFound
from prefect.input import RunInput
from pydantic import Field

from components.core.config import Resolved, resolve
from components.registry.promotion import Promotion
from components.registry.tracking import connect

# Default number of seconds between two looks for a person's answer.
POLL_SECONDS = 10
# Name of the approval flow's deployment.
DEPLOYMENT = "approval/approval"


def settings(profile: str, sets: str, home: str, *first: str) -> Resolved:
    """Return the parameters that result from a profile, KEY=VALUE words and the folder `home` of all runs.

    `profile` is a name such as "smoke". `sets` has words such as "seed=1" separated by spaces, as in a shell,
    and `first` has such words that `sets` and `home` override. If `home` is "", the parameter home is not
    changed. Raises UserError if a parameter is not valid.
    """
    return resolve(profile, (*first, *shlex.split(sets), *([f"home={json.dumps(home)}"] if home else ())))


class Answer(RunInput):
    """The form with which a person approves or refuses a model version that passed its gates and waits.

    The gates are conditions of promotion. Prefect checks the types of the form's fields before it resumes the
    flow.
    """

    approve: bool = Field(description="whether this version becomes the champion")
    who: str = Field(min_length=1, description="your name, for the audit chain")
    reason: str = Field(default="", description="why")


@flow(name="approval", flow_run_name="approval-{version}", persist_result=False)
def approval(
    version: str,
    profile: str = "h20-pool",
    sets: str = "",
    home: str = "",
    poll_seconds: int = POLL_SECONDS,
) -> dict[str, Any]:
    """Ask a person whether a waiting model version becomes the champion, and return the entry on the answer.

    The entry is that in the audit chain, the log of decisions, as a dictionary. The champion is the promoted
    version. `version` is a version's number or alias. The parameters are those of `settings` for `profile`,
    `sets` and `home`. Prefect looks for the answer every `poll_seconds` seconds. If nobody answers before the
    version's deadline, the version expires and the entry of its expiry is returned. Raises UserError if the
    version does not wait for an answer.
    """
    params = settings(profile, sets, home).params
    folder = Path(params.home).expanduser().resolve()
    promotion = Promotion(connect(params.registry, folder), params.registry, folder)
    number, waiting = promotion.waiting(version)
    left = (datetime.fromisoformat(waiting.evidence["deadline"]) - datetime.now(UTC)).total_seconds()
    try:
        # One second longer than the time that is left, so that the deadline has passed when Prefect gives up.
        answer = pause_flow_run(
            wait_for_input=Answer.with_initial_data(
                description=f"Version {number} of {promotion.model} passed its gates. "
                f"Report: {waiting.evidence['report']}. "
                f"Undecided by {waiting.evidence['deadline']} it expires."
            ),
            timeout=max(0, math.ceil(left)) + 1,
            poll_interval=poll_seconds,
        )
    except FlowPauseTimeout:
        expired = [entry for entry in promotion.expire() if entry.version == number]
        return (expired[0] if expired else promotion.waiting(version)[1]).model_dump(mode="json")
    decide = promotion.approve if answer.approve else promotion.decline
    return decide(number, who=answer.who, reason=answer.reason).model_dump(mode="json")


def ask(version: str, profile: str, sets: str, home: str) -> bool:
    """Start the deployed approval flow for a waiting model version, and return whether that flow is deployed.

    The call does not wait for the flow. A second call for the same version and home starts no second flow,
    unless the first has ended without success. `version` is a version's number. `profile` (such as "smoke"),
    `sets` (KEY=VALUE words) and `home` (the folder of all runs) give the parameters, as in `settings`.
    """

    def start(key: str | None) -> FlowRun:
        started = run_deployment(
            DEPLOYMENT,
            parameters={"version": version, "profile": profile, "sets": sets, "home": home},
            timeout=0,
            as_subflow=False,
            idempotency_key=key,
        )
        assert isinstance(started, FlowRun), "it is a coroutine only within another one"
        return started

    try:
        state = start(f"approve {version} in {home}").state
        if state is not None and state.is_final() and not state.is_completed():
            start(None)
    except ObjectNotFound:
        return False
    return True
