"""The tables of what a policy learned from step to step (tests/bench/night_learning.py)."""

import json
from pathlib import Path

import night_learning
import pytest

from components.judge.verdict import Verdict


def write(folder: Path, trajectories: dict[str, list[list[int]]]) -> None:
    """Write a step whose trajectories have these milestones by turn; 0 stands for a failure of the judge."""
    folder.mkdir(parents=True)
    lines = [
        {"task_id": task, "verdicts": [verdict(milestone).model_dump(mode="json") for milestone in turns]}
        for task, found in trajectories.items()
        for turns in found
    ]
    (folder / "trajectories.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def verdict(milestone: int) -> Verdict:
    if milestone == 0:
        return Verdict(status="infrastructure")
    return Verdict(status="correct" if milestone > 0 else "crashed", milestone=milestone)


def test_first_answers_are_compared_on_the_tasks_of_both_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "warmup-1/trajectories/step-0000", tmp_path / "agentic-2/sampling"
    write(first / "0000", {"a": [[-1], [1]], "b": [[1], [1], [1, 0]]})
    write(second / "0000", {"a": [[2, 3], [2]], "c": [[3, 3]]})
    monkeypatch.setattr(
        "sys.argv", ["night_learning.py", *map(str, (tmp_path / "warmup-1", tmp_path / "agentic-2"))]
    )
    night_learning.main()
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert lines[2][:5] == ["warmup step-0000", "4", "2", "0.50 [0.00, 1.00]", "75%"]
    assert lines[3][5:8] == ["33%", "1.7", "0.25 [0.00, 0.50]"]
    assert lines[-1] == [
        "warmup step-0000",
        "agentic sampling",
        "1",
        "2.00 [2.00, 2.00]",
        "2.50 [2.50, 2.50]",
    ]


def test_two_evaluations_have_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "evaluation-1", tmp_path / "evaluation-2"]
    for folder, milestones in zip(folders, ([1, 3], [3]), strict=True):
        write(folder / "episodes/0000", {"a": [milestones]})
    monkeypatch.setattr("sys.argv", ["night_learning.py", *map(str, folders)])
    night_learning.main()
    last = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert last[:3] == ["evaluation-1 sampling", "evaluation-2 sampling", "1"]
    assert last[3:] == ["2.00 [2.00, 2.00]", "0.00 [0.00, 0.00]"]
