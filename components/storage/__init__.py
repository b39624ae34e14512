"""The artefact store: bytes by key in a local folder or in S3, written once and check_key on the way."""

from components.storage.factory import open_store
from components.storage.folder import FolderStore
from components.storage.s3 import S3Store, StoreUnavailable
from components.storage.store import Store, StoredObject, put_checkpoint

__all__ = [
    "FolderStore",
    "S3Store",
    "Store",
    "StoreUnavailable",
    "StoredObject",
    "open_store",
    "put_checkpoint",
]
