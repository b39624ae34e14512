"""Version of the judge, which is a digest of its own sources, and the digest of its settings."""

from components.core.config import PROJECT, result_values
from components.core.files import digest_bytes, digest_json
from components.core.params import Params

SOURCES = sorted(
    path
    for package in ("judge", "sandbox")
    for path in (PROJECT / "components" / package).rglob("*")
    if path.suffix in (".py", ".cpp")
)
# Digest of the judge's own sources, which is stored in the evidence of every verdict.
VERSION = digest_bytes(b"".join(path.read_bytes() for path in SOURCES))[:16]


def protocol_digest(params: Params) -> str:
    """Return the digest of all parameters on which a verdict depends."""
    return digest_json(result_values(params, ("device", "precision", "sandbox")))
