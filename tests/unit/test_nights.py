"""What decides how nights follow each other, without a pipeline run."""

import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from components.core.config import resolve
from components.core.errors import UserError
from components.core.files import write_json
from components.core.progress import Quiet
from components.evaluation.compare import SETTINGS
from components.registry import models
from components.registry.tracking import RUN_KEY
from components.training.run_stage import check_stages
from flows import data, deployments
from flows.night import Night, changes_since, may_begin, training_deadline
from flows.run_context import PipelineRun, keep_request, open_run
from flows.steps import EvaluationRecord


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
    "bad",
    [
        *("night.hours=-1", "night.stages=[warmups]", "night.hours=.nan", "night.hours=.inf"),
        "home=~nobody-has-this-name/runs",
    ],
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
    assert second.run_id != first.run_id and second.continues == first.run_id
    record(second, None)
    assert open_run(resolved).run_id == second.run_id


def test_a_request_to_run_stages_again_is_stored_when_the_run_begins(tmp_path: Path) -> None:
    resolved = resolve("ci", (f"home={tmp_path}",))
    first = open_run(resolved)
    write_json(first.folder / "run.json", {})
    again = open_run(resolved, "agentic")
    assert again.run_id != first.run_id == open_run(resolved).run_id
    keep_request(again)
    assert again.run_id == open_run(resolved).run_id == open_run(resolved, "agentic").run_id


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": [1]}', "[" * 9999])
def test_a_damaged_file_of_requests_to_run_again_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "redo.json").write_text(text)
    with pytest.raises(UserError, match=r"redo\.json: cannot be read or is damaged .*; delete it"):
        open_run(resolve("smoke", (f"home={tmp_path}",)))


def test_a_scheduled_night_continues_what_the_newest_one_left_and_else_has_a_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "work_in_home", lambda run, _: run)

    def scheduled() -> PipelineRun:
        found: Any = deployments.nightly.fn("ci", "night.hours=1", str(tmp_path))
        return found

    def end(run: PipelineRun, unfinished: dict[str, Any] | None, age: float) -> None:
        rest: dict[str, Any] = {"stages": [], "evaluation": {"results": ""}, "dataset": {"version": ""}}
        write_json(run.folder / "run.json", rest | {"night": {"unfinished": unfinished}})
        os.utime(run.folder / "run.json", (time.time() - age,) * 2)

    today = int(f"{datetime.now(UTC):%Y%m%d}")
    assert scheduled().params.seed == today
    # The record of an earlier release has no seed.
    end(PipelineRun(resolve("ci", ("seed=3", f"home={tmp_path}"))), {"stage": "agentic"}, 30)
    assert scheduled().params.seed == today
    first = PipelineRun(resolve("ci", ("seed=7", "night.hours=2", f"home={tmp_path}")))
    end(first, {"seed": 7, "stage": "agentic"}, 20)
    # A run with other parameters does not hide the night that was left, nor lends its seed.
    other = PipelineRun(resolve("ci", ("seed=9", "agentic.clip_high=0.4", f"home={tmp_path}")))
    end(other, {"seed": 9, "stage": "agentic"}, 15)
    second = scheduled()
    assert second.params.seed == 7 and second.continues == first.run_id
    end(second, None, 10)
    assert scheduled().params.seed == today and not scheduled().continues
    # The seed of a run with other parameters is not taken a second time.
    other = PipelineRun(resolve("ci", ("seed=7", "agentic.clip_high=0.5", f"home={tmp_path}")))
    end(other, {"seed": 7, "stage": "agentic"}, 5)
    assert scheduled().params.seed == today


def test_stage_2_is_begun_only_if_its_last_duration_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PipelineRun(resolve("ci", (f"home={tmp_path}",)))
    monkeypatch.setattr("flows.night.time.time", lambda: 100.0)
    assert may_begin(run, "rejection", None) and may_begin(run, "rejection", 101.0)
    assert not may_begin(run, "warmup", 99.0)
    write_json(tmp_path / "stages" / "rejection-0123456789ab" / "stage.json", {"seconds": 50.0})
    assert not may_begin(run, "rejection", 149.0) and may_begin(run, "rejection", 151.0)
    (tmp_path / "stages" / "rejection-0123456789ab" / "stage.json").write_text("{")
    assert may_begin(run, "rejection", 101.0) and not may_begin(run, "rejection", 99.0)


def test_time_is_kept_for_what_was_measured_after_training_or_a_tenth_of_the_budget(tmp_path: Path) -> None:
    run = PipelineRun(resolve("ci", (f"home={tmp_path}", "night.hours=1")))
    night = Night(started=1000.0, champion=None)

    def left(seconds: float) -> float:
        """Return the seconds after the deadline, if an evaluation of the first policy took `seconds`."""
        before = EvaluationRecord(digest="", figures={}, results="", seconds=seconds)
        deadline = training_deadline(run, night, before)
        assert deadline is not None
        return 1000.0 + 3600.0 - deadline

    assert left(1.0) == 380.0 and left(400.0) == 520.0
    write_json(tmp_path / "runs" / "a" / "run.json", {"profile": run.profile, "tail_seconds": 40.0})
    assert left(1.0) == 70.0 and left(80.0) == 120.0
    for name, damage in {"b": "{", "c": "[1]"}.items():
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "run.json").write_text(damage)
    assert left(1.0) == 70.0, "a damaged record is left out"


def test_a_night_whose_champions_settings_are_damaged_tells_no_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PipelineRun(resolve("ci", (f"home={tmp_path}",)))
    monkeypatch.setattr(models, "describe", lambda *_: {"tags": {RUN_KEY: run.key}})
    values = run.params.model_dump(mode="json") | {"seed": run.params.seed + 1}
    write_json(run.folder / SETTINGS, {"params": values, "sources": {}})
    client: Any = None
    assert changes_since(run, client, "1") == [f"seed {run.params.seed + 1} -> {run.params.seed}", "code"]
    (run.folder / SETTINGS).write_text("{")
    assert changes_since(run, client, "1") == []


@pytest.mark.parametrize(("made_by", "said"), [("", "up to date"), ("an earlier release", "built")])
def test_a_data_set_that_was_made_again_is_not_called_up_to_date_though_it_is_equal(
    made_by: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = PipelineRun(resolve("ci", (f"home={tmp_path}",)))
    workspace, kept = tmp_path / "dvc", tmp_path / "datasets" / ("d" * 64)
    (workspace / ".dvc").mkdir(parents=True)
    (workspace / "dvc.lock").write_text("equal before and after")
    (workspace / ".dvc" / "made_by").write_text(made_by or data.maker_digest(run))
    write_json(kept / "metrics.json", {})
    monkeypatch.setattr(data, "prepare_workspace", lambda _: workspace)
    monkeypatch.setattr(data, "keep_version", lambda *_: kept)
    monkeypatch.setattr(data, "dvc", lambda *_: None)
    monkeypatch.setattr(data, "keep_lock", lambda *_: None)
    monkeypatch.setattr(data, "get_run_logger", logging.getLogger)
    with caplog.at_level(logging.INFO):
        record = data.dataset.fn(run, Quiet())
    assert caplog.messages == [f"version dddddddddddd, {said}"]
    assert record.cached == (said == "up to date")


def test_a_data_set_that_is_up_to_date_is_pushed_once_to_each_remote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "datasets" / ("d" * 64)
    write_json(kept / "metrics.json", {})
    commands: list[str] = []

    def dvc(workspace: Path, arguments: list[str], _: object) -> None:
        commands.append(arguments[0])
        (workspace / "dvc.lock").write_text("equal before and after")

    monkeypatch.setattr(data, "keep_version", lambda *_: kept)
    monkeypatch.setattr(data, "dvc", dvc)
    monkeypatch.setattr(data, "keep_lock", lambda *_: None)
    monkeypatch.setattr(data, "get_run_logger", lambda: logging.getLogger())
    for url in ("one", "one", "other", "other"):
        values = (f"home={tmp_path}", f"store.url={tmp_path / url}")
        data.dataset.fn(PipelineRun(resolve("ci", values)), Quiet())
    assert commands == ["repro", "push", "repro", "repro", "push", "repro"]
