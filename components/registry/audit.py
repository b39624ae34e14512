"""The audit chain: a tamper-evident log of decisions on model versions and changes of the champion.

The champion is the promoted version. There is one folder for each registered model and one file for each
entry, such as `000012.json`. An entry contains the evidence of the decision or change, and the digest of the
previous entry; its own digest covers all of its other fields, and it is signed by a trusted key
(components/core/signing.py). So an entry that is changed, removed, inserted or signed with another key breaks
the chain at a known place. If the last entries are removed, the rest is still a valid chain. To detect this
too, a tag of the registered model in MLflow names the newest entry (`anchor`).

An entry is written before the registry is changed, and it contains the aliases after the change. So if a
process is killed in between, the next process that takes the lock completes the change.
"""

import contextlib
import re
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from components.core.errors import UserError
from components.core.files import digest_json, locked, read_json, write_json
from components.core.promotion_params import Registry
from components.core.records import FrozenModel
from components.core.signing import Signer

# Kinds of audit entries. `registered` records the digests of a version's files. `refused` and
# `nothing_learned` are decisions of the gates and `declined` is one of a person. `gated` records gates that
# were run without a decision. `found` records that another program had moved an alias.
Action = Literal[
    "registered",
    "gated",
    "promoted",
    "refused",
    "nothing_learned",
    "waiting",
    "approved",
    "declined",
    "expired",
    "rolled_back",
    "found",
]
# Value of `before` in the first entry of a chain.
FIRST = "0" * 64
# Fields of an entry that its digest and its signature do not cover.
SEALS = {"digest", "signature"}
# Actions that change the state of a version. The newest entry with such an action gives the state.
DECISIONS: tuple[Action, ...] = (
    "promoted",
    "refused",
    "nothing_learned",
    "waiting",
    "approved",
    "declined",
    "expired",
)


class AuditEntry(FrozenModel):
    """One entry of the audit chain, the log of decisions on model versions.

    `number` counts from 1, and `before` is the digest of the previous entry, or 64 zeros. `when` is a time in
    UTC (ISO 8601, seconds). `who` is the user and host in the operating system, or the name that a person
    gave. `action` (one of Action) is what was done with the version `version` of the registered model
    `model`, and `reason` says why. `aliases` maps the aliases `champion` (the promoted version) and
    `previous` to their version numbers after the change; an alias that no version has is not a key.
    `evidence` has the facts on which the change is based, such as digests, figures with intervals, and
    thresholds. `key` identifies a change, so that a repeated call adds no second entry; it is "" for changes
    of which every call adds one. `digest` and `signature`, by a trusted key, cover all other fields.
    """

    number: int
    before: str
    when: str
    who: str
    action: Action
    model: str
    version: str
    aliases: dict[str, str]
    reason: str = ""
    evidence: dict[str, Any] = Field(default_factory=dict)
    key: str = ""
    digest: str
    signature: str = ""

    @property
    def anchor(self) -> str:
        return f"{self.number}:{self.digest}"

    @property
    def is_late(self) -> bool:
        """Return whether the deadline of a version that waits, in the evidence, has passed."""
        return datetime.now(UTC) > datetime.fromisoformat(self.evidence["deadline"])


class AuditChainError(UserError):
    """Error raised if an entry of an audit chain was changed, removed or inserted, or cannot be trusted.

    The last is so if it cannot be read or is not signed by a trusted key. The message names the first such
    entry.
    """


class AuditChain:
    """Log of decisions on versions of the registered model `model`, in a folder of its own below `folder`.

    Every method that reads the chain checks all of its entries, and raises AuditChainError if one is wrong.
    `signer` signs new entries and knows the trusted keys.
    """

    def __init__(self, folder: Path, model: str, signer: Signer):
        self.model = model
        self.signer = signer
        self.folder = (
            folder / digest_json(model)[:12] if not re.fullmatch(r"[\w.-]+", model) else folder / model
        )

    @classmethod
    def of(cls, registry: Registry, home: Path) -> "AuditChain":
        """Return the audit chain of `registry.model`, below the folder `registry.audit` or else `home`/audit.

        The audit chain is the log of decisions on the versions of that model. `home` is the folder in which
        the runs keep everything. Raises UserError if a path of a key begins with ~ and this account has no
        home folder.
        """
        try:
            folder = Path(registry.audit).expanduser().resolve() if registry.audit else home / "audit"
        except RuntimeError as error:
            raise UserError(
                f"registry.audit: {registry.audit} has no place, because this account has no home folder; "
                "give a path."
            ) from error
        return cls(folder, registry.model, Signer(registry))

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that holds the lock of the chain exclusively, after waiting until it is free."""
        return locked(self.folder / "lock")

    def append(
        self, action: Action, version: str, aliases: dict[str, str], who: str, **rest: Any
    ) -> AuditEntry:
        """Write the next entry and return it. The caller holds the lock (`locked`).

        The arguments are the fields of AuditEntry with these names, and `rest` may contain `reason`,
        `evidence` and `key`. Raises AuditChainError as `entries` does, and UserError if the entry cannot be
        signed.
        """
        entries = self.entries()
        content = AuditEntry(
            number=len(entries) + 1,
            before=entries[-1].digest if entries else FIRST,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            who=who,
            action=action,
            model=self.model,
            version=version,
            aliases=aliases,
            digest="",
            **rest,
        ).model_dump(mode="json", exclude=SEALS)
        seals = {"digest": digest_json(content), "signature": self.signer.sign(content)}
        entry = AuditEntry.model_validate(content | seals)
        write_json(self.folder / f"{entry.number:06d}.json", entry.model_dump(mode="json"))
        return entry

    def entries(self) -> list[AuditEntry]:
        """Return all entries in the order of their numbers; there are none if the folder does not exist.

        Raises AuditChainError, which names the first wrong entry, if an entry was changed, removed or
        inserted, cannot be read, or is not signed by a trusted key. Raises UserError if the file of trusted
        keys cannot be read.
        """
        found: list[AuditEntry] = []
        for number, path in enumerate(sorted(self.folder.glob(f"{'[0-9]' * 6}.json")), 1):
            if path.name != f"{number:06d}.json":
                raise AuditChainError(
                    f"{self.folder / f'{number:06d}.json'}: this audit entry is missing; "
                    "restore the folder from its backup."
                )
            try:
                content = read_json(path)
                entry = AuditEntry.model_validate(content)
            except (OSError, ValueError, RecursionError) as error:
                raise AuditChainError(
                    f"{path}: this audit entry cannot be read ({str(error).splitlines()[0]}); "
                    "restore it from its backup."
                ) from error
            body = {key: value for key, value in content.items() if key not in SEALS}
            if (
                digest_json(body) != entry.digest
                or entry.number != number
                or entry.before != (found[-1].digest if found else FIRST)
                or entry.model != self.model
            ):
                raise AuditChainError(
                    f"{path}: this audit entry was changed after it was written; restore it from its backup."
                )
            try:
                self.signer.check(body, entry.signature)
            except ValueError as error:
                raise AuditChainError(
                    f"{path}: this audit entry is not to be trusted, because {error}; restore it from its "
                    "backup, or add the key to the trusted ones if you know whose it is."
                ) from error
            found.append(entry)
        return found


def newest(entries: list[AuditEntry], version: str, actions: Collection[Action]) -> AuditEntry | None:
    """Return the newest entry of the version `version` with one of `actions`, or None if there is none.

    `entries` are those of an audit chain, the log of decisions, with the oldest first.
    """
    of_version = (entry for entry in reversed(entries) if entry.version == version)
    return next((entry for entry in of_version if entry.action in actions), None)


def recorded_aliases(entries: list[AuditEntry]) -> dict[str, str]:
    """Return the version number of each of the aliases `champion` and `previous` after the last entry.

    `entries` are those of an audit chain, the log of decisions. An alias that no version has is not a key.
    """
    return entries[-1].aliases if entries else {}


def check_anchor(entries: list[AuditEntry], anchor: str) -> None:
    """Raise AuditChainError unless the audit chain contains the entry that the anchor in the registry names.

    `entries` are all entries of the chain. `anchor` has the form NUMBER:DIGEST, or is empty if the registry
    has no anchor yet, which is no error. The entry need not be the newest one, because a process can be
    killed after it has written an entry and before it has written the anchor.
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
