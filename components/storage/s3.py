"""An artifact store in a bucket of an S3-compatible server.

Credentials and region are read from boto3's usual settings, and so is the endpoint if the parameter
store.endpoint is empty. Every write contains checksums that the server compares: the SHA-256 of the object,
or of each part of a large object. The object's SHA-256 is also stored as metadata, with which every read
compares the data; an object of another program that lacks it is not compared. A write has the condition
`If-None-Match: *`, so that if two processes write one key, the server refuses the second. Some servers ignore
the condition, so the store also checks before each write whether the key exists.

boto3's transfer manager moves large objects in parts, several at a time.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from components.core.errors import UserError
from components.core.files import digest_file, sync
from components.storage.store import StoredObject, check_key, has_digest, key_taken

# Error codes of a write that the server refused because the key exists or is being written, or because an
# earlier try of the same write, whose answer was lost, has completed it.
REFUSED = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchUpload")
# Error codes of a request for an object that does not exist.
MISSING = ("NoSuchKey", "NotFound", "404")
# Error codes of faults that may be gone when the request is repeated.
PASSING = (
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "Throttling",
    "TooManyRequests",
    "429",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeTooSkewed",
    "500",
    "502",
    "503",
    "504",
)


class StoreUnavailable(UserError, ConnectionError):
    """Error raised if the store's server does not answer or cannot serve the request now.

    The same call may succeed later.
    """


class S3Store:
    """A store of immutable objects in a bucket of an S3-compatible server, below one prefix of names.

    `url` is s3://bucket/prefix, and an empty `endpoint` means the one of boto3's settings. Raises UserError
    if `url` names no bucket. The methods raise StoreUnavailable if the call may succeed later, and UserError
    if it cannot succeed without a change of the settings or the bucket.
    """

    def __init__(self, url: str, endpoint: str):
        # boto3 is imported here, because a GPU node that only judges candidates does not have it.
        import boto3
        from botocore.config import Config

        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not bucket:
            raise UserError(f"store.url: {url} names no bucket; write s3://bucket/prefix.")
        self.bucket = bucket
        # Beginning of the names of all objects of this store.
        self.prefix = f"{prefix.strip('/')}/".lstrip("/")
        # AWS_RETRY_MODE and AWS_MAX_ATTEMPTS have priority when they are set.
        retries: Any = (
            None
            if {"AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS"} & set(os.environ)
            else {"mode": "standard", "max_attempts": 6}
        )
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint or None,
            config=Config(retries=retries, connect_timeout=10, read_timeout=60),
        )
        for operation in ("PutObject", "CompleteMultipartUpload"):
            self.client.meta.events.register(f"before-parameter-build.s3.{operation}", _refuse_existing)

    def put(self, key: str, source: Path) -> str:
        sha256 = digest_file(source)
        with self._faults(self._name(key), "write") as name:
            present = self._recorded(name)
            if present is None:
                present = self._write(name, source, sha256)
            if present != sha256:
                raise key_taken(self._address(name))
        return self._address(name)

    def get(self, key: str, target: Path) -> None:
        with self._faults(self._name(key), "read") as name:
            if (head := self._head(name)) is None:
                raise KeyError(key)
            recorded = head["Metadata"].get("sha256", "")
            if has_digest(target, recorded):
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
                copy = Path(folder) / "object"
                self.client.download_file(self.bucket, name, str(copy))
                if recorded and digest_file(copy) != recorded:
                    raise UserError(
                        f"{self._address(name)}: what came does not match its SHA-256; "
                        "fetch it again, and if it stays so restore it from a good copy."
                    )
                sync(copy)
                copy.replace(target)

    def exists(self, key: str) -> bool:
        with self._faults(self._name(key), "look-up") as name:
            return self._head(name) is not None

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        with self._faults(self.prefix + prefix, "listing") as start:
            for page in self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=start
            ):
                for item in page.get("Contents", ()):
                    yield StoredObject(
                        item["Key"].removeprefix(self.prefix), item["Size"], item["LastModified"]
                    )

    def remove(self, key: str) -> None:
        with self._faults(self._name(key), "removal") as name:
            self.client.delete_object(Bucket=self.bucket, Key=name)

    def abandoned(self, older_than: timedelta) -> list[tuple[str, str]]:
        limit = datetime.now(UTC) - older_than
        with self._faults(self.prefix, "listing"):
            return [
                (item["Key"].removeprefix(self.prefix), item["UploadId"])
                for page in self.client.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self.bucket, Prefix=self.prefix
                )
                for item in page.get("Uploads", ())
                if item["Initiated"] < limit
            ]

    def abandon(self, key: str, upload: str) -> None:
        with self._faults(self._name(key), "removal") as name:
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload)

    def _write(self, name: str, source: Path, sha256: str) -> str:
        """Write the file `source` as the object `name` unless it exists, and return the object's SHA-256.

        `sha256` is the digest of the file. The returned digest is the one that is recorded with the object;
        it differs from `sha256` if another process has written other bytes. Raises StoreUnavailable if the
        object is missing after the write.
        """
        arguments = {"Metadata": {"sha256": sha256}, "ChecksumAlgorithm": "SHA256"}
        try:
            with source.open("rb") as body:
                self.client.upload_fileobj(body, self.bucket, name, ExtraArgs=arguments)
        except self.client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] not in REFUSED:
                raise
        if (found := self._recorded(name)) is None:
            raise StoreUnavailable(f"{self._address(name)}: was written and is not there; try again.")
        return found

    def _name(self, key: str) -> str:
        return self.prefix + check_key(key)

    def _address(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    def _head(self, name: str) -> Any:
        try:
            return self.client.head_object(Bucket=self.bucket, Key=name)
        except self.client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] in MISSING:
                return None
            raise

    def _recorded(self, name: str) -> str | None:
        """Return the SHA-256 that was recorded when the object `name` was written.

        The result is None if there is no object, and "" if the object was written by a program that records
        none.
        """
        head = self._head(name)
        return None if head is None else str(head["Metadata"].get("sha256", ""))

    @contextlib.contextmanager
    def _faults(self, name: str, act: str) -> Iterator[str]:
        """Return a context that yields `name` unchanged and converts boto3's errors inside the context.

        `name` is the name of an object or the beginning of names, and `act` the operation, such as `read`,
        for the message. StoreUnavailable is raised if the call may succeed later, and UserError if it cannot
        succeed without a change of the settings or the bucket.
        """
        from boto3.exceptions import RetriesExceededError
        from botocore import exceptions

        address = self._address(name)
        try:
            yield name
        except exceptions.ClientError as error:
            if error.response["Error"]["Code"] in PASSING:
                raise StoreUnavailable(
                    f"{address}: the store cannot serve the {act} now ({error}); try again later."
                ) from error
            raise UserError(
                f"{address}: the store refused the {act} ({error}); check the bucket and the credentials."
            ) from error
        except (
            exceptions.ConnectionError,
            exceptions.HTTPClientError,
            exceptions.IncompleteReadError,
            exceptions.ResponseStreamingError,
            RetriesExceededError,
        ) as error:
            raise StoreUnavailable(
                f"{address}: the store broke off the {act} ({error}); try again later."
            ) from error
        except exceptions.BotoCoreError as error:
            raise UserError(
                f"{address}: the {act} is not possible ({error}); "
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the region."
            ) from error


def _refuse_existing(params: dict[str, Any], **_: Any) -> None:
    """Add to `params`, the parameters of a write, the condition that the object does not exist.

    The function handles an event of boto3, whose transfer manager has no argument for this condition.
    """
    params["IfNoneMatch"] = "*"
