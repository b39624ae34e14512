"""Retention: what an alias, an unfinished run or an audit entry refers to stays, whatever its age."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.cli.store import store_gc
from components.core.config import resolve
from components.core.errors import UserError
from components.core.files import MANIFEST, digest_file, digest_json, write_json
from components.registry import models
from components.registry.gates import Compared, Decision
from components.registry.promotion import Promotion
from components.registry.tracking import MlflowRun, connect
from components.storage import FolderStore
from components.storage.gc import plan, reason_to_keep
from flows import run_context

OLD = timedelta(days=90)
NAMES = ("predecessor", "champion", "declined", "undecided", "running", "forgotten")
ALL = {kind: set(NAMES) for kind in ("warm_up", "agentic", "runs")}
WAITING = Decision(verdict="waiting", gates=(), reasons=("a person has to approve.",))


def checkpoint(folder: Path, store: FolderStore, content: str) -> str:
    """Make a checkpoint and publish it; its digest."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content.encode() * 100)
    files = {"model.safetensors": digest_file(folder / "model.safetensors")}
    digest = digest_json(files)
    write_json(folder / "manifest.json", {"files": files, "digest": digest})
    for file in ("model.safetensors", "manifest.json"):
        store.put(f"checkpoints/{digest}/{file}", folder / file)
    return digest


def publish(home: Path, store: FolderStore, name: str) -> str:
    """Make a run of ninety days ago with its two checkpoints, and return the last one's digest."""
    folder = home / "made" / name
    digest, warm_up = (
        checkpoint(folder / "agentic", store, name),
        checkpoint(folder / "warm_up", store, f"{name} warm-up"),
    )
    write_json(folder / "run-manifest.json", {"checkpoint.warm_up": warm_up, "checkpoint.agentic": digest})
    store.put(f"runs/{key_of(name)[:12]}/0/manifest.json", folder / "run-manifest.json")
    then = (datetime.now(UTC) - OLD).timestamp()
    for path in store.root.rglob("*"):
        os.utime(path, (then, then))
    return digest


def key_of(name: str) -> str:
    return digest_json({"run": name})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a home with champion, predecessor, a declined and an undecided version, and an unfinished run."""
    tmp_path = tmp_path_factory.mktemp("made")
    registry = resolve("ci").params.registry
    client, store = connect(registry, tmp_path), FolderStore(tmp_path / "store")
    promotion = Promotion(client, registry, tmp_path)
    for name in NAMES:
        digest = publish(tmp_path, store, name)
        if name == "forgotten":
            continue
        night = MlflowRun(client, registry, tmp_path, key_of(name), name)
        tags = {"checkpoint.digest": digest}
        version = models.register(
            client,
            model=registry.model,
            run_key=key_of(name),
            run_id=night.run_id,
            experiment_id=night.experiment_id,
            checkpoint=tmp_path / "made" / name / "agentic",
            tags=tags,
            figures={},
        )
        results = tmp_path / f"{name}.json"
        results.write_text("{}")
        evidence = tags | {"manifest.digest": digest_file(tmp_path / "made" / name / "agentic" / MANIFEST)}
        evidence |= {"evaluation": results.name, "evaluation.digest": digest_file(results)}
        evidence |= {"start.evaluation": results.name, "start.digest": digest_file(results), "report": ""}
        promotion.register(version, evidence)
        if name in ("predecessor", "champion"):
            promotion.promote(version, override=True, reason="for the test")
        if name == "declined":
            version_now = models.aliases(client, registry.model)[models.CHAMPION]
            champion = Compared(version=version_now, evaluation="champion.json", digest="0")
            promotion.apply_decision(
                version, WAITING, champion=champion, approval_seconds=3600, key=key_of(name)
            )
            promotion.decline(version)
        if name != "running":
            night.end("FINISHED")
    return tmp_path


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    """A copy of it: making MLflow's tables takes seconds."""
    return shutil.copytree(made, tmp_path / "home")


def digest_of(home: Path, name: str, stage: str) -> str:
    return json.loads((home / "made" / name / stage / "manifest.json").read_text())["digest"]


def stored(home: Path) -> dict[str, set[str]]:
    """What is still in the store, by kind: names of nights."""
    present = {"/".join(entry.key.split("/")[:2]) for entry in FolderStore(home / "store").entries()}
    found = {
        stage: {name for name in NAMES if f"checkpoints/{digest_of(home, name, stage)}" in present}
        for stage in ("warm_up", "agentic")
    }
    return found | {"runs": {name for name in NAMES if f"runs/{key_of(name)[:12]}" in present}}


def test_what_an_alias_or_a_run_refers_to_stays_whole_and_evidence_keeps_what_was_decided(
    home: Path,
) -> None:
    store_gc(profile="ci", home=str(home), as_json=False)
    assert stored(home) == ALL  # only said what would go
    store_gc(delete=True, profile="ci", home=str(home), as_json=False)
    # Each champion was promoted by an entry of the chain, so that an alias that moves on leaves evidence
    # behind.
    assert stored(home)["agentic"] == set(NAMES) - {"undecided", "forgotten"}
    assert stored(home)["warm_up"] == {"predecessor", "champion", "running"}


def test_what_another_model_of_the_registry_needs_stays_too(home: Path) -> None:
    before = stored(home)
    connect(resolve("ci").params.registry, home).create_registered_model("another program's, of o'brien")
    store_gc(home=str(home), profile="ci", sets=["registry.model=other"], older_than=30, delete=True)
    assert stored(home)["agentic"] == before["agentic"] - {"forgotten", "undecided"}


def test_what_waits_for_approval_stays_when_another_version_is_the_candidate(home: Path) -> None:
    registry = resolve("ci").params.registry
    client = connect(registry, home)
    (waiting,) = (
        version
        for version in client.search_model_versions(f"name = '{registry.model}'")
        if version.tags[models.RUN_KEY] == key_of("undecided")
    )
    models.set_tags(client, registry.model, str(waiting.version), {models.DECISION: "waiting"})
    store_gc(home=str(home), profile="ci", older_than=30, delete=True)
    assert "undecided" in stored(home)["agentic"]


def test_evidence_is_found_in_the_folder_that_the_parameters_name(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("shared") / "audit"
    (home / "audit").rename(elsewhere)
    store_gc(delete=True, profile="ci", home=str(home), sets=[f"registry.audit={elsewhere}"], as_json=False)
    assert "declined" in stored(home)["agentic"]


def test_nothing_is_removed_while_a_run_works_in_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_context, "LOCK_SECONDS", 0)
    with run_context.home_lock(home), pytest.raises(run_context.Busy, match="another run"):
        store_gc(delete=True, profile="ci", home=str(home), as_json=False)
    assert stored(home) == ALL


def test_a_broken_chain_stops_the_removal(home: Path) -> None:
    entry = next((home / "audit").rglob("000002.json"))
    entry.write_text(entry.read_text().replace("for the test", "for the best"))
    with pytest.raises(UserError, match="was changed after it was written"):
        store_gc(delete=True, profile="ci", home=str(home), as_json=False)
    assert stored(home)["agentic"] == set(NAMES)


def test_what_is_young_stays(home: Path) -> None:
    store_gc(older_than=365, delete=True, profile="ci", home=str(home), as_json=False)
    assert stored(home) == ALL


def test_without_a_registry_nothing_can_go(tmp_path: Path) -> None:
    publish(tmp_path, FolderStore(tmp_path / "store"), "alone")
    with pytest.raises(UserError, match="no run was registered here"):
        store_gc(delete=True, profile="ci", home=str(tmp_path), as_json=False)
    assert len(list(FolderStore(tmp_path / "store").entries())) == 5


def test_objects_of_others_in_the_bucket_are_never_touched(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    (tmp_path / "x").write_bytes(b"x")
    for key in ("dvc/files/md5/ab/cd", "mlflow/1/artifacts/x", "checkpoints/loose"):
        store.put(key, tmp_path / "x")
    assert plan(store, {}, {}, datetime.now(UTC) + OLD, timedelta(0)).remove == ()


@given(st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(12, 64), st.integers(12, 64))
def test_a_reference_counts_in_full_or_shortened(digest: str, first: int, second: int) -> None:
    assert reason_to_keep(digest[:first], {digest[:second]: "somebody"}) == "somebody"
    assert reason_to_keep(digest[:first], {"f" * 11: "somebody"}) == ""
