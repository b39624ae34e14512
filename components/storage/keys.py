"""Validation of the keys of an artifact store, which are relative POSIX paths."""

import re
from pathlib import PurePosixPath

from components.core.errors import UserError

KEY = re.compile(r"[A-Za-z0-9][\w.,=+@ -]*(/[A-Za-z0-9_][\w.,=+@ -]*)*")


def check_key(key: str) -> str:
    """Return the key unchanged if it is valid.

    Raises UserError if the key is not a relative POSIX path, contains a character that is not permitted, or
    contains `..`.
    """
    if not KEY.fullmatch(key) or ".." in PurePosixPath(key).parts:
        raise UserError(f"store: {key!r} is not a key; use letters, digits and . _ - between slashes.")
    return key


def key_taken(address: str) -> UserError:
    return UserError(
        f"{address}: holds other bytes already and is never overwritten; remove it by hand if it is wrong."
    )
