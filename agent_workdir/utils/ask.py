"""Send the requests of the workspace's utilities (compile, verification, profiling) to the judge."""

import os
import socket
import sys


def ask(command: str) -> None:
    """Print the judge's reply to a utility, and end this process with the exit code of the reply.

    `command` is compile, verification or profiling. The exit code is 0 after success, 1 after failure, and 2
    without a reply or after bad input. The judge is reached through the socket that the variable JUDGE_SOCKET
    of a sandboxed shell names. If the variable is not set, the judge runs in this process.
    """
    path = os.environ.get("JUDGE_SOCKET", "")
    if not path:
        from components.agent.utilities import run_utility

        run_utility(command)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(command.encode() + b"\n")
        reply = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    code, _, text = reply.partition("\n")
    print(text, end="")
    sys.exit(int(code or 2))
