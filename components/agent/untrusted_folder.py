"""Read, write and remove files safely in a folder to which an untrusted process also writes.

Symbolic links are not followed. FIFOs, devices and large files are not read. The path of the root folder is
trusted, and files below it are opened relative to a descriptor of their parent folder.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from components.core.files import remove_tree

# Size of the largest file that is read, in bytes.
MAX_FILE_BYTES = 1 << 20
# Largest number of names that are read from one folder.
MAX_FILES = 200
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def opened(path: str | Path, flags: int, parent: int | None = None) -> Iterator[int]:
    """Return a context in which `path` is open with the `os.open` flags `flags`.

    The value of the context is the file descriptor. If `parent`, the descriptor of a folder, is given, `path`
    is relative to this folder. Raises OSError as `os.open` does.
    """
    descriptor = os.open(path, flags, 0o666, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(root: Path, path: str) -> bytes | None:
    """Return the bytes of the file `path` below `root`, where `path` is NAME or FOLDER/NAME.

    Returns None if the file cannot be opened, is not a regular file, or is larger than `MAX_FILE_BYTES`.
    """
    folder, _, name = path.rpartition("/")
    with contextlib.suppress(OSError), opened(root / folder, _FOLDER) as above:
        return _regular(above, name)
    return None


def contents(root: Path, folder: str = "") -> dict[str, bytes]:
    """Return the bytes of the files in `folder` below `root`, by file name.

    Only the first `MAX_FILES` names in sorted order are read, and only regular files of at most
    `MAX_FILE_BYTES` are included. The result is empty if `folder` cannot be opened or is a symbolic link.
    """
    with contextlib.suppress(OSError), opened(root / folder, _FOLDER) as above:
        files = {name: _regular(above, name) for name in sorted(os.listdir(above))[:MAX_FILES]}
        return {name: data for name, data in files.items() if data is not None}
    return {}


def _regular(above: int, name: str) -> bytes | None:
    with contextlib.suppress(OSError), opened(name, _READ, above) as descriptor:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES:
            return os.pread(descriptor, status.st_size, 0)
    return None


def write_text(root: Path, path: str, text: str) -> None:
    """Replace `path` below `root` by a new regular file with the content `text`.

    `path` is NAME or FOLDER/NAME. If FOLDER is missing or is not a folder, it is replaced by an empty one.
    Every user may read and write the new file. Raises OSError if the file cannot be written.
    """
    folder, _, name = path.rpartition("/")
    with contextlib.ExitStack() as stack:
        above = stack.enter_context(opened(root, _FOLDER))
        if folder:
            try:
                above = stack.enter_context(opened(folder, _FOLDER, above))
            except OSError:  # a file or symbolic link of this name is replaced by an empty folder
                _remove(above, folder, root / folder)
                os.mkdir(folder, dir_fd=above)
                os.chmod(folder, 0o777, dir_fd=above)
                above = stack.enter_context(opened(folder, _FOLDER, above))
        _remove(above, name, root / path)
        descriptor = stack.enter_context(opened(name, _NEW, above))
        os.fchmod(descriptor, 0o666)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(text.encode(errors="replace"))


def open_up(root: Path, *names: str) -> None:
    """Give all users all permissions for `root` and for the folders `names` directly below it.

    This is necessary because a process of the same user may have removed permissions. Names that are not
    folders, such as symbolic links, are skipped.
    """
    for path in (root, *(root / name for name in names)):
        with contextlib.suppress(OSError), opened(path, os.O_PATH | _FOLDER) as descriptor:
            os.chmod(f"/proc/self/fd/{descriptor}", 0o777)


def remove(root: Path, path: str) -> None:
    """Remove the file `path` below `root`, where `path` is NAME or FOLDER/NAME; errors are ignored."""
    folder, _, name = path.rpartition("/")
    with contextlib.suppress(OSError), opened(root / folder, _FOLDER) as above:
        os.unlink(name, dir_fd=above)


def _remove(above: int, name: str, path: Path) -> None:
    try:
        os.unlink(name, dir_fd=above)
    except FileNotFoundError:
        return
    except OSError:
        remove_tree(path)  # `name` is a folder; remove_tree does not follow links inside it


def used_bytes(root: Path, limit: int, entries: int) -> int:
    """Return the number of bytes that the files and folders below `root` occupy on disk.

    Returns `limit` + 1 if there are more bytes than `limit` or more files and folders than `entries`, or if
    permissions forbid reading a folder.
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
