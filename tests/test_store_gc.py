"""Claims about retention: what an alias, an unfinished night or an audit entry refers to stays, whatever its age."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.cli_store import store_gc
from components.config import BadInput, resolve
from components.files import digest_file, digest_json, write_json
from components.registry import models
from components.registry.references import references
from components.registry.tracking import NightRun, connect
from components.storage import FolderStore
from components.storage.collect import audit_references, damaged, plan, reason_to_keep

OLD = timedelta(days=90)


def publish(home: Path, store: FolderStore, name: str) -> str:
    """A checkpoint and its run as a night leaves them, ninety days old; the checkpoint's digest."""
    folder = home / "made" / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(name.encode() * 100)
    files = {"model.safetensors": digest_file(folder / "model.safetensors")}
    digest = digest_json(files)
    write_json(folder / "manifest.json", {"files": files, "digest": digest})
    write_json(folder / "run-manifest.json", {"checkpoint.agentic": digest})
    for file in ("model.safetensors", "manifest.json"):
        store.put(f"checkpoints/{digest}/{file}", folder / file)
    store.put(f"runs/{key_of(name)[:12]}/0/manifest.json", folder / "run-manifest.json")
    then = (datetime.now(UTC) - OLD).timestamp()
    for path in store.root.rglob("*"):
        os.utime(path, (then, then))
    return digest


def key_of(name: str) -> str:
    return digest_json({"run": name})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a champion, its predecessor, a refused version, a night that goes on, and one that only the audit names."""
    registry = resolve("ci").params.registry
    client, store = connect(registry, tmp_path), FolderStore(tmp_path / "store")
    for name in ("predecessor", "champion", "refused", "running", "audited", "forgotten"):
        digest = publish(tmp_path, store, name)
        if name in ("audited", "forgotten"):
            continue
        night = NightRun(client, registry, tmp_path, key_of(name), name)
        tags = {"checkpoint.digest": digest}
        version = models.register(
            client,
            model=registry.model,
            run_key=key_of(name),
            run_id=night.run_id,
            experiment_id=night.experiment_id,
            checkpoint=tmp_path / "made" / name,
            tags=tags,
            figures={},
        )
        if name in ("predecessor", "champion"):
            models.promote(client, registry.model, version, tmp_path / "lock")
        if name != "running":
            night.finish()
    write_json(tmp_path / "audit" / "0001.json", {"who": "somebody", "evidence": key_of("audited")})
    return tmp_path


def stored(home: Path) -> set[str]:
    """Names whose run is still in the store, each with its checkpoint."""
    keys = {entry.key.split("/")[1] for entry in FolderStore(home / "store").entries("runs/")}
    names = {name for name in ("predecessor", "champion", "refused", "running", "audited", "forgotten") if key_of(name)[:12] in keys}
    digests = {entry.key.split("/")[1] for entry in FolderStore(home / "store").entries("checkpoints/")}
    assert digests == {json.loads((home / "made" / name / "manifest.json").read_text())["digest"] for name in names}
    return names


ALL = {"predecessor", "champion", "refused", "running", "audited", "forgotten"}


def test_only_what_nothing_refers_to_goes(home: Path) -> None:
    client = connect(resolve("ci").params.registry, home)
    named = audit_references(home) | references(client, "cuda-agent")
    found = plan(FolderStore(home / "store"), named, datetime.now(UTC), timedelta(days=30))
    gone = {group.name for group in found.remove}
    assert gone == {
        f"runs/{key_of('refused')[:12]}",
        f"runs/{key_of('forgotten')[:12]}",
        *(f"checkpoints/{json.loads((home / 'made' / name / 'manifest.json').read_text())['digest']}" for name in ("refused", "forgotten")),
    }
    assert {reason.split(" in ")[0] for reason in found.keep.values()} >= {"audit entry", "a night that is not finished"}


def test_a_dry_run_removes_nothing_and_delete_does(home: Path) -> None:
    store_gc(profile="ci", home=str(home), as_json=False)
    assert stored(home) == ALL
    store_gc(delete=True, profile="ci", home=str(home), as_json=False)
    assert stored(home) == ALL - {"refused", "forgotten"}


def test_what_is_young_stays(home: Path) -> None:
    store_gc(older_than=365, delete=True, profile="ci", home=str(home), as_json=False)
    assert stored(home) == ALL


def test_without_a_registry_nothing_can_go(tmp_path: Path) -> None:
    publish(tmp_path, FolderStore(tmp_path / "store"), "alone")
    with pytest.raises(BadInput, match="no run was registered here"):
        store_gc(delete=True, profile="ci", home=str(tmp_path), as_json=False)
    assert len(list(FolderStore(tmp_path / "store").entries())) == 3


def test_objects_of_others_in_the_bucket_are_never_touched(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    (tmp_path / "x").write_bytes(b"x")
    for key in ("dvc/files/md5/ab/cd", "mlflow/1/artifacts/x", "checkpoints/loose"):
        store.put(key, tmp_path / "x")
    assert plan(store, {}, datetime.now(UTC) + OLD, timedelta(0)).remove == ()


def test_verify_names_what_is_damaged_missing_or_unfinished(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    sound, flipped, short, unfinished = (publish(tmp_path, store, name) for name in ("sound", "flipped", "short", "unfinished"))
    weights = tmp_path / "store" / "checkpoints" / flipped / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    store.remove(f"checkpoints/{short}/model.safetensors")
    store.remove(f"checkpoints/{unfinished}/manifest.json")
    faults = {key: fault for key, fault in damaged(store) if fault}
    assert faults == {
        f"checkpoints/{flipped}/model.safetensors": "does not match manifest.json",
        f"checkpoints/{short}/model.safetensors": "is missing",
        f"checkpoints/{unfinished}": "has no manifest.json: an upload that was not finished",
    }
    assert not any(fault for key, fault in damaged(store, f"checkpoints/{sound}"))


@given(st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(12, 64), st.integers(12, 64))
def test_a_reference_counts_in_full_or_shortened(digest: str, first: int, second: int) -> None:
    assert reason_to_keep(digest[:first], {digest[:second]: "somebody"}) == "somebody"
    assert reason_to_keep(digest[:first], {"f" * 11: "somebody"}) == ""
