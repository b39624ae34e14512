"""Claims about the artifact store, on a folder and on a real S3 protocol server in this process (moto)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from components.config import BadInput
from components.config import Store as StoreParams
from components.storage import FolderStore, S3Store, Store, open_store, put_folder


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "folder":
        return open_store(StoreParams(url=f"file://{tmp_path / 'store'}", endpoint=""), tmp_path)
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    bucket = tmp_path.name.replace("_", "-").lower()
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
    return open_store(StoreParams(url=f"s3://{bucket}/some/prefix", endpoint=endpoint), tmp_path)


def file(folder: Path, content: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_what_is_put_comes_back(store: Store, tmp_path: Path) -> None:
    assert not store.exists("runs/1/report.html")
    address = store.put("runs/1/report.html", file(tmp_path, b"\x00report" * 1000))
    assert address.endswith("runs/1/report.html") and store.exists("runs/1/report.html")
    store.get("runs/1/report.html", tmp_path / "back" / "report.html")
    assert (tmp_path / "back" / "report.html").read_bytes() == b"\x00report" * 1000


def test_a_missing_object_is_a_key_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        store.get("runs/none", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_equal_bytes_may_be_put_again_and_others_never(store: Store, tmp_path: Path) -> None:
    store.put("a/b", file(tmp_path, b"one"))
    store.put("a/b", file(tmp_path, b"one"))
    with pytest.raises(BadInput, match="never overwritten"):
        store.put("a/b", file(tmp_path, b"two"))
    store.get("a/b", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"one"


def test_a_key_cannot_leave_the_store(store: Store, tmp_path: Path) -> None:
    for key in ("../x", "/x", "a/../../x", "a//b", ""):
        with pytest.raises(BadInput, match="not a key"):
            store.put(key, file(tmp_path, b"x"))


def test_a_folder_is_stored_file_by_file(store: Store, tmp_path: Path) -> None:
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    file(tmp_path / "tree", b"1", "a.json")
    file(tmp_path / "tree" / "inner", b"2", "b.json")
    assert set(put_folder(store, "run", tmp_path / "tree")) == {"a.json", "inner/b.json"}
    assert store.exists("run/inner/b.json")


def test_damage_in_s3_is_noticed(tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="damaged")
    store = S3Store("s3://damaged", endpoint)
    store.put("weights", file(tmp_path, b"good"))
    sha256 = client.head_object(Bucket="damaged", Key="weights")["Metadata"]["sha256"]
    client.put_object(Bucket="damaged", Key="weights", Body=b"evil", Metadata={"sha256": sha256})
    with pytest.raises(BadInput, match="does not match its SHA-256"):
        store.get("weights", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_without_an_address_the_store_is_in_the_home(tmp_path: Path) -> None:
    store = open_store(StoreParams(url="", endpoint=""), tmp_path)
    assert isinstance(store, FolderStore) and store.root == tmp_path / "store"


def test_an_unknown_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"store\.url"):
        open_store(StoreParams(url="ftp://somewhere", endpoint=""), tmp_path)
    with pytest.raises(BadInput, match="no bucket"):
        open_store(StoreParams(url="s3://", endpoint=""), tmp_path)
