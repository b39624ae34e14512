"""The commands `cuda-agent store …`: what the artefact store holds, whether it is sound, and what can go."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.cli.common import CommonOptions, answer, home_of, stderr_console, with_common_options

if TYPE_CHECKING:
    from components.core.config import Resolved
    from components.storage import Store

store_app = typer.Typer(
    help="The artefact store: a folder or a bucket.", no_args_is_help=True, rich_markup_mode=None
)
Prefix = Annotated[str, typer.Argument(help="only keys that start with this, for instance runs/")]
FAILED = 1


def _open(resolved: Resolved) -> Store:
    from components.storage import open_store

    return open_store(resolved.params.store, home_of(resolved))


@store_app.command("list")
@with_common_options()
def store_list(given: CommonOptions, prefix: Prefix = "") -> None:
    """Every object with its size and time."""
    with answer(given.as_json) as out:
        entries = list(_open(given.resolved()).entries(prefix))
        console = stderr_console()
        for entry in entries:
            console.print(
                f"{entry.bytes:>14,}  {entry.modified:%Y-%m-%d %H:%M}  {entry.key}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        console.print(
            f"{len(entries)} objects, {sum(entry.bytes for entry in entries):,} bytes", highlight=False
        )
        out(
            {
                "objects": [
                    {"key": entry.key, "bytes": entry.bytes, "modified": entry.modified.isoformat()}
                    for entry in entries
                ]
            }
        )


@store_app.command("get")
@with_common_options()
def store_get(
    given: CommonOptions,
    key: Annotated[str, typer.Argument(help="a key, or a prefix that ends with /: everything below it")],
    out_path: Annotated[Path, typer.Option("--out", help="file, or folder for a prefix")],
) -> None:
    """Fetch an object, checked against its digest. An interrupted fetch goes on where it was."""
    from components.core.errors import UserError
    from components.core.progress_view import ProgressView

    with answer(given.as_json) as out:
        store = _open(given.resolved())
        entries = list(store.entries(key)) if key.endswith("/") else []
        keys = (
            {entry.key: out_path / entry.key.removeprefix(key) for entry in entries}
            if key.endswith("/")
            else {key: out_path}
        )
        if not keys:
            raise UserError(f"store: nothing lies below {key}; cuda-agent store list shows what there is.")
        with ProgressView(stderr_console()) as view:
            for number, (name, target) in enumerate(keys.items(), 1):
                try:
                    store.get(name, target)
                except KeyError as error:
                    raise UserError(
                        f"store: there is no object {name}; cuda-agent store list shows what there is."
                    ) from error
                view.update("fetched", number, len(keys))
        out({"objects": {name: str(target.resolve()) for name, target in keys.items()}})


@store_app.command("verify")
@with_common_options()
def store_verify(given: CommonOptions, prefix: Prefix = "") -> None:
    """Read every object and compare it with what was written; exit 1 when one is damaged."""
    from components.core.progress_view import ProgressView

    with answer(given.as_json) as out:
        from components.storage.gc import damaged

        store, console = _open(given.resolved()), stderr_console()
        total, faults, checked = sum(1 for _ in store.entries(prefix)), {}, 0
        with ProgressView(console) as view:
            for key, fault in damaged(store, prefix):
                checked += 1
                view.update("verified", checked, max(total, checked))
                if fault:
                    faults[key] = fault
        for key, fault in faults.items():
            console.print(f"{key} {fault}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"{checked} objects checked, {len(faults)} damaged", highlight=False)
        out({"checked": checked, "damaged": faults})
    if faults:
        raise typer.Exit(FAILED)


@store_app.command("gc")
@with_common_options()
def store_gc(
    given: CommonOptions,
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="DAYS", min=0, help="keep what is younger")
    ] = 30,
    delete: Annotated[
        bool, typer.Option("--delete", help="really remove; without it only say what would go")
    ] = False,
) -> None:
    """Remove checkpoints and runs that no alias, no unfinished night and no audit entry refers to."""
    with answer(given.as_json) as out:
        from components.cli.models import registry_client
        from components.registry.promotion import Promotion
        from components.registry.retention_refs import evidence, references
        from components.storage.gc import plan, reason_to_keep, remove
        from components.storage.s3 import S3Store

        resolved = given.resolved()
        store, client, age, console = (
            _open(resolved),
            registry_client(resolved),
            timedelta(days=older_than),
            stderr_console(),
        )

        chain = Promotion(client, resolved.params.registry, home_of(resolved)).chain

        def named() -> dict[str, str]:
            return references(client, resolved.params.registry.model)

        found = plan(store, named(), evidence(chain), datetime.now(UTC), age)
        removed: list[dict[str, Any]] = []
        for group in found.remove:
            # Asked anew each time: what has got a reference meanwhile stays.
            if delete:
                if reason_to_keep(group.id, named() | evidence(chain)):
                    continue
                remove(store, group)
            removed.append({"group": group.name, "bytes": group.bytes})
            console.print(
                f"{'removed' if delete else 'would go'}  {group.bytes:>14,}  {group.name}",
                highlight=False,
                markup=False,
            )
        uploads = store.abandoned(max(age, timedelta(days=1))) if isinstance(store, S3Store) else []
        for key, upload in uploads:
            if delete and isinstance(store, S3Store):
                store.abandon(key, upload)
            console.print(
                f"{'removed' if delete else 'would go'}  unfinished upload  {key}",
                highlight=False,
                markup=False,
            )
        size = sum(group["bytes"] for group in removed)
        hint = "" if delete or not (removed or uploads) else "; nothing was removed, --delete does it"
        console.print(f"{len(removed)} groups, {size:,} bytes; {len(found.keep)} kept{hint}", highlight=False)
        out(
            {
                "deleted": delete,
                "removed": removed,
                "bytes": size,
                "uploads": [key for key, _ in uploads],
                "kept": found.keep,
            }
        )
