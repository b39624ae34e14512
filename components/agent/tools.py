"""The tools of the agent, by the names and with the argument names that the field uses.

Files live in memory. A shell starts with the first command that needs one, gets the files as they are, and after
that whatever it changes in model_new.py and kernels/ comes back. The measured utilities alone need no shell.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import threading
from collections.abc import Callable

from components.agent import tool_schemas, untrusted_folder
from components.agent.judge_socket import Asking
from components.agent.shell import CommandResult, Shell
from components.agent.tool_parser import Request
from components.agent.tool_schemas import Arguments, validated
from components.agent.trajectory import ToolCall
from components.agent.workspace import (
    Workspace,
    observe_build,
    observe_profiling,
    observe_verification,
    plain_path,
)
from components.core.config import Sandbox
from components.core.text import readable
from components.judge.verdict import Verdict

UTILITIES = ("bash utils/compile.sh", "python3 -m utils.verification", "python3 -m utils.profiling")
SHELL_SECONDS = 120.0
MAX_SHELL_SECONDS = 600.0
SEARCH_SECONDS = 20.0
FEWEST_CHARACTERS, MOST_CHARACTERS = 2000, 30_000
LINES, LINE_CHARACTERS = 2000, 2000
FAILURE = "invalid tool call"


class Tools:
    """Runs the calls of one trajectory on its workspace. `judge` gives the verdict on the files as they are.

    `context` is the policy's window in tokens: an observation takes about a sixteenth of it at most. With `read_first`
    a file that the policy has neither read nor written cannot be overwritten.
    """

    def __init__(
        self,
        workspace: Workspace,
        sandbox: Sandbox,
        judge: Callable[[], Verdict],
        *,
        context: int = 1 << 17,
        read_first: bool = True,
    ):
        self.workspace = workspace
        self.sandbox = sandbox
        self.judge = judge
        self.limit = max(FEWEST_CHARACTERS, min(MOST_CHARACTERS, context // 4))
        self.read_first = read_first
        self.verdicts: list[Verdict] = []
        self.known: dict[str, str] = {}
        self.lock = threading.RLock()
        self._shell: Shell | None = None
        self._asking: Asking | None = None
        self._in_folder: dict[str, str] = {}

    def run(self, request: Request) -> ToolCall:
        """Execute one call; whatever is wrong with it is told to the policy."""
        given = request.error or validated(request.name, request.arguments)
        if isinstance(given, str):
            return ToolCall(request.name, request.arguments, f"{FAILURE}: {given}.", valid=False)
        before = len(self.verdicts)
        self._pull()
        observation = readable(self._dispatch(given), self.limit)
        return ToolCall(request.name, request.arguments, observation, verdicts=len(self.verdicts) - before)

    def _dispatch(self, given: Arguments) -> str:
        match given:
            case tool_schemas.Write():
                return self.write(given.file_path, given.content)
            case tool_schemas.Edit():
                return self.edit(given.file_path, [tool_schemas.OneEdit.model_construct(**dict(given))])
            case tool_schemas.MultiEdit():
                return self.edit(given.file_path, given.edits)
            case tool_schemas.Read():
                return self.read(given.file_path, given.offset or 1, given.limit or LINES)
            case tool_schemas.Bash():
                return self.bash(given)
            case tool_schemas.BashOutput():
                found = self._shell.new_output(given.bash_id) if self._shell is not None else None
                return (
                    self._no_job(given.bash_id) if found is None else f"{found[0]}\n[{found[1]}]".lstrip("\n")
                )
            case tool_schemas.KillBash():
                killed = self._shell is not None and self._shell.kill(given.shell_id)
                return f"Killed {given.shell_id[:40]}." if killed else self._no_job(given.shell_id)
            case tool_schemas.Glob():
                return self.glob(given.pattern, given.path)
            case tool_schemas.Grep():
                return self.grep(given)
            case tool_schemas.TodoWrite():
                counts = [
                    f"{sum(todo.status == status for todo in given.todos)} {status}"
                    for status in ("completed", "in_progress", "pending")
                ]
                return f"Todos: {', '.join(counts)}."
        raise AssertionError(f"no tool for {type(given).__name__}")

    def _no_job(self, name: str) -> str:
        return f"{name[:40]}: no background command of this name."

    # --- files ---------------------------------------------------------------------------------------------------------

    def write(self, path: str, content: str) -> str:
        plain = self.workspace.writable(path)
        if plain is None:
            return f"{path[:80]}: not writable; write model_new.py or kernels/NAME."
        there = self.workspace.files.get(plain)
        if self.read_first and there is not None and self.known.get(plain) != there:
            return self._unread(plain)
        if len(content) > untrusted_folder.MAX_FILE_BYTES:
            return f"{plain}: {len(content)} characters are more than the {untrusted_folder.MAX_FILE_BYTES} that a source file may have."
        self._keep(plain, content if content.endswith("\n") else content + "\n")
        return f"Written {plain}."

    def edit(self, path: str, edits: list[tool_schemas.OneEdit]) -> str:
        """All edits in order, or none."""
        plain = self.workspace.writable(path)
        text = self.workspace.files.get(plain) if plain is not None else None
        if plain is None or text is None:
            return f"{path[:80]}: no such file to edit; Write it first."
        if self.read_first and self.known.get(plain) != text:
            return self._unread(plain)
        for number, edit in enumerate(edits, 1):
            which = f"edit {number} of {len(edits)}: " if len(edits) > 1 else ""
            none = " No edit was made." if len(edits) > 1 else ""
            found = text.count(edit.old_string) if edit.old_string else 0
            if found == 0 or (found > 1 and not edit.replace_all):
                ask = "at least once" if edit.replace_all else "exactly once"
                return f"{plain}: {which}old_string occurs {found} times; it must occur {ask}.{none}"
            if edit.old_string == edit.new_string:
                return f"{plain}: {which}old_string and new_string are the same.{none}"
            text = text.replace(edit.old_string, edit.new_string)
            if len(text) > untrusted_folder.MAX_FILE_BYTES:
                return f"{plain}: {which}the file would have more than {untrusted_folder.MAX_FILE_BYTES} characters.{none}"
        self._keep(plain, text)
        return f"Edited {plain}."

    def _keep(self, path: str, text: str) -> None:
        with self.lock:
            self.workspace.files[path] = self.known[path] = text

    def _unread(self, path: str) -> str:
        return f"{path}: {'it has changed since you read it' if path in self.known else 'you have not read it'}; Read it first."

    def _text(self, path: str) -> str | None:
        """A file's text; what a shell made beside the candidate's files lies in its folder only."""
        found = self.workspace.read(path)
        if found is None and self._shell is not None and path.count("/") <= 1:
            data = untrusted_folder.read_bytes(self._shell.workspace, path)
            found = None if data is None else data.decode(errors="replace")
        return found

    def read(self, path: str, first: int, count: int) -> str:
        plain = plain_path(path)
        text = self._text(plain) if plain else None
        if plain is None or text is None:
            return f"{path.strip()[:80]}: no such file in the workspace."
        if "\0" in text or text.count("\ufffd") > max(3, len(text) // 10):
            return f"{plain}: a binary file; only text is read."
        if plain in self.workspace.files:
            self.known[plain] = text
        lines = text.splitlines()
        shown = lines[first - 1 : first - 1 + count]
        if not shown:
            return f"{plain}: it has {len(lines)} lines."
        said = [f"{number:>5}\t{line[:LINE_CHARACTERS]}" for number, line in enumerate(shown, first)]
        left = len(lines) - (first - 1 + len(shown))
        return "\n".join(
            [*said, *([f"[{left} more lines; read on with offset {first + len(shown)}]"] if left else [])]
        )

    def glob(self, pattern: str, path: str | None) -> str:
        start = plain_path(path or ".")
        if start is None:
            return f"{(path or '')[:80]}: outside the workspace."
        wanted = pattern.removeprefix("/workspace/").removeprefix("./")
        prefix = f"{start}/" if start else ""
        names = [name.removeprefix(prefix) for name in self._paths() if name.startswith(prefix)]
        found = [name for name in names if _matches(name, wanted)]
        return "\n".join(prefix + name for name in found) or f"No file matches {pattern[:80]}."

    def _paths(self) -> list[str]:
        found = set(self.workspace.paths())
        if self._shell is not None:
            found |= untrusted_folder.contents(self._shell.workspace).keys()
        return sorted(found)

    def grep(self, given: tool_schemas.Grep) -> str:
        """GNU grep inside the walls, where an expression that never ends is ended."""
        start = plain_path(given.path or ".")
        if start is None:
            return f"{(given.path or '')[:80]}: outside the workspace."
        words = [
            "grep",
            "-rIP",
            "--binary-files=without-match",
            f"--include={given.glob}" if given.glob else "",
            "-i" if given.ignore_case else "",
        ]
        if given.output_mode == "content":
            words += ["-n" if given.line_numbers else ""]
            words += [
                f"-{option}{value}"
                for option, value in (("A", given.after), ("B", given.before), ("C", given.context))
                if value is not None
            ]
        else:
            words += ["-l" if given.output_mode == "files_with_matches" else "-c"]
        places = (
            [start]
            if start
            else [
                "SKILL.md",
                "model.py",
                "model_new.py",
                "binding.cpp",
                "binding_registry.h",
                "vec.h",
                "kernels",
                "utils",
            ]
        )
        command = shlex.join([*(word for word in words if word), "-s", "-e", given.pattern, "--", *places])
        ended = self._in_shell(f"(cd /workspace && {command})", SEARCH_SECONDS)
        if ended.code is None or ended.code > 1 or (ended.code == 1 and not ended.output):
            trouble = ended.note or (ended.output.strip() if ended.code != 1 else "")
            return f"Nothing found. {trouble}".strip()
        lines = [
            line
            for line in ended.output.splitlines()
            if given.output_mode != "count" or not line.endswith(":0")
        ]
        left = len(lines) - (given.head_limit or len(lines))
        return "\n".join([*lines[: given.head_limit], *([f"[{left} more lines]"] if left > 0 else [])])

    # --- shell ---------------------------------------------------------------------------------------------------------

    def bash(self, given: tool_schemas.Bash) -> str:
        """The three measured utilities alone go to the judge at once; anything else runs in the shell."""
        parts = [part.strip() for part in given.command.strip().split("&&")]
        if not given.run_in_background and all(part in UTILITIES for part in parts):
            return self.utilities(parts)
        if given.run_in_background:
            shell = self._started()
            return f"Started {shell.start(given.command)} in the background."
        seconds = min(MAX_SHELL_SECONDS, given.timeout / 1000) if given.timeout else SHELL_SECONDS
        ended = self._in_shell(given.command, seconds)
        note = f"[{ended.note}]" if ended.note else f"[exit {ended.code}]" if ended.code else ""
        said = (
            f"{ended.output}\n{note}"
            if ended.output and note and not ended.output.endswith("\n")
            else ended.output + note
        )
        return said or "[no output]"

    def utilities(self, parts: list[str]) -> str:
        verdict = self._verdict()
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

    def _verdict(self) -> Verdict:
        verdict = self.judge()
        self.verdicts.append(verdict)
        return verdict

    def _answer(self, question: str) -> tuple[str, int]:
        """What a utility says inside the shell, and its exit code."""
        self._pull()
        verdict = self._verdict()
        failed = observe_build(verdict)
        if failed is not None:
            return failed, 1
        if question == "compile":
            return "Build succeeded.", 0
        if question == "profiling" and verdict.status == "correct":
            return observe_profiling(verdict), 0
        return observe_verification(verdict), int(verdict.status != "correct")

    def _started(self) -> Shell:
        if self._shell is None:
            self._shell = Shell(
                self.sandbox,
                self.workspace.task.code,
                waited=lambda: self._asking.waited() if self._asking else 0.0,
            )
            self._asking = Asking(self._shell.control / "judge.sock", self._answer)
        with self.lock:
            self._shell.push(self.workspace.files, self._in_folder)
            self._in_folder = dict(self.workspace.files)
        return self._shell

    def _in_shell(self, command: str, seconds: float) -> CommandResult:
        ended = self._started().run(command, seconds)
        self._pull()
        if self._asking is not None and self._asking.failure is not None:
            raise self._asking.failure  # the judge cannot work here: not the policy's affair
        return ended

    def _pull(self) -> None:
        """Take over what the shell has changed; what is in memory and not yet in its folder stays."""
        if self._shell is None:
            return
        with self.lock:
            found = self._shell.pull()
            for path in self._in_folder.keys() | found.keys():
                if found.get(path) == self._in_folder.get(path) or self.workspace.writable(path) is None:
                    continue
                if path in found:
                    self.workspace.files[path] = self._in_folder[path] = found[path]
                else:
                    self.workspace.files.pop(path, None)
                    self._in_folder.pop(path, None)

    def close(self) -> None:
        """Take the last changes over, and end the shell with everything that runs in it."""
        if self._shell is not None:
            self._pull()
            self._shell.close()
            self._shell = None
        if self._asking is not None:
            self._asking.close()
            self._asking = None


def _matches(name: str, pattern: str) -> bool:
    """Shell patterns in which `*` stays inside a folder and `**/` is any folders or none."""
    expression = "/".join(
        "(?:.*/)?"
        if part == "**"
        else fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z").replace(".*", "[^/]*")
        for part in pattern.split("/")
    )
    return re.fullmatch(expression.replace("(?:.*/)?/", "(?:.*/)?"), name) is not None
