"""The artifact store: immutable objects by key, in a local folder or in S3, with verified digests."""

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
