"""The tools of the agent: Write, Edit, Read and Bash, with the argument names that the field uses.

Tool calls are read from text in the Qwen3-Coder form or as Hermes JSON. What does not parse, or names no tool, becomes
an observation and is marked invalid, for the filter of stage 2.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.agent.trajectory import ToolCall
from components.agent.workspace import Workspace, observe_build, observe_profiling, observe_verification
from components.config import PROJECT, Sandbox
from components.sandbox import isolation
from components.sandbox.verdict import Verdict, clean

BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\n]+)>\n?(.*?)</function>\Z", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n?</parameter>", re.DOTALL)
UTILITIES = ("bash utils/compile.sh", "python3 -m utils.verification", "python3 -m utils.profiling")
MAX_CALLS = 16
SHELL_SECONDS = 30
FAILURE = "invalid tool call"


@dataclass(frozen=True)
class Request:
    """A tool call as the policy asked for it; `error` when it could not be read."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


def parse_calls(text: str) -> list[Request]:
    """Every tool call of an assistant message, in order; at most 16."""
    requests = []
    for block in BLOCK.findall(text)[:MAX_CALLS]:
        function = FUNCTION.search(block)
        if function is not None:
            arguments: dict[str, Any] = dict(PARAMETER.findall(function.group(2)))
            requests.append(Request(function.group(1).strip(), arguments))
            continue
        try:
            value = json.loads(block)
            requests.append(Request(str(value["name"]), dict(value.get("arguments") or {})))
        except (ValueError, KeyError, TypeError):
            requests.append(Request("", {}, "a call is <function=NAME>, its <parameter=…> and </function>, or one JSON object with name and arguments"))
    return requests


class Tools:
    """Runs the calls of one episode on its workspace. `judge` gives the verdict on the files as they are."""

    def __init__(self, workspace: Workspace, sandbox: Sandbox, judge: Callable[[], Verdict]):
        self.workspace = workspace
        self.sandbox = sandbox
        self.judge = judge
        self.verdicts: list[Verdict] = []

    def run(self, request: Request) -> ToolCall:
        """Execute one call; whatever is wrong with it is told to the policy."""
        tools: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
            "Write": (("file_path", "content"), self.write),
            "Edit": (("file_path", "old_string", "new_string"), self.edit),
            "Read": (("file_path",), self.read),
            "Bash": (("command",), self.bash),
        }
        error = request.error
        if not error and request.name not in tools:
            error = f"no tool is called {request.name[:40]}; there are {', '.join(tools)}"
        if not error:
            names, tool = tools[request.name]
            missing = [name for name in names if not isinstance(request.arguments.get(name), str)]
            error = f"{request.name} needs {', '.join(missing)}" if missing else ""
        if error:
            return ToolCall(request.name, request.arguments, f"{FAILURE}: {error}.", valid=False)
        return ToolCall(request.name, request.arguments, clean(tool(*(request.arguments[name] for name in names))))

    def write(self, path: str, content: str) -> str:
        plain = self.workspace.writable(path.strip())
        if plain is None:
            return f"{path[:80]}: not writable; write model_new.py or kernels/NAME."
        self.workspace.files[plain] = content if content.endswith("\n") else content + "\n"
        return f"Written {plain}."

    def edit(self, path: str, old: str, new: str) -> str:
        plain = self.workspace.writable(path.strip())
        if plain is None or plain not in self.workspace.files:
            return f"{path[:80]}: no such file to edit; Write it first."
        found = self.workspace.files[plain].count(old)
        if not old or found != 1:
            return f"{plain}: old_string occurs {found} times; it must occur exactly once."
        self.workspace.files[plain] = self.workspace.files[plain].replace(old, new)
        return f"Edited {plain}."

    def read(self, path: str) -> str:
        plain = path.strip().removeprefix("/workspace/").removeprefix("./")
        if plain == "model.py":
            return self.workspace.task.code
        template = {"SKILL.md", "binding.cpp", "binding_registry.h", "vec.h"}
        if plain in template:
            return (PROJECT / "agent_workdir" / plain).read_text()
        return self.workspace.files.get(plain, f"{plain[:80]}: no such file.")

    def bash(self, command: str) -> str:
        """The three measured utilities reach the judge; anything else runs in a sandboxed copy of the workspace."""
        parts = [part.strip() for part in command.strip().split("&&")]
        if all(part in UTILITIES for part in parts):
            return self.utilities(parts)
        return self.shell(command)

    def utilities(self, parts: list[str]) -> str:
        verdict = self.judge()
        self.verdicts.append(verdict)
        said: list[str] = []
        for part in parts:
            failed = observe_build(verdict)
            if failed is not None:
                return "\n".join([*said, failed])
            if part == UTILITIES[0]:
                continue
            if part == UTILITIES[1] or verdict.status != "correct":
                said.append(observe_verification(verdict))
                if verdict.status != "correct":
                    break
            else:
                said.append(observe_profiling(verdict))
        return "\n".join(said) or "Build succeeded."

    def shell(self, command: str) -> str:
        """One command in bash inside the walls; changes to model_new.py and kernels/ come back."""
        with tempfile.TemporaryDirectory(prefix="shell-") as folder:
            root = Path(folder)
            (root / "kernels").mkdir()
            for name, text in (self.workspace.files | {"model.py": self.workspace.task.code}).items():
                (root / name).write_text(text)
            for path in (root, root / "kernels"):
                path.chmod(0o777)
            argv = ["bash", "-c", command]
            if self.sandbox.isolation == "bubblewrap":
                walls = isolation.bubblewrap(device="cpu", read_only=[], writable=[], temporary_bytes=1 << 26, keep_capabilities=False)
                limits = isolation.confined(argv, memory_bytes=1 << 31, file_bytes=1 << 22, seconds=SHELL_SECONDS)
                argv = [*walls[: walls.index("--chdir")], "--bind", folder, "/workspace", "--chdir", "/workspace", "--", *limits]
            try:
                result = subprocess.run(argv, capture_output=True, timeout=SHELL_SECONDS, stdin=subprocess.DEVNULL, cwd=folder, check=False)
                said = (result.stdout + result.stderr).decode(errors="replace") + (f"\n[exit {result.returncode}]" if result.returncode else "")
            except subprocess.TimeoutExpired:
                return f"[the command took longer than {SHELL_SECONDS} s and was ended]"
            self._take_back(root)
        return said or "[no output]"

    def _take_back(self, root: Path) -> None:
        for path in [root / "model_new.py", *(root / "kernels").iterdir()]:
            name = path.relative_to(root).as_posix()
            if self.workspace.writable(name) is None or path.is_symlink() or not path.is_file() or os.stat(path).st_size > 1 << 20:
                continue
            self.workspace.files[name] = path.read_text(errors="replace")
