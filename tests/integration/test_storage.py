"""The artifact store on a folder and on moto, an S3 server in this process.

tests/nightly/test_swift.py has the same tests on a real Swift.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ResponseStreamingError
from moto.server import ThreadedMotoServer

from components.core.errors import UserError
from components.core.params import StoreParams
from components.storage import FolderStore, S3Store, Store, StoreUnavailable, open_store, put_checkpoint
from flows.deployments import retry_kind

KEYS = {
    "AWS_ACCESS_KEY_ID": "team:person",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it remembers keys
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def endpoint(moto: str) -> str:
    return moto


def s3_store(endpoint: str, folder: Path) -> Store:
    """Return a store in a new bucket of the server."""
    bucket = uuid4().hex
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
    return open_store(StoreParams(url=f"s3://{bucket}/some/prefix", endpoint=endpoint), folder)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, endpoint: str, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(StoreParams(url=f"file://{tmp_path / 'store'}", endpoint=""), tmp_path)
    return s3_store(endpoint, tmp_path)


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


def test_what_was_fetched_is_not_fetched_again_unless_it_differs(store: Store, tmp_path: Path) -> None:
    store.put("weights", file(tmp_path, b"one", "mine"))
    target = tmp_path / "back"
    store.get("weights", target)
    first = target.stat().st_ino
    store.get("weights", target)
    assert target.stat().st_ino == first
    target.write_bytes(b"two")
    store.get("weights", target)
    assert target.read_bytes() == b"one"


def test_a_missing_object_is_a_key_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        store.get("runs/none", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_equal_bytes_may_be_put_again_and_others_never(store: Store, tmp_path: Path) -> None:
    store.put("a/b", file(tmp_path, b"one"))
    store.put("a/b", file(tmp_path, b"one"))
    with pytest.raises(UserError, match="never overwritten"):
        store.put("a/b", file(tmp_path, b"two"))
    store.get("a/b", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"one"


def test_objects_are_listed_by_prefix_and_removed(store: Store, tmp_path: Path) -> None:
    for key in ("runs/1/a", "runs/2/b", "checkpoints/c"):
        store.put(key, file(tmp_path, key.encode()))
    assert [(entry.key, entry.bytes) for entry in store.entries("runs/")] == [
        ("runs/1/a", 8),
        ("runs/2/b", 8),
    ]
    store.remove("runs/1/a")
    store.remove("runs/1/a")
    store.put("runs.old/d", file(tmp_path, b"d"))
    # In the order of the keys, and not in that of folders and their names.
    assert [entry.key for entry in store.entries()] == ["checkpoints/c", "runs.old/d", "runs/2/b"]


def test_a_key_cannot_leave_the_store(store: Store, tmp_path: Path) -> None:
    for key in ("../x", "/x", "a/../../x", "a//b", ""):
        with pytest.raises(UserError, match="not a key"):
            store.put(key, file(tmp_path, b"x"))


def test_a_checkpoint_is_stored_file_by_file_with_its_manifest_last(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    file(tmp_path / "tree", b"1", "manifest.json")
    file(tmp_path / "tree", b"2", "weights")
    file(tmp_path / "tree" / "inner", b"3", "more")
    put, order = store.put, []
    monkeypatch.setattr(store, "put", lambda key, source: (order.append(key), put(key, source))[1])
    put_checkpoint(store, "ab", tmp_path / "tree")
    assert set(order) == {f"checkpoints/ab/{name}" for name in ("inner/more", "weights", "manifest.json")}
    assert order[-1] == "checkpoints/ab/manifest.json"
    assert all(map(store.exists, order))


def test_the_same_weights_from_another_revision_keep_the_first_manifest(store: Store, tmp_path: Path) -> None:
    for code in (b"first", b"second"):
        tree = tmp_path / code.decode()
        tree.mkdir()
        file(tree, b"weights", "model.safetensors")
        file(tree, code, "manifest.json")
        put_checkpoint(store, "ab", tree)
    store.get("checkpoints/ab/manifest.json", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"first"


@pytest.fixture
def bucket(endpoint: str) -> Any:
    """A bucket of this test and a maker of stores on it."""
    client = boto3.client("s3", endpoint_url=endpoint)
    name = uuid4().hex
    client.create_bucket(Bucket=name)

    def open_it() -> S3Store:
        return S3Store(f"s3://{name}/team", endpoint)

    open_it.client, open_it.name = client, name
    return open_it


LARGE = bytes(range(256)) * (12 << 12)
"""12 MiB: two parts."""


def test_a_large_object_goes_up_in_parts_and_comes_back(bucket: Any, tmp_path: Path) -> None:
    store = bucket()
    store.put("checkpoints/a/weights", file(tmp_path, LARGE))
    store.get("checkpoints/a/weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == LARGE


def test_an_interrupted_upload_leaves_nothing_and_is_made_anew(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, source = bucket(), file(tmp_path, LARGE)
    with monkeypatch.context() as broken:
        broken.setattr(
            store.client,
            "complete_multipart_upload",
            lambda **_: (_ for _ in ()).throw(EndpointConnectionError(endpoint_url="http://gone")),
        )
        with pytest.raises(StoreUnavailable, match="broke off the write"):
            store.put("weights", source)
    assert not store.exists("weights") and not store.abandoned(timedelta(0))
    store.put("weights", source)
    store.get("weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == LARGE


def test_a_prefix_that_no_key_has_is_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    store.put("runs/1/report", file(tmp_path, b"kept"))
    for prefix in ("/etc/x", "../", "/"):
        with pytest.raises(UserError, match="is not a key"):
            list(store.entries(prefix))
    assert all(len(list(store.entries(prefix))) == 1 for prefix in ("", "r", "runs/", "runs/1", "runs/1/re"))


def test_what_a_killed_write_left_in_a_folder_is_found_and_removed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    store.put("runs/1/report", file(tmp_path, b"kept"))
    left = [tmp_path / "store/runs/1/.cuda-agent-copy-ab12", tmp_path / "store/.sha256/runs/1/.report.x"]
    (tmp_path / "store/.git").mkdir()
    (tmp_path / "store/runs/.settings").mkdir()
    for folder in left:
        folder.mkdir()
        (folder / "object").write_bytes(b"half")
    assert store.abandoned(timedelta(days=1)) == []
    places = [(folder.relative_to(tmp_path / "store").as_posix(), "") for folder in left]
    assert sorted(store.abandoned(timedelta(0))) == sorted(places)
    for place in places:
        store.abandon(*place)
    assert not any(folder.exists() for folder in left) and not store.abandoned(timedelta(0))
    assert [entry.key for entry in store.entries()] == ["runs/1/report"]
    store.get("runs/1/report", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"kept"


@pytest.mark.parametrize("size", [1000, len(LARGE)])
def test_of_two_writers_that_both_saw_nothing_one_is_refused(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    first, second = bucket(), bucket()
    mine, theirs = file(tmp_path, LARGE[:size], "mine"), file(tmp_path, LARGE[::-1][:size], "theirs")
    looked = second._recorded

    def late(name: str) -> str | None:
        """The look-up's answer was true a moment ago: the other writer comes in between."""
        monkeypatch.setattr(second, "_recorded", looked)
        first.put("weights", mine)
        return None

    monkeypatch.setattr(second, "_recorded", late)
    with pytest.raises(UserError, match="never overwritten"):
        second.put("weights", theirs)
    first.get("weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == LARGE[:size]


def test_a_write_whose_answer_was_lost_is_found_when_it_is_tried_again(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket()
    upload = store.client.upload_fileobj

    def lose_the_answer(*arguments: Any, **more: Any) -> None:
        upload(*arguments, **more)
        raise ClientError({"Error": {"Code": "NoSuchUpload"}}, "CompleteMultipartUpload")

    monkeypatch.setattr(store.client, "upload_fileobj", lose_the_answer)
    store.put("weights", file(tmp_path, LARGE, "mine"))
    store.get("weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == LARGE


def test_an_interrupted_download_leaves_nothing_and_is_made_anew(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket()
    store.put("weights", file(tmp_path, LARGE))
    fetch = store.client.get_object

    class Broken:
        def __init__(self, body: Any):
            self.body = body

        def read(self, size: int) -> bytes:
            raise ResponseStreamingError(error="reset by peer")

    with monkeypatch.context() as broken:
        broken.setattr(
            store.client,
            "get_object",
            lambda **request: (answer := fetch(**request)) | {"Body": Broken(answer["Body"])},
        )
        with pytest.raises(StoreUnavailable):
            store.get("weights", tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    store.get("weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == LARGE


def test_a_store_that_is_away_is_a_fault_that_passes(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as raised:
        S3Store("s3://bucket", "http://127.0.0.1:9").put("weights", file(tmp_path, b"x"))
    assert retry_kind(raised.value) == "service" and retry_kind(UserError("a mistake")) is None


def test_the_endpoint_may_come_from_the_standard_variable(
    endpoint: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    store = S3Store(f"s3://{bucket.name}", "")
    store.put("weights", file(tmp_path, b"x"))
    assert [entry.key for entry in store.entries("wei")] == ["weights"]


def test_damage_in_s3_is_noticed(tmp_path: Path, bucket: Any) -> None:
    client, store = bucket.client, bucket()
    store.put("weights", file(tmp_path, b"good"))
    sha256 = client.head_object(Bucket=bucket.name, Key="team/weights")["Metadata"]["sha256"]
    client.put_object(Bucket=bucket.name, Key="team/weights", Body=b"evil", Metadata={"sha256": sha256})
    with pytest.raises(UserError, match="does not match its SHA-256"):
        store.get("weights", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_damage_in_a_folder_is_noticed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    for key in ("runs/a/report.html", "datasets/b/dvc.lock"):
        store.put(key, file(tmp_path, b"good"))
        (tmp_path / "store" / key).write_bytes(b"evil")
        with pytest.raises(UserError, match="does not match its SHA-256"):
            store.get(key, tmp_path / "back")
        store.remove(key)
    assert not (tmp_path / "back").exists() and not list((tmp_path / "store").iterdir())


def test_without_an_address_the_store_is_in_the_home(tmp_path: Path) -> None:
    store = open_store(StoreParams(url="", endpoint=""), tmp_path)
    assert isinstance(store, FolderStore) and store.root == tmp_path / "store"


def test_an_unknown_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"store\.url"):
        open_store(StoreParams(url="ftp://somewhere", endpoint=""), tmp_path)
    with pytest.raises(UserError, match="no bucket"):
        open_store(StoreParams(url="s3://", endpoint=""), tmp_path)


def test_a_removal_that_was_killed_leaves_the_object_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends when one of the two files of an object is gone."""
    store = FolderStore(tmp_path / "store")
    store.put("checkpoints/a/manifest.json", file(tmp_path, b"old"))
    unlink = Path.unlink

    def once(path: Path, **options: Any) -> None:
        unlink(path, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", once)
        store.remove("checkpoints/a/manifest.json")
    store.get("checkpoints/a/manifest.json", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == b"old"
    store.remove("checkpoints/a/manifest.json")
    store.put("checkpoints/a/manifest.json", file(tmp_path, b"new"))
    store.get("checkpoints/a/manifest.json", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == b"new"
