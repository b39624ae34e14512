"""States on disk: when they are written, when those of finished stages go, and the space that is checked."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from training_fixtures import episode, stage

from components.core.config import resolve
from components.core.errors import UserError
from components.training import disk_space, training_loop
from components.training.disk_space import count_parameters, needed_bytes
from components.training.run_stage import run_stage


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


def test_a_stage_that_does_not_fit_on_the_disk_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stage(tmp_path, "warmup")
    parameters = count_parameters(one.actor)
    assert 10_000 < parameters < 100_000
    assert needed_bytes(one) == parameters * (3 * 2 * 16 + 4)
    usage = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=rf"warmup needs {needed_bytes(one):,} bytes .* and 5 are free"):
        run_stage(one, episode)


@pytest.mark.parametrize("bad", ["0", "20 min", "min", "-1min"])
def test_what_is_neither_a_number_of_steps_nor_a_time_is_refused(bad: str) -> None:
    with pytest.raises(UserError, match=r"warmup\.checkpoint_every"):
        resolve("ci", (f"warmup.checkpoint_every={bad}",))
