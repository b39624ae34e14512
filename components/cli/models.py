"""The commands `cuda-agent models …`: list model versions, apply their gates, and decide on promotion.

The gates are the conditions that a version must meet before it is promoted, so that it becomes the champion.
`find_policy` finds the policy that the option `--policy` of other commands names.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.cli.common import (
    CommonOptions,
    ExitCode,
    Output,
    home_of,
    judge_session,
    print_line,
    print_table,
    with_common_options,
)
from components.core.errors import UserError, refuse
from components.core.text import format_number

if TYPE_CHECKING:
    from components.agent.policies import Policy
    from components.core.config import Resolved
    from components.registry.audit import AuditEntry
    from components.registry.promotion import Promotion

models_app = typer.Typer(
    help="Model versions: their gates, and who promoted what on which evidence.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Version = Annotated[str, typer.Argument(help="number or alias: candidate, champion, previous")]
Reason = Annotated[str, typer.Option("--reason", help="reason to record in the audit chain")]


@models_app.command("list")
@with_common_options()
def models_list(options: CommonOptions) -> Output:
    """List all registered versions of the model, newest first, with aliases, decisions and figures."""
    from components.registry import models

    promotion, _ = open_promotion(options)
    versions = [
        models.describe(promotion.client, promotion.model, number)
        for number in models.numbers(promotion.client, promotion.model)
    ]
    print_table(
        ("version", "aliases", "decision", "pass rate", "faster than compile", "data set"),
        [
            (
                version["version"],
                ", ".join(version["aliases"]),
                version["decision"],
                version["tags"].get("figure.pass_rate", ""),
                version["tags"].get("figure.faster_rate.compile", ""),
                version["tags"].get("dataset.version", "")[:12],
            )
            for version in versions
        ],
        empty=f"{promotion.model} has no version yet.",
    )
    return Output(
        {
            "name": promotion.model,
            "aliases": models.aliases(promotion.client, promotion.model),
            "versions": versions,
        }
    )


@models_app.command("show")
@with_common_options()
def models_show(options: CommonOptions, version: Version) -> Output:
    """Print the gates (conditions of promotion), decision, checkpoint and tags of one version."""
    from components.registry import models

    promotion, _ = open_promotion(options)
    record = models.describe(promotion.client, promotion.model, version)
    record |= {"checkpoint": models.location(promotion.client, promotion.model, record["version"])}
    aliases = ", ".join(record["aliases"]) or "no alias"
    print_line(f"{record['name']} version {record['version']} ({aliases}): {record['decision']}")
    _print_gates(record["gates"])
    print_line(f"  checkpoint  {record['checkpoint']}")
    for key, value in sorted(record["tags"].items()):
        print_line(f"  {key}  {value}")
    return Output(record)


@models_app.command("gate")
@with_common_options()
def models_gate(options: CommonOptions, version: Version) -> Output:
    """Apply the gates, the conditions of promotion, to a version again, and record the decision.

    The present thresholds apply, and the version is compared with the present champion, the promoted version.
    The sample of kernels that try to deceive the judge is judged again, and the version is refused if the
    judge believes one of them. A version that passes waits for approval by a person. The exit code is 4 if
    the gates refuse the version.
    """
    from components.registry.gate_runner import gate_again
    from components.registry.gates import REFUSALS
    from components.registry.models import CHAMPION

    promotion, resolved = open_promotion(options)
    profile = promotion.evidence(version, verify=False)[1]["profile"]
    name = profile or "''"
    refuse(
        (
            profile != resolved.profile,
            f"--profile {resolved.profile}: version {version} comes from a run of profile {name}, whose "
            f"thresholds apply; give --profile {name}.",
        )
    )
    with judge_session(resolved.params, promotion.home) as (pool, view):
        number, decision, champion = gate_again(resolved.params, promotion, version, pool, view)
    if promotion.aliases().get(CHAMPION) == number:
        entry = promotion.note(number, decision)
    else:
        entry = promotion.apply_decision(
            number,
            decision,
            champion=champion,
            approval_seconds=resolved.params.gate.approval_seconds,
        )
    _print_gates([gate.model_dump() for gate in decision.gates])
    for reason in decision.reasons:
        print_line(f"  {reason}")
    return _entry_output(promotion, entry, refused=decision.verdict in REFUSALS)


@models_app.command("promote")
@with_common_options()
def models_promote(
    options: CommonOptions,
    version: Version,
    reason: Reason = "",
    override: Annotated[
        bool, typer.Option("--override", help="promote although its gates did not pass; needs a reason")
    ] = False,
) -> Output:
    """Make a version the champion, the version in use, if its gates (conditions of promotion) have passed.

    Without --override, the exit code is 4 if they have not passed, and 2 if the version waits for approval.
    """
    promotion, _ = open_promotion(options)
    return _entry_output(promotion, promotion.promote(version, reason=reason, override=override))


@models_app.command("approve")
@with_common_options()
def models_approve(options: CommonOptions, version: Version, reason: Reason = "") -> Output:
    """Approve a version that waits for a person's decision; it then becomes the champion, the version in use.

    A version whose deadline is over expires instead, and the exit code is 4.
    """
    promotion, _ = open_promotion(options)
    entry = promotion.approve(version, reason=reason)
    return _entry_output(promotion, entry, refused=entry.action == "expired")


@models_app.command("refuse")
@with_common_options()
def models_refuse(options: CommonOptions, version: Version, reason: Reason = "") -> Output:
    """Refuse a version that waits for a person's decision.

    The champion, the version in use, does not change.
    """
    promotion, _ = open_promotion(options)
    return _entry_output(promotion, promotion.decline(version, reason=reason))


@models_app.command("rollback")
@with_common_options()
def models_rollback(options: CommonOptions, reason: Reason = "") -> Output:
    """Make the previous champion the champion (the version in use) again.

    The current champion becomes the previous one. It is an error if there is no previous champion.
    """
    promotion, _ = open_promotion(options)
    return _entry_output(promotion, promotion.rollback(reason=reason))


@models_app.command("audit")
@with_common_options()
def models_audit(options: CommonOptions) -> Output:
    """List the audit chain, the signed log of decisions on versions.

    Each row has the time, author, act, version, champion, reason and signer of one decision.
    """
    promotion, _ = open_promotion(options)
    entries = promotion.chain.entries()
    names = promotion.chain.signer.names()
    signers = {entry.number: names[entry.signature.partition(":")[0]][0] for entry in entries}
    print_table(
        ("", "when", "who", "act", "version", "champion", "reason", "signed by", "entry"),
        [
            (
                *(str(entry.number), entry.when, entry.who, entry.action, entry.version),
                *(entry.aliases.get("champion", "–"), entry.reason, signers[entry.number], entry.digest[:12]),
            )
            for entry in entries
        ],
        empty="The audit chain has no entry yet.",
    )
    return Output(
        {
            "name": promotion.model,
            "folder": str(promotion.chain.folder),
            "entries": [
                entry.model_dump(mode="json") | {"signer": signers[entry.number]} for entry in entries
            ],
        }
    )


@models_app.command("verify")
@with_common_options()
def models_verify(options: CommonOptions) -> Output:
    """Check that audit chain, registry, checkpoints and evidence agree. The exit code is 1 if they do not.

    The audit chain is the signed log of all decisions, and the evidence the results on which they are based.
    """
    from components.registry import models

    promotion, _ = open_promotion(options)
    problems = promotion.verify()
    agreement = "the audit chain is whole; registry, checkpoints and evidence agree with it."
    for line in problems or [f"{promotion.model}: {agreement}"]:
        print_line(line)
    return Output(
        {
            "name": promotion.model,
            "aliases": models.aliases(promotion.client, promotion.model),
            "intact": not problems,
            "problems": problems,
        },
        ExitCode.FAILED if problems else ExitCode.DONE,
    )


def registry_client(resolved: Resolved) -> Any:
    """Return the MLflow client of the model registry.

    Raises UserError if the folder of the parameter `home` has no registry yet and the parameters name no
    tracking server.
    """
    from components.core.promotion_params import DATABASE
    from components.registry.tracking import connect

    home = home_of(resolved)
    refuse(
        (
            not resolved.params.registry.tracking_uri and not (home / DATABASE).exists(),
            f"{home}: no run was registered here yet; run cuda-agent run first, or give its folder with "
            "--home.",
        )
    )
    return connect(resolved.params.registry, home)


def open_promotion(options: CommonOptions) -> tuple[Promotion, Resolved]:
    """Return the object that promotes versions of the registered model, and the resolved parameters.

    Raises UserError if a parameter is not valid or if there is no registry.
    """
    resolved = options.resolve()
    client = registry_client(resolved)
    from components.registry.promotion import Promotion

    return Promotion(client, resolved.params.registry, home_of(resolved)), resolved


def _entry_output(promotion: Promotion, entry: AuditEntry, *, refused: bool = False) -> Output:
    """Print the effect of a decision on a model version, and return the version's record with the decision.

    `entry` is the entry of the audit chain, the log of decisions, that records the decision. With `refused`
    the exit code is 4.
    """
    from components.registry import models

    record = models.describe(promotion.client, promotion.model, entry.version)
    aliases = models.aliases(promotion.client, promotion.model)
    champion = aliases.get(models.CHAMPION)
    state = f"version {champion} is champion" if champion else "there is no champion"
    print_line(f"{record['name']} version {entry.version}: {entry.action.replace('_', ' ')}; {state}.")
    if entry.action == "waiting":
        print_line(
            f"  waits until {entry.evidence['deadline']}: cuda-agent models approve {entry.version}, or "
            f"refuse; report {record['tags'].get('report', '–')}"
        )
    return Output(
        record | {"aliases": dict(aliases), "entry": entry.model_dump(mode="json")},
        ExitCode.REFUSED if refused else ExitCode.DONE,
    )


def _print_gates(gates: list[dict[str, Any]]) -> None:
    print_table(
        ("gate", "value", "95 % interval", "at least", "passed"),
        [
            (
                gate["name"],
                format_number(gate["value"]),
                "" if gate["low"] is None else f"{gate['low']:.3g} to {gate['high']:.3g}",
                format_number(gate["threshold"]),
                "yes" if gate["passed"] else "no",
            )
            for gate in gates
        ],
    )


def find_policy(name: str, server_model: str, resolved: Resolved) -> Policy:
    """Return the policy that `name`, the value of `--policy`, stands for.

    `name` is the address of an OpenAI-compatible server, a folder with a model, `rules` for the rule-based
    kernel writer, or the alias or number of a registered version. `server_model` is the value of `--model`:
    one of the server's models, or "" for the first. Raises UserError if there is no such policy, or if
    `server_model` is given for another one.
    """
    from components.agent.policies import folder_policy, server_policy

    params = resolved.params
    # Prompt and context window are those of the policy's manifest, unless the user sets them with `--set`.
    explicit = frozenset(key for key, source in resolved.sources.items() if source.startswith("--set"))
    if name.startswith(("http://", "https://")):
        from components.policy.chat_client import ChatClient

        client = ChatClient(name, server_model)
        client.choose_model()
        return server_policy(client, params, explicit)
    if server_model:
        raise UserError(
            f"--model {server_model}: only a server has several models; give its address with --policy."
        )
    if Path(name).is_dir():
        return folder_policy(Path(name), params, explicit)
    if name == "rules":
        from components.agent.rules import rules_policy

        return rules_policy(params, explicit)
    if name.isdigit() or name in ("champion", "candidate", "previous"):
        return folder_policy(_registered_checkpoint(name, resolved), params, explicit)
    raise UserError(
        f"--policy {name}: no such folder; give champion, a version's number, a folder, rules, or an address "
        "such as http://localhost:8000/v1."
    )


def _registered_checkpoint(name: str, resolved: Resolved) -> Path:
    """Return the folder with the checkpoint of a registered model version.

    `name` is an alias (champion, candidate, previous) or a number. The checkpoint is copied into the folder
    `policies` below the parameter `home` when it is used for the first time. Raises UserError if there is no
    such version, or if a file of the copy is damaged.
    """
    from components.core.files import atomic_folder
    from components.policy.checkpoint import verify_checkpoint
    from components.registry import models

    client, model = registry_client(resolved), resolved.params.registry.model
    number = models.aliases(client, model).get(name, name)
    refuse(
        (
            not number.isdigit(),
            f"--policy {name}: {model} has no {name} yet; cuda-agent models list shows all versions.",
        )
    )
    run = models.describe(client, model, number)["run_id"]
    folder = home_of(resolved) / "policies" / f"{model}-{number}-{run[:8]}"
    if not (folder / "manifest.json").is_file():
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        with atomic_folder(folder) as temporary:
            download = temporary / "download"
            shutil.copytree(models.checkpoint(client, model, number, download), temporary, dirs_exist_ok=True)
            shutil.rmtree(download, ignore_errors=True)
    verify_checkpoint(folder)
    return folder
