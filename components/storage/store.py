"""What a store is.

Keys are POSIX paths such as `runs/1f0c…/report.html`. An object is immutable: writing equal bytes again is
fine, writing different bytes under a key that is taken is refused, so that no run can change what another one
published.
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
    """One object. `modified` has a time zone."""

    key: str
    bytes: int
    modified: datetime


class Store(Protocol):
    def put(self, key: str, source: Path) -> str:
        """Store the file under `key` and return its address; UserError when the key holds other bytes."""
        ...

    def get(self, key: str, target: Path) -> None:
        """Write the object to `target` in one step.

        KeyError when there is none, UserError when it is damaged.
        """
        ...

    def exists(self, key: str) -> bool: ...

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        """Every object whose key starts with `prefix`, by key."""
        ...

    def digests(self, key: str) -> tuple[str, str]:
        """SHA-256 of the object as it is read now, and as it was written (empty where the store keeps none)."""
        ...

    def remove(self, key: str) -> None:
        """Delete the object; nothing happens when there is none."""
        ...


def put_checkpoint(store: Store, digest: str, folder: Path) -> None:
    """Store every file below `folder` under `checkpoints/<digest>`, manifest.json last.

    Whoever finds the manifest finds the rest: a folder whose writing was interrupted has none. Where it is
    found, nothing is written: the same weights, made by another revision of the code, have a manifest of
    their own, and the first one stays.
    """
    prefix = f"checkpoints/{digest}"
    if store.exists(f"{prefix}/{MANIFEST}"):
        return
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name == MANIFEST, path)
    )
    for path in files:
        store.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path)
