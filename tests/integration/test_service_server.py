"""The HTTP server of the service on a real socket, and the pool that judges on it."""

import contextlib
import http.client
from collections.abc import Iterator
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
