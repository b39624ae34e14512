"""The commands `cuda-agent models …`: what was promoted, on which evidence, and a release manager's own acts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.cli.common import CommonOptions, answer, home_of, stderr_console, with_common_options

if TYPE_CHECKING:
    from rich.table import Table

    from components.core.config import Resolved
    from components.registry.audit import AuditEntry
    from components.registry.promotion import Promotion

FAILED, REFUSED = 1, 4

models_app = typer.Typer(
    help="Model versions: what was promoted, by whom, on which evidence.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Version = Annotated[str, typer.Argument(help="number or alias: candidate, champion, previous")]
Reason = Annotated[str, typer.Option("--reason", help="why; it stands in the audit chain")]


@models_app.command("list")
@with_common_options()
def models_list(given: CommonOptions) -> None:
    """Every version, newest first."""
    from rich.table import Table

    with answer(given.as_json) as out:
        resolved = given.resolved()
        client = registry_client(resolved)
        from components.registry import models

        name = resolved.params.registry.model
        found = models.versions(client, name)
        table = Table(
            "version",
            "aliases",
            "decision",
            "pass rate",
            "faster than compile",
            "data set",
            box=None,
            padding=(0, 2, 0, 0),
        )
        for version in found:
            tags = version["tags"]
            figures = [
                tags.get("figure.pass_rate", ""),
                tags.get("figure.faster_rate.compile", ""),
                tags.get("dataset.version", "")[:12],
            ]
            table.add_row(version["version"], ", ".join(version["aliases"]), version["decision"], *figures)
        stderr_console().print(table if found else f"{name} has no version yet.")
        out({"name": name, "aliases": models.aliases(client, name), "versions": found})


@models_app.command("show")
@with_common_options()
def models_show(given: CommonOptions, version: Version) -> None:
    """One version: its gates, its decision, its evidence and where the report is."""
    with answer(given.as_json) as out:
        resolved = given.resolved()
        client = registry_client(resolved)
        from components.registry import models

        name = resolved.params.registry.model
        found = models.describe(client, name, version)
        found |= {"checkpoint": models.location(client, name, found["version"])}
        console = stderr_console()
        console.print(
            f"{found['name']} version {found['version']} ({', '.join(found['aliases']) or 'no alias'}): {found['decision']}",
            highlight=False,
        )
        console.print(_gates(found["gates"]))
        console.print(f"  checkpoint  {found['checkpoint']}", highlight=False, markup=False, soft_wrap=True)
        for key, value in sorted(found["tags"].items()):
            console.print(f"  {key}  {value}", highlight=False, markup=False, soft_wrap=True)
        out(found)


@models_app.command("gate")
@with_common_options()
def models_gate(given: CommonOptions, version: Version) -> None:
    """Hold a version against today's thresholds, today's champion and the exploits; one that passes waits for approval."""
    from components.core.progress_view import ProgressView

    with answer(given.as_json) as out:
        resolved = given.resolved()
        client = registry_client(resolved)
        from components.core.errors import UserError
        from components.judge.pool import open_pool
        from components.registry import models
        from components.registry.gate_runner import gate_again

        night = models.find(client, resolved.params.registry.model, version).tags.get(
            "profile", resolved.profile
        )
        if night != resolved.profile:
            named = night or "''"
            raise UserError(
                f"--profile {resolved.profile}: version {version} comes of a night of {named}, whose thresholds count; give --profile {named}."
            )
        place, console = home_of(resolved), stderr_console()
        pool = open_pool(resolved.params, place / "verdicts")
        try:
            with ProgressView(console) as view:
                number, decision, champion = gate_again(resolved.params, client, place, version, pool, view)
        finally:
            pool.close()
        promotion = _promotion(resolved, client)
        if models.aliases(client, promotion.model).get(models.CHAMPION) == number:
            entry = promotion.note(number, decision)
        else:
            entry = promotion.apply_decision(
                number, decision, champion=champion, approval_seconds=resolved.params.gate.approval_seconds
            )
        console.print(_gates([gate.model_dump() for gate in decision.gates]))
        for reason in decision.reasons:
            console.print(f"  {reason}", highlight=False, soft_wrap=True)
        _report(resolved, client, entry, out)
    if decision.verdict == "refused":
        raise typer.Exit(REFUSED)


@models_app.command("promote")
@with_common_options()
def models_promote(
    given: CommonOptions,
    version: Version,
    reason: Reason = "",
    override: Annotated[
        bool, typer.Option("--override", help="although its gates did not pass; needs a reason")
    ] = False,
) -> None:
    """Make a version whose gates passed the champion; exit code 4 when they did not."""
    with answer(given.as_json) as out:
        resolved = given.resolved()
        client = registry_client(resolved)
        from components.registry.promotion import NotPassed

        try:
            entry = _promotion(resolved, client).promote(version, reason=reason, override=override)
        except NotPassed as error:
            stderr_console().print(f"cuda-agent: {error}", highlight=False, soft_wrap=True, markup=False)
            raise typer.Exit(REFUSED) from error
        _report(resolved, client, entry, out)


@models_app.command("approve")
@with_common_options()
def models_approve(given: CommonOptions, version: Version, reason: Reason = "") -> None:
    """Approve a version that waits: it becomes the champion. Past its deadline it expires (exit code 4)."""
    with answer(given.as_json) as out:
        resolved = given.resolved()
        client = registry_client(resolved)
        entry = _promotion(resolved, client).approve(version, reason=reason)
        _report(resolved, client, entry, out)
    if entry.action == "expired":
        raise typer.Exit(REFUSED)


@models_app.command("refuse")
@with_common_options()
def models_refuse(given: CommonOptions, version: Version, reason: Reason = "") -> None:
    """Refuse a version that waits: the champion stays."""
    with answer(given.as_json) as out:
        resolved = given.resolved()
        client = registry_client(resolved)
        _report(resolved, client, _promotion(resolved, client).decline(version, reason=reason), out)


@models_app.command("rollback")
@with_common_options()
def models_rollback(given: CommonOptions, reason: Reason = "") -> None:
    """The previous champion returns; the two change places."""
    with answer(given.as_json) as out:
        resolved = given.resolved()
        client = registry_client(resolved)
        _report(resolved, client, _promotion(resolved, client).rollback(reason=reason), out)


@models_app.command("audit")
@with_common_options()
def models_audit(given: CommonOptions) -> None:
    """Every act in order: who, when, what, and on which evidence."""
    from rich.table import Table

    with answer(given.as_json) as out:
        resolved = given.resolved()
        promotion = _promotion(resolved, registry_client(resolved))
        entries = promotion.chain.entries()
        table = Table(
            "", "when", "who", "act", "version", "champion", "reason", "entry", box=None, padding=(0, 2, 0, 0)
        )
        for entry in entries:
            champion = entry.aliases.get("champion", "–")
            table.add_row(
                str(entry.number),
                entry.when,
                entry.who,
                entry.action,
                entry.version,
                champion,
                entry.reason,
                entry.digest[:12],
            )
        stderr_console().print(table if entries else "nobody has decided anything yet.")
        out(
            {
                "name": promotion.model,
                "folder": str(promotion.chain.folder),
                "entries": [entry.model_dump(mode="json") for entry in entries],
            }
        )


@models_app.command("verify")
@with_common_options()
def models_verify(given: CommonOptions) -> None:
    """See that audit chain, registry, checkpoints and evidence agree; exit code 1 when they do not."""
    with answer(given.as_json) as out:
        resolved = given.resolved()
        client = registry_client(resolved)
        promotion = _promotion(resolved, client)
        from components.registry import models

        problems = promotion.verify()
        for problem in problems:
            stderr_console().print(problem, highlight=False, soft_wrap=True, markup=False)
        if not problems:
            stderr_console().print(
                f"{promotion.model}: the audit chain is whole, and registry, checkpoints and evidence agree with it.",
                highlight=False,
            )
        out(
            {
                "name": promotion.model,
                "aliases": models.aliases(client, promotion.model),
                "intact": not problems,
                "problems": problems,
            }
        )
    if problems:
        raise typer.Exit(FAILED)


def registry_client(resolved: Resolved) -> Any:
    from components.core.errors import UserError
    from components.registry.tracking import connect

    home = home_of(resolved)
    if not resolved.params.registry.tracking_uri and not (home / "mlflow" / "mlflow.db").is_file():
        raise UserError(
            f"{home}: no run was registered here yet; run cuda-agent run first, or give its folder with --home."
        )
    return connect(resolved.params.registry, home)


def _promotion(resolved: Resolved, client: Any) -> Promotion:
    from components.registry.promotion import Promotion

    return Promotion(client, resolved.params.registry, home_of(resolved))


def _report(resolved: Resolved, client: Any, entry: AuditEntry, out: Any) -> None:
    """What an act did, for people and as the one JSON object."""
    from components.registry import models

    found = models.describe(client, resolved.params.registry.model, entry.version)
    aliases: Mapping[str, str] = models.aliases(client, resolved.params.registry.model)
    reigning = aliases.get(models.CHAMPION)
    champion = f"version {reigning} is champion" if reigning else "there is no champion"
    console = stderr_console()
    console.print(
        f"{found['name']} version {entry.version}: {entry.action.replace('_', ' ')}; {champion}.",
        highlight=False,
    )
    if entry.action == "waiting":
        deadline = f"until {entry.evidence['deadline']}"
        console.print(
            f"  waits {deadline}: cuda-agent models approve {entry.version}, or refuse; report {found['tags'].get('report', '–')}",
            soft_wrap=True,
        )
    out(found | {"aliases": dict(aliases), "entry": entry.model_dump(mode="json")})


def _gates(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    table = Table("gate", "value", "95 % interval", "at least", "passed", box=None, padding=(0, 2, 0, 0))
    for gate in rows:
        interval = f"{number(gate['low'])} to {number(gate['high'])}" if gate["low"] is not None else ""
        table.add_row(
            gate["name"],
            number(gate["value"]),
            interval,
            number(gate["threshold"]),
            "yes" if gate["passed"] else "no",
        )
    return table
