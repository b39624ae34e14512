"""The artefact store: bytes by key in a local folder or in S3, written once and checked on the way."""

from components.storage.factory import open_store
from components.storage.folder import FolderStore
from components.storage.s3 import S3Store, StoreUnavailable
from components.storage.store import Entry, Store, put_checkpoint

__all__ = ["Entry", "FolderStore", "S3Store", "Store", "StoreUnavailable", "open_store", "put_checkpoint"]
