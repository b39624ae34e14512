"""What is removed from a home: only what no kept run, no next night and no running stage needs."""

import os
import time
from pathlib import Path

import pytest

from components.core import files
from components.core.files import write_json
from flows.home_gc import note_use, removable
from flows.stage_keys import READS

DAY = 86_400.0
KEYS = {name: f"{index:012x}" for index, name in enumerate(("champion", "forgotten", "young", "old"), 1)}


def stage(home: Path, name: str, *, finished: bool = True) -> Path:
    folder = home / "stages" / f"agentic-{KEYS[name]}"
    write_json(folder / "state" / "step-0001-x" / "weights.json", [0] * 9)
    if finished:
        write_json(folder / "stage.json", {})
    return folder


def aged(home: Path, days: float) -> None:
    for path in home.rglob("*"):
        os.utime(path, (time.time() - days * DAY,) * 2)


def found(home: Path, days: float = 30, references: tuple[str, ...] = (KEYS["champion"],)) -> dict[str, str]:
    kept = dict.fromkeys((key + "f" * 52 for key in references), "version 1 is champion")
    return {item.path.relative_to(home).as_posix(): item.reason for item in removable(home, kept, days * DAY)}


def test_stages_of_referenced_runs_stay_and_lose_only_their_states(tmp_path: Path) -> None:
    champion, forgotten = stage(tmp_path, "champion"), stage(tmp_path, "forgotten")
    note_use(tmp_path / "runs" / KEYS["champion"], champion)
    write_json(tmp_path / "runs" / KEYS["forgotten"] / "run.json", {"checkpoint": str(forgotten)})
    aged(tmp_path, 40)
    assert found(tmp_path) == {
        f"stages/{forgotten.name}": "no kept run uses it",
        f"stages/{champion.name}/state": "the stage is finished",
    }
    assert found(tmp_path, days=50) == {}


def test_a_kept_run_keeps_its_stages_whatever_their_names_are(tmp_path: Path) -> None:
    for index, name in enumerate(READS):
        folder = tmp_path / "stages" / f"{name}-{index:012x}"
        folder.mkdir(parents=True)
        note_use(tmp_path / "runs" / KEYS["champion"], folder)
    aged(tmp_path, 40)
    assert "no kept run uses it" not in found(tmp_path).values()


def test_the_newest_run_keeps_its_unfinished_stage_with_its_states(tmp_path: Path) -> None:
    left, old = stage(tmp_path, "young", finished=False), stage(tmp_path, "old", finished=False)
    note_use(tmp_path / "runs" / KEYS["old"], old)
    aged(tmp_path, 41)
    note_use(tmp_path / "runs" / KEYS["young"], left)
    for path in (left, tmp_path / "runs" / KEYS["young"] / "stages.txt"):
        os.utime(path, (time.time() - 40 * DAY,) * 2)
    assert found(tmp_path) == {f"stages/{old.name}": "no kept run uses it"}


def test_an_old_night_keeps_the_stage_that_it_left_unfinished_until_a_night_continues_it(
    tmp_path: Path,
) -> None:
    left, other = stage(tmp_path, "old", finished=False), stage(tmp_path, "young")
    note_use(tmp_path / "runs" / KEYS["old"], left)
    write_json(tmp_path / "runs" / KEYS["old"] / "run.json", {"night": {"unfinished": {"seed": 1}}})
    note_use(tmp_path / "runs" / KEYS["young"], other)
    aged(tmp_path, 41)
    write_json(tmp_path / "runs" / KEYS["young"] / "run.json", {"night": {"continues": None}})
    assert f"stages/{left.name}" not in found(tmp_path)
    (tmp_path / "runs" / KEYS["champion"]).mkdir(exist_ok=True)
    (tmp_path / "runs" / KEYS["champion"] / "run.json").write_text(
        "{"
    )  # a damaged record is another's affair
    assert f"stages/{left.name}" not in found(tmp_path)
    record = {"night": {"continues": {"run_id": KEYS["old"]}}}
    write_json(tmp_path / "runs" / KEYS["young"] / "run.json", record)
    assert found(tmp_path)[f"stages/{left.name}"] == "no kept run uses it"


@pytest.mark.parametrize("place", [".", "datasets", "policies"])
def test_temporary_folders_are_abandoned_after_a_day_and_what_is_removed_is_gone(
    tmp_path: Path, place: str
) -> None:
    write_json(tmp_path / place / ".one.abc" / "tasks.json", 1)
    (tmp_path / place / ".git").mkdir()
    aged(tmp_path, 0.5)
    assert found(tmp_path, days=0) == {}
    aged(tmp_path, 2)
    (item,) = removable(tmp_path, {}, 0)
    assert item.reason == "abandoned temporary folder" and item.bytes == 2
    item.remove()
    assert [path.name for path in (tmp_path / place).iterdir()] == [".git"]


def test_a_stage_of_which_the_removal_was_killed_is_not_taken_for_one_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = stage(tmp_path, "old", finished=False)
    aged(tmp_path, 40)
    (item,) = removable(tmp_path, {}, 30 * DAY)

    def kill(folder: Path) -> None:
        if folder.exists():
            next(folder.rglob("weights.json")).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(files, "remove_tree", kill)
        item.remove()
    assert not old.exists()
    aged(tmp_path, 40)
    (left,) = removable(tmp_path, {}, 30 * DAY)
    left.remove()
    assert not list((tmp_path / "stages").iterdir())
