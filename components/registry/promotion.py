"""The operations that change the champion, each of which holds a lock and writes an audit entry.

An operation takes the lock, completes the operation of a process that was killed, checks its conditions,
verifies the files of the checkpoint, writes the audit entry, moves the aliases, and writes the anchor (the
number and digest of the entry) into a tag of the registered model, in this order. If the process is killed
after it wrote the entry, the next operation completes the change. An alias is one row in the registry's
database, so there is never more than one champion.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from components.core.errors import UserError
from components.core.files import MANIFEST, digest_file, verify_files
from components.core.params import Registry
from components.registry import models
from components.registry.audit import (
    DECISIONS,
    Action,
    AuditChain,
    AuditChainError,
    AuditEntry,
    check_anchor,
    person,
)
from components.registry.gates import Decision
from components.registry.models import CANDIDATE, CHAMPION, PREVIOUS

# Tag of the registered model that names the newest entry of the audit chain.
ANCHOR = "audit.anchor"
# Tags of a version that are copied into the evidence of its audit entries.
EVIDENCE = (
    "checkpoint.digest",
    "manifest.digest",
    "evaluation",
    "evaluation.digest",
    "dataset.version",
    "code.revision",
    "report",
    "device",
    "profile",
)
PASSED = ("promoted", "approved")
# Actions by which a version becomes the champion and the champion becomes the previous one.
CHAMPION_ACTIONS = (*PASSED, "rolled_back")
RESTORE = "restore it from the artifact store's backup, or promote another version"


class NotPassed(UserError):
    """Error raised if a version cannot be promoted because its gates did not pass."""

    exit_code = 4


class Promotion:
    """The operations that promote, refuse, expire and roll back versions of one registered model.

    `home` contains the files of the evidence. It also contains the audit chain, unless `registry.audit` names
    another folder. In the methods, `who` and `reason` become the fields of the audit entry with these names;
    without `who`, the entry names the present user.
    """

    def __init__(self, client: MlflowClient, registry: Registry, home: Path):
        self.client = client
        self.model = registry.model
        self.home = home
        self.chain = AuditChain(
            Path(registry.audit).expanduser().resolve() if registry.audit else home / "audit", registry.model
        )

    def apply_decision(
        self,
        version: str,
        decision: Decision,
        *,
        champion: str | None,
        approval_seconds: float,
        key: str = "",
        who: str = "",
        reason: str = "",
    ) -> AuditEntry:
        """Promote the version, refuse it, or let it wait for a person's approval, as `decision` says.

        `champion` is the number of the version with which the gates compared, or None if there was no
        champion. A version that waits expires after `approval_seconds`. If the chain already has an entry
        with this `key`, that entry is returned and nothing is changed. Raises UserError if the champion has
        changed since the comparison, or if a file of the evidence has changed.
        """
        with self._changing() as entries:
            known = next((entry for entry in entries if key and entry.key == key), None)
            if known is not None:
                return known
            self._same_champion(version, champion, entries)
            evidence = self._evidence(version) | {
                "gates": [gate.model_dump() for gate in decision.gates],
                "champion": champion,
            }
            if decision.verdict == "waiting":
                evidence["deadline"] = (datetime.now(UTC) + timedelta(seconds=approval_seconds)).isoformat(
                    timespec="milliseconds"
                )
            models.record_decision(self.client, self.model, version, decision)
            reason = reason or " ".join(decision.reasons)
            return self._append(
                decision.verdict, version, entries, who, reason=reason, evidence=evidence, key=key
            )

    def approve(self, version: str, *, who: str = "", reason: str = "") -> AuditEntry:
        """Make a waiting version the champion, or let it expire if its deadline has passed.

        The action of the returned entry is `approved` or `expired`. Raises UserError if the version does not
        wait, or if the champion or the evidence has changed since the gates passed.
        """
        with self._changing() as entries:
            version, waiting = self.waiting(version)
            if _is_late(waiting):
                return self._expire(version, entries)
            self._same_champion(version, waiting.evidence["champion"], entries)
            evidence = self._evidence(version)
            for name in ("checkpoint.digest", "evaluation.digest", "report.digest"):
                if evidence.get(name) != waiting.evidence.get(name):
                    raise UserError(
                        f"version {version}: its {name} changed since the gates passed; "
                        f"run cuda-agent models gate {version} again."
                    )
            evidence["decided"] = waiting.digest
            return self._append("approved", version, entries, who, reason=reason, evidence=evidence)

    def decline(self, version: str, *, who: str = "", reason: str = "") -> AuditEntry:
        """Refuse a waiting version by a person's decision.

        The champion does not change. Raises UserError if the version does not wait.
        """
        with self._changing() as entries:
            version, waiting = self.waiting(version)
            return self._append(
                "declined", version, entries, who, reason=reason, evidence={"decided": waiting.digest}
            )

    def promote(self, version: str, *, who: str = "", reason: str = "", override: bool = False) -> AuditEntry:
        """Make a version the champion if its gates have passed, for example a former champion.

        With `override`, which needs a `reason`, the gates need not have passed. Promoting the champion again
        adds an entry but changes no alias. Raises NotPassed if the gates of the version did not pass, and
        UserError if the version waits for approval or its checkpoint is damaged.
        """
        with self._changing() as entries:
            found = models.find(self.client, self.model, version)
            version = str(found.version)
            state = self.chain.state(version)
            action = state.action if state is not None else found.tags.get(models.DECISION, "undecided")
            if action == "waiting" and not override:
                raise UserError(
                    f"version {version}: waits for approval; "
                    f"use cuda-agent models approve {version} or refuse."
                )
            if action not in PASSED and not override:
                raise NotPassed(
                    f"version {version}: its gates did not pass ({action}); "
                    f"see cuda-agent models show {version}, or give --override with a reason."
                )
            if override and not reason:
                raise UserError("--override: give --reason as well; it stands in the audit chain.")
            evidence = self._evidence(version) | {
                "override": override,
                "decided": state.digest if state is not None else None,
            }
            return self._append("promoted", version, entries, who, reason=reason, evidence=evidence)

    def rollback(self, *, who: str = "", reason: str = "") -> AuditEntry:
        """Make the previous champion the champion again, by exchanging the aliases champion and previous.

        Raises UserError if there is no previous champion.
        """
        with self._changing() as entries:
            back = _aliases(entries).get(PREVIOUS)
            if back is None:
                raise UserError(
                    f"rollback: {self.model} has no previous champion yet; there is nothing to return to."
                )
            return self._append(
                "rolled_back", back, entries, who, reason=reason, evidence=self._evidence(back)
            )

    def expire(self) -> list[AuditEntry]:
        """Let every waiting version expire whose deadline has passed, and return the new entries."""
        with self._changing() as entries:
            state = {entry.version: entry for entry in entries if entry.action in DECISIONS}
            return [
                self._expire(entry.version, entries)
                for entry in state.values()
                if entry.action == "waiting" and _is_late(entry)
            ]

    def note(self, version: str, decision: Decision, *, who: str = "") -> AuditEntry:
        """Add an audit entry with the results of gates that were run again on the champion.

        The decision on the version and the aliases do not change.
        """
        with self._changing() as entries:
            evidence = self._evidence(version) | {"gates": [gate.model_dump() for gate in decision.gates]}
            return self._append(
                "gated", version, entries, who, reason=" ".join(decision.reasons), evidence=evidence
            )

    def verify(self) -> list[str]:
        """Return a sentence for each disagreement between audit chain, registry, checkpoints and evidence."""
        with self.chain.locked():
            try:
                entries = self.chain.entries()
                check_anchor(entries, self._anchor())
            except AuditChainError as error:
                return [str(error)]
            found = []
            actual = self._actual()
            if actual != _aliases(entries):
                found.append(
                    f"aliases: the registry says {_listed(actual)} and the audit chain "
                    f"{_listed(_aliases(entries))}; somebody moved them elsewhere."
                )
            for alias, version in sorted(actual.items()):
                try:
                    self._evidence(version)
                except UserError as error:
                    found.append(f"{alias} (version {version}): {error}")
            return found

    def waiting(self, version: str) -> tuple[str, AuditEntry]:
        """Return the number of a waiting version, and the audit entry by which it began to wait.

        `version` is a number or an alias. Raises UserError if the version does not wait for a decision.
        """
        version = str(models.find(self.client, self.model, version).version)
        state = self.chain.state(version)
        if state is None or state.action != "waiting":
            raise UserError(
                f"version {version}: does not wait for a decision "
                f"({'nobody gated it' if state is None else state.action})."
            )
        return version, state

    def _same_champion(self, version: str, compared: str | None, entries: list[AuditEntry]) -> None:
        """Raise UserError if the champion has changed since the gates compared `version` with it.

        `compared` is the number of the version that was the champion then, or None if there was no champion.
        """
        reigning = models.champion_besides(_aliases(entries), version)
        if reigning != compared:
            was, now = (f"version {one}" if one else "no champion" for one in (compared, reigning))
            raise UserError(
                f"version {version}: its gates compared it with {was}, and now there is {now}; "
                f"run cuda-agent models gate {version} again."
            )

    def _expire(self, version: str, entries: list[AuditEntry]) -> AuditEntry:
        return self._append("expired", version, entries, "time limit", reason="nobody decided in time")

    def _evidence(self, version: str) -> dict[str, Any]:
        """Return the evidence of a version for an audit entry, after verifying its files.

        Raises UserError, which names the file, if the checkpoint or the evaluation is missing or has changed
        since the version was registered. The report is not verified, but the evidence contains its digest.
        """
        tags = models.find(self.client, self.model, version).tags
        with tempfile.TemporaryDirectory(prefix="cuda-agent-") as scratch:
            folder = models.checkpoint(self.client, self.model, version, Path(scratch))
            digest, manifest = verify_files(folder, RESTORE), digest_file(folder / MANIFEST)
        if digest != tags.get("checkpoint.digest", digest):
            raise UserError(
                f"{folder}: holds another checkpoint than version {version} registered; {RESTORE}."
            )
        if manifest != tags.get("manifest.digest", manifest):
            raise UserError(
                f"{folder / MANIFEST}: was changed since version {version} was registered; {RESTORE}."
            )
        found: dict[str, Any] = {name: tags[name] for name in EVIDENCE if name in tags} | {
            "checkpoint.digest": digest
        }
        results = self.home / tags.get("evaluation", "")
        if "evaluation" in tags and not (
            results.is_file() and digest_file(results) == tags.get("evaluation.digest")
        ):
            raise UserError(
                f"{results}: is missing or is not what version {version} was measured with; "
                "restore it, or evaluate the version again."
            )
        report = Path(tags.get("report", ""))
        if report.is_file():
            found["report.digest"] = digest_file(report)
        return found

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[AuditEntry]]:
        """Hold the lock of the chain, complete an interrupted change, and yield all entries."""
        with self.chain.locked():
            yield self._recover()

    def _append(
        self, action: Action, version: str, entries: list[AuditEntry], who: str, **rest: Any
    ) -> AuditEntry:
        """Append an audit entry to the chain, apply it to the registry, and return it.

        `entries` are the entries of the chain so far. If `who` is empty, the present user is recorded. `rest`
        may contain the fields `reason`, `evidence` and `key` of the entry. If the action is in
        CHAMPION_ACTIONS, the version becomes the champion, and another champion before it gets the alias
        previous.
        """
        aliases = _aliases(entries)
        if action in CHAMPION_ACTIONS and aliases.get(CHAMPION) != version:
            previous = {PREVIOUS: aliases[CHAMPION]} if CHAMPION in aliases else {}
            aliases = aliases | previous | {CHAMPION: version}
        return self._apply_entry(self.chain.append(action, version, aliases, who or person(), **rest))

    def _apply_entry(self, entry: AuditEntry) -> AuditEntry:
        """Change the aliases and tags in the registry according to the entry, and return the entry.

        Repeating the call changes nothing.
        """
        actual = self._actual()
        for alias in (PREVIOUS, CHAMPION):
            wanted = entry.aliases.get(alias)
            if wanted is not None and actual.get(alias) != wanted:
                self.client.set_registered_model_alias(self.model, alias, wanted)
        if entry.action in DECISIONS:
            tags = {models.DECISION: entry.action, "decided.by": entry.who, "decided.when": entry.when}
            models.set_tags(self.client, self.model, entry.version, tags)
            if (
                entry.action != "waiting"
                and models.aliases(self.client, self.model).get(CANDIDATE) == entry.version
            ):
                self.client.delete_registered_model_alias(self.model, CANDIDATE)
        self.client.set_registered_model_tag(self.model, ANCHOR, entry.anchor)
        return entry

    def _recover(self) -> list[AuditEntry]:
        """Apply the newest entry if a killed process wrote it without applying it, and return all entries.

        If another program has moved the aliases, append an entry with the action `found`. Raises
        AuditChainError if the chain was changed.
        """
        entries = self.chain.entries()
        anchor = self._anchor()
        check_anchor(entries, anchor)
        if entries and anchor != entries[-1].anchor:
            self._apply_entry(entries[-1])
        actual = self._actual()
        if actual != _aliases(entries):
            found = self.chain.append(
                "found",
                actual.get(CHAMPION, ""),
                actual,
                "unknown",
                reason="aliases were moved by other means than this program",
            )
            entries.append(self._apply_entry(found))
        return entries

    def _anchor(self) -> str:
        return models.tags(self.client, self.model).get(ANCHOR, "")

    def _actual(self) -> dict[str, str]:
        return {
            alias: version
            for alias, version in models.aliases(self.client, self.model).items()
            if alias in (CHAMPION, PREVIOUS)
        }


def _is_late(waiting: AuditEntry) -> bool:
    return datetime.now(UTC) > datetime.fromisoformat(waiting.evidence["deadline"])


def _aliases(entries: list[AuditEntry]) -> dict[str, str]:
    return entries[-1].aliases if entries else {}


def _listed(aliases: dict[str, str]) -> str:
    return ", ".join(f"{alias} {version}" for alias, version in sorted(aliases.items())) or "nothing"
