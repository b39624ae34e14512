"""Asks the judge through the socket of a sandboxed shell; without one, the judge runs in this process."""

import os
import socket
import sys


def ask(command: str) -> None:
    """Print the judge's reply and exit with its code: 0 success, 1 failure, 2 no reply."""
    path = os.environ.get("JUDGE_SOCKET", "")
    if not path:
        from components.agent.workspace_cli import run_utility

        run_utility(command)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(command.encode() + b"\n")
        reply = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    code, _, text = reply.partition("\n")
    print(text, end="")
    sys.exit(int(code or 2))
