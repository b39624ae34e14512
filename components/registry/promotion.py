"""The operations on model versions and the champion, which hold a lock and record changes in the audit chain.

The champion is the promoted version, and the audit chain is the signed log of decisions. An operation that
decides on a version takes the lock, completes the operation of a process that was killed, checks its
conditions, verifies the files of the evidence, writes the audit entry, moves the aliases, and writes the
anchor (the number and digest of the entry) into a tag of the registered model, in this order. If the process
is killed after it wrote the entry, the next operation completes the change. An alias is one row in the
registry's database, so there is never more than one champion.

Every client of the registry may write tags and aliases, so no decision rests on them. The digests of a
version's files are in the signed entry of its registration, the state of a version is that of its newest
entry, and the champion is that of the newest entry of all: an alias that another program moved is set back.
"""

import contextlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from components.core.errors import UserError, refuse
from components.core.promotion_params import Registry
from components.core.signing import person
from components.registry import models
from components.registry.audit import (
    DECISIONS,
    Action,
    AuditChain,
    AuditChainError,
    AuditEntry,
    check_anchor,
    newest,
    recorded_aliases,
)
from components.registry.evidence import Evidence
from components.registry.gates import Compared, Decision
from components.registry.models import CHAMPION, PREVIOUS

PASSED = ("promoted", "approved")
# Actions by which a version becomes the champion and the champion becomes the previous one.
CHAMPION_ACTIONS = (*PASSED, "rolled_back")


class NotPassed(UserError):
    """Error raised if a version cannot be promoted because its gates did not pass.

    Gates are the conditions of promotion. A command that raises the error ends with the exit code 4.
    """

    exit_code = 4


class Promotion:
    """The operations that promote, refuse, expire and roll back versions of one registered model.

    `home`, the folder in which runs keep everything, contains the evaluations and reports on which decisions
    rest. It also contains the audit chain, the log of decisions, unless `registry.audit` names another
    folder. In the methods, `version` is a version's number, in `evidence`, `approve`, `decline`, `promote`
    and `waiting` also an alias. `who` and `reason` become the fields of the audit entry with these names;
    without `who`, the entry names the present user. Every method but `verify` raises AuditChainError if the
    audit chain was damaged, and those that add an entry raise UserError if it cannot be signed.
    """

    def __init__(self, client: MlflowClient, registry: Registry, home: Path):
        self.client = client
        self.model = registry.model
        self.home = home
        self.chain = AuditChain.of(registry, home)
        self.files = Evidence(client, registry.model, home, self.chain.folder)

    def register(self, version: str, evidence: Mapping[str, str]) -> AuditEntry:
        """Record the evidence of a version that was registered, on which all decisions on it will rest.

        `evidence` has the digests of the checkpoint's files (`checkpoint.digest`) and manifest
        (`manifest.digest`), the paths relative to `home` and the digests of the evaluations of the version
        (`evaluation`, `evaluation.digest`) and of the policy that its run began with (`start.evaluation`,
        `start.digest`), the path of the report (`report`), and further facts. The files are not read. Returns
        the new audit entry, or the newest registration entry of the version if its evidence is equal.
        """
        with self._changing() as entries:
            known = newest(entries, version, {"registered"})
            if known is not None and known.evidence == evidence:
                return known
            return self._append("registered", version, entries, "", evidence=dict(evidence))

    def evidence(self, version: str, *, verify: bool = True) -> tuple[str, dict[str, Any]]:
        """Return the number of a version and its evidence, which `register` has recorded.

        The evidence has the paths and digests of checkpoint, evaluations and report by names such as
        `checkpoint.digest`. `version` is a number or an alias. With `verify`, the files are verified, and
        `report.digest` is added if the report exists. Raises UserError if a file is missing or has changed,
        or if the version or the entry of its registration does not exist.
        """
        with self._changing() as entries:
            number = self._number(version, entries)
            read = self.files.verified if verify else self.files.recorded
            return number, read(number, entries)

    def aliases(self) -> dict[str, str]:
        """Return the version number of each of the aliases `champion` and `previous`, by alias.

        `champion` is the promoted version, and `previous` is the champion before the present one. An alias
        that no version has is not a key.
        """
        with self._changing() as entries:
            return recorded_aliases(entries)

    def compared(self, version: str, champion: str) -> Compared | None:
        """Return the stored evaluation of `champion` with which the gates have compared `version` before.

        The gates are the conditions of promotion. Both arguments are version numbers. Returns None if the
        gates have not compared the two, or if the file with the results is missing or changed.
        """
        for entry in reversed(self.chain.entries()):
            if entry.version == version and entry.evidence.get("champion"):
                found = Compared.model_validate(entry.evidence["champion"])
                if found.version == champion and self.files.match(found.evaluation, found.digest):
                    return found
        return None

    def apply_decision(
        self,
        version: str,
        decision: Decision,
        *,
        champion: Compared | None,
        approval_seconds: float,
        key: str = "",
    ) -> AuditEntry:
        """Promote the version, refuse it, or let it wait for a person's approval, as `decision` says.

        `champion` is the champion (the promoted version) with which the gates compared the version, or None
        if there was none. A version that waits expires after `approval_seconds`. If `key` is not empty and
        the audit chain already has an entry with this `key`, that entry is returned and nothing is changed.
        Otherwise the new entry is returned. Raises UserError if the champion has changed since the
        comparison, or if a file of the evidence has changed.
        """
        with self._changing() as entries:
            known = next((entry for entry in entries if key and entry.key == key), None)
            if known is not None:
                return known
            self._same_champion(version, champion.version if champion is not None else None, entries)
            evidence = self.files.verified(version, entries) | {
                "gates": [gate.model_dump() for gate in decision.gates],
                "champion": champion.model_dump() if champion is not None else None,
            }
            if decision.verdict == "waiting":
                evidence["deadline"] = (datetime.now(UTC) + timedelta(seconds=approval_seconds)).isoformat(
                    timespec="milliseconds"
                )
            models.record_decision(self.client, self.model, version, decision)
            return self._append(
                decision.verdict,
                version,
                entries,
                "",
                reason=" ".join(decision.reasons),
                evidence=evidence,
                key=key,
            )

    def approve(self, version: str, *, who: str = "", reason: str = "") -> AuditEntry:
        """Make a version that waits for approval the champion, or let it expire if its deadline has passed.

        The champion is the promoted version. The action of the returned entry is `approved` or `expired`.
        Raises UserError if the version does not wait, or if the champion or the evidence has changed since
        the gates passed.
        """
        with self._changing() as entries:
            version, waiting = self._waiting(version, entries)
            if waiting.is_late:
                return self._expire(version, entries)
            self._same_champion(version, (waiting.evidence["champion"] or {}).get("version"), entries)
            evidence = self.files.verified(version, entries)
            refuse(
                *(
                    (
                        evidence.get(name) != waiting.evidence.get(name),
                        f"version {version}: its {name} changed since the gates passed; "
                        f"run cuda-agent models gate {version} again.",
                    )
                    for name in ("checkpoint.digest", "evaluation.digest", "report.digest")
                )
            )
            evidence["decided"] = waiting.digest
            return self._append("approved", version, entries, who, reason=reason, evidence=evidence)

    def decline(self, version: str, *, who: str = "", reason: str = "") -> AuditEntry:
        """Refuse a version that waits for approval, by a person's decision, and return the audit entry.

        The champion (the promoted version) does not change. Raises UserError if the version does not wait.
        """
        with self._changing() as entries:
            version, waiting = self._waiting(version, entries)
            return self._append(
                "declined", version, entries, who, reason=reason, evidence={"decided": waiting.digest}
            )

    def promote(self, version: str, *, who: str = "", reason: str = "", override: bool = False) -> AuditEntry:
        """Make a version the champion if its gates have passed, for example a former champion.

        The champion is the promoted version. With `override`, which needs a `reason`, the version may wait
        for approval or its gates may have failed. Promoting the champion again adds an entry but changes no
        alias. Returns the entry. Without `override`, raises NotPassed if the gates of the version did not
        pass and UserError if it waits. Also raises UserError if its checkpoint or an evaluation is damaged,
        or if `override` is given without a `reason`.
        """
        with self._changing() as entries:
            version = self._number(version, entries)
            state = newest(entries, version, DECISIONS)
            action = state.action if state is not None else "undecided"
            refuse(
                (
                    action == "waiting" and not override,
                    f"version {version}: waits for approval; "
                    f"use cuda-agent models approve {version} or refuse.",
                ),
                (
                    override and not reason,
                    "--override: give --reason as well; it stands in the audit chain.",
                ),
            )
            if action not in PASSED and not override:
                raise NotPassed(
                    f"version {version}: its gates did not pass ({action}); "
                    f"see cuda-agent models show {version}, or give --override with a reason."
                )
            evidence = self.files.verified(version, entries) | {
                "override": override,
                "decided": state.digest if state is not None else None,
            }
            return self._append("promoted", version, entries, who, reason=reason, evidence=evidence)

    def rollback(self, *, who: str = "", reason: str = "") -> AuditEntry:
        """Make the previous champion the champion again, by exchanging the aliases champion and previous.

        The champion is the promoted version. Returns the audit entry. Raises UserError if there is no
        previous champion, or if its checkpoint or evaluations have changed.
        """
        with self._changing() as entries:
            if (back := recorded_aliases(entries).get(PREVIOUS)) is None:
                raise UserError(
                    f"rollback: {self.model} has no previous champion yet; there is nothing to return to."
                )
            return self._append(
                "rolled_back", back, entries, who, reason=reason, evidence=self.files.verified(back, entries)
            )

    def expire(self) -> list[AuditEntry]:
        """Let every version expire that waits for approval and whose deadline has passed.

        Returns the new audit entries.
        """
        with self._changing() as entries:
            state = {entry.version: entry for entry in entries if entry.action in DECISIONS}
            return [
                self._expire(entry.version, entries)
                for entry in state.values()
                if entry.action == "waiting" and entry.is_late
            ]

    def note(self, version: str, decision: Decision, *, who: str = "") -> AuditEntry:
        """Add an audit entry with the results of gates that were run again on the champion, and return it.

        `version` is the champion, and `decision` has the results. No alias or earlier decision changes.
        Raises UserError if a file of the version has changed.
        """
        with self._changing() as entries:
            gates = [gate.model_dump() for gate in decision.gates]
            evidence = self.files.verified(version, entries) | {"gates": gates}
            return self._append(
                "gated", version, entries, who, reason=" ".join(decision.reasons), evidence=evidence
            )

    def verify(self) -> list[str]:
        """Return a sentence for each disagreement between audit chain, registry, checkpoints and evidence.

        If the audit chain itself was damaged, the only sentence is on that. The list is empty if all agree.
        """
        with self.chain.locked():
            try:
                entries = self.chain.entries()
                check_anchor(entries, models.anchor(self.client, self.model))
            except AuditChainError as error:
                return [str(error)]
            actual, recorded = models.decided_aliases(self.client, self.model), recorded_aliases(entries)
            moved = (
                f"aliases: the registry says {_listed(actual)} and the audit chain {_listed(recorded)}; "
                "another program moved them."
            )
            found = [moved] if actual != recorded else []
            for version in reversed(models.numbers(self.client, self.model)):
                found += self.files.disagreements(version, entries)
            return found + self.files.untrusted_runs(self.chain.signer)

    def waiting(self, version: str) -> tuple[str, AuditEntry]:
        """Return the number of a version that waits for approval, and the audit entry that let it wait.

        `version` is a number or an alias. Raises UserError if the version does not wait for a decision.
        """
        with self._changing() as entries:
            return self._waiting(version, entries)

    def _waiting(self, version: str, entries: list[AuditEntry]) -> tuple[str, AuditEntry]:
        version = self._number(version, entries)
        state = newest(entries, version, DECISIONS)
        if state is None or state.action != "waiting":
            raise UserError(
                f"version {version}: does not wait for a decision "
                f"({'nobody gated it' if state is None else state.action})."
            )
        return version, state

    def _same_champion(self, version: str, compared: str | None, entries: list[AuditEntry]) -> None:
        """Raise UserError if the champion has changed since the gates compared `version` with it.

        The champion is the promoted version; if that is `version` itself, the previous one counts. `compared`
        is the number of the version that was the champion then, or None if there was no champion. `entries`
        are all entries of the audit chain.
        """
        reigning = models.champion_besides(recorded_aliases(entries), version)
        if reigning != compared:
            was, now = (f"version {one}" if one else "no champion" for one in (compared, reigning))
            raise UserError(
                f"version {version}: its gates compared it with {was}, and now there is {now}; "
                f"run cuda-agent models gate {version} again."
            )

    def _expire(self, version: str, entries: list[AuditEntry]) -> AuditEntry:
        return self._append("expired", version, entries, "time limit", reason="nobody decided in time")

    def _number(self, version: str, entries: list[AuditEntry]) -> str:
        """Return the number of a version, which is given by its number or an alias.

        The aliases champion and previous are looked up in `entries`, the entries of the audit chain, and the
        alias candidate in the registry. Raises UserError if there is no such version.
        """
        return str(
            models.find(self.client, self.model, recorded_aliases(entries).get(version, version)).version
        )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[AuditEntry]]:
        """Hold the lock of the audit chain while the `with` block runs, and yield all entries of the chain.

        A change that a killed process has left incomplete is completed first (`_recover`).
        """
        with self.chain.locked():
            yield self._recover()

    def _append(
        self, action: Action, version: str, entries: list[AuditEntry], who: str, **rest: Any
    ) -> AuditEntry:
        """Append an audit entry to the chain, change the registry as the entry says, and return the entry.

        `entries` are the entries of the chain so far. If `who` is empty, the present user is recorded. `rest`
        may contain the fields `reason`, `evidence` and `key` of the entry. If the action is in
        CHAMPION_ACTIONS, the version becomes the champion (the promoted version), and the champion before,
        unless it is the same version, gets the alias previous.
        """
        aliases = recorded_aliases(entries)
        if action in CHAMPION_ACTIONS and aliases.get(CHAMPION) != version:
            previous = {PREVIOUS: aliases[CHAMPION]} if CHAMPION in aliases else {}
            aliases = aliases | previous | {CHAMPION: version}
        entry = self.chain.append(action, version, aliases, who or person(), **rest)
        return models.apply_entry(self.client, self.model, entry)

    def _recover(self) -> list[AuditEntry]:
        """Apply the newest entry if a killed process wrote it without applying it, and return all entries.

        If another program has moved the aliases, they are set back, and an entry with the action `found` is
        appended. An alias of a version that another program has deleted is not set back. Raises
        AuditChainError if the chain was changed.
        """
        entries = self.chain.entries()
        anchor = models.anchor(self.client, self.model)
        check_anchor(entries, anchor)
        if entries and anchor != entries[-1].anchor:
            models.apply_entry(self.client, self.model, entries[-1])
        actual, recorded = models.decided_aliases(self.client, self.model), recorded_aliases(entries)
        if actual != recorded:
            numbers = models.numbers(self.client, self.model)
            existing = {alias: number for alias, number in recorded.items() if number in numbers}
            deleted = sorted({*recorded.values()} - {*existing.values()})
            reason = (
                f"another program had deleted version {', '.join(deleted)}; no alias names it any more"
                if deleted
                else f"another program had moved the aliases to {_listed(actual)}; they were set back"
            )
            found = self.chain.append("found", existing.get(CHAMPION, ""), existing, "unknown", reason=reason)
            entries.append(models.apply_entry(self.client, self.model, found))
        return entries


def _listed(aliases: dict[str, str]) -> str:
    return ", ".join(f"{alias} {version}" for alias, version in sorted(aliases.items())) or "nothing"
