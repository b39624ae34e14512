"""The audit chain: a tamper-evident log of every change of the champion, with its evidence.

There is one folder for each registered model and one file for each entry, such as `000012.json`. An entry
contains the digest of the one before it, and its own digest covers everything else in it. An entry that is
changed, removed or inserted therefore breaks the chain at a known place. Entries removed at the end would
leave a valid, shorter chain: therefore the registry also names the newest entry (`anchor`), in another place
under other permissions.

An entry is written before the registry is changed (write-ahead): it says what the aliases have to become, and
the next process that takes the lock completes what a killed one had begun.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from components.core.errors import UserError
from components.core.files import digest_json, read_json, write_json
from components.core.records import FrozenModel

Action = Literal[
    "gated", "promoted", "refused", "waiting", "approved", "declined", "expired", "rolled_back", "found"
]
"""Type of an action.

The gates have `refused`, a person has `declined`; `found` records that another program moved an alias.
"""
FIRST = "0" * 64
FILE = re.compile(r"(\d{6})\.json")
DECISIONS: tuple[Action, ...] = ("promoted", "refused", "waiting", "approved", "declined", "expired")
"""Actions that decide about a version; the newest of them is its state."""


class AuditEntry(FrozenModel):
    """Entry about one change; `aliases` are the versions of champion and previous after it."""

    number: int
    before: str
    """Digest of the entry before this one; zeros for the first."""
    when: str
    """Time in UTC by ISO 8601, to the second."""
    who: str
    """The operating system's user and host, or the name that a person gave with the decision."""
    action: Action
    model: str
    version: str
    aliases: dict[str, str]
    reason: str = ""
    evidence: dict[str, Any] = Field(default_factory=dict)
    """Digests, figures with intervals and thresholds on which the change is based."""
    key: str = ""
    """Name of the change, by which a repetition after a kill adds nothing; empty if each call is a change."""
    digest: str

    @property
    def anchor(self) -> str:
        return f"{self.number}:{self.digest}"


class AuditChainError(UserError):
    """Error of a chain that was changed; the message names the first wrong entry."""


def person() -> str:
    """Return the name of the acting person: the operating system's user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user often has no name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


class AuditChain:
    """Chain of one registered model, in a folder below `folder`; every read checks all entries."""

    def __init__(self, folder: Path, model: str):
        self.model = model
        self.folder = (
            folder / digest_json(model)[:12] if not re.fullmatch(r"[\w.-]+", model) else folder / model
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the chain's lock, which excludes every process that sees the folder.

        The lock of a killed process is released at once.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def append(
        self, action: Action, version: str, aliases: dict[str, str], who: str, **rest: Any
    ) -> AuditEntry:
        """Write the next entry while the lock is held; `rest` holds reason, evidence and key."""
        entries = self.entries()
        content = {
            "number": len(entries) + 1,
            "before": entries[-1].digest if entries else FIRST,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "who": who,
            "action": action,
            "model": self.model,
            "version": version,
            "aliases": aliases,
        } | rest
        # The defaults are filled in first, because the digest covers them too.
        content = AuditEntry.model_validate(content | {"digest": ""}).model_dump(
            mode="json", exclude={"digest"}
        )
        entry = AuditEntry.model_validate(content | {"digest": digest_json(content)})
        write_json(self.folder / f"{entry.number:06d}.json", entry.model_dump(mode="json"))
        return entry

    def entries(self) -> list[AuditEntry]:
        """Return every entry in order.

        Raises AuditChainError with the first changed, removed or inserted one.
        """
        names = (
            sorted(path.name for path in self.folder.iterdir() if FILE.fullmatch(path.name))
            if self.folder.is_dir()
            else []
        )
        found: list[AuditEntry] = []
        for number, name in enumerate(names, 1):
            path = self.folder / name
            if name != f"{number:06d}.json":
                raise AuditChainError(
                    f"{self.folder / f'{number:06d}.json'}: this audit entry is missing; "
                    "restore the folder from its backup."
                )
            try:
                content = read_json(path)
                entry = AuditEntry.model_validate(content)
            except (OSError, ValueError, ValidationError) as error:
                raise AuditChainError(
                    f"{path}: this audit entry cannot be read ({str(error).splitlines()[0]}); "
                    "restore it from its backup."
                ) from error
            body = {key: value for key, value in content.items() if key != "digest"}
            before = found[-1].digest if found else FIRST
            if (
                digest_json(body) != entry.digest
                or entry.number != number
                or entry.before != before
                or entry.model != self.model
            ):
                raise AuditChainError(
                    f"{path}: this audit entry was changed after it was written; restore it from its backup."
                )
            found.append(entry)
        return found

    def state(self, version: str) -> AuditEntry | None:
        """Return the newest entry that decided `version`; None for a version without a decision."""
        return next(
            (
                entry
                for entry in reversed(self.entries())
                if entry.version == version and entry.action in DECISIONS
            ),
            None,
        )


def check_anchor(entries: list[AuditEntry], anchor: str) -> None:
    """Raise AuditChainError unless the chain holds the entry that the registry names.

    The anchor may be older than the newest entry: a process can be killed between the two writes.
    """
    number, _, digest = anchor.partition(":")
    if anchor and (
        not number.isdigit()
        or int(number) > len(entries)
        or int(number) < 1
        or entries[int(number) - 1].digest != digest
    ):
        raise AuditChainError(
            f"audit: the registry names entry {number}, which the chain does not hold any more; "
            "restore the folder from its backup."
        )
