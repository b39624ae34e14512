"""Tasks that the judge cannot measure: an evaluation leaves them out before any attempt, and lists them."""

from concurrent.futures import Future
from pathlib import Path

import pytest
from evaluation_fixtures import LINES, TASKS, LinePool, Script, run
from evaluation_fixtures import at_once as at_once

from components.core.config import resolve
from components.core.errors import UserError
from components.evaluation.report import write_evaluation_report
from components.evaluation.results import Evaluation, load_evaluation
from components.judge.verdict import Admission
from components.registry.gates import integrity


class Refusing(LinePool):
    """A pool that cannot judge tasks whose source is a key of `refused`, for the reason that is its value."""

    def __init__(self, refused: dict[str, str], lives: int = 1000):
        super().__init__(lives)
        self.refused = refused

    def check(self, code: str) -> Future[Admission]:
        if code not in self.refused:
            return super().check(code)
        refusal: Future[Admission] = Future()
        detail = "judging it takes 99.9 GB of device memory"
        refusal.set_result(Admission(False, self.refused[code], {"detail": detail}))
        return refusal


def test_tasks_too_large_for_the_device_are_left_out_before_any_attempt_and_listed(tmp_path: Path) -> None:
    refused = {TASKS[1].code: "too_large"}

    def evaluated(out: Path) -> Evaluation:
        return run(out, Refusing(refused), Script(LINES), tasks=TASKS[:3])

    found = evaluated(tmp_path / "some")
    assert [row.task_id for row in found.tasks] == [TASKS[0].task_id, TASKS[2].task_id]
    assert [(left.task_id, left.reason) for left in found.not_measurable] == [
        (TASKS[1].task_id, "judging it takes 99.9 GB of device memory")
    ]
    assert load_evaluation(tmp_path / "some") == found and found.overall.errors == 0
    gate = integrity(
        found.overall,
        resolve("ci").params.gate.model_copy(update={"measured": 1.0}),
        digests_match=True,
        isolated=True,
        report_complete=True,
    )[0]
    assert gate.name == "integrity.measured" and gate.passed, "what cannot be measured is no error"
    assert "can be measured on this device" not in write_evaluation_report(tmp_path, found).read_text()
    assert "cannot be measured on this device" in write_evaluation_report(tmp_path, found).read_text()
    refused |= {TASKS[0].code: "does_not_run", TASKS[2].code: "too_large"}
    with pytest.raises(
        UserError,
        match=r"3 of 3 tasks are left out, .* on this device \(1 does_not_run, such as: judging it "
        r"takes 99.9 GB.*; 0 tasks remain\.",
    ):
        evaluated(tmp_path / "none")
    assert not (tmp_path / "none" / "episodes").exists(), "no attempt was made"
    del refused[TASKS[0].code]
    with pytest.raises(UserError, match=r"; 1 tasks remain, less than the share of 0\.5"):
        evaluated(tmp_path / "few")


def test_stored_attempts_are_not_taken_for_attempts_at_the_tasks_that_can_be_measured_now(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, LinePool(0), Script(LINES), tasks=TASKS[:3])
    (tmp_path / "task_checks.json").unlink()
    pool = Refusing({TASKS[0].code: "too_large"})
    with pytest.raises(UserError, match=r"0000: has attempts at other tasks .*; delete .*, and evaluate"):
        run(tmp_path, pool, Script(LINES), tasks=TASKS[:3])
