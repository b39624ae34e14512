"""Execute the agent's tools, such as Bash, Read and Edit, whose names and arguments are common among agents.

The files of the candidate (the agent's implementation of the task) are kept in memory. A shell is started by
the first command that needs one and gets a copy of the files. After each command, the changes that the shell
made to model_new.py and kernels/ are copied back. A command that consists only of utilities (compile,
verification, profiling) needs no shell.
"""

import io
import shlex
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

from components.agent import tool_schemas, untrusted_folder
from components.agent.shell import CommandResult, Shell
from components.agent.tool_parser import Request
from components.agent.tool_schemas import Arguments, validated
from components.agent.trajectory import ToolCall
from components.agent.utilities import BUILD_SUCCEEDED, COMMANDS, Utility, utility_output
from components.agent.workspace import TEMPLATE_FILES, Workspace, matches_glob, plain_path
from components.core.params import Sandbox
from components.core.text import readable
from components.judge.verdict import Verdict

# Default time limit of a shell command.
SHELL_SECONDS = 120.0
# Largest time limit that the policy can give a shell command.
MAX_SHELL_SECONDS = 600.0
# Time limit of a Grep call.
SEARCH_SECONDS = 20.0
# Smallest and largest limit of the length of an observation, in characters. Between them, the limit is a
# quarter of the number of tokens in the policy's context window.
MIN_OBSERVATION, MAX_OBSERVATION = 2000, 30_000
# Largest number of lines, and of characters in each line, that one Read call shows.
MAX_LINES, MAX_LINE_CHARACTERS = 2000, 2000


class JudgeFailed(Exception):
    """Error raised in place of an observation if the judge itself failed.

    `verdict` is the judge's result with the status `infrastructure`, whose reason and log say why.
    """

    def __init__(self, verdict: Verdict):
        super().__init__(f"{verdict.reason}: {verdict.log}")
        self.verdict = verdict


class Tools:
    """Executor of the tool calls of one trajectory, an attempt of a policy at a task, on its workspace.

    `sandbox` are the parameters of the isolation of shell commands. `judge` returns the verdict on the
    current files of the workspace. `context` is the policy's context window in tokens. An observation (the
    text that a call returns to the policy) has at most `context` / 4 characters, which fill about a sixteenth
    of the window, but this limit is never below `MIN_OBSERVATION` or above `MAX_OBSERVATION`. With
    `read_first`, a file cannot be overwritten or edited before the policy has seen its current text.
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
        self.limit = max(MIN_OBSERVATION, min(MAX_OBSERVATION, context // 4))
        self.read_first = read_first
        self.verdicts: list[Verdict] = []
        # Number of verdicts that are counted in the records of the calls so far.
        self._counted = 0
        # Text of each candidate's file at the time when the policy last read or wrote it.
        self.last_seen: dict[str, str] = {}
        self.lock = threading.RLock()
        self._shell: Shell | None = None
        self.is_closed = False
        # The candidate's files that were last written to the shell's workspace or read from it.
        self._pushed: dict[str, str] = {}

    def run(self, request: Request) -> ToolCall:
        """Execute one tool call and return its record.

        A mistake in the call raises no exception but is described in the observation, which is the text that
        the call returns to the policy. Raises JudgeFailed if the judge failed in this call or for a command
        in the background, so that no observation tells the policy of the failure. Raises CancelledError if a
        shell is needed after `close`.
        """
        arguments = request.error or validated(request.name, request.arguments)
        if isinstance(arguments, str):
            return ToolCall(request.name, request.arguments, f"invalid tool call: {arguments}.", valid=False)
        self._pull()
        observation = readable(self._dispatch(arguments), self.limit)
        shell = self._shell
        if shell is not None and shell.socket.failure is not None:
            raise shell.socket.failure
        # A command in the background may have used the judge since the previous call.
        before, self._counted = self._counted, len(self.verdicts)
        return ToolCall(request.name, request.arguments, observation, verdicts=self._counted - before)

    def _dispatch(self, arguments: Arguments) -> str:
        match arguments:
            case tool_schemas.Write():
                return self.write(arguments.file_path, arguments.content)
            case tool_schemas.Edit():
                return self.edit(arguments.file_path, [arguments])
            case tool_schemas.MultiEdit():
                return self.edit(arguments.file_path, arguments.edits)
            case tool_schemas.Read():
                return self.read(arguments.file_path, arguments.offset or 1, arguments.limit or MAX_LINES)
            case tool_schemas.Bash():
                return self.bash(arguments)
            case tool_schemas.BashOutput(bash_id=name):
                output = shell.new_output(name) if (shell := self._shell) is not None else None
                return _no_job(name) if output is None else f"{output[0]}\n[{output[1]}]".lstrip("\n")
            case tool_schemas.KillBash(shell_id=name):
                killed = (shell := self._shell) is not None and shell.kill(name)
                return f"Killed {name[:40]}." if killed else _no_job(name)
            case tool_schemas.Glob():
                return self.glob(arguments.pattern, arguments.path)
            case tool_schemas.Grep():
                return self.grep(arguments)
            case tool_schemas.TodoWrite(todos=todos):
                counts = [
                    f"{sum(todo.status == status for todo in todos)} {status}"
                    for status in ("completed", "in_progress", "pending")
                ]
                return f"Todos: {', '.join(counts)}."
        raise AssertionError(f"no tool for {type(arguments).__name__}")

    # --- files ---

    def write(self, path: str, content: str) -> str:
        if (plain := self.workspace.writable(path)) is None:
            return f"{path[:80]}: not writable; write model_new.py or kernels/NAME."
        if plain in self.workspace.files and (problem := self._unread(plain)):
            return problem
        return self._keep(plain, content.removesuffix("\n") + "\n") or f"Written {plain}."

    def edit(self, path: str, edits: Sequence[tool_schemas.OneEdit | tool_schemas.Edit]) -> str:
        """Apply all edits to the file `path` in order, or none if one fails.

        Returns the observation for the policy: that the file was edited, or why it was not.
        """
        plain = self.workspace.writable(path)
        text = self.workspace.files.get(plain) if plain is not None else None
        if plain is None or text is None:
            return f"{path[:80]}: no such file to edit; Write it first."
        if problem := self._unread(plain):
            return problem
        for number, edit in enumerate(edits, 1):
            text, problem = _edited(text, edit)
            if problem and len(edits) > 1:
                return f"{plain}: edit {number} of {len(edits)}: {problem} No edit was made."
            if problem:
                return f"{plain}: {problem}"
        return self._keep(plain, text) or f"Edited {plain}."

    def _keep(self, path: str, text: str) -> str:
        """Store the text of a candidate's file.

        Returns an empty string, or a sentence that says why the text is refused, which is that it is too
        long.
        """
        if len(text) > untrusted_folder.MAX_FILE_BYTES:
            return f"{path}: {_too_long(len(text))}"
        with self.lock:
            self.workspace.files[path] = self.last_seen[path] = text
        return ""

    def _unread(self, path: str) -> str:
        """Return the reason why the policy may not overwrite the existing file `path`, or an empty string.

        The policy may not if `read_first` is set and the policy has not seen the present text of the file.
        """
        if not self.read_first or self.last_seen.get(path) == self.workspace.files[path]:
            return ""
        reason = "it has changed since you read it" if path in self.last_seen else "you have not read it"
        return f"{path}: {reason}; Read it first."

    def _text(self, path: str) -> str | None:
        """Return the text of the file `path`, or None if there is no such file.

        The task, the template's files and the files of the agent's implementation are read from memory. Other
        files, such as those that shell commands have written, are read from the shell's workspace if they are
        in it or in a folder directly below it.
        """
        text = self.workspace.read(path)
        if text is None and (shell := self._shell) is not None and path.count("/") <= 1:
            data = untrusted_folder.read_bytes(shell.workspace, path)
            text = None if data is None else data.decode(errors="replace")
        return text

    def read(self, path: str, first: int, count: int) -> str:
        plain = plain_path(path)
        text = self._text(plain) if plain else None
        if plain is None or text is None:
            return f"{path.strip()[:80]}: no such file in the workspace."
        if "\0" in text or text.count("\ufffd") > max(3, len(text) // 10):
            return f"{plain}: a binary file; only text is read."
        if plain in self.workspace.files:
            self.last_seen[plain] = text
        lines = [line.rstrip("\r\n") for line in io.StringIO(text)]  # as compilers count them
        shown = lines[first - 1 : first - 1 + count]
        if not shown:
            return f"{plain}: it has {len(lines)} lines."
        output = [f"{number:>5}\t{line[:MAX_LINE_CHARACTERS]}" for number, line in enumerate(shown, first)]
        next_line = first + len(shown)
        if next_line <= len(lines):
            output.append(f"[{len(lines) - next_line + 1} more lines; read on with offset {next_line}]")
        return "\n".join(output)

    def glob(self, pattern: str, path: str | None) -> str:
        if (start := plain_path(path or ".")) is None:
            return f"{(path or '')[:80]}: outside the workspace."
        shell = self._shell
        written = untrusted_folder.contents(shell.workspace) if shell is not None else {}
        prefix = f"{start}/" if start else ""
        pattern = pattern.removeprefix("/workspace/").removeprefix("./")
        matching = [
            name
            for name in sorted({*self.workspace.paths(), *written})
            if name.startswith(prefix) and matches_glob(name.removeprefix(prefix), pattern)
        ]
        return "\n".join(matching) or f"No file matches {pattern[:80]}."

    def grep(self, arguments: tool_schemas.Grep) -> str:
        """Run GNU grep in the shell and return its output, or that nothing was found, as the observation.

        A regular expression that backtracks without end is stopped by the time limit of the shell command.
        """
        if (start := plain_path(arguments.path or ".")) is None:
            return f"{(arguments.path or '')[:80]}: outside the workspace."
        searched = [start] if start else [*TEMPLATE_FILES, "model.py", "model_new.py", "kernels", "utils"]
        command = shlex.join(
            ["grep", *_grep_options(arguments), "-s", "-e", arguments.pattern, "--", *searched]
        )
        result = self._in_shell(f"(cd /workspace && {command})", SEARCH_SECONDS)
        # Exit code 2 also means that a file is missing or cannot be read, where others may have matches.
        if result.code is None or not result.output or result.output.startswith("grep: "):
            return f"Nothing found. {result.note or result.output.strip()}".strip()
        lines = result.output.removesuffix("\n").split("\n")  # as grep ends them
        if arguments.output_mode == "count":
            lines = [line for line in lines if not line.endswith(":0")]
        left = len(lines) - (arguments.head_limit or len(lines))
        return "\n".join(lines[: arguments.head_limit] + ([f"[{left} more lines]"] if left > 0 else []))

    # --- commands ---

    def bash(self, arguments: tool_schemas.Bash) -> str:
        """Run a shell command and return the observation: its output, then its exit code unless that is 0.

        A command that consists only of calls of the workspace's utilities (compile, verification, profiling)
        is answered with the judge's verdict, without a shell, unless it is to run in the background. The
        observation of a command that was started in the background has the name by which BashOutput and
        KillBash find it.
        """
        if arguments.run_in_background:
            return f"Started {self._started().start(arguments.command)} in the background."
        parts = [part.strip() for part in arguments.command.strip().split("&&")]
        if all(part in COMMANDS for part in parts):
            return self._run_utilities([COMMANDS[part] for part in parts])
        # The smaller one is chosen before the division, because a float cannot hold every integer.
        limit = int(MAX_SHELL_SECONDS * 1000)
        seconds = min(limit, arguments.timeout) / 1000 if arguments.timeout else SHELL_SECONDS
        result = self._in_shell(arguments.command, seconds)
        note = f"[{result.note}]" if result.note else f"[exit {result.code}]" if result.code else ""
        separator = "\n" if result.output and note and not result.output.endswith("\n") else ""
        return f"{result.output}{separator}{note}" or "[no output]"

    def _run_utilities(self, utilities: list[Utility]) -> str:
        """Judge the files once and return the output of `utilities`, up to the first utility that fails.

        The success of compile is reported only if no other utility was run. Raises JudgeFailed if the judge
        itself fails.
        """
        verdict = self._verdict()
        outputs = []
        for utility in utilities:
            text, code = utility_output(utility, verdict)
            if text != BUILD_SUCCEEDED:
                outputs.append(text)
            if code:
                break
        return "\n".join(outputs) or BUILD_SUCCEEDED

    def _verdict(self) -> Verdict:
        verdict = self.judge()
        if verdict.status == "infrastructure":
            raise JudgeFailed(verdict)
        self.verdicts.append(verdict)
        return verdict

    def _serve_utility(self, utility: Utility) -> tuple[str, int]:
        """Return the text and exit code for a utility that a command in the shell has called.

        The files are first copied from the shell into memory, and then judged. Raises JudgeFailed if the
        judge itself fails.
        """
        self._pull()
        return utility_output(utility, self._verdict())

    def _started(self) -> Shell:
        with self.lock:
            if self.is_closed:
                raise CancelledError
            if self._shell is None:
                texts = {name: self.workspace.read(name) or "" for name in ("model.py", *TEMPLATE_FILES)}
                self._shell = Shell(self.sandbox, texts, self._serve_utility)
            self._shell.push(self.workspace.files, self._pushed)
            self._pushed = dict(self.workspace.files)
            return self._shell

    def _in_shell(self, command: str, seconds: float) -> CommandResult:
        result = self._started().run(command, seconds)
        self._pull()
        return result

    def _pull(self) -> None:
        """Copy the changes that shell commands made to the candidate's files into memory.

        The candidate is the agent's implementation of the task. A file that the shell did not change is left
        alone in memory, because the text in memory may be newer than the text in the shell's workspace.
        """
        with self.lock:
            if self._shell is None:
                return
            pulled = self._shell.pull()
            for path in self._pushed.keys() | pulled.keys():
                if pulled.get(path) == self._pushed.get(path) or self.workspace.writable(path) is None:
                    continue
                if path in pulled:
                    self.workspace.files[path] = self._pushed[path] = pulled[path]
                else:
                    self.workspace.files.pop(path, None)
                    self._pushed.pop(path, None)

    def close(self) -> None:
        """Copy the last changes from the shell into memory, and end the shell with all its processes.

        A call that still runs in another thread, and then needs a shell, raises CancelledError.
        """
        with self.lock:
            self.is_closed = True
            self._pull()
            shell, self._shell = self._shell, None
        if shell is not None:
            shell.close()


def _no_job(name: str) -> str:
    return f"{name[:40]}: no background command of this name."


def _too_long(length: int) -> str:
    limit = untrusted_folder.MAX_FILE_BYTES
    return f"{length} characters are more than the {limit} that a source file may have."


def _edited(text: str, edit: tool_schemas.OneEdit | tool_schemas.Edit) -> tuple[str, str]:
    """Return `text` after `edit`, and an empty string.

    If the edit is refused, the second value is a sentence that says why, and the first one has no meaning.
    """
    count = text.count(edit.old_string) if edit.old_string else 0
    if count == 0 or (count > 1 and not edit.replace_all):
        needed = "at least once" if edit.replace_all else "exactly once"
        return text, f"old_string occurs {count} times; it must occur {needed}."
    if edit.old_string == edit.new_string:
        return text, "old_string and new_string are the same."
    length = len(text) + count * (len(edit.new_string) - len(edit.old_string))
    if length > untrusted_folder.MAX_FILE_BYTES:  # known before the text is made, which could fill the memory
        return text, _too_long(length)
    return text.replace(edit.old_string, edit.new_string), ""


def _grep_options(arguments: tool_schemas.Grep) -> list[str]:
    content = arguments.output_mode == "content"
    options = {
        f"--include={arguments.glob}": arguments.glob,
        "-i": arguments.ignore_case,
        "-l": arguments.output_mode == "files_with_matches",
        "-c": arguments.output_mode == "count",
        "-n": content and arguments.line_numbers,
        f"-A{arguments.after}": content and arguments.after is not None,
        f"-B{arguments.before}": content and arguments.before is not None,
        f"-C{arguments.context}": content and arguments.context is not None,
    }
    return ["-rIP", "--binary-files=without-match", *(key for key, chosen in options.items() if chosen)]
