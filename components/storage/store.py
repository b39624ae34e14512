"""Interface of an artifact store.

Keys are POSIX paths such as `runs/1f0c…/report.html`. An object is immutable: equal bytes may be written
again, different bytes are refused, so that no run can change what another one published.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from components.core.files import MANIFEST


@dataclass(frozen=True)
class StoredObject:
    """Key and attributes of one object; `modified` has a time zone."""

    key: str
    bytes: int
    modified: datetime


class Store(Protocol):
    """An artifact store: immutable objects by key."""

    def put(self, key: str, source: Path) -> str:
        """Store the file under `key` and return its address.

        Raises UserError when the key holds other bytes.
        """
        ...

    def get(self, key: str, target: Path) -> None:
        """Write the object to `target` by an atomic replacement.

        Raises KeyError when it does not exist and UserError when it is damaged.
        """
        ...

    def exists(self, key: str) -> bool: ...

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield every object whose key starts with `prefix`, in the order of the keys."""
        ...

    def digests(self, key: str) -> tuple[str, str]:
        """Return the SHA-256 of the object as it is now, and as it was written; empty when not recorded."""
        ...

    def remove(self, key: str) -> None:
        """Delete the object; nothing happens when there is none."""
        ...


def put_checkpoint(store: Store, digest: str, folder: Path) -> None:
    """Store every file below `folder` under `checkpoints/<digest>`, manifest.json last.

    A manifest in the store therefore means that the checkpoint is complete, and then nothing is written. The
    first manifest stays even when equal weights come with another one, made by another revision of the code.
    """
    prefix = f"checkpoints/{digest}"
    if store.exists(f"{prefix}/{MANIFEST}"):
        return
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name == MANIFEST, path)
    )
    for path in files:
        store.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path)
