"""Claims about the agent's tools: what agents expect of each, and that nothing leads out of the workspace.

The shell is the real one, inside bubblewrap; the judge is that of agent_world.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_fixtures import MEASURE, TASK, kernel, params, verdict_of

from components.agent.tool_parser import Request
from components.agent.tool_schemas import TOOLS, descriptions
from components.agent.tools import Tools
from components.agent.utility_output import COMMANDS
from components.agent.workspace import Workspace
from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.text import readable
from components.judge.verdict import Verdict
from components.sandbox.isolation import can_change_uid

Use = Callable[..., str]


@pytest.fixture
def tools() -> Iterator[Tools]:
    workspace = Workspace(TASK)
    made = Tools(workspace, params().sandbox, lambda: verdict_of(workspace.files))
    yield made
    made.close()


@pytest.fixture
def use(tools: Tools) -> Use:
    def call(name: str, **arguments: Any) -> str:
        return tools.run(Request(name, arguments)).observation

    return call


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


def test_a_binary_file_is_not_shown(use: Use) -> None:
    use("Bash", command="head -c 1000 /dev/urandom > kernels/a.bin; printf 'a\\0b' > kernels/b.bin")
    assert use("Read", file_path="kernels/a.bin") == "kernels/a.bin: a binary file; only text is read."
    assert use("Read", file_path="kernels/b.bin") == "kernels/b.bin: a binary file; only text is read."


def test_long_output_keeps_head_and_tail_and_says_what_was_cut() -> None:
    text = readable("a" * 5000 + "z" * 5000, 1000)
    assert text == "a" * 480 + "\n[... 9040 characters cut ...]\n" + "z" * 480
    assert readable("\x1b[31mred\x1b[0m\ttab\x07\r\n", 100) == "red\ttab\n"


def test_files_are_found_by_pattern_and_content(use: Use) -> None:
    use("Write", file_path="kernels/forward.cpp", content="float a;\nFLOAT b;\n")
    assert use("Glob", pattern="kernels/*.cpp") == "kernels/forward.cpp"
    assert use("Glob", pattern="*.cpp", path="kernels") == "kernels/forward.cpp"
    assert use("Glob", pattern="**/*.cpp").splitlines() == ["binding.cpp", "kernels/forward.cpp"]
    assert use("Glob", pattern="*.rs") == "No file matches *.rs."
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


# --- shell ----------------------------------------------------------------------------------------


def test_the_shell_keeps_directory_variables_and_functions(use: Use) -> None:
    assert use("Bash", command="cd kernels; export A=5; f() { echo $A in $(pwd); }") == "[no output]"
    assert use("Bash", command="f; false") == "5 in /workspace/kernels\n[exit 1]"


def test_the_utilities_inside_the_shell_ask_the_judge(use: Use, tools: Tools) -> None:
    use("Write", file_path="kernels/forward.cpp", content=kernel(3.0))
    said = use(
        "Bash",
        command=(
            "bash utils/compile.sh && python3 -m utils.verification && python3 -m utils.profiling | head -1;"
            " echo '// wrong' > kernels/forward.cpp"
        ),
    )
    assert said.splitlines() == [
        "Build succeeded.",
        "[PASS] verify success",
        "Torch Baseline: 1000.0 us, Torch Compile: 500.0 us, CUDA Extension: 333.3 us",
    ]
    assert (
        use("Bash", command="python3 -m utils.verification || echo code $?")
        == "[FAIL] wrong_output: max_error:given\ncode 1\n"
    )
    assert [verdict.status for verdict in tools.verdicts] == ["correct", "correct", "correct", "wrong_output"]


def test_the_socket_only_asks(use: Use, tools: Tools) -> None:
    script = (
        "import os,socket;s=socket.socket(socket.AF_UNIX);s.connect(os.environ['JUDGE_SOCKET']);"
        "s.send(b'shutdown\\n');print(s.recv(99))"
    )
    assert "ask for compile, verification or profiling" in use("Bash", command=f'python3 -c "{script}"')
    assert tools.verdicts == []


def test_a_judge_that_cannot_work_is_not_the_policys_affair(tools: Tools, use: Use) -> None:
    def broken() -> Verdict:
        raise UserError("sandbox.isolation: bubblewrap is not installed")

    tools.judge = broken
    with pytest.raises(UserError, match="bubblewrap is not installed"):
        use("Bash", command="cd /workspace; python3 -m utils.verification")


def test_a_command_that_takes_too_long_is_ended_with_its_children(use: Use) -> None:
    begun = time.monotonic()
    assert "took longer than 0.5 s and was ended" in use("Bash", command="sleep 77 & sleep 78", timeout=500)
    assert time.monotonic() - begun < 60
    assert use("Bash", command="ls /proc | grep -c '^[0-9]' ; echo in $(pwd)").endswith("in /workspace\n")
    assert "sleep" not in use("Bash", command="cat /proc/*/comm")


def test_a_shell_that_ends_itself_is_replaced(use: Use) -> None:
    assert (
        use("Bash", command="exit 3")
        == "[the shell ended with exit code 3; a new one starts with the next command]"
    )
    assert use("Bash", command="echo here") == "here\n"


def test_a_background_command_is_followed_and_killed(use: Use) -> None:
    name = use("Bash", command="echo one; sleep 0.3; echo two; sleep 300", run_in_background=True).split()[1]
    deadline, said = time.monotonic() + 120, ""
    while "two" not in said and time.monotonic() < deadline:
        said += use("BashOutput", bash_id=name)
        time.sleep(0.05)
    assert "one\n" in said and "two\n" in said and said.endswith("[running]")
    assert use("KillBash", shell_id=name) == f"Killed {name}."
    assert "sleep" not in use("Bash", command="cat /proc/*/comm")
    assert use("BashOutput", bash_id="bash_99") == "bash_99: no background command of this name."


def test_a_shell_answers_a_process_that_holds_a_thousand_descriptors(use: Use) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert use("Bash", command="echo here") == "here\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_command_that_daemonises_blocks_nothing_and_ends_with_the_trajectory(
    use: Use, tools: Tools
) -> None:
    marker = f"77{os.getpid()}"
    begun = time.monotonic()
    assert use("Bash", command=f"setsid nohup sleep {marker} & disown; echo gone") == "gone\n"
    assert time.monotonic() - begun < 60
    assert comes_to_pass(
        lambda: sleeps(marker)
    )  # the shell's answer may come before the child has become `sleep`
    tools.close()
    assert comes_to_pass(lambda: not sleeps(marker))


def comes_to_pass(claim: Callable[[], bool], seconds: float = 60) -> bool:
    """Wait up to `seconds` until `claim` holds, and return whether it does."""
    deadline = time.monotonic() + seconds
    while not (holds := claim()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds  # asked once more, a process in the middle of execve would have no command line


def sleeps(marker: str) -> bool:
    return any(f"sleep\0{marker}" in line for line in command_lines())


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return found


def test_endless_output_is_held_and_both_ends_are_shown(use: Use) -> None:
    said = use("Bash", command="echo first; yes | head -c 100000000; echo last", timeout=60_000)
    assert said.startswith("first\ny\n") and "cut ...]" in said and len(said) <= 30_000


def test_a_full_disk_ends_the_command_not_the_machine(use: Use) -> None:
    said = use(
        "Bash",
        command="for i in $(seq 20); do head -c 60000000 /dev/zero > big$i; done; sleep 60",
        timeout=50_000,
    )
    assert "more than 256 MB" in said
    assert use("Bash", command="rm -f big*; echo fine") == "fine\n"


def test_links_and_pipes_are_not_followed(use: Use, tools: Tools) -> None:
    secret = "/etc/hostname"
    use("Bash", command=f"rm -r kernels model_new.py; ln -s /etc kernels; ln -s {secret} model_new.py")
    assert tools.workspace.files == {}
    assert "no such file" in use("Read", file_path="kernels/hostname")
    assert use("Write", file_path="kernels/forward.cpp", content="int a;\n") == "Written kernels/forward.cpp."
    assert use("Bash", command="ls -A kernels; mkfifo kernels/pipe") == "forward.cpp\n"
    assert set(tools.workspace.files) == {"kernels/forward.cpp"}


def test_the_shell_sees_no_network_and_nothing_of_the_machine(use: Use) -> None:
    probe = (
        "import socket\ntry: socket.create_connection(('127.0.0.1', 22), 1)\nexcept OSError as e:"
        " print(type(e).__name__)"
    )
    assert use("Bash", command=f'python3 -c "{probe}"').strip() in ("ConnectionRefusedError", "OSError")
    assert use("Bash", command="cat /etc/passwd /etc/shadow 2>&1 | grep -c root") == "0\n[exit 1]"
    assert (
        use("Bash", command="echo x 2>&1 >> SKILL.md; echo y 2>&1 >> utils/compile.py; echo $?").splitlines()[
            -1
        ]
        == "1"
    )


def test_the_shell_sees_no_variable_of_whoever_judges(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubblewrap's own process would tell them to a shell of the same user."""
    monkeypatch.setenv("PLANTED_TOKEN", "a secret")
    assert (
        use("Bash", command="cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c PLANTED")
        == "0\n[exit 1]"
    )
    if (
        not can_change_uid()
    ):  # of root's, bubblewrap is another user's process; no pattern matches its own command line
        assert (
            use(
                "Bash",
                command="cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c -e '--ro[-]bind' -e '^b[w]rap'",
            ).splitlines()[-1]
            == "[exit 1]"
        )
    assert (
        use(
            "Bash",
            command=(
                "for p in / /etc /dev /dev/shm /usr; do (echo x > $p/mark) 2>/dev/null && echo $p; done; true"
            ),
        )
        == "[no output]"
    )


def test_folders_that_are_closed_to_their_owner_hold_nobody_up(use: Use, tools: Tools) -> None:
    assert (
        use("Bash", command="mkdir -p kernels; echo 1 > kernels/a.cpp; chmod 000 kernels 2>/dev/null; true")
        == "[no output]"
    )
    assert use("Write", file_path="kernels/b.cpp", content="int b;\n") == "Written kernels/b.cpp."
    assert "b.cpp" in use("Bash", command="ls kernels; mkdir -p kernels/c/d; chmod 000 kernels/c; true")
    assert use("Write", file_path="kernels/c", content="int c;\n") == "Written kernels/c."
    assert "int c;" in use("Bash", command="cat kernels/c; chmod 555 . 2>/dev/null; true")
    use("Read", file_path="model_new.py")
    assert use("Write", file_path="model_new.py", content="x = 1\n") == "Written model_new.py."
    assert use("Bash", command="cat model_new.py") == "x = 1\n"


def test_a_folder_that_cannot_be_looked_into_hides_no_bytes(use: Use) -> None:
    fill = (
        "mkdir hidden; cd hidden; chmod 0300 .; for i in $(seq 20); do head -c 60000000 /dev/zero > big$i;"
        " done; sleep 60"
    )
    assert "more than 256 MB" in use("Bash", command=fill, timeout=50_000)


DETACHING = """
import sys
fixtures, marker = sys.argv[1:]
sys.path.insert(0, fixtures)
from agent_fixtures import TASK, params
from components.agent.shell import Shell
keep = "import ctypes, time; print(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)); time.sleep(%s)" % marker
shell = Shell(params().sandbox, TASK.code, lambda utility: ("", 0))
shell.start(f"setsid python3 -c '{keep}'")
said = shell.run(f"(setsid sleep {marker} &) ; echo begun", 60)
print(said.output, flush=True)
shell.run(f"exec python3 -c '{keep}'", 300)
"""


def test_nothing_that_a_command_detached_outlives_a_killed_judge() -> None:
    """A command cannot keep its process after its parent, even as the sandbox's first process."""
    marker = f"31{os.getpid()}"

    def detached() -> set[int]:
        processes = {process.pid: process.info["cmdline"] for process in psutil.process_iter(["cmdline"])}
        ends = (marker, f"sleep({marker})")
        return {
            pid
            for pid, words in processes.items()
            if pid != judge.pid and any(word.endswith(ends) for word in words or ())
        }

    command = [sys.executable, "-c", DETACHING, str(PROJECT / "tests" / "fixtures"), marker]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as judge:
        try:
            assert judge.stdout is not None and judge.stdout.readline() == "begun\n"
            assert comes_to_pass(lambda: len(detached()) >= 3, 120), detached()
            time.sleep(1)  # all three have asked to be kept by now
            assert len(detached()) >= 3
        finally:
            judge.kill()
    assert comes_to_pass(lambda: not detached()), "a process outlives its judge"
