"""The HTTP server of the service on a real socket, and the pool that judges on it."""

import contextlib
import errno
import http.client
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_fixtures import PARAMS, TASK, TextJudges, body, text_service

from components.core.errors import UserError
from components.core.params import Params
from components.judge.pool.local_pool import Candidate, Job
from components.judge.pool.open_pool import open_pool
from components.service import connections as service_connections
from components.service.app import BODY_BYTES
from components.service.server import bind


@pytest.fixture
def judges() -> TextJudges:
    return TextJudges()


def test_other_machines_are_served_with_tokens_only() -> None:
    with pytest.raises(UserError, match="--tokens"):
        bind("0.0.0.0:0", has_tokens=False)
    with bind("0", has_tokens=False) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(UserError, match="cannot listen"):
            bind(str(port), has_tokens=False)
    with pytest.raises(UserError, match="give a port"):
        bind("here", has_tokens=False)


@pytest.fixture
def address(tmp_path: Path, judges: TextJudges) -> Iterator[str]:
    with text_service(tmp_path / "there", judges) as address:
        yield address


def test_no_answer_waits_for_the_acknowledgement_of_a_packet(address: str) -> None:
    """Without TCP_NODELAY every answer on a connection that is used again takes 40 ms at least."""
    with httpx.Client(base_url=address) as client:
        seconds = [client.post("/v1/judgements?wait=10", json=body("a")).elapsed for _ in range(20)]
    assert min(seconds[1:]) < timedelta(milliseconds=30)


def test_a_client_that_sends_too_much_reads_why(address: str) -> None:
    """A connection that is closed while a client sends is an error of the network to it."""
    chunks = [b" " * 65536] * (2 * BODY_BYTES // 65536)
    for content, headers in ((b"".join(chunks), {}), (iter(chunks), {"Transfer-Encoding": "chunked"})):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        is_chunked = bool(headers)
        connection.request("POST", "/v1/judgements", content, headers, encode_chunked=is_chunked)
        answer = connection.getresponse()
        assert answer.status == 413 and b"larger than" in answer.read()
        connection.close()


def at(address: str, **pool: Any) -> Params:
    return PARAMS.model_copy(update={"pool": PARAMS.pool.model_copy(update={"service": address} | pool)})


def test_a_pool_on_a_service_measures_once_per_epoch_also_after_its_journal_is_lost(
    address: str, tmp_path: Path, judges: TextJudges
) -> None:
    candidate = Candidate.of({"model_new.py": "a"})
    for _ in range(2):
        with contextlib.closing(open_pool(at(address), tmp_path / "verdicts")) as pool:
            for epoch in ("first", "second", "first"):
                assert pool.submit(Job(TASK, candidate, epoch)).result(10).status == "wrong_output"
            assert pool.submit(Job(TASK, Candidate.of({"model_new.py": "fail"}), "0")).result(30).status == (
                "infrastructure"
            )
            assert pool.admit(TASK.code).result(10).admitted
        for path in (tmp_path / "verdicts").glob("??/*.json"):
            path.unlink()
    assert [text for _, text in judges.measured].count("a") == 2


def test_a_pool_names_what_is_wrong_with_its_service(address: str, tmp_path: Path) -> None:
    def error_of(params: Params) -> str:
        with contextlib.closing(open_pool(params, tmp_path / "verdicts")) as pool:
            error = pool.submit(Job(TASK, Candidate.of({"model_new.py": "a"}), "0")).exception(10)
        assert isinstance(error, UserError)
        return str(error)

    assert "no service at http://127.0.0.1:1" in error_of(at("http://127.0.0.1:1"))
    assert "cannot be read" in error_of(at(address, service_token=str(tmp_path / "none")))
    sandbox = PARAMS.sandbox.model_copy(update={"rounds": 7})
    other = at(address).model_copy(update={"sandbox": sandbox})
    assert "sandbox.rounds is 5 there and 7 here" in error_of(other)
    with pytest.raises(UserError, match=r"pool\.judges"):
        open_pool(at(address, judges=2), tmp_path / "verdicts")


SLOW_BODY = b"POST /v1/judgements HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{"


@contextlib.contextmanager
def connected(address: str, number: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections that send `sent` and nothing more."""
    host, port = address.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(number):
            made.append(stack.enter_context(socket.create_connection((host, int(port)), 10)))
            made[-1].sendall(sent)
        yield made


def are_closed(connections: list[socket.socket], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    for connection in connections:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            while connection.recv(4096):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
    return True


def test_clients_that_send_nothing_keep_nobody_from_connecting(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_connections, "MOST_CONNECTIONS", 20)
    with connected(address, 60) as idle, connected(address, 30, SLOW_BODY) as slow:
        assert httpx.get(f"{address}/health").status_code == 200
        assert httpx.post(f"{address}/v1/judgements?wait=10", json=body("a")).status_code == 200
        assert are_closed(idle + slow[:10]), "those that have waited longest make room"


def test_a_request_that_does_not_come_is_not_waited_for(
    tmp_path: Path, judges: TextJudges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_connections, "REQUEST_SECONDS", 0.5)
    with (
        text_service(tmp_path, judges) as address,
        connected(address, 3) as idle,
        connected(address, 3, SLOW_BODY) as slow,
    ):
        answer = httpx.post(f"{address}/v1/judgements?wait=10", json=body("sleep 1.5"))
        assert answer.status_code == 200, "an answer may take longer"
        assert are_closed(idle + slow, 1)


def test_a_service_whose_connections_are_all_being_answered_says_so(
    address: str, judges: TextJudges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_connections, "MOST_CONNECTIONS", 1)
    with ThreadPoolExecutor(1) as executor:
        waits = executor.submit(
            httpx.post, f"{address}/v1/judgements?wait=10", json=body("sleep 5"), timeout=30
        )
        while not judges.measured:  # the request that is answered for five seconds has the one place
            assert not waits.done(), waits.result().text
            time.sleep(0.05)
        answer = httpx.get(f"{address}/health")
        assert answer.status_code == 503 and "no place" in answer.json()["error"]
        assert waits.result().status_code == 200


def test_a_service_without_descriptors_accepts_again_when_there_are_some(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback may need a file, so that logging it fails too."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(logging.getLogger("asyncio"), "error", fail)
    monkeypatch.setattr(service_connections, "DESCRIPTOR_SHARE", 1.0)
    assert httpx.get(f"{address}/health").status_code == 200
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open("/dev/null", os.O_RDONLY)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 4, limits[1]))
    try:
        host, port = address.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for _ in range(8):  # of the client and the server, in this process
                stack.enter_context(socket.create_connection((host, int(port)), 2))
            time.sleep(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert httpx.get(f"{address}/health", timeout=20).status_code == 200
