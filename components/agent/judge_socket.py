"""Unix socket through which commands in a sandboxed shell get verdicts from the judge.

A request is the name of a utility and a newline. The utilities are the workspace's commands compile,
verification and profiling. The reply is the exit code of the command, a newline, and the text that the
command prints. A request contains no files and no result, because the candidate's files are read from the
workspace when the request arrives.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from components.agent import untrusted_folder
from components.agent.utility_output import COMMANDS, Utility

# Largest number of requests of one trajectory; it is limited because all trajectories share the judge.
MAX_REQUESTS = 500


class JudgeSocket:
    """Server that answers the requests on a Unix socket, one after the other, in a thread until `close`.

    `path` is the file of the socket, which the constructor creates. A request names a utility: compile,
    verification or profiling. `handle` is called with this name, and returns the text that the utility prints
    and its exit code. If `handle` raises an exception, the exit code is 2, and `failure` has the exception.
    """

    def __init__(self, path: Path, handle: Callable[[Utility], tuple[str, int]]):
        self.handle = handle
        self.requests = 0
        # Exception that `handle` raised, which the thread that runs the shell command raises again.
        self.failure: Exception | None = None
        self._busy_seconds = 0.0
        self._busy_since: float | None = None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The path of a socket is limited to 107 bytes, so it is given relative to a descriptor of its folder.
        with untrusted_folder.opened(path.parent, os.O_RDONLY | os.O_DIRECTORY) as folder:
            self.socket.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.chmod(path, 0o666)
        self.socket.listen(8)
        threading.Thread(target=self._serve, name="judge-socket", daemon=True).start()

    def busy_seconds(self) -> float:
        """Return the seconds spent in `handle` so far, including those of a running request."""
        since = self._busy_since
        return self._busy_seconds + (time.monotonic() - since if since is not None else 0.0)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                command = connection.recv(64).decode(errors="replace").strip()
                self.requests += 1
                text, code = self._reply(command)
                connection.sendall(f"{code}\n{text}\n".encode(errors="replace"))

    def _reply(self, command: str) -> tuple[str, int]:
        utility = next((utility for utility in COMMANDS.values() if utility == command), None)
        if utility is None:
            return "ask for compile, verification or profiling", 2
        if self.requests > MAX_REQUESTS:
            return f"no more than {MAX_REQUESTS} questions in one trajectory", 2
        self._busy_since = time.monotonic()
        try:
            return self.handle(utility)
        except Exception as error:
            self.failure = error
            return "the judge could not answer", 2
        finally:
            self._busy_seconds, self._busy_since = self.busy_seconds(), None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the waiting call of `accept`
        self.socket.close()
