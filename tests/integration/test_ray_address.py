"""A Ray cluster that has ended is one sentence at once, whatever names its address."""

import socket
import time
from pathlib import Path

import pytest

from components.core.errors import UserError


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("named", ["file", "variable"])
def test_a_cluster_that_has_ended_is_one_sentence_at_once(
    named: str, closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from components.planning.ray_cluster import connect

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = f"127.0.0.1:{closed_port}"
    if named == "variable":
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^RAY_ADDRESS=.*: no Ray cluster answers there"):
        connect()
    assert time.monotonic() - began < 30
