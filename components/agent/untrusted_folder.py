"""Safe access to a folder that an untrusted process also writes.

Symbolic links are not followed; FIFOs, devices and large files are not read. The root folder is trusted, and
everything below it is opened relative to a descriptor of its parent folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from components.core.files import remove_tree

MAX_FILE_BYTES = 1 << 20
"""Size of the largest file that is read."""
MAX_FILES = 200
"""Number of names of a folder that are read."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def opened(path: str | Path, flags: int, parent: int | None = None) -> Iterator[int]:
    """Open `path`, relative to the descriptor `parent` if there is one, and yield its descriptor."""
    descriptor = os.open(path, flags, 0o666, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(root: Path, path: str) -> bytes | None:
    """Return the bytes of the regular file `path` (at most two levels) below `root`, or None."""
    folder, _, name = path.rpartition("/")
    try:
        with opened(root / folder, _FOLDER) as above:
            return _regular(above, name)
    except OSError:
        return None


def contents(root: Path, folder: str = "") -> dict[str, bytes]:
    """Return name and bytes of the regular files among the first `MAX_FILES` names in `folder` below `root`.

    The result is empty where `folder` is a symbolic link or no folder.
    """
    try:
        with opened(root / folder, _FOLDER) as above:
            files = {name: _regular(above, name) for name in sorted(os.listdir(above))[:MAX_FILES]}
    except OSError:
        return {}
    return {name: data for name, data in files.items() if data is not None}


def _regular(above: int, name: str) -> bytes | None:
    try:
        with opened(name, _READ, above) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
                return None
            return os.pread(descriptor, status.st_size, 0)
    except OSError:
        return None


def write_text(root: Path, path: str, text: str) -> None:
    """Replace `path` (at most two levels) below `root` by a new regular file that every user may write."""
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
    """Restore all permissions of `root` and of the folders `names` directly below it.

    A process that runs as the same user may have removed them. Names that are no plain folders are skipped.
    """
    for path in (root, *(root / name for name in names)):
        with contextlib.suppress(OSError), opened(path, os.O_PATH | _FOLDER) as descriptor:
            os.chmod(f"/proc/self/fd/{descriptor}", 0o777)


def remove(root: Path, path: str) -> None:
    """Remove the file `path` (at most two levels) below `root`, if it can be removed."""
    folder, _, name = path.rpartition("/")
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        above = stack.enter_context(opened(root, _FOLDER))
        if folder:
            above = stack.enter_context(opened(folder, _FOLDER, above))
        os.unlink(name, dir_fd=above)


def _plain_folder(above: int, name: str, root: Path) -> str:
    """Make sure that `name` is a plain folder, replacing what is there if it is not; return the name."""
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
        remove_tree(path)  # it is a folder; links inside are not followed


def used_bytes(root: Path, limit: int, entries: int) -> int:
    """Return the bytes on disk below `root`.

    The result is `limit` + 1 as soon as there are more bytes than `limit` or more names than `entries`, or
    when a folder cannot be read.
    """
    total = count = 0
    errors: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=errors.append):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            count += 1
        if total > limit or count > entries:
            return limit + 1
    return limit + 1 if any(isinstance(error, PermissionError) for error in errors) else total
