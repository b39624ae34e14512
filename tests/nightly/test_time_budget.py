"""A stage that a time budget ends keeps its weights so far, and continues to the same bits."""

import dataclasses
from pathlib import Path

import pytest
from training_fixtures import episode, stage

from components.core.files import digest_tree, read_json
from components.training import training_loop
from components.training.run_stage import run_stage
from components.training.stage import STAGES, UNFINISHED, Stage, StageName, load_result

SHORT = (
    *("warmup.steps=3", "agentic.steps=3", "critic.epochs=3", "rejection.epochs=3", "rejection.batch=4"),
    *("warmup.critic_warmup_steps=0", "critic.min_explained_variance=-100", "warmup.checkpoint_every=2"),
)
DEADLINE = 1e9


def made(folder: Path, name: StageName, inputs: Path) -> Stage:
    built = stage(folder, name, *SHORT)
    if name == "critic":
        sampled = (inputs / "warmup" / "trajectories", inputs / "rejection" / "trajectories")
        return dataclasses.replace(built, trajectories=sampled)
    return dataclasses.replace(built, critic=inputs / "critic" / "checkpoint") if name == "agentic" else built


def test_every_stage_stopped_by_its_deadline_continues_to_equal_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in STAGES:
        whole = made(tmp_path / "whole", name, tmp_path / "whole")
        run_stage(whole, episode)
        cut = dataclasses.replace(made(tmp_path / "cut", name, tmp_path / "whole"), deadline=DEADLINE)

        def now(metrics: Path = cut.out / "metrics.jsonl") -> float:
            done = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
            return 2 * DEADLINE if done >= 1 else 0.0

        with monkeypatch.context() as patch:
            patch.setattr(training_loop.time, "time", now)
            first = run_stage(cut, episode)
            again = run_stage(cut, episode)
        total = len((whole.out / "metrics.jsonl").read_text().splitlines())
        assert first.progress == again.progress == (1, total), name
        assert first.digest == again.digest and first.checkpoint == "checkpoint-0001"
        assert load_result(cut.out) is None and load_result(cut.out, UNFINISHED) == again
        ended = run_stage(dataclasses.replace(cut, deadline=None), episode)
        assert ended.progress is None
        assert digest_tree(cut.out / "checkpoint") == digest_tree(whole.out / "checkpoint"), name
        assert read_json(cut.out / "stage.json")["figures"] == read_json(whole.out / "stage.json")["figures"]


def test_a_step_that_would_end_after_the_deadline_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = dataclasses.replace(stage(tmp_path, "warmup", *SHORT), deadline=DEADLINE)
    monkeypatch.setattr(training_loop.time, "time", lambda: DEADLINE - 1e-3)
    assert run_stage(one, episode).progress == (1, 3), "the first takes longer than the millisecond left"
