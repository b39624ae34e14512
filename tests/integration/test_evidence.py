"""Evidence that was forged, exchanged or deleted decides nothing, and is named."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from promotion_fixtures import PARAMS, WAITING, aliases, apply_decision, promotion_of
from promotion_fixtures import home as home

from components.core.config import resolve
from components.core.errors import UserError
from components.core.files import digest_json, digest_tree, read_json, write_json
from components.core.signing import Signer
from components.registry import models
from components.registry.audit import SEALS, AuditChain, AuditChainError
from components.registry.gates import Decision
from components.registry.promotion import NotPassed, Promotion
from flows.run_context import PipelineRun, check_environment

REFUSED = Decision(verdict="refused", gates=(), reasons=("too slow.",))


def foreign_signer(folder: Path) -> Signer:
    return Signer(PARAMS.model_copy(update={"key": str(folder / "foreign" / "key")}))


def forge(promotion: Promotion, number: int, signer: Signer | None, **fields: Any) -> None:
    """Write an entry of the chain whose digests are right, signed by `signer` if there is one."""
    folder = promotion.chain.folder
    body = read_json(folder / f"{number - 1:06d}.json")
    fields |= {"number": number, "before": body["digest"]}
    body = {name: value for name, value in body.items() if name not in SEALS} | fields
    signature = signer.sign(body) if signer is not None else ""
    write_json(folder / f"{number:06d}.json", body | {"digest": digest_json(body), "signature": signature})


def test_an_approval_from_a_home_without_the_evaluation_is_refused(home: Path, tmp_path: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", WAITING)
    other = tmp_path / "other"
    shared = PARAMS.model_copy(update={"audit": str(home / "audit")})
    with pytest.raises(UserError, match=r"other/results-1\.json: is missing"):
        Promotion(promotion.client, shared, other).approve("1")
    with pytest.raises(AuditChainError, match="which the chain does not hold"):
        Promotion(promotion.client, PARAMS, other).approve("1")
    promotion.client.delete_registered_model_tag(PARAMS.model, "audit.anchor")
    with pytest.raises(UserError, match="does not wait for a decision"):
        Promotion(promotion.client, PARAMS, other).approve("1")
    assert aliases(promotion) == {}


@pytest.mark.parametrize("is_signed", [False, True])
def test_a_forged_entry_makes_no_champion(home: Path, tmp_path: Path, is_signed: bool) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", REFUSED, champion="1")
    signer = foreign_signer(tmp_path) if is_signed else None
    fields = {"action": "promoted", "version": "2", "aliases": {"champion": "2", "previous": "1"}}
    forge(promotion, 6, signer, **fields)
    why = "signed with the key" if is_signed else "it is not signed"
    for act in (promotion.expire, promotion.rollback, promotion.aliases):
        with pytest.raises(AuditChainError, match=rf"000006\.json: this audit entry is not .*{why}"):
            act()
    assert why in promotion.verify()[0] and aliases(promotion) == {"champion": "1"}


def test_a_chain_rewritten_whole_with_another_key_is_refused(home: Path, tmp_path: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    signer, before = foreign_signer(tmp_path), "0" * 64
    for path in sorted(promotion.chain.folder.glob("*.json")):
        body = {name: value for name, value in read_json(path).items() if name not in SEALS}
        body |= {"who": "mallory", "before": before}
        before = digest_json(body)
        write_json(path, body | {"digest": before, "signature": signer.sign(body)})
    promotion.client.set_registered_model_tag(PARAMS.model, "audit.anchor", f"{body['number']}:{before}")
    with pytest.raises(AuditChainError, match=r"000001\.json: .* which .*trusted_keys does not list"):
        promotion.rollback()
    assert "does not list" in promotion.verify()[0]


def test_a_signature_of_another_record_does_not_fit(home: Path) -> None:
    promotion = promotion_of(home)
    folder = promotion.chain.folder
    last = read_json(folder / "000003.json")
    body = {name: value for name, value in last.items() if name not in SEALS} | {"who": "mallory"}
    write_json(folder / "000003.json", body | {"digest": digest_json(body), "signature": last["signature"]})
    promotion.client.set_registered_model_tag(PARAMS.model, "audit.anchor", f"3:{digest_json(body)}")
    assert "it was changed after it was signed" in promotion.verify()[0]


def test_no_rollback_to_an_exchanged_checkpoint_whose_tags_were_deleted(home: Path, tmp_path: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", champion="1")
    folder = models.checkpoint(promotion.client, PARAMS.model, "1", tmp_path)
    (folder / "model.safetensors").write_bytes(b"other weights")
    (folder / "manifest.json").unlink()
    files = digest_tree(folder)
    write_json(folder / "manifest.json", {"files": files, "digest": digest_json(files)})
    for name in ("checkpoint.digest", "manifest.digest"):
        promotion.client.delete_model_version_tag(PARAMS.model, "1", name)
    with pytest.raises(UserError, match="holds another checkpoint than version 1 registered"):
        promotion.rollback()
    assert aliases(promotion)["champion"] == "2"
    assert "previous (version 1)" in promotion.verify()[0]


def test_the_tag_of_an_approval_is_no_approval(home: Path) -> None:
    promotion = promotion_of(home)
    promotion.client.set_model_version_tag(PARAMS.model, "3", models.DECISION, "approved")
    with pytest.raises(NotPassed, match="undecided"):
        promotion.promote("3")
    assert "its tag gate.verdict is 'approved', and the audit chain says None" in promotion.verify()[0]


def test_exchanged_evidence_of_two_versions_is_refused(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", WAITING)
    (home / "results-2.json").write_text('{"better": true}')
    shutil.copyfile(home / "results-2.json", home / "results-1.json")
    with pytest.raises(UserError, match=r"results-1\.json: is missing or is not what version 1 was"):
        promotion.approve("1")
    (home / "results-1.json").write_text("{}")
    tags = models.find(promotion.client, PARAMS.model, "2").tags
    for name in ("checkpoint.digest", "evaluation", "evaluation.digest"):
        promotion.client.set_model_version_tag(PARAMS.model, "1", name, tags[name])
    assert [line.partition(" is ")[0] for line in promotion.verify()] == [
        "version 1: its tag checkpoint.digest",
        "version 1: its tag evaluation",
    ]
    assert promotion.approve("1").evidence["evaluation"] == "results-1.json"


def test_a_version_that_another_program_registered_cannot_be_decided_on(home: Path) -> None:
    promotion = promotion_of(home)
    version = promotion.client.create_model_version(PARAMS.model, source=str(home / "checkpoints" / "1"))
    number = str(version.version)
    for act in (
        lambda: promotion.promote(number, override=True, reason="x"),
        lambda: apply_decision(promotion, number),
    ):
        with pytest.raises(UserError, match=f"version {number}: the audit chain .* has no entry"):
            act()
    assert f"version {number}: the audit chain" in promotion.verify()[0]


def test_an_edited_record_of_a_run_is_found(home: Path) -> None:
    promotion = promotion_of(home)
    path = home / "runs" / "0123456789ab" / "run.json"
    record = {"evaluation": {"pass_rate": 0.5}, "seconds": 1.5}
    write_json(path, record | {"signature": promotion.chain.signer.sign(record)})
    assert promotion.verify() == []
    path.write_text(path.read_text().replace("0.5", "0.9"))
    assert "run.json: this record of a run is not to be trusted" in promotion.verify()[0]
    for damage in ("[1]", "3", '{"signature": 3}'):
        path.write_text(damage)
        assert promotion.verify() == [
            f"{path}: this record of a run is not to be trusted, because it is not signed."
        ]
    path.write_text("[" * 100_000)
    assert "run.json: this record of a run is not to be trusted" in promotion.verify()[0]


def test_a_colleague_decides_with_a_key_of_ones_own(home: Path, tmp_path: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", WAITING)
    key, own = tmp_path / "kim", promotion.chain.signer
    generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "kim", "-f", str(key)]
    if shutil.which("ssh-keygen") is None:
        pytest.skip("OpenSSH is not installed")
    subprocess.run(generate, check=True)
    trusted = tmp_path / "trusted"
    colleague = Promotion(
        promotion.client,
        PARAMS.model_copy(update={"key": str(key), "trusted_keys": str(trusted)}),
        home,
    )
    trusted.write_text(own.trusted.read_text())
    with pytest.raises(UserError, match=r"does not list this key.*append the line: ssh-ed25519 "):
        colleague.approve("1")
    trusted.write_text(own.trusted.read_text() + key.with_suffix(".pub").read_text())
    entry = colleague.approve("1")
    assert (
        colleague.chain.signer.check(
            {name: value for name, value in entry.model_dump(mode="json").items() if name not in SEALS},
            entry.signature,
        )
        == "kim"
    )
    assert "which the chain" not in colleague.verify() and colleague.verify() == []
    assert "does not list" in promotion.verify()[0]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("signing_key", "no key", r"registry\.key: .*signing_key is no readable private key"),
        ("trusted_keys", "ssh-ed25519 AAAA kim", r"trusted_keys, line 1: not an Ed25519 public key"),
    ],
)
def test_a_key_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    registry = PARAMS.model_copy(update={"key": str(tmp_path / "signing_key")})
    Signer(registry).sign({})
    assert (tmp_path / "signing_key").stat().st_mode & 0o777 == 0o600
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        Signer(registry).sign({})


def test_a_run_checks_its_key_and_the_audit_chain_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("no key")
    run = PipelineRun(resolve("ci", (f"home={tmp_path}", f"registry.key={tmp_path / 'broken'}")))
    with pytest.raises(UserError, match=r"^registry\.key: .*/broken is no readable private key"):
        check_environment(run)

    run = PipelineRun(resolve("ci", (f"home={tmp_path}", f"registry.key={tmp_path / 'own' / 'key'}")))
    chain = AuditChain.of(run.params.registry, tmp_path)
    chain.signer = foreign_signer(tmp_path)
    with chain.locked():
        chain.append("registered", "1", {}, "mallory")
    with pytest.raises(UserError, match=r"000001\.json: .* not to be trusted, because it is signed with"):
        check_environment(run)
