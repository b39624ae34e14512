"""Claims about the agent's tools for files: what agents expect of each, and that nothing leads outside.

The shell is the real one, inside bubblewrap; the judge is that of agent_fixtures.
"""

import json

import pytest
from agent_fixtures import MEASURE, kernel
from agent_tool_fixtures import Use
from agent_tool_fixtures import tools as tools
from agent_tool_fixtures import use as use

from components.agent.tool_parser import Request
from components.agent.tool_schemas import TOOLS, descriptions
from components.agent.tools import Tools
from components.agent.utilities import COMMANDS
from components.core.text import readable


def test_every_verdict_is_counted_by_one_call_also_of_a_command_in_the_background(tools: Tools) -> None:
    measure = Request("Bash", {"command": MEASURE})
    assert tools.run(measure).verdicts == 1
    tools._serve_utility(COMMANDS[MEASURE.split(" && ")[0]])  # as a command in the background calls it
    wrong = tools.run(Request("Nothing", {}))
    assert (wrong.valid, wrong.verdicts) == (False, 0)
    assert tools.run(measure).verdicts == 2 and len(tools.verdicts) == 3


# --- the small policy's path ----------------------------------------------------------------------


def test_writing_and_measuring_says_what_trained_policies_have_seen_and_starts_no_shell(
    tools: Tools, use: Use
) -> None:
    assert (
        use("Write", file_path="kernels/forward.cpp", content=kernel(2.0)) == "Written kernels/forward.cpp."
    )
    assert (
        use("Bash", command=MEASURE)
        == "[PASS] verify success\nTorch Baseline: 1000.0 us, Torch Compile: 500.0 us, CUDA Extension: 500.0"
        " us\nSpeed-up: 2.00x eager, 1.00x compile. Milestone: 2 of 3."
    )
    use("Write", file_path="kernels/forward.cpp", content=kernel("wrong"))
    assert use("Bash", command=MEASURE) == "[FAIL] wrong_output: max_error:given"
    use("Write", file_path="kernels/forward.cpp", content=kernel("build_failed"))
    assert use("Bash", command=MEASURE) == "Build failed: error: expected ';'"
    assert use("Bash", command="bash utils/compile.sh") == "Build failed: error: expected ';'"
    assert tools._shell is None and [verdict.status for verdict in tools.verdicts] == [
        "correct",
        "wrong_output",
        "build_failed",
        "build_failed",
    ]


def test_a_call_that_is_none_is_told_in_the_words_that_policies_know(tools: Tools) -> None:
    assert (
        tools.run(Request("Write", {"content": "x"})).observation
        == "invalid tool call: Write needs file_path."
    )
    unknown = tools.run(Request("Wrote", {}))
    assert (
        unknown.observation.startswith("invalid tool call: no tool is called Wrote; there are Write, Edit")
        and not unknown.valid
    )


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "/etc/passwd",
        "kernels/../../x.cpp",
        "model.py",
        "utils/compile.sh",
        "kernels",
        "kernels/a/b.cpp",
        "",
        "/workspace/../x",
    ],
)
def test_no_path_but_the_candidates_own_is_written(use: Use, tools: Tools, path: str) -> None:
    assert "not writable" in use("Write", file_path=path, content="x")
    assert set(tools.workspace.files) == {"model_new.py"}


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "kernels/../../../etc/passwd"])
def test_nothing_outside_is_read_searched_or_listed(use: Use, path: str) -> None:
    assert "no such file in the workspace" in use("Read", file_path=path)
    assert "outside the workspace" in use("Grep", pattern="root", path=path)
    assert "outside the workspace" in use("Glob", pattern="*", path=path)


@pytest.mark.parametrize(
    "path", ["kernels/" + "a" * 256, "kernels/a\0b.cpp", "kernels/\ud800.cpp", "kernels/a b.cpp", "é" * 200]
)
def test_a_name_that_no_file_can_have_ends_no_episode(use: Use, tools: Tools, path: str) -> None:
    answer = use("Write", file_path=path, content="int a;")
    assert "not writable" in answer or "invalid tool call" in answer
    use("Write", file_path="kernels/forward.cpp", content=kernel(2.0))
    assert "forward.cpp" in use("Bash", command="ls kernels")
    for call in (Request("Read", {"file_path": path}), Request("Grep", {"pattern": "x", "path": path})):
        assert tools.run(call).observation
    use("Write", file_path="kernels/b.cpp", content="// \ud800\0")
    assert "b.cpp" in use("Bash", command="ls kernels")


def test_a_file_is_read_before_it_is_overwritten_or_edited(use: Use) -> None:
    assert (
        use("Write", file_path="model_new.py", content="x")
        == "model_new.py: you have not read it; Read it first."
    )
    assert "Read it first" in use(
        "Edit", file_path="model_new.py", old_string="import torch\n", new_string=""
    )
    use("Read", file_path="model_new.py")
    assert use("Write", file_path="model_new.py", content="x") == "Written model_new.py."


def test_a_file_that_the_shell_changed_is_read_again_first(use: Use) -> None:
    use("Write", file_path="kernels/forward.cpp", content="int a;\n")
    use("Bash", command="echo 'int b;' >> kernels/forward.cpp")
    assert (
        use("Edit", file_path="kernels/forward.cpp", old_string="int a;", new_string="")
        == "kernels/forward.cpp: it has changed since you read it; Read it first."
    )
    assert use("Read", file_path="/workspace/kernels/forward.cpp") == "    1\tint a;\n    2\tint b;"
    assert (
        use("Edit", file_path="kernels/forward.cpp", old_string="int a;", new_string="int c;")
        == "Edited kernels/forward.cpp."
    )
    assert use("Bash", command="cat kernels/forward.cpp") == "int c;\nint b;\n"


def test_an_edit_must_be_unambiguous(use: Use, tools: Tools) -> None:
    use("Write", file_path="kernels/a.h", content="x x\n")
    assert "occurs 2 times; it must occur exactly once." in use(
        "Edit", file_path="kernels/a.h", old_string="x", new_string="y"
    )
    assert "occurs 0 times" in use("Edit", file_path="kernels/a.h", old_string="z", new_string="y")
    assert "occurs 0 times" in use("Edit", file_path="kernels/a.h", old_string="", new_string="y")
    assert "are the same" in use("Edit", file_path="kernels/a.h", old_string="x x", new_string="x x")
    assert (
        use("Edit", file_path="kernels/a.h", old_string="x", new_string="y", replace_all=True)
        == "Edited kernels/a.h."
    )
    assert tools.workspace.files["kernels/a.h"] == "y y\n"


def test_an_edit_that_multiplies_a_file_is_refused_before_it_is_made(use: Use, tools: Tools) -> None:
    use("Write", file_path="kernels/a.h", content="x" * 1_000_000)
    edit = {"old_string": "x", "new_string": "y" * 1_000_000, "replace_all": True}  # a terabyte
    assert "1000000000001 characters are more than" in use("Edit", file_path="kernels/a.h", **edit)
    assert "characters are more than" in use("MultiEdit", file_path="kernels/a.h", edits=[edit])
    assert tools.workspace.files["kernels/a.h"] == "x" * 1_000_000 + "\n"


def test_several_edits_are_all_made_or_none(use: Use, tools: Tools) -> None:
    use("Write", file_path="kernels/a.h", content="one two\n")
    edits = [{"old_string": "one", "new_string": "1"}, {"old_string": "three", "new_string": "3"}]
    assert (
        use("MultiEdit", file_path="kernels/a.h", edits=edits)
        == "kernels/a.h: edit 2 of 2: old_string occurs 0 times; it must occur exactly once. No edit was"
        " made."
    )
    assert tools.workspace.files["kernels/a.h"] == "one two\n"
    edits[1]["old_string"] = "two"
    assert use("MultiEdit", file_path="kernels/a.h", edits=json.dumps(edits)) == "Edited kernels/a.h."
    assert tools.workspace.files["kernels/a.h"] == "1 3\n"


def test_a_long_file_is_read_in_parts(use: Use) -> None:
    use("Write", file_path="kernels/a.h", content="".join(f"line {i}\n" for i in range(1, 101)))
    assert use("Read", file_path="kernels/a.h", offset="99") == "   99\tline 99\n  100\tline 100"
    assert (
        use("Read", file_path="kernels/a.h", limit=1)
        == "    1\tline 1\n[99 more lines; read on with offset 2]"
    )
    assert use("Read", file_path="kernels/a.h", offset=200) == "kernels/a.h: it has 100 lines."


def test_lines_are_numbered_as_a_compiler_numbers_them(use: Use) -> None:
    use("Write", file_path="kernels/a.h", content="// a\f b\u2028 c\nint d;\n")
    assert use("Read", file_path="kernels/a.h").splitlines()[-1] == "    2\tint d;"
    found = use("Grep", pattern=" [bd]", path="kernels", output_mode="content", head_limit=1)
    assert found == "kernels/a.h:1:// a b c\n[1 more lines]"


def test_a_binary_file_is_not_shown(use: Use) -> None:
    use("Bash", command="head -c 1000 /dev/urandom > kernels/a.bin; printf 'a\\0b' > kernels/b.bin")
    assert use("Read", file_path="kernels/a.bin") == "kernels/a.bin: a binary file; only text is read."
    assert use("Read", file_path="kernels/b.bin") == "kernels/b.bin: a binary file; only text is read."


def test_long_output_keeps_head_and_tail_and_says_what_was_cut() -> None:
    text = readable("a" * 5000 + "z" * 5000, 1000)
    assert text == "a" * 480 + "\n[... 9040 characters cut ...]\n" + "z" * 480
    assert readable("\x1b[31mred\x1b[0m\ttab\x07\r\n", 100) == "red\ttab\n"


def test_matches_are_shown_if_a_file_is_missing_or_cannot_be_read(use: Use, tools: Tools) -> None:
    del tools.workspace.files["model_new.py"]  # as in a task from which no file to begin with can be made
    found = use("Grep", pattern="class Model", output_mode="count")
    assert found == "SKILL.md:1\nmodel.py:1"
    use("Bash", command="echo 'class Model' > kernels/a.cpp; chmod 000 kernels/a.cpp")
    assert use("Grep", pattern="class Model", output_mode="count") == found


def test_integers_of_any_length_end_no_episode(use: Use) -> None:
    number = int("9" * 400)
    assert use("Bash", command="echo a", timeout=number) == "a\n"
    assert use("Read", file_path="model.py", limit=number).startswith("    1\t")
    assert "lines." in use("Read", file_path="model.py", offset=number)
    assert use("Grep", pattern="nowhere-to-be-found", head_limit=number) == "Nothing found."


def test_files_are_found_by_pattern_and_content(use: Use) -> None:
    use("Write", file_path="kernels/forward.cpp", content="float a;\nFLOAT b;\n")
    assert use("Glob", pattern="kernels/*.cpp") == "kernels/forward.cpp"
    assert use("Glob", pattern="*.cpp", path="kernels") == "kernels/forward.cpp"
    assert use("Glob", pattern="**/*.cpp").splitlines() == ["binding.cpp", "kernels/forward.cpp"]
    assert use("Glob", pattern="*.rs") == "No file matches *.rs."
    assert use("Glob", pattern="kernels/**") == "kernels/forward.cpp"
    assert use("Glob", pattern="/workspace/**/forward.cpp") == "kernels/forward.cpp"
    assert {"model.py", "kernels/forward.cpp", "utils/ask.py"} <= set(use("Glob", pattern="**").splitlines())
    assert (
        use("Grep", pattern=r"^float\s\w;", output_mode="content", path="kernels")
        == "kernels/forward.cpp:1:float a;"
    )
    assert (
        use("Grep", **{"pattern": "float", "-i": True, "output_mode": "count", "path": "kernels"})
        == "kernels/forward.cpp:2"
    )
    assert "kernels/forward.cpp" in use("Grep", pattern="float").splitlines()
    assert use("Grep", pattern="nowhere-to-be-found") == "Nothing found."
    assert (
        use("Grep", pattern="float", output_mode="content", path="vec.h", head_limit=1)
        .splitlines()[1]
        .endswith("more lines]")
    )
    assert use("Grep", pattern="(").startswith("Nothing found. grep:")


def test_every_tool_is_described_by_a_schema() -> None:
    found = {tool["function"]["name"]: tool["function"] for tool in descriptions()}
    assert (
        set(found)
        == {
            "Bash",
            "BashOutput",
            "KillBash",
            "Read",
            "Write",
            "Edit",
            "MultiEdit",
            "Glob",
            "Grep",
            "TodoWrite",
        }
        == set(TOOLS)
    )
    assert set(found["Grep"]["parameters"]["properties"]) >= {
        "pattern",
        "-i",
        "-A",
        "output_mode",
        "head_limit",
    }
    assert found["Write"]["parameters"]["required"] == ["file_path", "content"]


def test_a_todo_list_is_counted(use: Use) -> None:
    todos = [
        {"content": "a", "status": "completed", "activeForm": "doing a"},
        {"content": "b", "status": "pending"},
    ]
    assert use("TodoWrite", todos=todos) == "Todos: 1 completed, 0 in_progress, 1 pending."
    assert use("TodoWrite", todos="not a list").startswith("invalid tool call: TodoWrite: todos:")
