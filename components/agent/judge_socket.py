"""The socket through which a sandboxed shell reaches the judge: it can ask for a measurement, never make one.

A request is one word (compile, verification, profiling) and a newline; the answer is an exit code, a newline and
text. The files that are judged are those that lie in the workspace at that moment, read by this side.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

QUESTIONS = ("compile", "verification", "profiling")
MAX_QUESTIONS = 500
"""Of one trajectory; the judge is everybody's."""


class Asking:
    """Answers until it is closed, one question at a time. `answer` gives text and exit code."""

    def __init__(self, path: Path, answer: Callable[[str], tuple[str, int]]):
        self.answer = answer
        self.total = 0.0
        self.since: float | None = None
        self.asked = 0
        self.failure: Exception | None = None
        """What went wrong while a question was answered; whoever runs the shell raises it."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.closing(_Folder(path.parent)) as above:  # a socket's path may have 107 bytes only
            self.socket.bind(f"/proc/self/fd/{above.descriptor}/{path.name}")
        os.chmod(path, 0o666)
        self.socket.listen(8)
        threading.Thread(target=self._serve, name="asking", daemon=True).start()

    def waited(self) -> float:
        """Seconds that answers have taken so far."""
        since = self.since
        return self.total + (time.monotonic() - since if since is not None else 0.0)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                question = connection.recv(64).decode(errors="replace").strip()
                self.asked += 1
                if question not in QUESTIONS:
                    connection.sendall(b"2\nask for compile, verification or profiling\n")
                elif self.asked > MAX_QUESTIONS:
                    connection.sendall(
                        f"2\nno more than {MAX_QUESTIONS} questions in one trajectory\n".encode()
                    )
                else:
                    self.since = time.monotonic()
                    try:
                        text, code = self.answer(question)
                    except Exception as error:
                        self.failure = error
                        text, code = "the judge could not answer", 2
                    finally:
                        self.total, self.since = self.waited(), None
                    connection.sendall(f"{code}\n{text}\n".encode(errors="replace"))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self.socket.close()


class _Folder:
    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        os.close(self.descriptor)
