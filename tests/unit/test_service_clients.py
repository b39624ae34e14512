"""What the clients of the judge's service do with the answers of a busy service, and of one that is no judge."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from components.core.config import resolve
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.pool import service_client
from components.judge.pool.service_client import ServiceClient
from components.judge.verdict import protocol_digest
from components.service.client import cuda_agent_reward as reward

PARAMS = resolve("ci").params
TASK = KernelTask(code="x = 1\n")
VERDICT = {"state": "done", "verdict": {"status": "wrong_output", "milestone": -1}}
SETTINGS = {"protocol": protocol_digest(PARAMS), "settings": {}}
Reply = tuple[int, Any, dict[str, str]]


@contextlib.contextmanager
def server(*replies: Reply) -> Iterator[str]:
    """Answer requests with `replies` in turn (status, JSON or text, headers), and yield the address."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content, headers = left.pop(0)
            body = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
    assert not left, "every reply was asked for"


def at(address: str) -> Params:
    return PARAMS.model_copy(update={"pool": PARAMS.pool.model_copy(update={"service": address})})


BUSY: list[Reply] = [
    (503, {"error": "connections: no place"}, {"Retry-After": "0"}),
    (503, "no place", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
    (429, {"error": "queue: full"}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
    (502, "<html>", {}),
]


def test_a_busy_service_is_asked_again_also_if_it_says_when_by_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_client, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(reward, "RETRY_SECONDS", 0.0)
    with server((200, SETTINGS, {}), *BUSY, (200, VERDICT, {})) as address:
        with contextlib.closing(ServiceClient(at(address))) as client:
            assert client.verdict(TASK, {}).status == "wrong_output"
    with server(*BUSY, (200, VERDICT, {})) as address:
        monkeypatch.setenv("CUDA_AGENT_JUDGE", address)
        assert reward.verdict_on("0123", {})["milestone"] == -1
