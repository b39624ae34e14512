"""The evidence of model versions: the files on which promotions rest, and their recorded digests."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from components.core.errors import UserError, refuse
from components.core.files import MANIFEST, digest_file, read_json, verify_files
from components.core.signing import Signer
from components.registry import models
from components.registry.audit import DECISIONS, AuditEntry, newest, recorded_aliases

RESTORE = "restore it from the artifact store's backup, or promote another version"


class Evidence:
    """Reads the evidence of versions of one registered model from entries of its audit chain.

    The audit chain is the log of decisions on versions. The evidence of a version has the digests of its
    checkpoint and evaluations and the paths of evaluations and report, on which decisions rest. `home` is the
    folder that contains the evaluations and reports, and `chain` the folder of the audit chain. The argument
    `entries` of the methods has all entries of the chain.
    """

    def __init__(self, client: MlflowClient, model: str, home: Path, chain: Path):
        self.client = client
        self.model = model
        self.home = home
        self.chain = chain

    def verified(self, version: str, entries: list[AuditEntry]) -> dict[str, Any]:
        """Return the recorded evidence of a version, after verifying the files that it names.

        `version` is a number. Raises UserError, which names the file, if the checkpoint or an evaluation is
        missing or has changed since the version was registered, or if the chain has no entry of the
        registration. The report is not verified, but its SHA-256 is added to the evidence as `report.digest`
        if the report exists.
        """
        evidence = self.recorded(version, entries)
        self.verify(version, evidence)
        report = self.home / evidence["report"]
        if report.is_file():
            evidence["report.digest"] = digest_file(report)
        return evidence

    def recorded(self, version: str, entries: list[AuditEntry]) -> dict[str, Any]:
        """Return the evidence that was recorded when a version was registered, without verifying it.

        Its keys are names such as `checkpoint.digest`, `evaluation` (a path) and `evaluation.digest`. Raises
        UserError if the chain has no entry of the registration.
        """
        if (registered := newest(entries, version, {"registered"})) is None:
            raise UserError(
                f"version {version}: the audit chain {self.chain} has no entry of its registration, so "
                "nothing says what it was; decide in the home that registered it."
            )
        return dict(registered.evidence)

    def verify(self, version: str, evidence: Mapping[str, Any]) -> None:
        """Raise UserError unless checkpoint and evaluations of a version have the digests in `evidence`.

        `version` is a number, and `evidence` is what `recorded` returns. A checkpoint that is not in a local
        folder is downloaded to a temporary one.
        """
        with tempfile.TemporaryDirectory(prefix="cuda-agent-") as scratch:
            folder = models.checkpoint(self.client, self.model, version, Path(scratch))
            digest, manifest = verify_files(folder, RESTORE), digest_file(folder / MANIFEST)
        refuse(
            (
                digest != evidence["checkpoint.digest"],
                f"{folder}: holds another checkpoint than version {version} registered; {RESTORE}.",
            ),
            (
                manifest != evidence["manifest.digest"],
                f"{folder / MANIFEST}: was changed since version {version} was registered; {RESTORE}.",
            ),
            *(
                (
                    not self.match(evidence[name], evidence[sealed]),
                    f"{self.home / evidence[name]}: is missing or is not what version {version} was measured "
                    "with; restore it, or evaluate the version again.",
                )
                for name, sealed in (
                    ("evaluation", "evaluation.digest"),
                    ("start.evaluation", "start.digest"),
                )
            ),
        )

    def match(self, path: str, digest: str) -> bool:
        """Return whether the file `path`, relative to `home`, exists and has the SHA-256 `digest`."""
        return (self.home / path).is_file() and digest_file(self.home / path) == digest

    def disagreements(self, version: str, entries: list[AuditEntry]) -> list[str]:
        """Return a sentence for each disagreement between a version's files and tags and the audit chain.

        The tags in the registry are compared for every version. The files are verified only if the version is
        the champion (the promoted version) or the previous champion, or waits for approval, because those of
        other versions may have been deleted.
        """
        state = newest(entries, version, DECISIONS)
        action = state.action if state is not None else None
        names = [alias for alias, number in recorded_aliases(entries).items() if number == version]
        read = self.verified if names or action == "waiting" else self.recorded
        try:
            expected = read(version, entries) | {models.DECISION: action}
        except UserError as error:
            return [f"{names[0]} (version {version}): {error}" if names else str(error)]
        tags = models.find(self.client, self.model, version).tags
        return [
            f"version {version}: its tag {name} is {tags[name]!r}, and the audit chain says "
            f"{expected[name]!r}."
            for name in sorted(expected.keys() & tags.keys())
            if tags[name] != expected[name]
        ]

    def untrusted_runs(self, signer: Signer) -> list[str]:
        """Return a sentence for each record of a run that is not signed by a trusted key.

        The records are the files `home`/runs/*/run.json. A record that was changed after it was signed, or is
        no JSON object, counts as not signed. `signer` has the trusted keys.
        """
        found = []
        for file in sorted(self.home.glob("runs/*/run.json")):
            try:
                record = read_json(file)
                signature = record.pop("signature", "") if isinstance(record, dict) else ""
                signer.check(record, str(signature))
            except (ValueError, RecursionError) as error:
                found.append(f"{file}: this record of a run is not to be trusted, because {error}.")
        return found
