"""The interface of artifact stores.

Keys are POSIX paths such as `runs/1f0c/report.html`. An object is immutable: writing equal bytes to its key
again has no effect, and writing different bytes raises UserError. So no run can change the objects of another
run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Protocol

from components.core.errors import UserError
from components.core.files import MANIFEST

# Pattern of a valid key.
KEY = re.compile(r"[A-Za-z0-9][\w.,=+@ -]*(/[A-Za-z0-9_][\w.,=+@ -]*)*")


@dataclass(frozen=True)
class StoredObject:
    """The key, the size in bytes and the modification time of one object. `modified` has a time zone."""

    key: str
    bytes: int
    modified: datetime


class Store(Protocol):
    """A store of immutable objects with keys."""

    def put(self, key: str, source: Path) -> str:
        """Store the file under `key`, and return the address of the object.

        Raises UserError if the key already has other content.
        """

    def get(self, key: str, target: Path) -> None:
        """Write the object to `target`, which is replaced in one step.

        Raises KeyError if there is no object with this key, and UserError if the object is damaged.
        """

    def exists(self, key: str) -> bool: ...

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield every object whose key starts with `prefix`, in the order of the keys."""

    def digests(self, key: str) -> tuple[str, str]:
        """Return the SHA-256 of the object's present bytes, and the SHA-256 recorded when it was written.

        The second is empty if none was recorded.
        """

    def remove(self, key: str) -> None:
        """Delete the object if it exists."""


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


def put_checkpoint(store: Store, digest: str, folder: Path) -> None:
    """Store every file of a checkpoint under `checkpoints/<digest>`, with manifest.json as the last one.

    `folder` is the folder of the checkpoint, and `digest` that of its files. If the store has the manifest,
    it has the whole checkpoint, so nothing is written. This holds even if the manifest in `folder` differs,
    because different revisions of the code can make equal weights.
    """
    prefix = f"checkpoints/{digest}"
    if store.exists(f"{prefix}/{MANIFEST}"):
        return
    files = filter(Path.is_file, folder.rglob("*"))
    for path in sorted(files, key=lambda path: (path.name == MANIFEST, path)):
        store.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path)
