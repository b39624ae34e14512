"""Claims about the agent's shell: what it keeps, what ends a command, and that nothing leads outside.

The shell is the real one, inside bubblewrap; the judge is that of agent_fixtures.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from agent_fixtures import kernel
from agent_tool_fixtures import Use
from agent_tool_fixtures import tools as tools
from agent_tool_fixtures import use as use

from components.agent import shell, untrusted_folder
from components.agent.shell_disk import MAX_DISK_BYTES
from components.agent.tools import JudgeFailed, Tools
from components.core.config import PROJECT
from components.core.errors import UserError
from components.judge.verdict import Verdict
from components.sandbox.isolation import can_change_uid


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


@pytest.mark.parametrize("background", [False, True])
def test_a_failure_of_the_judge_is_no_output_of_a_command(use: Use, background: bool) -> None:
    use("Write", file_path="kernels/forward.cpp", content=kernel("infrastructure"))
    asking = "python3 -m utils.verification; echo code $?"
    with pytest.raises(JudgeFailed, match="no_memory"):
        said = use("Bash", command=asking, run_in_background=background)
        name = said.split()[1]
        while "code" not in said:  # the failure is raised before the output is shown
            said = use("BashOutput", bash_id=name)


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


def test_a_shell_with_all_processes_that_it_may_have_leaves_other_shells_theirs(tools: Tools) -> None:
    full, other = (shell.Shell(tools.sandbox, {}, lambda _: ("", 0)) for _ in range(2))
    try:
        name = full.start("while sleep 300 & do :; done; sleep 300")
        assert comes_to_pass(lambda: "fork" in (full.new_output(name) or ("", ""))[0])
        answer = other.run("for i in $(seq 20); do sleep 0.01 & done; wait; echo fine", 60)
        assert answer.output == "fine\n"
    finally:
        full.close()
        other.close()


def test_a_background_command_is_followed_and_killed(use: Use) -> None:
    name = use("Bash", command="echo one; sleep 0.3; echo two; sleep 300", run_in_background=True).split()[1]
    deadline, said = time.monotonic() + 120, ""
    while "two" not in said and time.monotonic() < deadline:
        said += use("BashOutput", bash_id=name)
        time.sleep(0.05)
    assert "one\n" in said and "two\n" in said and said.endswith("[running]")
    assert use("KillBash", shell_id=name) == f"Killed {name}."
    assert comes_to_pass(lambda: "sleep" not in use("Bash", command="cat /proc/*/comm"))
    assert use("BashOutput", bash_id="bash_99") == "bash_99: no background command of this name."


def test_a_background_command_that_exits_or_is_killed_has_ended(use: Use) -> None:
    name = use("Bash", command="exit 3", run_in_background=True).split()[1]
    assert comes_to_pass(lambda: use("BashOutput", bash_id=name) == "[ended with exit code 3]")
    assert use("KillBash", shell_id=name) == f"Killed {name}."
    assert use("BashOutput", bash_id=name) == "[ended with exit code 3]"
    name = use("Bash", command="sleep 300", run_in_background=True).split()[1]
    use("KillBash", shell_id=name)
    assert use("BashOutput", bash_id=name) == "[ended with exit code 137]"


def test_a_background_command_does_not_run_in_the_shell_that_replaces_its_own(use: Use) -> None:
    name = use("Bash", command="sleep 300", run_in_background=True).split()[1]
    use("Bash", command="exit")
    assert use("Bash", command="echo here") == "here\n"
    assert use("KillBash", shell_id=name) == f"Killed {name}."
    assert use("BashOutput", bash_id=name) == "[killed with its shell]"


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


@pytest.mark.parametrize(
    "fill",
    [
        pytest.param(
            "d=$(printf 'a%.0s' $(seq 250)); for i in $(seq 20); do mkdir $d; cd $d; done; "
            "for i in $(seq 6); do head -c 60000000 /dev/zero > big$i; done; sleep 60",
            id="too-deep",
        ),
        pytest.param(
            "python3 -c \"import os, time\nkept = []\nfor i in range(6):\n    file = open('big', 'wb')\n"
            "    os.unlink('big')\n    file.write(bytes(60000000))\n    file.flush()\n"
            '    kept.append(file)\ntime.sleep(60)"',
            id="removed",
        ),
    ],
)
def test_no_bytes_are_hidden_from_the_limit(use: Use, fill: str) -> None:
    assert "more than 256 MB" in use("Bash", command=fill, timeout=50_000)
    assert use("Bash", command="cd /workspace; ls") != ""


def test_what_runs_in_the_background_cannot_fill_the_disk(use: Use, tools: Tools) -> None:
    fill = "for i in $(seq 100); do head -c 60000000 /dev/zero > big$i; sleep 0.3; done; sleep 60"
    name = use("Bash", command=fill, run_in_background=True).split()[1]
    assert comes_to_pass(lambda: "[killed with its shell]" in use("BashOutput", bash_id=name))
    assert tools._shell is not None
    assert untrusted_folder.used_bytes(tools._shell.base, 1 << 40, 1 << 20) < 2 * MAX_DISK_BYTES
    assert "model_new.py" in use("Bash", command="ls")


SWAPPING = """
import ctypes, os, shutil, sys, time
libc = ctypes.CDLL(None)
folder, link = "/workspace/kernels", "/workspace/link"
while True:
    try:
        if not os.path.islink(folder) and not os.path.islink(link):
            shutil.rmtree(link, ignore_errors=True)
            os.symlink(sys.argv[1], link)
        for path in (folder, link):
            if not os.path.islink(path) and not os.path.isdir(path + "/kept"):
                if os.path.lexists(path + "/kept"):
                    os.unlink(path + "/kept")
                os.makedirs(path + "/kept/a/b")
    except OSError:
        pass
    libc.renameat2(-100, folder.encode(), -100, link.encode(), 2)
    time.sleep(0.001)
"""


def test_a_folder_that_becomes_a_link_at_any_time_leads_nowhere(use: Use, tmp_path: Path) -> None:
    """A file is written into kernels/, in place of a folder, while a command swaps kernels/ for a link."""
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    outside.chmod(0o711)
    use("Bash", command=f"cat > /tmp/swap.py <<'END'\n{SWAPPING}END")
    use("Bash", command=f"python3 /tmp/swap.py {outside}", run_in_background=True)
    for number in range(25):
        use("Write", file_path="kernels/kept", content=f"{number}\n")
        use("Bash", command="true")
    assert (outside / "kept").is_dir() and outside.stat().st_mode & 0o777 == 0o711
    assert list(outside.iterdir()) == [outside / "kept"]


DETACHING = """
import sys
fixtures, marker = sys.argv[1:]
sys.path.insert(0, fixtures)
from agent_fixtures import TASK, params
from components.agent.shell import Shell
keep = "import ctypes, time; print(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)); time.sleep(%s)" % marker
shell = Shell(params().sandbox, {"model.py": TASK.code}, lambda utility: ("", 0))
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


def test_a_command_that_writes_to_the_descriptor_of_the_replies_deceives_only_itself(use: Use) -> None:
    # The shell closes its end of the substitution's own pipe only after it has forked.
    of_replies = "$(sleep 0.1; ls -l /proc/$$/fd | awk '/pipe/ && /l-wx/ {print $9}')"
    use("Bash", command=f"junk() {{ eval \"printf 'junk%b' '$1' >&{of_replies}\"; }}")
    assert use("Bash", command="junk ' 0\\n'; sleep 1; (exit 3)") == "[exit 3]"
    assert use("Bash", command="echo next; (exit 4)") == "next\n[exit 4]"
    assert use("Bash", command="junk ''; (exit 5)") == "[exit 5]"
    assert use("Bash", command="while junk '\\n'; do sleep 0.01; done", timeout=2000).startswith(
        ("[took longer than 2 s", "[the shell ended")
    )
    assert use("Bash", command="(exit 6)") == "[exit 6]"
