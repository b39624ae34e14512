"""A person's decision on a promotion, on a real Prefect server and a real MLflow store."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from promotion_fixtures import PASSING, WAITING, aliases, apply_decision, promotion_of
from promotion_fixtures import home as home

SETS = "registry.model=policy registry.experiment=nights"


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    # Prefect reads its settings when it is first imported, which another file's test may have done in this
    # process: its own harness changes them for all threads and gives them back.
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


def answered(home: Path, version: str) -> dict[str, Any]:
    from flows.approval import approval

    return approval(version, profile="ci", sets=SETS, home=str(home), poll_seconds=1)


def answer_when_asked(version: str, answers: list[dict[str, Any]], refused: list[str]) -> threading.Thread:
    """A person: waits for the pause, gives each answer in turn until one is taken."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterName,
        FlowRunFilterState,
        FlowRunFilterStateName,
    )

    def person() -> None:
        paused = FlowRunFilter(
            name=FlowRunFilterName(any_=[f"approval-{version}"]),
            state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Paused"])),
        )
        with get_client(sync_client=True) as client:
            deadline = time.monotonic() + 240
            while (
                not (found := client.read_flow_runs(flow_run_filter=paused)) and time.monotonic() < deadline
            ):
                time.sleep(0.2)
            for answer in answers:
                taken = client.resume_flow_run(found[0].id, run_input=answer)
                if taken.status.value == "ACCEPT":
                    return
                refused.append(str(taken.details))

    thread = threading.Thread(target=person)
    thread.start()
    return thread


@pytest.mark.timeout(300)
def test_a_typed_answer_promotes_or_refuses_and_names_the_person(server: None, home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", WAITING)
    refused: list[str] = []
    person = answer_when_asked(
        "1",
        [{"approve": "perhaps", "who": "kim"}, {"approve": True, "who": "kim", "reason": "read"}],
        refused,
    )
    entry = answered(home, "1")
    person.join()
    assert (entry["action"], entry["who"], entry["reason"]) == ("approved", "kim", "read") and aliases(
        promotion
    ) == {"champion": "1"}
    assert len(refused) == 1, "an answer of another type is refused by Prefect"

    apply_decision(promotion, "2", WAITING, champion="1")
    person = answer_when_asked("2", [{"approve": False, "who": "kim"}], refused)
    assert answered(home, "2")["action"] == "declined"
    person.join()
    assert aliases(promotion) == {"champion": "1"} and promotion.verify() == []


@pytest.mark.timeout(300)
def test_an_unanswered_question_expires(server: None, home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", PASSING)
    apply_decision(promotion, "2", WAITING, champion="1", approval_seconds=3)
    assert answered(home, "2")["action"] == "expired" and aliases(promotion) == {"champion": "1"}


def test_the_run_starts_the_deployed_flow_and_says_when_there_is_none(server: None) -> None:
    from prefect.client.orchestration import get_client

    from flows import approval

    assert approval.ask("7", "ci", SETS, "") is False
    with get_client(sync_client=True) as client:
        client.create_deployment(flow_id=client.create_flow_from_name("approval"), name="approval")
        for _ in range(2):
            assert approval.ask("7", "ci", SETS, "") is True, "asked again, as after a kill"
        scheduled = [found for found in client.read_flow_runs() if found.parameters.get("version") == "7"]
    assert len(scheduled) == 1 and scheduled[0].parameters["sets"] == SETS
