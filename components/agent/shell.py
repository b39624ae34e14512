"""The agent's shell: one bash inside the walls that lives from its first command to the end of the trajectory.

Commands run in that very bash, so directory, variables and functions persist. Each command's output goes to a file,
so nothing that it leaves behind can block its end. What the shell may write is /workspace, /output and /tmp; the
judge is reached through the socket in /control, which only asks (components/agent/judge_socket.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from components.agent import untrusted_folder
from components.core.config import PROJECT, Sandbox
from components.core.files import remove_tree, scratch_folder
from components.sandbox import clock, isolation

TEMPLATE = PROJECT / "agent_workdir"
TEMPLATE_FILES = ("SKILL.md", "binding.cpp", "binding_registry.h", "vec.h")
MEMORY_BYTES = 4 << 30
MAX_FILE_BYTES = 64 << 20
MAX_DISK_BYTES = 256 << 20
MAX_ENTRIES = 10_000
KEPT_BYTES = 1 << 16
"""Of a command's output, this much of its head and of its tail is read."""
CPU_SECONDS = 3600
POLL_SECONDS = 0.25
DRIVER = r"""
trap '' XFSZ
declare -A __job
cd /workspace
while IFS=' ' read -r __kind __n; do
  case $__kind in
    run) . "$CONTROL/$__n.sh" </dev/null >"$OUTPUT/$__n" 2>&1; printf '%s %s\n' "$__n" "$?" ;;
    start) set -m
      ( trap - XFSZ; . "$CONTROL/$__n.sh"; echo $? >"$OUTPUT/$__n.exit" ) </dev/null >"$OUTPUT/$__n" 2>&1 &
      __job[$__n]=$!; set +m; printf '%s 0\n' "$__n" ;;
    kill) kill -KILL -- "-${__job[$__n]}" 2>/dev/null
      { wait "${__job[$__n]}"; } 2>/dev/null; printf '%s 0\n' "$__n" ;;
  esac
done
"""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended: its exit code, or why it has none."""

    output: str
    code: int | None
    note: str = ""


class Shell:
    """Start it when it is first needed; a shell that died or was killed starts anew with the next command."""

    def __init__(self, sandbox: Sandbox, task_source: str, *, waited: Callable[[], float] = lambda: 0.0):
        """`waited` tells how many seconds the judge has kept this shell waiting so far; a command's limit grows by them."""
        self.sandbox = sandbox
        self.waited = waited
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
        (self.base / "model.py").write_text(task_source)
        (self.base / "model.py").chmod(0o644)
        if sandbox.isolation == "none":  # nothing can be mounted, so the files themselves are there
            shutil.copytree(TEMPLATE / "utils", self.workspace / "utils")
            for path in (self.base / "model.py", *(TEMPLATE / name for name in TEMPLATE_FILES)):
                shutil.copy(path, self.workspace)
        self.process: subprocess.Popen[bytes] | None = None
        self.next = 0
        self.read_until: dict[str, int] = {}
        self.busy = threading.Lock()

    # --- files ---------------------------------------------------------------------------------------------------------

    def push(self, files: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Bring the folder from `before`, what it held when it was last read, to `files`."""
        untrusted_folder.open_up(self.workspace, "kernels")
        for path in before.keys() - files.keys():
            untrusted_folder.remove(self.workspace, path)
        for path, text in files.items():
            if before.get(path) != text:
                untrusted_folder.write_text(self.workspace, path, text)

    def pull(self) -> dict[str, str]:
        """The candidate's files as they lie in the folder."""
        untrusted_folder.open_up(self.workspace, "kernels")
        found = {
            f"kernels/{name}": data
            for name, data in untrusted_folder.contents(self.workspace, "kernels").items()
        }
        model = untrusted_folder.read_bytes(self.workspace, "model_new.py")
        if model is not None:
            found["model_new.py"] = model
        return {path: data.decode(errors="replace") for path, data in found.items()}

    # --- commands ------------------------------------------------------------------------------------------------------

    def run(self, command: str, seconds: float) -> CommandResult:
        """Run `command` to its end, at most `seconds` long."""
        number = self._command(command)
        line = self._order(f"run {number}", number, seconds)
        code = int(line) if line.lstrip("-").isdigit() else None
        note = "" if code is not None else line
        return CommandResult(self._read(number)[0], code, note)

    def start(self, command: str) -> str:
        """Start `command` in the background; the name by which its output is read."""
        number = self._command(command)
        self._order(f"start {number}", number, 5.0)
        self.read_until[number] = 0
        return f"bash_{number}"

    def new_output(self, name: str) -> tuple[str, str] | None:
        """What a background command has said since the last call, and its state; None when there is no such command."""
        number = name.removeprefix("bash_")
        if number not in self.read_until:
            return None
        ended = untrusted_folder.read_bytes(self.output, f"{number}.exit")
        text, self.read_until[number] = self._read(number, self.read_until[number])
        if ended is not None:
            return text, f"ended with exit code {ended.decode(errors='replace').strip()[:8]}"
        return (
            text,
            "running"
            if self.process is not None and self.process.poll() is None
            else "killed with its shell",
        )

    def kill(self, name: str) -> bool:
        """End a background command and its children; False when there is none of that name."""
        number = name.removeprefix("bash_")
        if number not in self.read_until:
            return False
        self._order(f"kill {number}", number, 5.0)
        return True

    def close(self) -> None:
        """End every process and remove the folder."""
        self._end()
        remove_tree(self.base)

    # --- the process ---------------------------------------------------------------------------------------------------

    def _command(self, command: str) -> str:
        self.next += 1
        path = self.control / f"{self.next}.sh"
        path.write_text(command.replace("\0", "") + "\n", errors="replace")
        path.chmod(0o644)
        return str(self.next)

    def _order(self, order: str, number: str, seconds: float) -> str:
        """What the driver answers to `order`: an exit code, or the reason why there is none."""
        with self.busy:
            if self.process is None or self.process.poll() is not None:
                self._end()
                self.process = self._start()
            process = self.process
            assert process.stdin is not None and process.stdout is not None
            spent, waited = 0.0, self.waited()
            try:
                process.stdin.write(f"{order}\n".encode())
                process.stdin.flush()
            except BrokenPipeError:
                return self._died(process)
            said = b""
            output = (
                select.poll()
            )  # select() itself refuses descriptors above 1023, and a judge with many warm tasks holds more
            output.register(process.stdout, select.POLLIN)
            while not said.endswith(b"\n"):
                began = time.monotonic()
                ready = output.poll(POLL_SECONDS * 1000)
                spent += clock.charged_seconds(time.monotonic() - began, POLL_SECONDS)
                if ready:
                    part = os.read(process.stdout.fileno(), 4096)
                    if not part:
                        return self._died(process)
                    said = (said + part)[-256:]
                elif (
                    untrusted_folder.used_bytes(self.base, limit=MAX_DISK_BYTES, entries=MAX_ENTRIES)
                    > MAX_DISK_BYTES
                ):
                    self._end()
                    most = f"more than {MAX_DISK_BYTES >> 20} MB or {MAX_ENTRIES} files, or a folder that is closed to its owner"
                    return f"ended: {most}; remove some in the next command, which starts a new shell"
                elif spent - (self.waited() - waited) > seconds:
                    self._end()
                    return f"took longer than {seconds:g} s and was ended, with everything it had started; a new shell starts with the next command"
            answer = said.decode(errors="replace").split("\n")[-2].split()
            return answer[1] if len(answer) == 2 and answer[0] == number else "0"

    def _died(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        self._end()
        return f"the shell ended with exit code {process.returncode}; a new one starts with the next command"

    def _start(self) -> subprocess.Popen[bytes]:
        inside = {"CONTROL": "/control", "OUTPUT": "/output", "JUDGE_SOCKET": "/control/judge.sock"}
        command = ["bash", "--noprofile", "--norc", "-c", DRIVER]
        if self.sandbox.isolation == "none":
            places = {
                "CONTROL": str(self.control),
                "OUTPUT": str(self.output),
                "JUDGE_SOCKET": str(self.control / "judge.sock"),
            }
            command[-1] = DRIVER.replace("/workspace", str(self.workspace))
            return self._popen(command, (), os.environ | places | {"HOME": str(self.workspace)})
        seen = {
            self.control: "/control",
            self.base / "model.py": "/workspace/model.py",
            TEMPLATE / "utils": "/workspace/utils",
        }
        isolated = isolation.bubblewrap(
            device="cpu",
            paths=isolation.interpreter_paths()
            | seen
            | {TEMPLATE / name: f"/workspace/{name}" for name in TEMPLATE_FILES},
            writable={"/workspace": self.workspace, "/output": self.output},
            temporary_bytes=1 << 28,
            keep_capabilities=False,
        )
        binds = []
        path = os.pathsep.join(
            ["/usr/local/bin", "/usr/bin", "/bin", str(Path(sys.base_prefix).resolve() / "bin")]
        )
        for key, value in (inside | {"PATH": path, "TMPDIR": "/tmp"}).items():
            binds += ["--setenv", key, value]
        limits = isolation.with_limits(
            command, memory_bytes=MEMORY_BYTES, file_bytes=MAX_FILE_BYTES, seconds=CPU_SECONDS
        )
        filter_fd = os.memfd_create("seccomp")
        try:
            os.write(filter_fd, isolation.seccomp_program("baseline"))
            os.lseek(filter_fd, 0, os.SEEK_SET)
            place = isolated.index("--chdir")
            return self._popen(
                [*isolated[:place], *binds, "--seccomp", str(filter_fd), *isolated[place:], *limits],
                (filter_fd,),
                isolation.BUBBLEWRAP_ENVIRONMENT,
            )
        finally:
            os.close(filter_fd)

    def _popen(
        self, command: list[str], pass_fds: tuple[int, ...], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
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

    def _end(self) -> None:
        """Killing bubblewrap ends its process namespace, and with it everything that a command has left behind."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, number: str, start: int = 0) -> tuple[str, int]:
        """Output from byte `start` on, its head and tail when it is long, and the byte up to which it was read."""
        try:
            with untrusted_folder.opened(
                self.output / number, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            ) as descriptor:
                end = os.fstat(descriptor).st_size
                if end - start <= 2 * KEPT_BYTES:
                    return os.pread(descriptor, max(0, end - start), start).decode(errors="replace"), end
                head, tail = (
                    os.pread(descriptor, KEPT_BYTES, start),
                    os.pread(descriptor, KEPT_BYTES, end - KEPT_BYTES),
                )
                cut = end - start - 2 * KEPT_BYTES
                return (
                    f"{head.decode(errors='replace')}\n[... {cut} bytes cut ...]\n{tail.decode(errors='replace')}",
                    end,
                )
        except OSError:
            return "", start
