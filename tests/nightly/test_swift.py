"""The artifact store on a real Swift (infra/swift/serve.py), and what only such a server shows."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import boto3
import pytest
from prefect_fixtures import free_port

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from test_storage import *  # noqa: F403  (the tests and their fixtures, on the server of this file)
from test_storage import KEYS, LARGE, file, s3_store

from components.core.config import PROJECT
from components.core.errors import UserError
from components.storage import S3Store, Store, StoreUnavailable
from flows.deployments import retry_kind


class Swift:
    """infra/swift/serve.py as a process, with everything that it started in one group."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            sys.executable,
            PROJECT / "infra" / "swift" / "serve.py",
            self.folder,
            "--port",
            str(self.port),
            "--bucket",
            "kept",
        ]
        with (self.folder.parent / "swift.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | KEYS,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None and self.process.stdout.readline().startswith("S3 on"), (
            self.folder.parent / "swift.log"
        ).read_text()[-2000:]

    def end(self, how: signal.Signals) -> None:
        os.killpg(self.process.pid, how)
        self.process.wait()


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    server = Swift(tmp_path_factory.mktemp("swift") / "kept")
    yield server
    server.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def endpoint(swift: Swift) -> str:
    return swift.url


@pytest.fixture
def store(endpoint: str, tmp_path: Path) -> Store:
    return s3_store(endpoint, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wrong"),
        ("AWS_ACCESS_KEY_ID", "team:nobody"),
        ("AWS_ACCESS_KEY_ID", "others:person"),
    ],
)
def test_who_has_not_the_key_neither_writes_nor_reads(
    swift: Swift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    key = uuid4().hex
    owner = S3Store("s3://kept", swift.url)
    owner.put(f"{key}/mine", file(tmp_path, b"mine"))
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    stranger = S3Store("s3://kept", swift.url)
    for act in (
        lambda: stranger.put(f"{key}/theirs", file(tmp_path, b"x")),
        lambda: stranger.get(f"{key}/mine", tmp_path / "x"),
        lambda: list(stranger.entries()),
    ):
        with pytest.raises(UserError, match=r"refused the .*check the bucket and the credentials") as raised:
            act()
        assert retry_kind(raised.value) is None, "waiting does not fix a wrong key"
    assert [entry.key for entry in owner.entries(key)] == [f"{key}/mine"]


def test_a_server_that_is_killed_has_everything_when_it_is_back(swift: Swift, tmp_path: Path) -> None:
    store = S3Store("s3://kept", swift.url)
    for name, content in (("small", b"x"), ("large", LARGE)):
        store.put(name, file(tmp_path, content))
    swift.end(signal.SIGKILL)
    with pytest.raises(StoreUnavailable):
        store.get("small", tmp_path / "back")
    swift.start()
    assert {"small", "large"} <= {entry.key for entry in store.entries()}
    store.get("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == LARGE


@pytest.mark.parametrize(
    ("folder", "key", "named"),
    [
        ("kept", "nobody", "AWS_ACCESS_KEY_ID must have the form TEAM:PERSON"),
        ("file", "team:person", "file: cannot store objects .File exists."),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_sentence(
    tmp_path: Path, folder: str, key: str, named: str
) -> None:
    file(tmp_path, b"")
    command = [sys.executable, PROJECT / "infra" / "swift" / "serve.py", tmp_path / folder]
    done = subprocess.run(
        command, env=os.environ | {"AWS_ACCESS_KEY_ID": key}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and re.search(named, done.stderr.splitlines()[-1]), done.stderr
