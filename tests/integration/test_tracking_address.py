"""Databases and addresses that MLflow cannot use, and passwords in them."""

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
from promotion_fixtures import empty_store

from components.core.config import resolve
from components.core.errors import UserError
from components.core.promotion_params import Registry
from components.registry.tracking import connect
from flows import run_context

PARAMS = Registry(tracking_uri="", experiment="nights", model="policy", audit="", key="", trusted_keys="")


def change_version(file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("update alembic_version set version_num = 'deadbeef1234'")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.write_bytes(b"no database" * 1000), "file is not a database"),
        (lambda file: file.write_bytes(file.read_bytes()[: 3 << 14]), "database disk image is malformed"),
        (change_version, "found version deadbeef1234, but expected"),
        (lambda file: (file.unlink(), file.mkdir()), "Is a directory"),
    ],
    ids=["garbage", "cut_off", "other_version", "folder"],
)
def test_a_database_that_mlflow_cannot_use_is_named_in_one_sentence(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    file = tmp_path / "mlflow" / "mlflow.db"
    file.parent.mkdir()
    file.write_bytes(empty_store())
    damage(file)
    with pytest.raises(UserError) as raised:
        connect(PARAMS, tmp_path)
    text = str(raised.value)
    assert text.startswith(f"{file}: MLflow ") and reason in text and len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("foo://bar", "unsupported URI"),
        ("http://127.0.0.1:9", "Max retries exceeded"),
        ("http:///a", "Invalid url"),
        ("sqlite:////proc/x/y.db", "No such file"),
        ("postgresql://127.0.0.1:1/x", "Connection refused"),
    ],
)
def test_an_address_that_mlflow_cannot_use_is_named_at_once(
    tmp_path: Path, address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow, "set_tracking_uri", lambda _: None)  # which is that of the other tests
    began = time.monotonic()
    with pytest.raises(UserError, match=f"registry.tracking_uri: MLflow cannot use .*{reason}"):
        connect(PARAMS.model_copy(update={"tracking_uri": address}), tmp_path)
    assert time.monotonic() - began < 30


def test_an_address_whose_password_is_not_encoded_is_refused_without_telling_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^registry.tracking_uri: .* as %2F and %40\.$") as refused:
        connect(PARAMS.model_copy(update={"tracking_uri": "postgresql://u:pa/ss@h/db"}), tmp_path)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("address", ["http://u:p@ss@h:5000", "postgresql://u:pass@h/db?x=y@z"])
def test_the_command_that_serves_mlflow_does_not_tell_the_password(tmp_path: Path, address: str) -> None:
    sets = (f"home={tmp_path}", f"registry.tracking_uri={address}")
    commands = run_context.interface_commands(run_context.open_run(resolve("ci", sets)), {"experiment": "1"})
    assert "//u:***@h" in commands["mlflow"] and "pass" not in commands["mlflow"]
