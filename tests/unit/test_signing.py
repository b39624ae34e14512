"""Faults of the files of keys and of the audit chain are named, without a registry."""

from pathlib import Path

import pytest

from components.core.config import resolve
from components.core.errors import UserError
from components.core.promotion_params import Registry
from components.core.signing import Signer
from components.registry.audit import AuditChain


def registry(**values: str) -> Registry:
    return resolve("ci").params.registry.model_copy(update=values)


def test_trusted_keys_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trusted = tmp_path / "file" / "trusted_keys"
    signer = Signer(registry(key=str(tmp_path / "key"), trusted_keys=str(trusted)))
    with pytest.raises(UserError, match=rf"^registry\.trusted_keys: {trusted} cannot be written .*; name"):
        signer.sign({})


def test_an_audit_chain_below_a_home_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    place = "~nobody-has-this-name/audit"
    with pytest.raises(UserError, match=rf"^registry\.audit: {place} has no place"):
        AuditChain.of(registry(audit=place), tmp_path)
