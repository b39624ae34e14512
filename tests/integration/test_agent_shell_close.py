"""The end of the agent's shell while other threads use it: nothing is left, and no file is lost."""

import contextlib
import shutil
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agent_tool_fixtures import Use
from agent_tool_fixtures import tools as tools
from agent_tool_fixtures import use as use

from components.agent import shell, shell_disk
from components.agent.tools import Tools


def test_a_shell_leaves_its_folders_alone_once_it_is_closed(
    use: Use, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Semaphore(0), list[bool]()

    def look(base: Path, pid: int) -> bool:
        begun.release()
        time.sleep(0.3)
        ended.append(base.exists())
        return False

    monkeypatch.setattr(shell, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(shell_disk, "is_full", look)
    assert use("Bash", command="true") == "[no output]"
    assert begun.acquire(timeout=60)
    tools.close()
    assert ended and all(ended)


def test_a_shell_that_starts_while_its_tools_are_closed_is_ended(
    use: Use, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, made = threading.Event(), list[shell.Shell]()

    class Slow(shell.Shell):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            starts.set()
            time.sleep(0.3)
            super().__init__(*arguments)

    monkeypatch.setattr("components.agent.tools.Shell", Slow)
    with ThreadPoolExecutor(1) as executor:
        command = executor.submit(use, "Bash", command="sleep 300")
        assert starts.wait(60)
        tools.close()
        with contextlib.suppress(CancelledError):
            command.result(60)
    assert made[0].process is None and not made[0].base.exists()


def test_a_command_in_the_background_takes_no_files_away_when_the_tools_are_closed(
    use: Use, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(folder: Path) -> None:
        shutil.rmtree(folder)
        tools._pull()

    use("Write", file_path="kernels/forward.cpp", content="// one")
    use("Bash", command="echo '// two' >> kernels/forward.cpp")
    monkeypatch.setattr(shell, "remove_tree", remove)
    tools.close()
    assert tools.workspace.files["kernels/forward.cpp"] == "// one\n// two\n"
