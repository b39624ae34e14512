"""Promotion on a real MLflow store: a person decides in time, by command, and the result is reported."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from promotion_fixtures import PARAMS, WAITING, actions, aliases, apply_decision, promotion_of
from promotion_fixtures import home as home
from typer.testing import CliRunner

from components.cli.main import app
from components.core.errors import UserError
from components.registry import models
from components.registry.audit import AuditChainError
from components.registry.gates import Decision, Gate
from components.registry.promotion import NotPassed, Promotion


def decision_of(promotion: Promotion, version: str) -> str:
    return str(models.find(promotion.client, PARAMS.model, version).tags[models.DECISION])


def test_promotion_then_rollback_and_the_chain_tells_who_and_on_what(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", champion="1")
    assert aliases(promotion) == {"champion": "2", "previous": "1"}
    promotion.rollback(who="kim", reason="slow on the fleet")
    assert aliases(promotion) == {"champion": "1", "previous": "2"}
    entries = [entry for entry in promotion.chain.entries() if entry.action != "registered"]
    assert [entry.action for entry in entries] == ["promoted", "promoted", "rolled_back"]
    assert entries[-1].who == "kim" and entries[-1].reason == "slow on the fleet"
    assert (
        entries[1].evidence["checkpoint.digest"]
        and entries[1].evidence["report.digest"]
        and entries[1].evidence["dataset.version"] == "d1"
    )
    assert promotion.verify() == []


def test_settling_the_same_run_twice_adds_nothing(home: Path) -> None:
    promotion = promotion_of(home)
    assert apply_decision(promotion, "1", key="k") == apply_decision(promotion, "1", key="k")
    assert actions(promotion) == ["promoted"]


def test_a_decided_version_that_its_run_registers_again_does_not_become_the_candidate(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", WAITING)
    promotion.decline("1")
    promotion.register("1", promotion.evidence("1", verify=False)[1])
    assert models.aliases(promotion.client, PARAMS.model) == {"candidate": "3"}
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(models, "apply_entry", Mock(side_effect=KeyboardInterrupt))
        promotion.register("2", promotion.evidence("2", verify=False)[1] | {"profile": "other"})
    promotion.aliases()
    assert models.aliases(promotion.client, PARAMS.model) == {"candidate": "2"}


def test_a_person_approves_or_refuses_what_waits_and_nothing_else(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", WAITING)
    assert aliases(promotion) == {} and decision_of(promotion, "1") == "waiting"
    with pytest.raises(UserError, match="use cuda-agent models approve 1"):
        promotion.promote("1")
    assert promotion.approve("1", who="kim").action == "approved"
    assert aliases(promotion) == {"champion": "1"}
    apply_decision(promotion, "2", WAITING, champion="1")
    assert promotion.decline("2", reason="no").action == "declined"
    assert aliases(promotion) == {"champion": "1"}
    for act in (promotion.approve, promotion.decline):
        with pytest.raises(UserError, match="does not wait for a decision"):
            act("2")
    with pytest.raises(NotPassed):
        promotion.promote("2")


def test_an_approval_that_comes_too_late_expires(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", WAITING, champion="1", approval_seconds=0.001)
    apply_decision(promotion, "3", WAITING, champion="1", approval_seconds=0.001)
    time.sleep(0.01)
    assert promotion.approve("2").action == "expired"
    assert [entry.version for entry in promotion.expire()] == ["3"] and promotion.expire() == []
    assert aliases(promotion) == {"champion": "1"} and decision_of(promotion, "3") == "expired"


def test_an_approval_is_void_when_another_champion_reigns_by_now(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", WAITING, champion="1")
    apply_decision(promotion, "3", champion="1")
    with pytest.raises(UserError, match=r"compared it with version 1, and now there is version 3"):
        promotion.approve("2")
    assert aliases(promotion)["champion"] == "3"


def test_a_report_changed_after_the_gates_passed_voids_the_approval(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", WAITING)
    (home / "report-1.html").write_text("<html>better</html>")
    with pytest.raises(UserError, match=r"report\.digest changed"):
        promotion.approve("1")


@pytest.mark.parametrize("content", [None, "{ }"])
def test_a_version_whose_evaluation_was_deleted_or_changed_is_refused(
    home: Path, content: str | None
) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", WAITING, champion="1")
    results = home / "results-2.json"
    results.unlink()
    if content is not None:
        results.write_text(content)
    for act in (
        lambda: promotion.approve("2"),
        lambda: apply_decision(promotion, "2", champion="1"),
        lambda: promotion.promote("2", override=True, reason="x"),
    ):
        with pytest.raises(UserError, match=r"results-2\.json: is missing or is not what version 2"):
            act()
    assert aliases(promotion) == {"champion": "1"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_checkpoint_with_one_flipped_byte_is_refused_by_name(home: Path, name: str) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    folder = models.checkpoint(promotion.client, PARAMS.model, "2", home / "scratch")
    file = folder / name
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    for act in (
        lambda: apply_decision(promotion, "2", champion="1"),
        lambda: promotion.promote("2", override=True, reason="x"),
    ):
        with pytest.raises(UserError, match=str(file).replace(".", r"\.")):
            act()
    assert aliases(promotion) == {"champion": "1"} and actions(promotion) == ["promoted"]


def test_a_damaged_previous_champion_is_not_returned_to(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", champion="1")
    file = models.checkpoint(promotion.client, PARAMS.model, "1", home / "scratch") / "model.safetensors"
    file.write_bytes(b"other")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        promotion.rollback()
    assert aliases(promotion)["champion"] == "2"
    assert len(promotion.verify()) == 1 and "previous (version 1)" in promotion.verify()[0]


def test_an_override_needs_a_reason_and_is_told(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", Decision(verdict="refused", gates=(), reasons=("too slow.",)))
    with pytest.raises(UserError, match="--reason"):
        promotion.promote("1", override=True)
    assert promotion.promote("1", override=True, reason="the old one crashes").evidence["override"] is True
    assert aliases(promotion) == {"champion": "1"}


def changed(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"who": "somebody else"}))


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (lambda folder: changed(folder / "000001.json"), "000001.json: this audit entry was changed"),
        (lambda folder: (folder / "000001.json").unlink(), "000001.json: this audit entry is missing"),
        (lambda folder: (folder / "000006.json").unlink(), "names entry 6, which the chain does not hold"),
        *(
            (
                lambda folder, text=text: (folder / "000002.json").write_text(text),
                "000002.json: this audit entry cannot be read",
            )
            for text in ("{", "[" * 100_000)
        ),
    ],
)
def test_a_changed_audit_chain_is_noticed_and_stops_every_act(home: Path, tamper: Any, says: str) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", champion="1")
    promotion.rollback()
    tamper(promotion.chain.folder)
    assert says in promotion.verify()[0]
    with pytest.raises(AuditChainError, match=says.split(",")[0]):
        promotion.rollback()


def test_aliases_moved_by_other_means_are_set_back_and_an_entry_says_so(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", champion="1")
    promotion.client.set_registered_model_alias(PARAMS.model, "champion", "3")
    assert "champion 3" in promotion.verify()[0]
    promotion.rollback()
    assert actions(promotion) == ["promoted", "promoted", "found", "rolled_back"]
    assert "champion 3, previous 1; they were set back" in promotion.chain.entries()[-2].reason
    assert aliases(promotion) == {"champion": "1", "previous": "2"} and promotion.verify() == []
    promotion.client.set_registered_model_alias(PARAMS.model, "champion", "3")
    assert promotion.aliases() == {"champion": "1", "previous": "2"} == aliases(promotion)


def test_a_champion_that_was_deleted_in_the_registry_blocks_nothing(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    promotion.client.delete_model_version(PARAMS.model, "1")
    for _ in range(2):
        assert promotion.aliases() == {}
    assert actions(promotion) == ["promoted", "found"]
    assert "had deleted version 1" in promotion.chain.entries()[-1].reason and promotion.verify() == []
    apply_decision(promotion, "2")
    assert promotion.aliases() == aliases(promotion) == {"champion": "2"}


def test_a_waiting_version_that_was_deleted_in_the_registry_expires_and_blocks_nothing(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "2", WAITING, approval_seconds=0.001)
    promotion.client.delete_model_version(PARAMS.model, "2")
    time.sleep(0.01)
    assert [entry.version for entry in promotion.expire()] == ["2"]
    apply_decision(promotion, "1")
    assert promotion.aliases() == aliases(promotion) == {"champion": "1"} and promotion.verify() == []


def test_gates_of_an_earlier_decision_are_not_shown(home: Path) -> None:
    promotion = promotion_of(home)
    for names in (("pass_rate", "start.better"), ("pass_rate",)):
        gates = tuple(Gate(name=name, value=1.0, threshold=0.5, passed=True) for name in names)
        apply_decision(promotion, "1", Decision(verdict="refused", gates=gates, reasons=("slow",)))
    shown = models.describe(promotion.client, PARAMS.model, "1")["gates"]
    assert [gate["name"] for gate in shown] == ["pass_rate"]


def arguments(home: Path, *words: str) -> list[str]:
    """Arguments of `cuda-agent` for the command `models …` on the registry of `home`."""
    sets = ("--set", f"registry.model={PARAMS.model}", "--set", f"registry.experiment={PARAMS.experiment}")
    return ["models", *words, "--home", str(home), *sets, "--json"]


def command(home: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the one JSON object, and what people see, of `cuda-agent models …`."""
    done = CliRunner().invoke(app, arguments(home, *words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_a_release_manager_decides_by_commands_alone(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    apply_decision(promotion, "2", WAITING, champion="1")
    code, found, stderr_console = command(home, "approve", "2", "--reason", "read")
    assert (
        code == 0
        and found["aliases"]["champion"] == "2"
        and found["decision"] == "approved"
        and "version 2 is champion" in stderr_console
    )
    assert found["entry"]["reason"] == "read" and {"name", "version", "gates"} <= set(found)
    assert command(home, "rollback")[1]["aliases"]["champion"] == "1"
    aliases = command(home, "promote", "2")[1]["aliases"]
    assert aliases == {"candidate": "3", "champion": "2", "previous": "1"}, "3 is registered and undecided"
    code, found, _ = command(home, "audit")
    assert code == 0 and [entry["action"] for entry in found["entries"][3:]] == [
        "promoted",
        "waiting",
        "approved",
        "rolled_back",
        "promoted",
    ]
    code, found, _ = command(home, "verify")
    assert code == 0 and found["intact"] is True


def test_what_is_not_done_has_its_own_exit_code(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1", WAITING, approval_seconds=0.001)
    apply_decision(promotion, "2", Decision(verdict="refused", gates=(), reasons=("too slow.",)))
    apply_decision(promotion, "3", WAITING)
    time.sleep(0.01)
    code, found, _ = command(home, "approve", "1")
    assert code == 4 and found["decision"] == "expired"
    promote = [sys.executable, "-m", "components.cli", *arguments(home, "promote", "2")]
    done = subprocess.run(promote, capture_output=True, text=True)
    assert done.returncode == 4 and done.stdout == "" and "its gates did not pass" in done.stderr
    assert command(home, "refuse", "3", "--reason", "not now")[1]["decision"] == "declined"
    with pytest.raises(UserError, match="no version 9"):
        command(home, "show", "9")
    with pytest.raises(UserError, match=r"version 3 comes from a run of profile ci.*give --profile ci"):
        command(home, "gate", "3")
    with pytest.raises(UserError, match="no previous champion"):
        command(home, "rollback")
    changed(promotion.chain.folder / "000002.json")
    code, found, _ = command(home, "verify")
    assert code == 1 and found["intact"] is False and "000002.json" in found["problems"][0]
