"""The interface of artifact stores, and the store whose objects are files below one folder.

Keys are POSIX paths such as `runs/1f0c/report.html`. An object is immutable: writing equal bytes to its key
again has no effect, and writing different bytes raises UserError. So no run can overwrite the objects of
another run; objects are removed only by `Store.remove`.
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Protocol

from components.core.errors import UserError
from components.core.files import MANIFEST, atomic_write, digest_file, remove_tree, sync

# Pattern of a valid key.
KEY = re.compile(r"[A-Za-z0-9][\w.,=+@ -]*(/[A-Za-z0-9_][\w.,=+@ -]*)*")
# Folder of a store of files that has the SHA-256 of each object.
NOTES = ".sha256"
# Beginning of the names of temporary folders, in which files are copied.
TEMPORARY = ".cuda-agent-copy-"
# Error numbers with which os.link fails on file systems without hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class StoredObject:
    """The key, the size in bytes and the modification time of one object. `modified` has a time zone."""

    key: str
    bytes: int
    modified: datetime


class Store(Protocol):
    """A store of immutable objects with keys, which are POSIX paths such as `runs/1f0c/report.html`."""

    def put(self, key: str, source: Path) -> str:
        """Store the file `source` under `key`, and return the address of the object (a path or an s3:// URL).

        Raises UserError if the key is not valid or already has other content.
        """

    def get(self, key: str, target: Path) -> None:
        """Write the object `key` to the file `target`, which is replaced in one step unless it is equal.

        Raises KeyError if there is no object with this key, and UserError if the object is damaged.
        """

    def exists(self, key: str) -> bool: ...

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield every object whose key starts with `prefix`, in the order of the keys.

        A store of files raises UserError if no key can start with `prefix`.
        """

    def remove(self, key: str) -> None:
        """Delete the object `key`; nothing happens if there is none."""

    def abandoned(self, older_than: timedelta) -> list[tuple[str, str]]:
        """Return the place and the id of each unfinished write that began earlier than `older_than` ago.

        Such a write was killed. It uses storage, but is in no list of the objects.
        """

    def abandon(self, key: str, upload: str) -> None:
        """Free the storage of an unfinished write, given by its place and its id."""


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

    `folder` is the folder of the checkpoint, and `digest` the digest of its files, which the manifest lists.
    If the store has the manifest, it has the whole checkpoint, so nothing is written. This holds even if the
    manifest in `folder` differs, because different revisions of the code can make equal weights. Raises
    UserError if an object of the store has other bytes than the file of its key.
    """
    prefix = f"checkpoints/{digest}"
    if store.exists(f"{prefix}/{MANIFEST}"):
        return
    files = filter(Path.is_file, folder.rglob("*"))
    for path in sorted(files, key=lambda path: (path.name == MANIFEST, path)):
        store.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path)


class FolderStore:
    """A store of immutable objects as files below the folder `root`, each at the path that is its key.

    The SHA-256 of each object is in a file below `.sha256`. If two processes write different bytes under one
    key at the same time, only one of them succeeds, because objects are created with hard links. On a file
    system without hard links both may succeed.
    """

    def __init__(self, root: Path):
        self.root = root

    def put(self, key: str, source: Path) -> str:
        target = self.root / check_key(key)
        sha256 = digest_file(source)
        is_written = not target.exists() and _copy(source, target, replace=False)
        if not is_written and digest_file(target) != sha256:
            raise key_taken(str(target))
        if is_written or not self._recorded(key):
            atomic_write(self._note(key), sha256)
        return str(target)

    def get(self, key: str, target: Path) -> None:
        path = self.root / check_key(key)
        if not path.is_file():
            raise KeyError(key)
        if not has_digest(target, recorded := self._recorded(key)):
            _copy(path, target, replace=True, sha256=recorded)

    def exists(self, key: str) -> bool:
        return (self.root / check_key(key)).is_file()

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        if prefix:
            check_key(prefix.removesuffix("/"))
        for path in sorted((self.root / prefix.rpartition("/")[0]).rglob("*"), key=Path.as_posix):
            key = path.relative_to(self.root).as_posix()
            if (
                path.is_file()
                and key.startswith(prefix)
                and not any(part.startswith(".") for part in key.split("/"))
            ):
                status = path.stat()
                yield StoredObject(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))

    def remove(self, key: str) -> None:
        path = self.root / check_key(key)
        for gone in (self._note(key), path):
            gone.unlink(missing_ok=True)
            for folder in gone.parents:
                if folder == self.root or not folder.is_dir() or any(folder.iterdir()):
                    break
                folder.rmdir()

    def abandoned(self, older_than: timedelta) -> list[tuple[str, str]]:
        limit = (datetime.now(UTC) - older_than).timestamp()
        return [
            (path.relative_to(self.root).as_posix(), "")
            for path in [*sorted(self.root.rglob(f"{TEMPORARY}*")), *sorted((self.root / NOTES).rglob(".*"))]
            if path.is_dir() and path.stat().st_mtime < limit
        ]

    def abandon(self, key: str, upload: str) -> None:
        remove_tree(self.root / key)

    def _note(self, key: str) -> Path:
        """Return the path of the file with the SHA-256 of the object `key`.

        This file is not in the same folder as the object, because libraries load the folder of a checkpoint
        in the store directly and that folder must contain no other files.
        """
        return self.root / NOTES / check_key(key)

    def _recorded(self, key: str) -> str:
        """Return the SHA-256 that was recorded when the object `key` was written, or "".

        No digest was recorded if the writer was killed before it recorded one, or if another program wrote
        the object.
        """
        note = self._note(key)
        return note.read_text().strip() if note.is_file() else ""


def has_digest(file: Path, sha256: str) -> bool:
    """Return whether `file` exists and has this SHA-256, which is "" if it is not known."""
    return bool(sha256) and file.is_file() and digest_file(file) == sha256


def _copy(source: Path, target: Path, *, replace: bool, sha256: str = "") -> bool:
    """Copy a file so that the target appears in one step, and return whether the target was written.

    If `replace` is false and the target exists, nothing is written. Raises UserError if `sha256` is not empty
    and differs from the SHA-256 of the copy; the target is then unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=TEMPORARY) as folder:
        copy = Path(folder) / "object"
        shutil.copyfile(source, copy)
        sync(copy)
        if sha256 and digest_file(copy) != sha256:
            raise UserError(f"{source}: does not match its SHA-256; restore it from a good copy.")
        if replace:
            copy.replace(target)
            return True
        try:
            os.link(copy, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Without hard links, two processes that write at the same time both succeed. The lock of the home
            # still prevents this for pipeline runs.
            copy.replace(target)
    return True
