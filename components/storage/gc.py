"""Find the objects in an artifact store that can be removed, and remove them.

Objects belong to groups, which are kept or removed as a whole: those of a checkpoint, whose keys begin with
`checkpoints/<digest>`, and those of a run of the pipeline, `runs/<run>`. All other objects (of DVC's remote
and of MLflow) are managed by other programs and are never removed.
"""

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from components.core.files import MANIFEST
from components.storage.store import Store, StoredObject

# First parts of the keys of objects that belong to a group.
GROUPS = ("checkpoints", "runs")
# Pattern of a run id or a digest within a text.
WORD = re.compile(r"[0-9a-f]{12,64}")


@dataclass(frozen=True)
class Group:
    """A group of stored objects that are kept or removed together: those of one checkpoint or one run.

    `name` is the beginning of their keys, `checkpoints/<digest>` or `runs/<run>`.
    """

    name: str
    entries: tuple[StoredObject, ...]

    @property
    def id(self) -> str:
        return self.name.partition("/")[2]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


@dataclass(frozen=True)
class Plan:
    """The groups of stored objects that can be removed (`remove`), and those that are kept (`keep`).

    `keep` has the reason for each of them by the group's name.
    """

    remove: tuple[Group, ...]
    keep: dict[str, str]


def groups(entries: Iterable[StoredObject]) -> list[Group]:
    found: dict[str, list[StoredObject]] = {}
    for entry in entries:
        parts = entry.key.split("/")
        if parts[0] in GROUPS and len(parts) > 2:
            found.setdefault("/".join(parts[:2]), []).append(entry)
    return [Group(name, tuple(members)) for name, members in sorted(found.items())]


def plan(
    store: Store, references: dict[str, str], evidence: dict[str, str], now: datetime, older_than: timedelta
) -> Plan:
    """Return a plan that removes the groups without a reference that are older than `older_than`.

    A group is the objects of one run or one checkpoint; its age is that of its newest object at the time
    `now`. `references` and `evidence` map run ids and digests to a description of what refers to them:
    `references` those in present use, and `evidence` those that past decisions name. If a run is kept because
    of `references` or its age, all checkpoints that its manifest names are kept too. If it is kept only
    because of `evidence`, checkpoints that only its manifest names are not kept.
    """
    found = groups(store.entries())
    keep: dict[str, str] = {}
    named: dict[str, str] = {}
    for group in found:
        newest = max(entry.modified for entry in group.entries)
        used = reason_to_keep(group.id, references) or (
            "younger than the limit" if now - newest < older_than else ""
        )
        if reason := used or reason_to_keep(group.id, evidence):
            keep[group.name] = reason
        if used and group.name.startswith("runs/"):
            for entry in group.entries:
                if entry.key.endswith(f"/{MANIFEST}"):
                    named |= dict.fromkeys(words(_read(store, entry.key)), f"named by {group.name}")
    for group in found:
        if group.name not in keep and (reason := reason_to_keep(group.id, named)):
            keep[group.name] = reason
    return Plan(tuple(group for group in found if group.name not in keep), keep)


def remove(store: Store, group: Group) -> None:
    """Delete all objects of a group from the store.

    Its object manifest.json is deleted first, so that a partly deleted group is not taken for a complete one.
    """
    for entry in sorted(group.entries, key=lambda entry: (not entry.key.endswith(f"/{MANIFEST}"), entry.key)):
        store.remove(entry.key)


def words(text: str) -> set[str]:
    """Return every part of a text that can be a run id or a digest, which has 12 to 64 hexadecimal digits."""
    return set(WORD.findall(text))


def reason_to_keep(identity: str, references: dict[str, str]) -> str:
    """Return the description of a reference to the run or checkpoint `identity`, or an empty string.

    `references` maps run ids, run keys and digests to a description of what refers to them. A key of this
    mapping matches if it is equal to the identity, if it begins with the identity (a run's key begins with
    the run's id), or if it is a prefix of the identity with at least 12 digits.
    """
    if identity in references:
        return references[identity]
    return next(
        (
            reason
            for word, reason in references.items()
            if word.startswith(identity) or (len(word) >= 12 and identity.startswith(word))
        ),
        "",
    )


def _read(store: Store, key: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        store.get(key, Path(folder) / "object")
        return (Path(folder) / "object").read_text()
