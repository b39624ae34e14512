"""Ed25519 signatures of records, and the public keys whose signatures are trusted.

Keys have OpenSSH's formats, so `ssh-keygen -t ed25519` makes a private key, and the file of trusted keys has
one public key and a name per line, as ssh's authorized_keys has. If the file of trusted keys does not exist,
the first signature writes it with the public key of the present private key. A private key is made before, if
there is none.
"""

import base64
import getpass
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from components.core.errors import UserError
from components.core.files import atomic_write, digest_json, locked
from components.core.promotion_params import Registry

KEY, TRUSTED = "signing_key", "trusted_keys"


def person() -> str:
    """Return the current user and the host as `user@host`, with `uid NUMBER` for a user without a name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user often has no name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


class Signer:
    """Signs records with one private key, and verifies signatures by the trusted keys.

    The parameters registry.key and registry.trusted_keys name the files of the private key and of the trusted
    keys. If `registry.key` is empty, the private key is the file signing_key in the folder `cuda-agent` of
    the user's configuration. If `registry.trusted_keys` is empty, the trusted keys are in the file
    trusted_keys in the folder of the private key. Relative paths begin at the working directory. Raises
    UserError if a path begins with ~ and this account has no home folder.
    """

    def __init__(self, registry: Registry):
        place = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "cuda-agent")
        key = Path(registry.key or place / KEY)
        trusted = Path(registry.trusted_keys or key.with_name(TRUSTED))
        try:
            self.key, self.trusted = key.expanduser(), trusted.expanduser()
        except RuntimeError as error:
            raise UserError(
                f"registry.key: {key} has no place, because this account has no home folder; give a path."
            ) from error

    def sign(self, record: Mapping[str, Any]) -> str:
        """Return the fingerprint of the key and the signature of a JSON record, as `FINGERPRINT:BASE64`.

        If the file of trusted keys does not exist, it is written with this key, which is made if there is
        none. Raises UserError if the key cannot be read or made, or is not a trusted one, or as `names` does.
        """
        private = self._private()
        public = private.public_key()
        if _fingerprint(public) not in self.names():
            raise UserError(
                f"{self.key}: {self.trusted} does not list this key, so its signatures would not be "
                f"accepted; append the line: {_line(public)}"
            )
        signature = base64.b64encode(private.sign(digest_json(dict(record)).encode())).decode()
        return f"{_fingerprint(public)}:{signature}"

    def check(self, record: Mapping[str, Any], signature: str) -> str:
        """Return the name of the trusted key with which a JSON record was signed.

        `signature` has the form that `sign` returns. Raises ValueError, which says what is wrong, if the
        signature is empty, is by a key that is not trusted, or does not belong to `record`. Raises UserError
        as `names` does.
        """
        fingerprint, _, value = signature.partition(":")
        if not value:
            raise ValueError("it is not signed")
        known = self.names().get(fingerprint)
        if known is None:
            raise ValueError(f"it is signed with the key {fingerprint}, which {self.trusted} does not list")
        name, public = known
        try:
            public.verify(base64.b64decode(value), digest_json(dict(record)).encode())
        except (InvalidSignature, ValueError) as error:
            raise ValueError("it was changed after it was signed") from error
        return name

    def names(self) -> dict[str, tuple[str, Ed25519PublicKey]]:
        """Return the name and the public key on each line of the file `trusted`, by the key's fingerprint.

        Empty lines and lines that begin with # are skipped. A key without a name has the name `unnamed`. The
        result is empty if there is no such file. Raises UserError if the file cannot be read, or if a line is
        no Ed25519 key.
        """
        try:
            lines = self.trusted.read_text().splitlines() if self.trusted.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"registry.trusted_keys: {self.trusted} cannot be read ({error}); mend it."
            ) from error
        found = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                public = serialization.load_ssh_public_key(line.encode())
            except (ValueError, UnsupportedAlgorithm):
                public = None
            if not isinstance(public, Ed25519PublicKey):
                raise UserError(
                    f"registry.trusted_keys: {self.trusted}, line {number}: not an Ed25519 public key; "
                    "give ssh-ed25519, the key, and a name."
                )
            found[_fingerprint(public)] = (" ".join(line.split()[2:]) or "unnamed", public)
        return found

    def _private(self) -> Ed25519PrivateKey:
        """Return the private key.

        If the file of trusted keys does not exist, a private key is made unless there is one, and its public
        key is written as the only line of the file of trusted keys. Raises UserError if the private key is
        not a readable Ed25519 key without a passphrase, or if a file cannot be written.
        """
        try:
            if not self.trusted.exists():
                self._make()
            private = serialization.load_ssh_private_key(self.key.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UserError(
                f"registry.key: {self.key} is no readable private key without a passphrase ({error}); make "
                "one with ssh-keygen -t ed25519, or name another file."
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise UserError(
                f"registry.key: {self.key} is no Ed25519 key; make one with ssh-keygen -t ed25519."
            )
        if not self.trusted.exists():
            try:
                atomic_write(self.trusted, f"{_line(private.public_key())}\n")
            except OSError as error:
                raise UserError(
                    f"registry.trusted_keys: {self.trusted} cannot be written ({error}); name another file."
                ) from error
        return private

    def _make(self) -> None:
        """Write a new private key without a passphrase to the file `self.key`, unless the file exists.

        Only the user can read the file. A lock in the folder of the file keeps two processes from making two
        keys.
        """
        self.key.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self.key.parent / "lock"):
            if not self.key.exists():
                text = Ed25519PrivateKey.generate().private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.OpenSSH,
                    serialization.NoEncryption(),
                )
                atomic_write(self.key, text, mode=0o600)


def _line(public: Ed25519PublicKey) -> str:
    """Return the line `ssh-ed25519 KEY USER@HOST` of the file of trusted keys for a public key."""
    text = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return f"{text.decode()} {person()}"


def _fingerprint(public: Ed25519PublicKey) -> str:
    """Return the fingerprint of a key as `ssh-keygen -l` prints it, without the prefix SHA256."""
    return base64.b64encode(serialization.ssh_key_fingerprint(public, hashes.SHA256())).decode().rstrip("=")
