"""Trajectory pages need no other file and escape everything."""

import dataclasses
import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest
from agent_fixtures import MEASURE, TASK, ScriptedPool, ScriptedSampler, call, params, tokenizer, write

from components.agent import trajectory_viewer
from components.agent.episode import RolloutRequest, run_episodes
from components.agent.trajectory import (
    ToolCall,
    Trajectory,
    load_trajectories,
    save_trajectories,
    trajectory_folders,
    updates_of,
)
from components.cli.common import newest_dataset
from components.cli.trajectory import trajectory_app
from components.core.errors import UserError

TOKENIZER = tokenizer()
SAID = [
    f"I try <b>this</b>.\n{write(0.8)}\n{call('Bash', command=MEASURE)}",
    f"{call('Edit', file_path='kernels/forward.cpp', old_string='0.8', new_string='2.5')}\n"
    f"{call('Bash', command='python3 -m utils.profiling; echo x > kernels/note.h')}",
    f"{write('wrong')}\n{call('Bash', command=MEASURE)}\n<tool_call>{{nonsense</tool_call>",
    f"{write(2.5)}\n{call('Read', file_path='kernels/note.h')}",
    "Done.",
]


@pytest.fixture(scope="module")
def trajectory() -> Trajectory:
    script = ScriptedSampler(TOKENIZER, lambda i, t: SAID[t])
    request = RolloutRequest(
        tasks=[TASK],
        params=params(context=4096),
        pool=ScriptedPool(),
        epoch="t",
        seed=0,
        max_turns=9,
        max_new_tokens=512,
        temperature=1.0,
    )
    return run_episodes(request, script, TOKENIZER)[0]


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for key, value in attrs if key in ("src", "href")]


def test_the_page_stands_alone_and_shows_each_change_and_each_measurement(trajectory: Trajectory) -> None:
    text = trajectory_viewer.page(trajectory, "A <name>")
    page = Links()
    page.feed(text)
    assert page.found == [] and "script" not in page.tags and "b" not in page.tags
    assert "I try &lt;b&gt;this&lt;/b&gt;." in text and "A &lt;name&gt;" in text
    assert text.count('<p class="verdict wrong">wrong_output: max_error:given') == 1
    assert '<span class="cut">-0.8</span>' in text and '<span class="add">+2.5</span>' in text


def test_a_trajectory_on_which_the_judge_failed_has_a_page(trajectory: Trajectory) -> None:
    page = trajectory_viewer.page(dataclasses.replace(trajectory, reward=None), "lost")
    assert "Reward none," in page


def test_turns_know_their_verdicts_and_their_changes(trajectory: Trajectory) -> None:
    steps = trajectory_viewer.steps(trajectory)
    assert [[len(action.verdicts) for action in step.actions] for step in steps] == [
        [0, 1],
        [0, 1],
        [0, 1, 0],
        [0, 0],
        [],
    ]
    assert steps[0].actions[0].diff == ("@@ -0,0 +1 @@", "+// 0.8") and steps[2].actions[0].diff[-2:] == (
        "-// 2.5",
        "+// wrong",
    )
    shown = "\n".join(text for text, _ in trajectory_viewer.lines(trajectory))
    assert "= correct, 2.50x eager (2.25 to 2.75)" in shown and "final answer: correct, 2.50x eager" in shown


def test_the_best_is_chosen_unless_one_is_named(trajectory: Trajectory, tmp_path: Path) -> None:
    worse = dataclasses.replace(trajectory, reward=-1.0)
    save_trajectories(tmp_path / "trajectories", [worse, trajectory])
    found = load_trajectories(tmp_path)
    assert (
        trajectory_viewer.choose(found, 0, tmp_path)[0] == 2
        and trajectory_viewer.choose(found, 1, tmp_path)[0] == 1
    )
    with pytest.raises(UserError, match="there is no trajectory 3; it holds 2"):
        trajectory_viewer.choose(found, 3, tmp_path)


def test_a_stages_folder_is_all_of_its_steps_in_order(trajectory: Trajectory, tmp_path: Path) -> None:
    for step, reward in enumerate((1.0, 3.0)):
        save_trajectories(
            tmp_path / "trajectories" / f"step-{step:04d}", [dataclasses.replace(trajectory, reward=reward)]
        )
    assert [found.reward for found in load_trajectories(tmp_path)] == [1.0, 3.0]
    with pytest.raises(UserError, match="not a folder of trajectories"):
        load_trajectories(tmp_path / "nothing")


@pytest.mark.parametrize(("version", "updates"), [("0123+3", 3), ("a+b+12", 12), ("0123", 0), ("0123+", 0)])
def test_a_version_names_its_updates_after_the_plus_sign(version: str, updates: int) -> None:
    assert updates_of(version) == updates


def test_an_edit_after_a_write_without_a_final_newline_is_followed() -> None:
    written = ToolCall(name="Write", arguments={"content": "int a;"}, observation="Written model_new.py.")
    edited = ToolCall(
        name="Edit",
        arguments={"old_string": "a;\n", "new_string": "b;\n"},
        observation="Edited model_new.py.",
    )
    files: dict[str, str] = {}
    for made in (written, edited):
        list(trajectory_viewer._change(made, files))
    assert files == {"model_new.py": "int b;\n"}


def test_a_changed_line_that_begins_with_two_signs_is_part_of_the_diff() -> None:
    texts = {"old_string": "--i;\n", "new_string": "++i;\n"}
    lines = list(trajectory_viewer._change(ToolCall("Edit", texts, "Edited kernels/k.cu."), {}))
    assert lines[1:] == ["---i;", "+++i;"]


def test_a_lone_surrogate_and_a_terminal_escape_are_no_hindrance(
    trajectory: Trajectory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    turn = dataclasses.replace(trajectory.turns[0], text="left \x1b]0;title\x07right \ud800")
    save_trajectories(
        tmp_path / "odd", [dataclasses.replace(trajectory, turns=(turn,), files={"k": "\ud800"})]
    )
    for arguments in (["show"], ["show", "--json"], ["html", "--out", str(tmp_path / "page.html")]):
        trajectory_app([arguments[0], str(tmp_path / "odd"), *arguments[1:]], standalone_mode=False)
    out, err = capfd.readouterr()
    assert json.loads(out)["trajectories"][0]["turns"] == 1
    assert "left right" in err and "\x1b" not in err
    assert "left" in (tmp_path / "page.html").read_text()


def test_what_a_killed_process_left_is_no_trajectory_and_no_data_set(
    trajectory: Trajectory, tmp_path: Path
) -> None:
    whole, left = tmp_path / "episodes" / "0000", tmp_path / "episodes" / ".0001.x7"
    for folder in (whole, left):
        save_trajectories(folder, [trajectory])
    assert trajectory_folders(tmp_path) == [whole] and trajectory_folders(left) == [left]
    (left / "tokens.safetensors").unlink()
    assert len(load_trajectories(tmp_path)) == 1
    for name in ("aa", ".bb.x7"):
        (tmp_path / "datasets" / name).mkdir(parents=True)
        (tmp_path / "datasets" / name / "tasks.parquet").touch()
    (tmp_path / "datasets" / "notes.txt").touch()
    os.utime(tmp_path / "datasets" / "aa", (0, 0))
    assert newest_dataset(tmp_path) == tmp_path / "datasets" / "aa"
