"""States on disk: when they are written, which are loaded, and when those of finished stages go."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_fixtures import engine_of
from training_fixtures import episode, stage

from components.core import files
from components.core.config import resolve
from components.core.errors import UserError
from components.training import training_loop
from components.training.run_stage import run_stage
from components.training.training_loop import StateStore


def states(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[1] for path in (folder / "state").glob("step-*"))


def test_states_are_written_by_time_and_those_of_the_finished_stage_go_with_the_next_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ("warmup.steps=4", "warmup.checkpoint_every=20min", "critic.min_explained_variance=-100")
    first = stage(tmp_path, "warmup", *sets)
    steps = iter(range(1000))
    # Each look at the clock is six minutes after the one before: every second step is due.
    clock = SimpleNamespace(time=training_loop.time.time, monotonic=lambda: 360.0 * next(steps))
    monkeypatch.setattr(training_loop, "time", clock)
    run_stage(first, episode)
    monkeypatch.undo()
    assert states(first.out)[-1] == "0004" and len(states(first.out)) == 2
    second = dataclasses.replace(
        stage(tmp_path, "critic", *sets), trajectories=(first.out / "trajectories",), earlier=(first.out,)
    )
    run_stage(second, episode)
    assert not (first.out / "state").exists() and (first.out / "checkpoint").is_dir()
    assert states(second.out)


def test_a_state_of_another_layout_is_not_loaded(tmp_path: Path) -> None:
    engine = engine_of(1)
    made = stage(tmp_path, "warmup")
    store = StateStore(made, {}, engine.world, 2)
    for name in (
        "step-0007-bfloat16-zero1-world1",
        "step-0006-float32-zero3-world1",
        "step-0004-float32-zero1-world2",
        "step-0002-float32-zero1-world1",
    ):
        (made.out / "state" / name).mkdir(parents=True)
    assert [steps for steps, _ in store.complete()] == [2]


@pytest.mark.parametrize("bad", ["0", "20 min", "min", "-1min"])
def test_what_is_neither_a_number_of_steps_nor_a_time_is_refused(bad: str) -> None:
    with pytest.raises(UserError, match=r"warmup\.checkpoint_every"):
        resolve("ci", (f"warmup.checkpoint_every={bad}",))


def test_the_state_before_the_first_step_is_written_once(tmp_path: Path) -> None:
    """A process that is killed while it writes a state again would leave a part of it."""
    engine = engine_of(1)
    made = stage(tmp_path, "warmup")
    written: list[int] = []
    double = SimpleNamespace(
        world=engine.world,
        save=lambda folder: written.append(folder.mkdir(parents=True)),
        load=lambda _: None,
    )
    for _ in range(2):
        assert training_loop.resume(made, {"actor": double}, rolls_back=True).start == 0
        assert len(written) == 1 and states(made.out) == ["0000"]


def test_the_state_that_a_new_one_replaces_is_never_there_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage(tmp_path, "warmup")
    double = SimpleNamespace(world=engine_of(1).world, save=lambda folder: folder.mkdir(parents=True))
    store = StateStore(made, {"actor": double}, double.world, 1)
    store.save(1)
    removed: list[str] = []
    monkeypatch.setattr(files, "remove_tree", lambda folder: removed.append(folder.name))
    store.save(2)
    assert [steps for steps, _ in store.complete()] == [2]
    assert removed and all(name.startswith(".") for name in removed)
