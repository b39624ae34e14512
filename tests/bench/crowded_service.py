"""Seconds of an honest caller of the HTTP service, alone and beside clients that send nothing.

    python tests/bench/crowded_service.py [--idle 5000] [--slow 200] [--queued 50] [--calls 20]

A service with 4,096 descriptors is started with two tokens. The honest caller asks for /health and for the
verdict on candidates that the screen refuses, first alone. Then `--idle` connections are opened that send
nothing, `--slow` that announce a body and send one byte of it, and another token fills its queue with
`--queued` measured jobs, and the honest caller asks again.

Prints one JSON object with median and largest seconds, and how many idle connections the service has closed.
Exits with 1 if a request failed, or if the queue was not full.
"""

import argparse
import contextlib
import json
import resource
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import httpx
import judge_fixtures as corpus
from serve_fixtures import start

from components.service.tokens import Token, create_token

DESCRIPTORS = 4096
SLOW = b"POST /v1/judgements HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{"


def calls(address: str, secret: str, task: str, number: int, mark: str) -> dict[str, dict[str, float]]:
    """Return the median and the largest seconds of `number` calls of each kind, each on a new connection."""
    seconds: dict[str, list[float]] = {"health": [], "verdict": []}
    headers = {"Authorization": f"Bearer {secret}"}
    for index in range(number):
        began = time.perf_counter()
        httpx.get(f"{address}/health", timeout=60).raise_for_status()
        seconds["health"].append(time.perf_counter() - began)
        request = {"task": task, "files": {"model_new.py": f"def ModelNew(:  # {mark} {index}"}}
        began = time.perf_counter()
        answer = httpx.post(
            f"{address}/v1/judgements?wait=60", json=request, headers=headers, timeout=90
        ).raise_for_status()
        seconds["verdict"].append(time.perf_counter() - began)
        assert answer.json()["verdict"]["reason"] == "syntax", answer.text
    return {
        kind: {"median": round(statistics.median(found), 4), "largest": round(max(found), 4)}
        for kind, found in seconds.items()
    }


def fill(address: str, secret: str, task: str, number: int) -> int:
    """Submit `number` measured jobs and one more, and return the HTTP status of the last answer."""
    files = corpus.files("honest", "slow")
    with httpx.Client(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
        for index in range(number + 1):
            marked = files | {"model_new.py": f"{files['model_new.py']}\n# {index}\n"}
            answer = client.post(f"{address}/v1/judgements", json={"task": task, "files": marked})
    return answer.status_code


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def measure(address: str, secrets: dict[str, str], chosen: argparse.Namespace) -> dict[str, Any]:
    honest = {"Authorization": f"Bearer {secrets['honest']}"}
    task = httpx.get(f"{address}/v1/tasks", headers=honest).json()[0]["task_id"]
    calls(address, secrets["honest"], task, 1, "first")
    report: dict[str, Any] = {"alone": calls(address, secrets["honest"], task, chosen.calls, "alone")}
    host, port = address.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(chosen.idle)
        ]
        for _ in range(chosen.slow):
            stack.enter_context(socket.create_connection((host, int(port)), 60)).sendall(SLOW)
        report["status_of_a_full_queue"] = fill(address, secrets["flood"], task, chosen.queued)
        report["beside"] = calls(address, secrets["honest"], task, chosen.calls, "beside")
        report["idle_closed"] = sum(map(is_closed, idle))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--queued", type=int, default=50)
    parser.add_argument("--calls", type=int, default=20)
    chosen = parser.parse_args()
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with tempfile.TemporaryDirectory() as folder:
        home, file = Path(folder), Path(folder, "tokens.json")
        (home / "tasks").mkdir()
        (home / "tasks" / "1_leaky.py").write_text(corpus.CODE)
        tokens = (
            Token(name="honest", digest=""),
            Token(name="flood", digest="", queued=chosen.queued),
        )
        secrets = {token.name: create_token(file, token, None) for token in tokens}
        process, address = start(home, "--tokens", str(file), "--tasks", str(home / "tasks"))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        try:
            report = measure(address, secrets, chosen)
        finally:
            process.terminate()
            process.communicate()
    print(json.dumps(report, indent=2))
    sys.exit(0 if report["status_of_a_full_queue"] == 429 else 1)


if __name__ == "__main__":
    main()
