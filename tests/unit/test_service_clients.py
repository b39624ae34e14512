"""Clients of the judge's service wait for a busy one, and name a server that is no judge."""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from components.core.config import resolve
from components.core.errors import UserError
from components.core.params import Params
from components.core.progress import Report, ignore
from components.core.task import KernelTask
from components.judge.pool import service_client
from components.judge.pool.service_client import ServiceClient, connect, socket_path
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


def test_a_busy_service_is_asked_again_also_if_it_says_when_by_a_date(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_client, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(reward, "RETRY_SECONDS", 0.0)
    with (
        server((200, SETTINGS, {}), *BUSY, (200, VERDICT, {})) as address,
        contextlib.closing(ServiceClient(at(address))) as client,
    ):
        assert client.verdict(TASK, {}).status == "wrong_output"
    with server(*BUSY, (200, VERDICT, {})) as address:
        monkeypatch.setenv("CUDA_AGENT_JUDGE", address)
        assert reward.verdict_on("0123", {})["milestone"] == -1


@pytest.mark.parametrize("content", ["<html>", [], {"detail": "Not Found"}])
def test_a_server_that_is_no_judge_is_bad_input_and_no_connection_to_it_stays_open(
    content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[httpx.Client] = []
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: made.append(client(**options)) or made[-1])
    with (
        server((200, content, {})) as address,
        pytest.raises(UserError, match=f"{address} is no judge; give"),
    ):
        ServiceClient(at(address))
    assert made[0].is_closed


@pytest.mark.parametrize("reply", [(200, "<html>", {}), (202, {}, {})])
@pytest.mark.parametrize("report", [ignore, print])
def test_an_answer_that_no_judge_has_sent_ends_a_judgement(reply: Reply, report: Report) -> None:
    with (
        server((200, SETTINGS, {}), reply) as address,
        contextlib.closing(ServiceClient(at(address))) as client,
        pytest.raises(UserError, match=rf"HTTP status {reply[0]}, which no judge has sent"),
    ):
        client.verdict(TASK, {}, report=report)


def test_the_socket_of_another_server_is_not_taken_for_a_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    client = httpx.Client(transport=other, base_url="http://localhost")
    monkeypatch.setattr(
        service_client, "ServiceClient", lambda *_, **__: SimpleNamespace(client=client, close=client.close)
    )
    socket_path(tmp_path, "cpu").touch()
    with pytest.raises(UserError, match=r"other sources \(None\)"):
        connect(PARAMS, tmp_path)
    assert client.is_closed


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(502, content=b"\xff"),
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(500, json=["error"]),
    ],
)
def test_a_coding_agent_is_told_that_no_judge_answers(answer: httpx.Response) -> None:
    pytest.importorskip("mcp", reason="the extra serve is not installed")
    from mcp.server.mcpserver.exceptions import ToolError

    from components.service.mcp_server import make_mcp_server

    other = httpx.MockTransport(lambda request: answer)
    tools = make_mcp_server(httpx.AsyncClient(transport=other, base_url="http://other"))
    with pytest.raises(
        ToolError, match=r"no judge answers at http://other \(.+\); start one: cuda-agent serve"
    ):
        asyncio.run(tools.call_tool("tasks", {}))


@pytest.mark.parametrize("address", ["http://[::1", "http://..", "localhost:8080", "http://127.0.0.1:1"])
def test_an_address_without_a_service_is_named(address: str) -> None:
    pool = PARAMS.pool.model_copy(update={"service": address})
    with pytest.raises(UserError, match=rf"^pool\.service: no service at {re.escape(address)} \(.+\); start"):
        ServiceClient(PARAMS.model_copy(update={"pool": pool}))


def test_a_token_that_no_header_can_have_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("schlüssel", encoding="utf-8")
    with pytest.raises(UserError, match="token cannot be read"):
        service_client.token_headers(str(tmp_path / "token"), "pool.service_token")


@pytest.mark.parametrize("path", ["nowhere/token", "~nobody-has-this-name/token"])
def test_a_token_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(UserError, match=rf"^pool\.service_token: {path} cannot be read .*; give the file"):
        service_client.token_headers(path, "pool.service_token")
