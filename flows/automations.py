"""Definitions of Prefect's automations, which mark killed runs, resume nightly runs and alert an operator.

An alert is sent through the notification block that `cuda-agent deploy --alert` names. Without a block, the
alert appears only in Prefect's event feed. The time limits are chosen for runs that last hours.
"""

from datetime import timedelta
from functools import partial
from uuid import UUID

from prefect.automations import AutomationCore
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, DoNothing, SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.progress import COLLAPSING, PROGRESS

# Seconds without a heartbeat after which a run is marked as crashed: three intervals of 30 s. The interval is
# set in infra/prefect/pools.yaml. Prefect deletes a trigger's bucket 60 s after its end, so a heartbeat that
# arrives more than a minute late does not fire this trigger.
HEARTBEATS_SECONDS = 90
# Seconds after which a late run that has not started causes an alert.
START_SECONDS = 15 * 60
# Seconds without a further progress report after which a run causes an alert.
STALL_SECONDS = 60 * 60
# Seconds after a completed night after which the absence of the next one causes an alert.
NIGHT_SECONDS = 26 * 3600
# Events of the end or the pause of a flow run.
ENDS = {
    "prefect.flow-run.Completed",
    "prefect.flow-run.Failed",
    "prefect.flow-run.Cancelled",
    "prefect.flow-run.Crashed",
    "prefect.flow-run.Paused",
}
FLOW_RUN = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
EACH_RUN = {"prefect.resource.id"}

SUBJECT = "CUDA Agent: {{ automation.name }}"
BODY = (
    "{{ automation.description }}\n"
    "Flow run {{ flow_run.name }} is {{ flow_run.state.name }}: {{ flow_run.state.message }}\n"
    "{{ flow_run | ui_url }}"
)

# Trigger that fires at each event in `expect`, for each flow run separately.
when = partial(EventTrigger, match=FLOW_RUN, for_each=EACH_RUN, posture=Posture.Reactive)
# Trigger that fires if no event in `expect` arrives within the time `within` after an event in `after`.
unless = partial(EventTrigger, match=FLOW_RUN, for_each=EACH_RUN, posture=Posture.Proactive, threshold=1)


# Events of flow runs of the deployment `nightly`.
NIGHTLY = ResourceSpecification({"prefect.resource.name": "nightly", "prefect.resource.role": "deployment"})


def automations(block: UUID | None) -> list[AutomationCore]:
    """Return the definitions of all Prefect automations of the project.

    `block` is the id of the notification block through which alerts are sent. If it is None, no notification
    is sent.
    """
    alarm = (
        SendNotification(block_document_id=block, subject=SUBJECT, body=BODY)
        if block is not None
        else DoNothing()
    )
    return [
        AutomationCore(
            name="cuda-agent-zombie",
            description="No heartbeat for 90 s: the run was killed and nobody said so; "
            "it is marked as crashed.",
            trigger=unless(
                after={"prefect.flow-run.heartbeat"},
                expect={"prefect.flow-run.heartbeat", *ENDS, "prefect.flow-run.AwaitingRetry"},
                within=timedelta(seconds=HEARTBEATS_SECONDS),
            ),
            actions=[
                ChangeFlowRunState(
                    name="Crashed",
                    state=StateType.CRASHED,
                    force=False,
                    message="no heartbeat: the run's process is gone",
                )
            ],
        ),
        AutomationCore(
            name="cuda-agent-resume",
            description="A crashed night goes back to a worker, which continues it where it was. A run "
            "that crashes again and again ends itself.",
            trigger=when(match_related=NIGHTLY, expect={"prefect.flow-run.Crashed"}),
            actions=[
                ChangeFlowRunState(
                    state=StateType.SCHEDULED,
                    name="AwaitingRetry",
                    message="crashed; continued by a worker",
                    force=True,
                )
            ],
        ),
        AutomationCore(
            name="cuda-agent-failed",
            description="A run failed or crashed.",
            trigger=when(expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}),
            actions=[alarm],
        ),
        AutomationCore(
            name="cuda-agent-late",
            description="A scheduled run was late and did not start within 15 minutes: no worker serves "
            "its pool, or the one before it is not done.",
            trigger=unless(
                after={"prefect.flow-run.Late"},
                expect={"prefect.flow-run.Running", "prefect.flow-run.Pending", "prefect.flow-run.Cancelled"},
                within=timedelta(seconds=START_SECONDS),
            ),
            actions=[alarm],
        ),
        AutomationCore(
            name="cuda-agent-missed",
            description="No night was completed for 26 hours.",
            trigger=unless(
                match_related=NIGHTLY,
                after={"prefect.flow-run.Completed"},
                expect={"prefect.flow-run.Completed"},
                within=timedelta(seconds=NIGHT_SECONDS),
            ),
            actions=[alarm],
        ),
        AutomationCore(
            name="cuda-agent-stalled",
            description="A run reported progress and then nothing for an hour.",
            trigger=unless(
                after={PROGRESS}, expect={PROGRESS, *ENDS}, within=timedelta(seconds=STALL_SECONDS)
            ),
            actions=[alarm],
        ),
        AutomationCore(
            name="cuda-agent-collapsing",
            description="Training begins to collapse: entropy, length-clipped share or explained "
            "variance near their limits.",
            trigger=when(expect={COLLAPSING}),
            actions=[alarm],
        ),
    ]
