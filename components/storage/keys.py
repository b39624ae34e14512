"""The permitted keys of an artifact store: relative POSIX paths that cannot leave it."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from components.core.errors import UserError

KEY = re.compile(r"[A-Za-z0-9][\w.,=+@ -]*(/[A-Za-z0-9_][\w.,=+@ -]*)*")


def check_key(key: str) -> str:
    """Return the key.

    Raises UserError when it is no relative POSIX path of permitted characters.
    """
    if not KEY.fullmatch(key) or ".." in PurePosixPath(key).parts:
        raise UserError(f"store: {key!r} is not a key; use letters, digits and . _ - between slashes.")
    return key


def key_taken(address: str) -> UserError:
    return UserError(
        f"{address}: holds other bytes already and is never overwritten; remove it by hand if it is wrong."
    )
