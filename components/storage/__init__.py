"""The artifact store: immutable objects by key, in a local folder or in S3, with verified digests.

`open_store` returns the store that the parameters name; `store.py` has the interface.
"""

from pathlib import Path

from components.core.errors import UserError
from components.core.params import StoreParams
from components.storage.s3 import S3Store, StoreUnavailable
from components.storage.store import FolderStore, Store, StoredObject, put_checkpoint

__all__ = [
    "FolderStore",
    "S3Store",
    "Store",
    "StoreUnavailable",
    "StoredObject",
    "open_store",
    "put_checkpoint",
    "store_folder",
]


def open_store(params: StoreParams, home: Path) -> Store:
    """Return the artifact store that `params.url` (the parameter store.url) names.

    The URL `s3://bucket/prefix` names a part of an S3 bucket; a path or a file:// URL names a folder; and an
    empty URL names the folder `store` in `home`, which is the folder of all runs. Raises UserError for any
    other URL.
    """
    url = params.url
    if url.startswith("s3://"):
        return S3Store(url, params.endpoint)
    if "://" in url and not url.startswith("file://"):
        raise UserError(f"store.url: {url} is neither a folder nor s3://bucket/prefix; give one of these.")
    return FolderStore(store_folder(url) if url else home / "store")


def store_folder(url: str) -> Path:
    """Return the absolute path of the folder that `url`, a path or a file:// URL, names.

    A relative path is one in the current folder, and ~ stands for the user's home folder, as in the parameter
    home. Raises UserError if this account has no home folder.
    """
    try:
        return Path(url.removeprefix("file://")).expanduser().resolve()
    except RuntimeError as error:
        raise UserError(
            f"store.url: {url} has no place, because there is no such home folder; give a path."
        ) from error
