"""Faults of the object store: what was published is whole, and once."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from components.core.errors import UserError
from components.storage import S3Store, StoreUnavailable
from flows.deployments import retry_by_kind

PART = 8 << 20
WEIGHTS = os.urandom(1 << 16) * 320
"""20 MiB: three parts."""


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def moto() -> Iterator[tuple[str, int]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="nights")
    yield host, port
    server.stop()


class Wire:
    """A wire to the server that can be cut, and that can flip one bit of what comes back."""

    def __init__(self, server: tuple[str, int]):
        self.server = server
        self.flip_after: int | None = None
        self.cut_after: int | None = None
        self.up = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.server)
            threading.Thread(target=self._up, args=(near, far), daemon=True).start()
            threading.Thread(target=self._down, args=(far, near), daemon=True).start()

    def _up(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            while data := self._read(near):
                self.up += len(data)
                if self.cut_after is not None and self.up > self.cut_after:
                    return
                far.sendall(data)

    def _down(self, far: socket.socket, near: socket.socket) -> None:
        passed = 0
        while data := self._read(far):
            passed += len(data)
            if self.flip_after is not None and passed > self.flip_after:
                self.flip_after = None
                data = data[:-1] + bytes([data[-1] ^ 1])
            try:
                near.sendall(data)
            except OSError:
                return

    @staticmethod
    def _read(source: socket.socket) -> bytes:
        try:
            return source.recv(1 << 16)
        except OSError:
            return b""


@contextmanager
def wire(server: tuple[str, int]) -> Iterator[Wire]:
    made = Wire(server)
    try:
        yield made
    finally:
        made.listener.close()


def weights(folder: Path) -> Path:
    path = folder / "weights"
    path.write_bytes(WEIGHTS)
    return path


@pytest.mark.timeout(60)
def test_a_store_that_is_cut_off_in_an_upload_gets_the_object_when_it_is_back(
    moto: tuple[str, int], tmp_path: Path
) -> None:
    with wire(moto) as line:
        line.cut_after = 2 * PART + PART // 2
        store = S3Store("s3://nights", line.url)
        told: list[str] = []

        def back(_: float) -> None:
            told.append(f"{line.up}")
            line.cut_after = None

        retry_by_kind(lambda: store.put("weights", weights(tmp_path)), told.append, back)
        assert told and "service fault" in told[0]
        store.get("weights", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == WEIGHTS


@pytest.mark.timeout(60)
def test_a_bit_that_flips_on_the_way_is_noticed_and_the_next_try_is_whole(
    moto: tuple[str, int], tmp_path: Path
) -> None:
    with wire(moto) as line:
        store = S3Store("s3://nights", line.url)
        store.put("weights", weights(tmp_path))
        line.flip_after = PART
        with pytest.raises((UserError, StoreUnavailable)):
            store.get("weights", tmp_path / "back")
        assert not (tmp_path / "back").exists()
        store.get("weights", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == WEIGHTS


WRITER = """
import sys
from pathlib import Path
from components.storage import S3Store
print("up", flush=True)
store = S3Store("s3://nights", sys.argv[1])
store.put("weights", Path(sys.argv[2]))
"""


@pytest.mark.timeout(60)
def test_a_writer_that_is_killed_again_and_again_leaves_one_whole_object(
    moto: tuple[str, int], tmp_path: Path
) -> None:
    url, source = "http://{}:{}".format(*moto), weights(tmp_path)
    command = [sys.executable, "-c", WRITER, url, str(source)]
    for delay in (0.05, 0.15, 0.3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    store = S3Store("s3://nights", url)
    store.get("weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == WEIGHTS


@pytest.mark.timeout(60)
def test_of_ten_writers_at_once_one_wins_and_the_others_are_told(
    moto: tuple[str, int], tmp_path: Path
) -> None:
    url, outcomes = "http://{}:{}".format(*moto), []

    def write(number: int) -> None:
        path = tmp_path / f"writer-{number}"
        path.write_bytes(f"writer {number}".encode() * 100)
        try:
            S3Store("s3://nights", url).put("decision", path)
            outcomes.append(number)
        except UserError as error:
            assert "never overwritten" in str(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = outcomes
    S3Store("s3://nights", url).get("decision", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == f"writer {winner}".encode() * 100
