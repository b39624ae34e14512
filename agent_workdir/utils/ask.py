"""Asks the judge through the socket that a sandboxed shell has; elsewhere the judge runs here."""

import os
import socket
import sys


def ask(question: str) -> None:
    """Print the judge's words and leave with its exit code: 0 done, 1 failed, 2 not answered."""
    path = os.environ.get("JUDGE_SOCKET", "")
    if not path:
        from components.agent import workspace_cli as commands

        {"compile": commands.compile, "verification": commands.verification, "profiling": commands.profiling}[question]()
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(question.encode() + b"\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    code, _, text = answer.partition("\n")
    print(text, end="")
    sys.exit(int(code or 2))
