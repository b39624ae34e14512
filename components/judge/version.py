"""Version of the judge: a digest of its own sources."""

from components.core.config import PROJECT
from components.core.files import digest_bytes, digest_json
from components.core.params import Params

SOURCES = sorted(
    path
    for package in ("judge", "sandbox")
    for path in (PROJECT / "components" / package).iterdir()
    if path.suffix in (".py", ".cpp")
)
# Digest of the judge's own sources, which is stored in the evidence of every verdict.
VERSION = digest_bytes(b"".join(path.read_bytes() for path in SOURCES))[:16]
# Names of the sandbox parameters that change no verdict and are not part of the protocol's digest.
WITHOUT_EFFECT = {"build_workers", "warm_tasks", "attempts"}


def protocol_digest(params: Params) -> str:
    """Return the digest of all parameters that a verdict depends on."""
    return digest_json([params.device, params.precision, params.sandbox.model_dump(exclude=WITHOUT_EFFECT)])
