"""Atomic writes, digests of files and folders, the user's cache, and messages about faults of the machine.

Outputs of the pipeline are written to a temporary file or folder beside the target, flushed to the disk and
renamed. So if the process is killed, the target never has only a part of its new content.
"""

import base64
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from components.core.errors import InfrastructureError, UserError, error_chain, refuse

# Name of the file of a checkpoint that lists the digest of each other file, and the digest of that list.
MANIFEST = "manifest.json"
# Arguments of renameat2(2): paths are relative to the working directory, and the two paths are exchanged.
AT_FDCWD, RENAME_EXCHANGE = -100, 2
libc = ctypes.CDLL(None)
# End of a message about a full disk.
DISK_FULL = (
    "the disk is full; free some space or give another folder with --home, then run the same command again."
)


def digest_bytes(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value as 64 hexadecimal digits.

    The order of the keys in `value` has no effect on the digest. Raises TypeError if JSON cannot represent
    `value`.
    """
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def hex_to_base64(digest: str) -> str:
    """Return the base64 text of bytes that are given as hexadecimal digits."""
    return base64.b64encode(bytes.fromhex(digest)).decode()


def digest_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_tree(folder: Path, *, exclude: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the SHA-256 of every file below `folder` by relative POSIX path, in the order of the paths.

    A digest has 64 hexadecimal digits. For a symbolic link to a file, it is that of the target's content.
    `exclude` has the relative paths of files that are left out.
    """
    return {
        path.relative_to(folder).as_posix(): digest_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix() not in exclude
    }


def sync(path: Path) -> None:
    """Flush the content of a file, or the list of the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush the content of every file below `folder` to the disk, but no folder's list of entries."""
    for path in filter(Path.is_file, folder.rglob("*")):
        sync(path)


def user_cache(name: str) -> Path:
    """Return the folder `name` in this user's cache, and create it if it does not exist.

    The cache is shared by all homes (a home is the folder of a run's files, the parameter `home`). Its files
    can be deleted at any time. Because its files are loaded and executed, UserError is raised if the folder
    belongs to another user, cannot be made or written, or is on a file system that forbids execution.
    """
    place = os.environ.get("XDG_CACHE_HOME", "")
    remedy = "name a folder of your own by the variable XDG_CACHE_HOME"
    try:
        folder = (Path(place) if Path(place).is_absolute() else Path.home() / ".cache") / "cuda-agent" / name
        folder.mkdir(parents=True, exist_ok=True)
    except RuntimeError as error:  # Path.home raises it for an account without a name or a HOME.
        raise UserError(
            f"HOME: it is not set, and this account has no home folder; set it, or {remedy}."
        ) from error
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: cannot be made ({error.strerror}); {remedy}."
        ) from error
    owner = folder.stat().st_uid
    refuse(
        (
            owner != os.geteuid(),
            f"{folder}: belongs to another user (uid {owner}), and programs are kept there; {remedy}.",
        ),
        (not os.access(folder, os.W_OK | os.X_OK), f"{folder}: cannot be written; {remedy}."),
    )
    check_executable(folder, remedy)
    return folder


def check_executable(folder: Path, remedy: str) -> None:
    """Raise UserError if the file system of `folder` forbids loading programs and libraries.

    `remedy` is the end of the message and says what the user can do.
    """
    refuse(
        (
            os.statvfs(folder).f_flag & os.ST_NOEXEC,
            f"{folder}: its file system is mounted noexec, and what is compiled there must be loaded; "
            f"{remedy}.",
        )
    )


def scratch_folder() -> Path:
    """Return a folder for temporary files that are executed, such as compiled programs.

    It is the system's temporary folder, or a folder in the user's cache if the file system of the system's
    folder forbids execution. Raises UserError if execution is forbidden in both, or if the cache belongs to
    another user or cannot be written.
    """
    system = Path(tempfile.gettempdir())
    return user_cache("tmp") if os.statvfs(system).f_flag & os.ST_NOEXEC else system


def sqlalchemy_path(file: Path) -> str:
    """Return the path of a SQLite database in the form that an address of SQLAlchemy has after `sqlite:///`.

    In such an address a question mark ends the path. A path with a question mark is therefore returned as a
    file URI of SQLite, in which the question mark is percent-encoded. Any other path is returned unchanged.
    """
    return f"file:{quote(str(file))}?uri=true" if "?" in str(file) else str(file)


def atomic_write(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Replace the content of `path` in one step; the file gets the access rights `mode`.

    A reader sees either the whole old content or the whole new content. A text is written in UTF-8. Folders
    that do not exist are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / "new"
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
    sync(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces the folder `path` when the `with` block ends.

    The old folder is deleted. If the block raises an exception, the new folder is deleted and `path` is not
    changed. If `path` exists, the kernel exchanges it with the new folder in one step, so that a process that
    is killed leaves the old or the new folder there. Only on a file system that cannot exchange folders, such
    as NFS, the old one is renamed first, and a process that is killed between the two renames leaves no
    `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        sync_tree(temporary)
        os.chmod(temporary, 0o755)
        if not path.exists():
            os.rename(temporary, path)
        elif libc.renameat2(AT_FDCWD, bytes(temporary), AT_FDCWD, bytes(path), RENAME_EXCHANGE) != 0:
            os.rename(path, old := f"{temporary}.old")
            os.rename(temporary, path)
            os.rename(old, temporary)
        sync(path.parent)
    finally:
        remove_tree(temporary)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until the lock of the file `path` is free, and hold it exclusively while the `with` block runs.

    The file is made if it does not exist, with its folder. If a process is killed, the operating system
    releases its lock at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_replaceable(folder: Path, what: str, names: Sequence[str]) -> None:
    """Raise UserError unless a new folder may and can take the place of the folder `folder`.

    It may if there is no such folder, if it is empty, or if it has the first of `names` and nothing else than
    `names`. `what` says in the message what the folder may hold. It cannot if `folder` is a mount point or
    has the working directory in it, or if the folder above cannot be written.
    """
    above = next(filter(os.path.lexists, folder.absolute().parents), folder)
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(found - set(names))
    is_other = os.path.lexists(folder) if not folder.is_dir() else found and names[0] not in found
    refuse(
        (
            others or is_other,
            f"{folder}: holds something else than {what}{f' ({others[0]})' if others else ''}; "
            "give a new or empty folder.",
        ),
        (
            os.path.ismount(folder) or Path.cwd().is_relative_to(folder.resolve()),
            f"{folder}: cannot be replaced, because it is a mount point or the current folder is in it; "
            "give a folder below it.",
        ),
        (
            not above.is_dir() or not os.access(above, os.W_OK | os.X_OK),
            f"{folder}: cannot be made, because {above} is no folder to write to; give another folder.",
        ),
    )


def write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def write_changed(path: Path, text: str) -> None:
    """Write `text` to the file `path` unless the file already has this content.

    An unchanged file keeps its modification time, which DVC and other programs compare.
    """
    if not path.is_file() or path.read_bytes() != text.encode():
        atomic_write(path, text)


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def verify_files(checkpoint: Path, remedy: str = "delete the folder and run again") -> str:
    """Check the files of the folder `checkpoint` against its manifest, and return the manifest's digest.

    The manifest, manifest.json, lists the SHA-256 of each other file, and has the digest of this list (64
    hexadecimal digits), which is returned. Raises UserError if the manifest is missing or damaged, or if a
    file is missing, added or changed; the message names the first such file. `remedy` is the end of the
    message and says what the user can do.
    """
    try:
        manifest = read_json(checkpoint / MANIFEST)
        expected, digest = dict(manifest["files"]), str(manifest["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint / MANIFEST}: is missing or damaged, so this is not a checkpoint; {remedy}."
        ) from error
    refuse(
        (
            digest_json(expected) != digest,
            f"{checkpoint / MANIFEST}: its digest does not match the files that it lists, the checkpoint "
            f"is corrupt; {remedy}.",
        )
    )
    found = digest_tree(checkpoint, exclude=(MANIFEST,))  # of a valid list only: the files can be large
    refuse(
        *(
            (
                expected.get(name) != found.get(name),
                f"{checkpoint / name}: its digest does not match {MANIFEST}, the checkpoint is corrupt; "
                f"{remedy}.",
            )
            for name in sorted(set(expected) | set(found))
        )
    )
    return digest


def remove_tree(folder: Path) -> None:
    """Remove a folder with its content, or a file, whatever the depth of the content is.

    If access rights prevent the removal, the user's rights to the content are set to read, write and execute,
    and the removal is tried again. What still cannot be removed stays, and no error is raised.
    """
    for program in (("rm", "-rf"), ("chmod", "-R", "u+rwx"), ("rm", "-rf")):
        if os.path.lexists(folder):
            subprocess.run(
                [*program, "--", str(folder)],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )


def discard(folder: Path) -> None:
    """Remove a folder with its content, if it exists.

    The folder is renamed first, so that what is left of it is not taken for a complete folder if the process
    is killed. What is left has a name that begins with a dot, and the next call for `folder` removes it.
    """
    hidden = folder.with_name(f".{folder.name}.removed")
    remove_tree(hidden)
    if folder.exists():
        folder.rename(hidden)
        remove_tree(hidden)


def remove_stale(folder: Path, seconds: float) -> None:
    """Remove the files and folders in `folder` that were last modified more than `seconds` seconds ago.

    They are removed in the reverse order of their names, so that in the cache of builds
    (components/sandbox/build.py) a `.symbols` file, which marks a complete build, is removed before its
    `.so`. What cannot be removed stays, and no error is raised.
    """
    for path in sorted(folder.iterdir(), reverse=True):
        with contextlib.suppress(OSError):  # Another process may have removed it.
            if path.lstat().st_mtime < time.time() - seconds:
                remove_tree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def environment_fault(error: BaseException) -> str:
    """Return one sentence on the fault of the machine or the judge, such as a full disk, that led to `error`.

    The judge is the component that builds, checks and times kernels. The result is empty if neither `error`
    nor one of its causes is such a fault. The messages of the errors are searched as well, because
    safetensors and torch keep only the text of the system's error, and SQLite reports a full disk with a text
    of its own.
    """
    for seen in error_chain(error):
        place = f"{seen.filename}: " if isinstance(seen, OSError) and seen.filename else ""
        match seen:
            case InfrastructureError():
                return f"{seen}; what was judged is kept: run the same command again."
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                return place + DISK_FULL
            case _ if re.search("No space left on device|database or disk is full", str(seen)):
                return place + DISK_FULL
            # In /proc, no file can be made; elsewhere, a missing file is a fault of the program.
            case OSError(
                errno=errno.EISDIR | errno.ENOTDIR | errno.EEXIST | errno.ENAMETOOLONG | errno.ENOENT
            ) if place and (seen.errno != errno.ENOENT or place.startswith("/proc/")):
                return (
                    f"{seen.filename2 or seen.filename}: cannot be written there ({seen.strerror}); "
                    "give another path."
                )
            case OSError(errno=errno.EROFS | errno.EACCES | errno.EPERM) if place:
                return (
                    f"{place}cannot be written ({seen.strerror}); "
                    "fix its permissions or give another folder with --home."
                )
    return ""
