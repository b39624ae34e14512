"""Read, write and remove files safely in a folder to which an untrusted process also writes.

Symbolic links are not followed. FIFOs, devices and large files are not read. The path of the root folder is
trusted, and only trusted processes may write to the folder that holds it. Files below the root folder are
opened relative to a descriptor of their parent folder, because the untrusted process may replace any folder
by a link at any time. For the same reason no path below the root folder is given to another program.
"""

import contextlib
import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Size of the largest file that is read, in bytes.
MAX_FILE_BYTES = 1 << 20
# Largest number of names that are read from one folder, and of bytes of all files that are read from it.
MAX_FILES, MAX_FOLDER_BYTES = 200, 16 << 20
# Number of times that a file is written if the untrusted process changes its folder meanwhile.
WRITE_ATTEMPTS = 20
# Errors of a full disk or a faulty machine, which an untrusted process does not cause by changing names.
MACHINE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE})
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
    `MAX_FILE_BYTES` are included, of which those that follow `MAX_FOLDER_BYTES` of others are left out. The
    result is empty if `folder` cannot be opened or is a symbolic link.
    """
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError), opened(root / folder, _FOLDER) as above:
        left = MAX_FOLDER_BYTES
        for name in sorted(os.listdir(above))[:MAX_FILES]:
            data = _regular(above, name)
            if data is not None and len(data) <= left:
                found[name] = data
                left -= len(data)
    return found


def _regular(above: int, name: str) -> bytes | None:
    with contextlib.suppress(OSError), opened(name, _READ, above) as descriptor:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES:
            return os.pread(descriptor, status.st_size, 0)
    return None


def write_text(root: Path, path: str, text: str) -> None:
    """Replace `path` below `root` by a new regular file with the content `text`.

    `path` is NAME or FOLDER/NAME. If FOLDER is missing or is not a folder, it is replaced by an empty one.
    Every user may read and write the new file. If the untrusted process changes the folders again and again
    meanwhile, the file may not be written. Raises OSError if the machine cannot write the file, for instance
    because the disk is full.
    """
    # What is new is made here and then renamed, and what is in the way is moved here before it is removed, as
    # the untrusted process cannot reach this folder.
    own = Path(tempfile.mkdtemp(dir=root.parent, prefix="own-"))
    try:
        file = own / "file"
        file.write_bytes(text.encode(errors="replace"))
        file.chmod(0o666)
        for attempt in range(WRITE_ATTEMPTS):
            try:
                _place(root, path, own, attempt)
            except OSError as error:
                if error.errno in MACHINE_ERRORS:
                    raise
            else:
                return
    finally:
        # Without chmod, which would follow a link that a process still puts into a moved folder. What cannot
        # be removed so is removed with the folder that holds `root`.
        subprocess.run(["rm", "-rf", "--", str(own)], stderr=subprocess.DEVNULL, check=False)


def _place(root: Path, path: str, own: Path, attempt: int) -> None:
    """Rename the file `own`/file to `path` below `root`, in place of what is there.

    What is in the way is moved to the folder `own`, under a name with the number `attempt`. Raises OSError if
    another process changes the folders meanwhile.
    """
    folder, _, name = path.rpartition("/")
    with contextlib.ExitStack() as stack:
        above = stack.enter_context(opened(root, _FOLDER))
        if folder:
            try:
                above_file = stack.enter_context(opened(folder, _FOLDER, above))
            except OSError:  # a file or symbolic link of this name is replaced by an empty folder
                _move_away(above, folder, own / f"folder-{attempt}")
                new = own / f"new-{attempt}"
                new.mkdir()
                new.chmod(0o777)
                os.rename(new, folder, dst_dir_fd=above)
                above_file = stack.enter_context(opened(folder, _FOLDER, above))
            above = above_file
        try:
            os.rename(own / "file", name, dst_dir_fd=above)
        except IsADirectoryError:
            _move_away(above, name, own / f"name-{attempt}")
            os.rename(own / "file", name, dst_dir_fd=above)


def _move_away(above: int, name: str, target: Path) -> None:
    # A folder can be moved to another one only by those who may write to it.
    with contextlib.suppress(OSError), opened(name, os.O_PATH | _FOLDER, above) as descriptor:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o777)
    with contextlib.suppress(FileNotFoundError):
        os.rename(name, target, src_dir_fd=above)


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


def used_bytes(root: Path, limit: int, entries: int) -> int:
    """Return the number of bytes that the files and folders below `root` occupy on disk.

    Returns `limit` + 1 if there are more bytes than `limit` or more files and folders than `entries`, or if a
    folder cannot be read, because of its permissions or because its path is too long.
    """
    total = count = 0
    errors: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=errors.append):
        for name in (*folders, *files):
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError as error:
                errors.append(error)
            count += 1
        if total > limit or count > entries:
            return limit + 1
    # A file or folder that is missing was removed or replaced meanwhile.
    is_complete = all(isinstance(error, FileNotFoundError | NotADirectoryError) for error in errors)
    return total if is_complete else limit + 1
