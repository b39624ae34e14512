"""Bearer tokens of the HTTP service, of which only the SHA-256 digests are stored.

A token is 256 random bits, so that its digest needs neither salt nor a slow hash function.
"""

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from components.core.errors import UserError, refuse
from components.core.files import digest_bytes, locked, write_json
from components.core.records import Count, FrozenModel
from components.judge.pool.service_client import MOST_MEASUREMENTS
from components.service.requests import ServiceError


class Token(FrozenModel):
    """The token of one caller: the SHA-256 digest of its secret, and the caller's rights and limits.

    `expires` is the time from which the token is refused; if it is None, the token does not expire. `queued`
    limits the jobs that may wait or be judged at the same time, and `measurements` how often an equal
    candidate (the files that are to be judged) may be measured. `own_tasks` is whether the caller may send
    the source of a task, and `operator` whether the caller may read metrics.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    digest: str
    expires: AwareDatetime | None = None
    queued: Count = Field(default=1000, description="jobs that may wait or be judged at the same time")
    own_tasks: bool = Field(default=True, description="whether tasks may be sent")
    measurements: Count = Field(default=16, description="how often an equal candidate may be measured")
    operator: bool = Field(default=False, description="whether metrics may be read")


# Caller of a service without a token file, which only this machine can connect to.
LOCAL = Token(name="local", digest="", queued=10_000, measurements=1000, operator=True)
# Caller by the Unix socket, which only the account that runs the service can connect to. It alone may send
# all parameters of a judgement, and occupy all workers.
OWNER = LOCAL.model_copy(update={"name": "owner", "measurements": MOST_MEASUREMENTS})
RESERVED = {LOCAL.name, OWNER.name}
RECORDS = TypeAdapter(list[Token])


def read_tokens(path: Path) -> list[Token]:
    """Return the tokens in the token file `path`.

    Raises UserError if the file cannot be read or is damaged, has a name twice, or has a name of callers
    without a token (RESERVED).
    """
    try:
        tokens = RECORDS.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise UserError(
            f"{path}: not a readable token file ({reason}); make one with cuda-agent token create."
        ) from error
    names = {token.name for token in tokens}
    refuse(
        (
            RESERVED & names,
            f"{path}: {' and '.join(sorted(RESERVED))} name callers without a token; rename it.",
        ),
        (len(names) < len(tokens), f"{path}: two tokens have the same name; remove one of them."),
    )
    return tokens


def write_tokens(path: Path, tokens: list[Token]) -> None:
    write_json(path, RECORDS.dump_python(tokens, mode="json"))


def create_token(path: Path, token: Token, days: float | None) -> str:
    """Add `token` to the token file `path`, and return the token's secret.

    The file is made if it does not exist. The secret is not stored; only its digest is. The digest and the
    expiry of `token` are replaced. It expires after `days` days, or never if `days` is None. Raises UserError
    if the file has a token of this name, cannot be read or is damaged, or if the name is one of those of
    callers without a token (RESERVED).
    """
    refuse(
        (
            token.name in RESERVED,
            f"{path}: {token.name} names callers without a token; choose another name.",
        )
    )
    secret = secrets.token_urlsafe(32)
    expires = datetime.now(UTC) + timedelta(days=days) if days is not None else None
    added = token.model_copy(update={"digest": digest_bytes(secret.encode()), "expires": expires})
    with locked(path.with_suffix(".lock")):
        tokens = read_tokens(path) if path.exists() else []
        refuse(
            (
                token.name in {other.name for other in tokens},
                f"{path}: a token named {token.name} exists; revoke it or choose another name.",
            )
        )
        write_tokens(path, [*tokens, added])
    return secret


def revoke_token(path: Path, name: str) -> None:
    """Remove the token of the caller `name` from the token file `path`.

    Raises UserError if there is none, or if the file cannot be read or is damaged.
    """
    read_tokens(path)  # so that no lock is made where no token file is
    with locked(path.with_suffix(".lock")):
        tokens = read_tokens(path)
        kept = [token for token in tokens if token.name != name]
        refuse(
            (
                len(kept) == len(tokens),
                f"{path}: no token named {name}; cuda-agent token list shows all.",
            )
        )
        write_tokens(path, kept)


@dataclass(frozen=True)
class TokenFile:
    """The tokens of the token file `path`, which `find` reads each time, so that changes apply at once.

    Raises UserError if the file cannot be read or is damaged when the object is made.
    """

    path: Path

    def __post_init__(self) -> None:
        read_tokens(self.path)

    def find(self, secret: str) -> Token:
        """Return the token with this secret.

        Raises ServiceError with the HTTP status 401 if there is none or it has expired, and 503 if the file
        cannot be read or is damaged.
        """
        try:
            tokens = {token.digest: token for token in read_tokens(self.path)}
        except UserError as error:
            raise ServiceError(503, "the service's token file cannot be read.") from error
        token = tokens.get(digest_bytes(secret.encode(errors="replace")))
        if token is None:
            raise ServiceError(401, "Authorization: unknown token; ask the service's operator for one.")
        now = datetime.now(UTC)
        if token.expires is not None and token.expires <= now:
            raise ServiceError(
                401,
                f"Authorization: the token {token.name} expired at {token.expires:%Y-%m-%d %H:%M} UTC, and "
                f"the service's clock says {now:%Y-%m-%d %H:%M}; ask its operator for a new one.",
            )
        return token
