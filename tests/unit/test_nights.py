"""What decides how nights follow each other, without a pipeline run."""

from pathlib import Path
from typing import Any

import pytest

from components.core.config import resolve
from components.core.errors import UserError
from components.core.files import digest_tree, write_json
from components.training.run_stage import check_stages
from flows.night import Night, carry_over, line_of, may_begin, training_deadline
from flows.run_context import PipelineRun, open_run
from flows.steps import EvaluationRecord


def test_nights_of_one_line_differ_only_in_seed_data_and_what_follows_training() -> None:
    line = line_of(resolve("ci").params)
    same = ("seed=7", "data.seed=7", "gate.pass_rate=0.1", "evaluation.attempts=1", "night.hours=3")
    assert line_of(resolve("ci", same).params) == line
    for changed in ("agentic.clip_high=0.3", "night.stages=[warmup]", "policy.source=champion"):
        assert line_of(resolve("ci", (changed,)).params) != line


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ("[agentic, warmup, rejection, critic]", "order"),
        ("[warmup, warmup]", "order"),
        ("[]", "no stage trains the policy"),
        ("[critic]", "no stage trains the policy"),
        ("[agentic]", "agentic needs the critic"),
        ("[critic, agentic]", "trajectories of warmup or rejection"),
    ],
)
def test_stages_that_cannot_follow_each_other_are_refused_by_name(stages: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"^night\.stages: .*{why}"):
        check_stages(resolve("ci", (f"night.stages={stages}",)).params)


@pytest.mark.parametrize(
    "bad", ["night.hours=-1", "night.stages=[warmups]", "night.hours=.nan", "night.hours=.inf"]
)
def test_bad_values_are_refused_where_they_are_read(bad: str) -> None:
    with pytest.raises(UserError, match=bad.partition("=")[0].replace(".", r"\.")):
        resolve("ci", (bad,))


def test_a_run_that_its_budget_ended_is_followed_by_another_one(tmp_path: Path) -> None:
    resolved = resolve("ci", (f"home={tmp_path}",))

    def record(run: PipelineRun, unfinished: dict[str, Any] | None) -> None:
        write_json(run.folder / "run.json", {"night": {"unfinished": unfinished}})

    first = open_run(resolved)
    assert open_run(resolved).run_id == first.run_id
    record(first, {"stage": "agentic"})
    second = open_run(resolved)
    assert second.run_id != first.run_id
    record(second, None)
    assert open_run(resolved).run_id == second.run_id


def test_stage_2_is_begun_only_if_its_last_duration_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PipelineRun(resolve("ci", (f"home={tmp_path}",)))
    monkeypatch.setattr("flows.night.time.time", lambda: 100.0)
    assert may_begin(run, "rejection", None) and may_begin(run, "rejection", 101.0)
    assert not may_begin(run, "warmup", 99.0)
    write_json(tmp_path / "stages" / "rejection-0123456789ab" / "stage.json", {"seconds": 50.0})
    assert not may_begin(run, "rejection", 149.0) and may_begin(run, "rejection", 151.0)


def test_time_is_kept_for_what_was_measured_after_training_or_a_tenth_of_the_budget(tmp_path: Path) -> None:
    run = PipelineRun(resolve("ci", (f"home={tmp_path}", "night.hours=1")))
    night = Night(started=1000.0, champion=None, continues=None)

    def left(seconds: float) -> float:
        """Return the seconds after the deadline, if an evaluation of the first policy took `seconds`."""
        before = EvaluationRecord(digest="", figures={}, results="", seconds=seconds)
        deadline = training_deadline(run, night, before)
        assert deadline is not None
        return 1000.0 + 3600.0 - deadline

    assert left(1.0) == 380.0 and left(400.0) == 1020.0
    write_json(tmp_path / "runs" / "a" / "run.json", {"profile": run.profile, "tail_seconds": 40.0})
    assert left(1.0) == 70.0 and left(80.0) == 120.0


def test_an_unfinished_stage_is_carried_over_once_and_the_earlier_one_stays(tmp_path: Path) -> None:
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    write_json(earlier / "trajectories" / "step-0000" / "one.json", 1)
    write_json(earlier / "state" / "step-0001-x" / "weights.json", 2)
    write_json(earlier / "state" / ".step-0002-x.writing" / "weights.json", 3)
    write_json(earlier / "metrics.jsonl", {"step": 0})
    before = digest_tree(earlier)
    carry_over(earlier, later)
    write_json(later / "metrics.jsonl", {"step": 1})
    carry_over(earlier, later)
    assert digest_tree(earlier) == before
    found = digest_tree(later)
    assert found.keys() == {
        "metrics.jsonl",
        "state/step-0001-x/weights.json",
        "trajectories/step-0000/one.json",
    }
    assert found["metrics.jsonl"] != before["metrics.jsonl"]


def test_a_stage_that_ended_before_its_first_update_is_carried_over(tmp_path: Path) -> None:
    write_json(tmp_path / "earlier" / "state" / "step-0000" / "state.json", {})
    carry_over(tmp_path / "earlier", tmp_path / "later")
    assert (tmp_path / "later" / "state" / "step-0000" / "state.json").is_file()
