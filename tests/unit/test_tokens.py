"""The file of the service's tokens."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.core.errors import UserError
from components.service.tokens import Token, create_token, read_tokens, revoke_token


def test_no_token_is_lost_that_is_made_or_revoked_while_another_is(tmp_path: Path) -> None:
    path, names = tmp_path / "new" / "tokens.json", [f"t{number}" for number in range(24)]

    def change(name: str) -> None:
        create_token(path, Token(name=name, digest=""), None)
        if int(name[1:]) % 2:
            revoke_token(path, name)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(change, names))
    assert {token.name for token in read_tokens(path)} == set(names[::2])


def test_a_token_that_is_not_there_is_not_revoked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a readable token file"):
        revoke_token(tmp_path / "none" / "tokens.json", "bob")
    assert not any(tmp_path.iterdir())
    create_token(tmp_path / "tokens.json", Token(name="eve", digest=""), None)
    with pytest.raises(UserError, match="no token named bob; cuda-agent token list"):
        revoke_token(tmp_path / "tokens.json", "bob")
