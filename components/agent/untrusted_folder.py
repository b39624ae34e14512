"""A folder that an untrusted process writes too: read and written without ever following what it may have put there.

Symbolic links, FIFOs, devices and large files are not followed, opened or read. The folder itself is ours; every step
below it goes through a descriptor of the folder above.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from components.core.files import remove_tree

MAX_FILE_BYTES = 1 << 20
MAX_FILES = 200
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def opened(path: str | Path, flags: int, above: int | None = None, mode: int = 0o666) -> Iterator[int]:
    descriptor = os.open(path, flags, mode, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(root: Path, path: str, limit: int = MAX_FILE_BYTES) -> bytes | None:
    """The content of the regular file `path` (two levels at most) below `root`; None when there is no such plain file."""
    folder, _, name = path.rpartition("/")
    try:
        with opened(root / folder, _FOLDER) as above:
            return _regular(above, name, limit)
    except OSError:
        return None


def contents(root: Path, folder: str = "") -> dict[str, bytes]:
    """The regular files among the first 200 names that lie directly in `folder` below `root`; none when it is no plain folder."""
    try:
        with opened(root / folder, _FOLDER) as above:
            found = {
                name: _regular(above, name, MAX_FILE_BYTES) for name in sorted(os.listdir(above))[:MAX_FILES]
            }
    except OSError:
        return {}
    return {name: data for name, data in found.items() if data is not None}


def _regular(above: int, name: str, limit: int) -> bytes | None:
    try:
        with opened(name, _READ, above) as descriptor:
            found = os.fstat(descriptor)
            return (
                os.pread(descriptor, found.st_size, 0)
                if stat.S_ISREG(found.st_mode) and found.st_size <= limit
                else None
            )
    except OSError:
        return None


def write_text(root: Path, path: str, text: str) -> None:
    """Replace `path` (two levels at most) below `root` by a new plain file that everybody may write."""
    folder, _, name = path.rpartition("/")
    with contextlib.ExitStack() as stack:
        above = stack.enter_context(opened(root, _FOLDER))
        if folder:
            above = stack.enter_context(opened(_plain_folder(above, folder, root), _FOLDER, above))
        _remove(above, name, root / path)
        descriptor = stack.enter_context(opened(name, _NEW, above))
        os.fchmod(descriptor, 0o666)
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(descriptor, data) :]


def open_up(root: Path, *names: str) -> None:
    """Give everybody every right to the folder `root` and to those of the folders `names` directly below it that are plain folders: what
    runs as the same user may have taken them from us."""
    for path in (root, *(root / name for name in names)):
        with contextlib.suppress(OSError), opened(path, os.O_PATH | _FOLDER) as descriptor:
            os.chmod(f"/proc/self/fd/{descriptor}", 0o777)


def remove(root: Path, path: str) -> None:
    folder, _, name = path.rpartition("/")
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        above = stack.enter_context(opened(root, _FOLDER))
        if folder:
            above = stack.enter_context(opened(folder, _FOLDER, above))
        os.unlink(name, dir_fd=above)


def _plain_folder(above: int, name: str, root: Path) -> str:
    try:
        with opened(name, _FOLDER, above):
            return name
    except OSError:
        _remove(above, name, root / name)
        os.mkdir(name, dir_fd=above)
        os.chmod(name, 0o777, dir_fd=above)
        return name


def _remove(above: int, name: str, path: Path) -> None:
    try:
        os.unlink(name, dir_fd=above)
    except FileNotFoundError:
        return
    except OSError:
        remove_tree(path)  # a folder in the place of a file; links in it are not followed


def used_bytes(root: Path, *, limit: int, entries: int) -> int:
    """Bytes on disk below `root`; `limit` + 1 as soon as the limit, or the number of `entries`, is passed, or a folder cannot be looked into."""
    total = count = 0
    closed: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=closed.append):
        if any(isinstance(error, PermissionError) for error in closed):
            return limit + 1
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            count += 1
        if total > limit or count > entries:
            return limit + 1
    return limit + 1 if any(isinstance(error, PermissionError) for error in closed) else total
