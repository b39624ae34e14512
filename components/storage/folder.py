"""The artifact store as files below one folder."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from components.core import telemetry
from components.core.errors import UserError
from components.core.files import atomic_write, digest_file
from components.storage.keys import check_key, key_taken
from components.storage.store import StoredObject

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers of os.link on file systems without hard links."""


class FolderStore:
    """A store of objects as files, with the SHA-256 of each below `.sha256`.

    When two processes write one key at once, only one of them succeeds: objects are created as hard links.
    """

    def __init__(self, root: Path):
        self.root = root

    def put(self, key: str, source: Path) -> str:
        target = self.root / check_key(key)
        with telemetry.transfer("put") as moved:
            sha256 = digest_file(source)
            if not target.exists() and _copy(source, target, replace=False):
                moved.append(source.stat().st_size)
            elif digest_file(target) != sha256:
                raise key_taken(str(target))
            if not self._recorded(key):
                atomic_write(self._note(key), sha256)
        return str(target)

    def get(self, key: str, target: Path) -> None:
        path = self.root / check_key(key)
        if not path.is_file():
            raise KeyError(key)
        with telemetry.transfer("get") as moved:
            _copy(path, target, replace=True, sha256=self._recorded(key))
            moved.append(path.stat().st_size)

    def exists(self, key: str) -> bool:
        return (self.root / check_key(key)).is_file()

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        for path in sorted(self.root.rglob("*")):
            key = path.relative_to(self.root).as_posix()
            if (
                path.is_file()
                and key.startswith(prefix)
                and not any(part.startswith(".") for part in key.split("/"))
            ):
                status = path.stat()
                yield StoredObject(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))

    def digests(self, key: str) -> tuple[str, str]:
        path = self.root / check_key(key)
        return digest_file(path), self._recorded(key)

    def remove(self, key: str) -> None:
        path = self.root / check_key(key)
        for gone in (path, self._note(key)):
            gone.unlink(missing_ok=True)
            for folder in gone.parents:
                if folder == self.root or not folder.is_dir() or any(folder.iterdir()):
                    break
                folder.rmdir()

    def _note(self, key: str) -> Path:
        """Return the file with the object's SHA-256.

        It is not beside the object, since libraries load a checkpoint's folder in the store directly.
        """
        return self.root / ".sha256" / check_key(key)

    def _recorded(self, key: str) -> str:
        """Return the SHA-256 that the object was written with.

        It is empty when the writer was killed before it recorded the digest, or was another program.
        """
        note = self._note(key)
        return note.read_text().strip() if note.is_file() else ""


def _copy(source: Path, target: Path, *, replace: bool, sha256: str = "") -> bool:
    """Copy a file in one step; return False when the target exists and `replace` is not set.

    Raises UserError when the copy does not match `sha256`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        copy = Path(folder) / "object"
        shutil.copyfile(source, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
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
            # Without hard links two simultaneous writers are not told apart; the home's lock still
            # orders runs.
            copy.replace(target)
    return True
