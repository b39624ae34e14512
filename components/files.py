"""Files with digests: atomic writes, and digests of files and folders.

Every output of the pipeline is a file (or a folder) with a digest, and is written so that a kill at any moment
leaves either the old state or the new one: write beside, flush to the disk, rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.config import BadInput

MANIFEST = "manifest.json"
"""A checkpoint's: the digest of every file in its folder, and of them all."""


def digest_bytes(data: bytes) -> str:
    """SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """Digest of a JSON value, independent of key order and spacing."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def digest_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_tree(folder: Path, *, exclude: tuple[str, ...] = ()) -> dict[str, str]:
    """Digest of every regular file below `folder`, by its POSIX path relative to it, sorted."""
    return {
        path.relative_to(folder).as_posix(): digest_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix() not in exclude
    }


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def user_cache(name: str) -> Path:
    """A folder for what is the same in every home of a user and costs seconds to make; whatever is in it can be deleted."""
    place = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(place) if Path(place).is_absolute() else Path.home() / ".cache") / "cuda-agent" / name


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` in one step; readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `path` when the block ends well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
        os.chmod(temporary, 0o755)
        if path.exists():
            retired = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
            os.rename(path, retired / "old")
            os.rename(temporary, path)
            shutil.rmtree(retired)
        else:
            os.rename(temporary, path)
        _sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def verify_files(checkpoint: Path, mend: str = "delete the folder and run again") -> str:
    """The digest of a checkpoint whose files match its manifest; BadInput names the first file that does not.

    The same rule as components.policy.model.verify_checkpoint, without its imports. `mend` says what a person does then.
    """
    try:
        manifest = read_json(checkpoint / MANIFEST)
        expected, digest = dict(manifest["files"]), str(manifest["digest"])
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{checkpoint / MANIFEST}: is missing or damaged, so this is not a checkpoint; {mend}.") from error
    if digest_json(expected) != digest:
        raise BadInput(f"{checkpoint / MANIFEST}: its digest does not match the files that it lists, the checkpoint is corrupt; {mend}.")
    found = digest_tree(checkpoint, exclude=(MANIFEST,))
    for name in sorted(set(expected) | set(found)):
        if expected.get(name) != found.get(name):
            raise BadInput(f"{checkpoint / name}: its digest does not match {MANIFEST}, the checkpoint is corrupt; {mend}.")
    return digest


def forget(folder: Path, seconds: float) -> None:
    """Remove what lies in a cache's folder unchanged for so long. Of two files that differ in their ending the later name goes first."""
    for path in sorted(folder.iterdir(), reverse=True):
        with contextlib.suppress(OSError, RecursionError):  # somebody else may have been here; folders may be nested without end
            if path.stat().st_mtime < time.time() - seconds:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
