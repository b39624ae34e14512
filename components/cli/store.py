"""The commands `cuda-agent store …`: list, fetch and remove objects of the artefact store.

The store is a folder or a bucket that keeps checkpoints, results of runs and data sets.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.cli.common import (
    CommonOptions,
    Output,
    home_of,
    print_line,
    stderr_console,
    with_common_options,
)
from components.core.errors import UserError, refuse

if TYPE_CHECKING:
    from components.core.config import Resolved
    from components.storage import Store

store_app = typer.Typer(
    help="The artefact store: a folder or a bucket.", no_args_is_help=True, rich_markup_mode=None
)
Prefix = Annotated[str, typer.Argument(help="only keys that start with this, for instance runs/")]


def _open_store(resolved: Resolved) -> Store:
    from components.storage import open_store

    return open_store(resolved.params.store, home_of(resolved))


@store_app.command("list")
@with_common_options()
def store_list(options: CommonOptions, prefix: Prefix = "") -> Output:
    """List the objects whose key begins with a prefix, with their sizes in bytes and times of last change."""
    entries = list(_open_store(options.resolve()).entries(prefix))
    for entry in entries:
        print_line(f"{entry.bytes:>14,}  {entry.modified:%Y-%m-%d %H:%M}  {entry.key}")
    print_line(f"{len(entries)} objects, {sum(entry.bytes for entry in entries):,} bytes")
    return Output(
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
    options: CommonOptions,
    key: Annotated[str, typer.Argument(help="a key, or a prefix that ends with /: everything below it")],
    out_path: Annotated[Path, typer.Option("--out", help="file, or folder for a prefix")],
) -> Output:
    """Fetch an object, or all objects below a prefix, and check that their digests are correct.

    An interrupted fetch continues where it stopped.
    """
    from components.cli.progress_view import ProgressView

    store = _open_store(options.resolve())
    paths = {key: out_path}
    if key.endswith("/"):
        paths = {entry.key: out_path / entry.key.removeprefix(key) for entry in store.entries(key)}
    refuse((not paths, f"store: no object lies below {key}; cuda-agent store list shows all keys."))
    with ProgressView(stderr_console()) as view:
        for number, (name, path) in enumerate(paths.items(), 1):
            try:
                store.get(name, path)
            except KeyError as error:
                raise UserError(
                    f"store: there is no object {name}; cuda-agent store list shows all keys."
                ) from error
            view.update("fetched", number, len(paths))
    return Output({"objects": {name: str(path.resolve()) for name, path in paths.items()}})


@store_app.command("gc")
@with_common_options()
def store_gc(
    options: CommonOptions,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than", metavar="DAYS", min=0, max=36_500, help="keep everything younger than this"
        ),
    ] = 30,
    delete: Annotated[
        bool, typer.Option("--delete", help="remove; without it the command only lists what it would remove")
    ] = False,
) -> Output:
    """List old checkpoints and runs in the store that nothing refers to, and old files of the home folder.

    A checkpoint or run is kept if it is younger than --older-than, or if a model version that has an alias or
    waits for approval, an unfinished run or a log of decisions refers to it. Of the home folder, in which
    runs keep everything, the command lists stages that no run to be kept uses, resumable states of finished
    stages, and abandoned temporary folders. With --delete all of these are removed; no run may work in the
    home meanwhile.
    """
    from components.cli.models import open_promotion
    from components.registry.audit import AuditChain
    from components.registry.models import evidence, references, registered_models
    from components.storage.gc import plan, reason_to_keep, remove
    from flows.home_gc import removable
    from flows.run_context import home_lock

    promotion, resolved = open_promotion(options)
    home, params = home_of(resolved), resolved.params
    store, age = _open_store(resolved), timedelta(days=older_than)

    def decided() -> dict[str, str]:
        found = evidence(promotion.chain)
        for model in registered_models(promotion.client):
            found |= evidence(AuditChain.of(params.registry.model_copy(update={"model": model}), home))
        return found

    def referenced() -> dict[str, str]:
        return references(promotion.client)

    with home_lock(home) if delete else contextlib.nullcontext():
        planned = plan(store, referenced(), decided(), datetime.now(UTC), age)
        verb, removed = "removed" if delete else "would remove", list[dict[str, Any]]()
        for group in planned.remove:
            if delete:
                # The references are read again for each group, because a run in another home, whose store
                # is the same, may have added one since the plan.
                if reason_to_keep(group.id, referenced() | decided()):
                    continue
                remove(store, group)
            removed.append({"group": group.name, "bytes": group.bytes})
            print_line(f"{verb}  {group.bytes:>14,}  {group.name}")
        uploads = store.abandoned(max(age, timedelta(days=1)))
        for key, upload in uploads:
            if delete:
                store.abandon(key, upload)
            print_line(f"{verb}  unfinished upload  {key}")
        left_over = list[dict[str, Any]]()
        for item in removable(home, referenced(), age.total_seconds()):
            left_over.append({"path": str(item.path), "bytes": item.bytes, "reason": item.reason})
            print_line(f"{verb}  {item.bytes:>14,}  {item.path.relative_to(home)}  {item.reason}")
            if delete:
                item.remove()
    size = sum(group["bytes"] for group in (*removed, *left_over))
    is_plan = not delete and (removed or uploads or left_over)
    print_line(
        f"{len(removed)} groups and {len(left_over)} of the home, {size:,} bytes; {len(planned.keep)} kept"
        f"{'; nothing was removed, --delete removes them' if is_plan else ''}"
    )
    return Output(
        {
            "deleted": delete,
            "removed": removed,
            "home": left_over,
            "bytes": size,
            "uploads": [key for key, _ in uploads],
            "kept": planned.keep,
        }
    )
