"""Run the shell commands of an agent in one sandboxed bash.

The bash runs from the first command to the end of the trajectory, which is one attempt of the agent at a
task, so the working directory, variables and functions persist. Each command writes its output to a file of
its own, because the end of a pipe would not be reached as long as a background process keeps it open. The
isolated shell may write to /workspace, /output and /tmp, and it sends requests to the judge through a socket
in /control (components/agent/utilities.py).
"""

import contextlib
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

from components.agent import shell_disk, untrusted_folder
from components.agent.utilities import JudgeSocket, Utility
from components.agent.workspace import TEMPLATE
from components.core.files import remove_tree, scratch_folder
from components.core.params import Sandbox
from components.sandbox import isolation
from components.sandbox.process_tree import children, process_descriptor
from components.sandbox.unsuspended_time import unsuspended_seconds

# Capacity of the shell's /tmp, in bytes.
TEMPORARY_BYTES = 1 << 28
# Limit of the shell's memory, in bytes.
MEMORY_BYTES = 4 << 30
# Limit of the size of one file that the shell writes, in bytes.
MAX_FILE_BYTES = 64 << 20
# Bytes of a command's output that are read at its beginning, and again at its end.
KEPT_BYTES = 1 << 16
# Bytes of other text before the reply to a command after which the shell counts as ended. Only a command that
# writes to the descriptor of the replies causes such text.
MAX_REPLY_BYTES = 4096
# Limit of the CPU time of one process, in seconds.
CPU_SECONDS = 3600
POLL_SECONDS = 0.25
# Seconds between two looks at what the commands in the background occupy, and their share of the time.
WATCH_SECONDS, WATCH_SHARE = 1.0, 0.05
# Limit of the seconds in which all processes of a killed shell have ended.
END_SECONDS = 10
# Number of shell commands that may run at the same time for each core; more than 1, because many commands
# wait, for instance for a verdict.
COMMANDS_PER_CORE = 8
COMMAND_PLACES = threading.Semaphore(COMMANDS_PER_CORE * (os.cpu_count() or 1))
# Seconds that starting or ending a background command may take.
CONTROL_SECONDS = 5.0
DRIVER = r"""
trap '' XFSZ
declare -A __job
cd /workspace
while IFS=' ' read -r __kind __n; do
  case $__kind in
    run) . "$CONTROL/$__n.sh" </dev/null >"$OUTPUT/$__n" 2>&1; printf '%s %s\n' "$__n" "$?" ;;
    start) set -m
      { ( trap - XFSZ; . "$CONTROL/$__n.sh" ); echo $? >"$OUTPUT/$__n.exit"
      } </dev/null >"$OUTPUT/$__n" 2>&1 &
      __job[$__n]=$!; set +m; printf '%s 0\n' "$__n" ;;
    kill) kill -KILL -- "-${__job[$__n]}" 2>/dev/null
      { wait "${__job[$__n]}" || echo $? >"$OUTPUT/$__n.exit"; } 2>/dev/null; printf '%s 0\n' "$__n" ;;
  esac
done
"""


@dataclass(frozen=True)
class CommandResult:
    """Output and exit code of a command.

    `code` is None if the command or its shell was ended before there was an exit code. `note` says why, and
    is empty if there is an exit code.
    """

    output: str
    code: int | None
    note: str = ""


class Shell:
    """Sandboxed bash in which all shell commands of one trajectory (an attempt at a task) run.

    The bash starts with the first command. If it has ended, for instance because a command took too long, the
    next command starts it again.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        texts: Mapping[str, str],
        serve_utility: Callable[[Utility], tuple[str, int]],
    ):
        """Create the shell's folders and the socket through which its commands call the utilities.

        `sandbox` are the parameters that say how the shell is isolated. `texts` are the contents of the
        read-only files of the workspace that are not in utils/, by name, such as model.py. `serve_utility` is
        called with the name of a utility (compile, verification or profiling) and returns its text and exit
        code. The duration of such a call does not count towards the time limit of the command that uses the
        utility.
        """
        self.sandbox, self.texts, self.uid = sandbox, texts, isolation.shell_uid()
        self.base = Path(tempfile.mkdtemp(prefix="agent-", dir=scratch_folder()))
        self.workspace, self.control, self.output = (
            self.base / name for name in ("workspace", "control", "output")
        )
        for path, mode in (
            (self.workspace, 0o777),
            (self.control, 0o755),
            (self.output, 0o777),
            (self.workspace / "kernels", 0o777),
        ):
            path.mkdir()
            path.chmod(mode)
        for name, text in texts.items():
            (self.base / name).write_text(text)
            (self.base / name).chmod(0o644)
        if sandbox.isolation == "none":  # without mounts, the template's files must be copied
            shutil.copytree(TEMPLATE / "utils", self.workspace / "utils")
            for name in texts:
                shutil.copy(self.base / name, self.workspace)
        self.socket = JudgeSocket(self.control / "judge.sock", serve_utility)
        self.process: subprocess.Popen[bytes] | None = None
        self.commands = 0
        # Number of bytes of output that were already returned, by the number of the background command.
        self.read_until: dict[str, int] = {}
        # The bash in which each background command was started, by its number; None if it ended at once.
        self.started_in: dict[str, subprocess.Popen[bytes] | None] = {}
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.watcher = threading.Thread(target=self._watch, name="shell-watch", daemon=True)
        self.watcher.start()

    # --- files ---

    def push(self, files: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Update the candidate's files in the shell's workspace to `files`.

        The candidate is the agent's implementation of the task. `files` are the new files, and `before` are
        those that the workspace held when it was last written or read. Both have texts by workspace path.
        Only the differences between them are written, and files that are missing in `files` are removed.
        """
        untrusted_folder.open_up(self.workspace, "kernels")
        for path in before.keys() - files.keys():
            untrusted_folder.remove(self.workspace, path)
        for path, text in files.items():
            if before.get(path) != text:
                untrusted_folder.write_text(self.workspace, path, text)

    def pull(self) -> dict[str, str]:
        """Return the candidate's files in the shell's workspace: model_new.py and those in kernels/.

        The candidate is the agent's implementation of the task. The result has texts by workspace path. Files
        that are too large, and files beyond the largest number in a folder (untrusted_folder.py), are left
        out.
        """
        untrusted_folder.open_up(self.workspace, "kernels")
        kernels = untrusted_folder.contents(self.workspace, "kernels")
        files: dict[str, bytes | None] = {f"kernels/{name}": data for name, data in kernels.items()}
        files["model_new.py"] = untrusted_folder.read_bytes(self.workspace, "model_new.py")
        return {path: data.decode(errors="replace") for path, data in files.items() if data is not None}

    # --- commands ---

    def run(self, command: str, seconds: float) -> CommandResult:
        """Run `command`, wait until it ends, and return its output and exit code.

        Before the command starts, this method waits while `COMMANDS_PER_CORE` commands for each core are
        running in this process. After `seconds`, in which neither this wait nor the time of the judge counts,
        the shell is ended, and the result has no exit code.
        """
        number = self._save(command)
        with COMMAND_PLACES:
            line = self._send(f"run {number}", seconds)
        code = int(line) if line.isdigit() else None
        return CommandResult(self._read(number)[0], code, line if code is None else "")

    def start(self, command: str) -> str:
        """Start `command` in the background and return the name that `new_output` and `kill` expect."""
        number = self._save(command)
        self._send(f"start {number}", CONTROL_SECONDS)
        self.read_until[number], self.started_in[number] = 0, self.process
        return f"bash_{number}"

    def new_output(self, name: str) -> tuple[str, str] | None:
        """Return the output of a background command since the last call, and a text about its state.

        `name` is what `start` returned for the command. The text says that the command is running, that it
        ended (with its exit code, 137 after `kill`), or that it was killed with its shell. Returns None if
        there is no background command of this name.
        """
        number = name.removeprefix("bash_")
        if number not in self.read_until:
            return None
        ended = untrusted_folder.read_bytes(self.output, f"{number}.exit")
        text, self.read_until[number] = self._read(number, self.read_until[number])
        if ended is not None:
            return text, f"ended with exit code {ended.decode(errors='replace').strip()[:8]}"
        return text, "running" if self._has_its_shell(number) else "killed with its shell"

    def kill(self, name: str) -> bool:
        """Kill a background command and its child processes.

        `name` is what `start` returned for the command. Returns False if there is no background command of
        this name, and True otherwise, also if the command has ended before.
        """
        number = name.removeprefix("bash_")
        if number not in self.read_until:
            return False
        if self._has_its_shell(number):
            self._send(f"kill {number}", CONTROL_SECONDS)
        return True

    def _has_its_shell(self, number: str) -> bool:
        """Return whether the bash runs in which the background command `number` was started."""
        shell = self.started_in[number]
        return shell is not None and shell is self.process and shell.poll() is None

    def close(self) -> None:
        """End all processes of the shell and remove its folders.

        A call that still runs in another thread returns, or raises CancelledError.
        """
        self.closing.set()
        with self.lock:  # which a call that waits for a reply leaves soon (`_reply`)
            self._end()
        self.socket.close()
        self.watcher.join()  # it looks into the folders
        remove_tree(self.base)

    # --- the process ---

    def _save(self, command: str) -> str:
        """Write `command` to the file NUMBER.sh in the control folder and return NUMBER, counted from 1."""
        self.commands += 1
        path = self.control / f"{self.commands}.sh"
        try:
            path.write_text(command.replace("\0", "") + "\n", errors="replace")
            path.chmod(0o644)
        except FileNotFoundError:
            if self.closing.is_set():
                raise CancelledError from None
            raise
        return str(self.commands)

    def _send(self, order: str, seconds: float) -> str:
        """Send the line `order` to the script `DRIVER`, which the bash runs, and return the reply.

        The reply is an exit code, or a sentence that says why there is none. `order` is the word run, start
        or kill, followed by the number of a command. `seconds` is the time limit of the order. If the bash
        does not run, it is started before the line is sent.
        """
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._end()
                self.process = self._start()
            process = self.process
            assert process.stdin is not None
            try:
                process.stdin.write(f"{order}\n".encode())
                process.stdin.flush()
            except BrokenPipeError:
                return self._died(process)
            return self._reply(process, order.split()[1], seconds)

    def _reply(self, process: subprocess.Popen[bytes], number: str, seconds: float) -> str:
        """Wait for the reply of the script `DRIVER` to command `number` and return its exit code as text.

        Other text that comes before the reply is skipped. If it is longer than MAX_REPLY_BYTES, or if the
        command exceeds its time limit `seconds` or the limits of disk space, the shell is ended. In this
        case, and if the shell has ended by itself, a sentence that says so is returned instead. Raises
        CancelledError, after ending the shell, within POLL_SECONDS of a call of `close`.
        """
        assert process.stdout is not None
        began, judge_seconds, reply = unsuspended_seconds(), self.socket.judging.seconds(), b""
        found: re.Match[bytes] | None = None
        output = select.poll()  # select() would refuse descriptors above 1023
        output.register(process.stdout, select.POLLIN)
        looked = time.monotonic()
        while found is None:
            if self.closing.is_set():
                self._end()
                raise CancelledError
            if output.poll(POLL_SECONDS * 1000):
                part = os.read(process.stdout.fileno(), MAX_REPLY_BYTES)
                reply += part
                if not part or len(reply) > MAX_REPLY_BYTES:
                    return self._died(process)
                found = re.search(rb"(?<!\d)%b (\d+)\n" % number.encode(), reply)
            # Other text must not keep this process from looking.
            if found is None and time.monotonic() - looked >= POLL_SECONDS:
                if shell_disk.is_full(self.base, process.pid):
                    return f"ended: {shell_disk.LIMIT}; {self._end_full()}"
                looked = time.monotonic()
            judged = self.socket.judging.seconds() - judge_seconds
            if found is None and unsuspended_seconds() - began - judged > seconds:
                self._end()
                return (
                    f"took longer than {seconds:g} s and was ended, with everything it had started; "
                    "a new shell starts with the next command"
                )
        return found[1].decode()

    def _died(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        self._end()
        return f"the shell ended with exit code {process.returncode}; a new one starts with the next command"

    def _start(self) -> subprocess.Popen[bytes]:
        if self.closing.is_set():
            raise CancelledError
        is_isolated = self.sandbox.isolation != "none"
        control, output = ("/control", "/output") if is_isolated else (self.control, self.output)
        variables = {"CONTROL": f"{control}", "OUTPUT": f"{output}", "JUDGE_SOCKET": f"{control}/judge.sock"}
        command = ["bash", "--noprofile", "--norc", "-c", DRIVER]
        with contextlib.ExitStack() as stack:
            if is_isolated:
                folders = {
                    self.control: "/control",
                    TEMPLATE / "utils": "/workspace/utils",
                } | {self.base / name: f"/workspace/{name}" for name in self.texts}
                interpreter = Path(sys.base_prefix).resolve() / "bin"
                search_path = f"/usr/local/bin:/usr/bin:/bin:{interpreter}"
                command, filter_fd = stack.enter_context(
                    isolation.confined(
                        command,
                        paths=isolation.interpreter_paths() | folders,
                        writable={"/workspace": self.workspace, "/output": self.output},
                        variables=variables | {"PATH": search_path, "TMPDIR": "/tmp"},
                        temporary_bytes=TEMPORARY_BYTES,
                        memory_bytes=MEMORY_BYTES,
                        file_bytes=MAX_FILE_BYTES,
                        seconds=CPU_SECONDS,
                        uid=self.uid,
                    )
                )
                pass_fds, environment = [filter_fd], isolation.BUBBLEWRAP_ENVIRONMENT
            else:
                command[-1] = DRIVER.replace("/workspace", str(self.workspace))
                pass_fds, environment = [], os.environ | variables | {"HOME": str(self.workspace)}
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=pass_fds,
                env=environment,
                cwd=self.workspace,
                bufsize=0,
                start_new_session=True,
            )

    def _watch(self) -> None:
        """End the shell if background commands fill the disk; while a command is awaited, `_reply` looks."""
        pause = WATCH_SECONDS
        while not self.closing.wait(pause):
            if not self.lock.acquire(blocking=False):
                continue
            try:
                began = time.monotonic()
                if self.process is not None and shell_disk.is_full(self.base, self.process.pid):
                    self._end_full()
                pause = max(WATCH_SECONDS, (time.monotonic() - began) / WATCH_SHARE)
            finally:
                self.lock.release()

    def _end_full(self) -> str:
        """End the shell because its files exceed a limit, and return what happens to the files."""
        self._end()
        return shell_disk.after_end(self.base, self.workspace, self.output, self.texts)

    def _end(self) -> None:
        """Kill the shell.

        If the shell is isolated, bubblewrap's process namespace ends with it, so the kernel also kills all
        processes that commands have started. When this method returns they have ended, so that none of them
        can change files that are then removed.
        """
        process, self.process = self.process, None
        if process is None:
            return
        # The first process of the namespace, which ends after all others of it.
        first = [descriptor for pid in children(process.pid) if (descriptor := process_descriptor(pid))]
        with process, contextlib.suppress(ProcessLookupError):  # closes the pipes and waits
            os.killpg(process.pid, 9)
        for descriptor in first:
            ended = select.poll()  # select() would refuse descriptors above 1023
            ended.register(descriptor, select.POLLIN)
            ended.poll(END_SECONDS * 1000)
            os.close(descriptor)

    def _read(self, number: str, start: int = 0) -> tuple[str, int]:
        """Return the output of command `number` from byte `start` on, and the offset of its end in bytes.

        An output longer than 2 * `KEPT_BYTES` is shortened in the middle. If the file of the output cannot be
        read, an empty text and `start` are returned.
        """
        try:
            with untrusted_folder.opened(
                self.output / number, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            ) as descriptor:
                end = os.fstat(descriptor).st_size
                if end - start <= 2 * KEPT_BYTES:
                    return os.pread(descriptor, max(0, end - start), start).decode(errors="replace"), end
                head, tail = (
                    os.pread(descriptor, KEPT_BYTES, place).decode(errors="replace")
                    for place in (start, end - KEPT_BYTES)
                )
                return f"{head}\n[... {end - start - 2 * KEPT_BYTES} bytes cut ...]\n{tail}", end
        except OSError:
            return "", start
