"""The commands `cuda-agent optimize` and `cuda-agent trajectory …`: a module made faster, and what a policy did."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.cli.common import CommonOptions, Json, answer, home_of, stderr_console, with_common_options

if TYPE_CHECKING:
    from components.agent.policies import CheckpointPolicy, ServerPolicy
    from components.core.config import Params, Resolved

trajectory_app = typer.Typer(
    help="What a policy did: read it, look at it, do it again.", no_args_is_help=True, rich_markup_mode=None
)


@with_common_options()
def optimize(
    given: CommonOptions,
    module: Annotated[
        Path,
        typer.Argument(
            help="file with Model, get_inputs and get_init_inputs, or with the class that --class names"
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            "--policy", help="champion, a version, a folder, or the address of an OpenAI-compatible server"
        ),
    ] = "champion",
    model: Annotated[
        str, typer.Option("--model", help="which of the server's models; without it the first")
    ] = "",
    device: Annotated[
        str, typer.Option("--device", help="cpu or cuda; without it cuda where there is a GPU")
    ] = "",
    attempts: Annotated[
        int, typer.Option("--attempts", min=0, help="trajectories; 0 is what suits the policy")
    ] = 0,
    turns: Annotated[
        int, typer.Option("--turns", min=0, help="turns of one trajectory; 0 is what suits the policy")
    ] = 0,
    budget: Annotated[
        float, typer.Option("--budget", min=0, help="seconds after which no turn begins; 0 is no limit")
    ] = 0,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="folder to write; without it optimized-NAME beside you")
    ] = None,
    class_name: Annotated[str, typer.Option("--class", help="class of the file to make faster")] = "",
    inputs: Annotated[
        str,
        typer.Option(
            "--inputs",
            metavar="EXPR",
            help="what --class is called with: a tensor or a list, such as torch.randn(8, 64)",
        ),
    ] = "",
    init: Annotated[
        str, typer.Option("--init", metavar="EXPR", help="list of the constructor's arguments of --class")
    ] = "",
) -> None:
    """Make a PyTorch module faster: a verified, measured kernel, or an honest "no gain found". Exit 0 either way."""
    from components.core.progress_view import ProgressView

    with answer(given.as_json) as out:
        device = device or ("cuda" if Path("/dev/nvidia0").exists() else "cpu")
        resolved = given.for_judging(f"device={device}")
        from components.agent.export import check_out, hand_over, headline
        from components.agent.optimize import any_time, search_budget
        from components.agent.optimize import optimize as search
        from components.agent.user_module import user_task
        from components.judge.pool import open_pool

        task = user_task(module, class_name, inputs, init)
        folder = out_folder or Path(f"optimized-{module.stem}")
        check_out(folder)
        chosen = policy_of(policy, model, resolved)
        params, place, console = any_time(chosen.params), home_of(resolved), stderr_console()
        pool = open_pool(params, place / "verdicts")
        try:
            pool.prepare()
            with ProgressView(console) as view:
                limits = search_budget(params, attempts, turns, budget)
                outcome = search(chosen, task, pool, limits, origin=str(module), progress=view)
        finally:
            pool.close()
        record = hand_over(
            outcome, params, folder, place / "judge" / "builds", f"{policy} ({chosen.version})"
        )
        console.print(headline(outcome), highlight=False, soft_wrap=True, markup=False)
        for note in outcome.notes:
            console.print(f"  {note}", highlight=False, soft_wrap=True, markup=False)
        console.print(f"{folder}/report.md", highlight=False, soft_wrap=True, markup=False)
        out(record)


def policy_of(name: str, model: str, resolved: Resolved) -> CheckpointPolicy | ServerPolicy:
    """The policy that a person means: an address, a folder, or a version of the registry by alias or number."""
    from components.agent.policies import folder_policy, server_policy
    from components.core.errors import UserError

    params: Params = resolved.params
    by_hand = frozenset(key for key, source in resolved.sources.items() if source.startswith("--set"))
    if name.startswith(("http://", "https://")):
        from components.policy.chat_client import ChatClient

        client = ChatClient(name, model)
        client.choose_model()
        return server_policy(client, params, by_hand)
    if model:
        raise UserError(f"--model {model}: only a server has several models; give its address with --policy.")
    if Path(name).is_dir():
        return folder_policy(Path(name), params, by_hand)
    if name.isdigit() or name in ("champion", "candidate", "previous"):
        return folder_policy(_version(name, resolved), params, by_hand)
    raise UserError(
        f"--policy {name}: no such folder; give champion, a version's number, a folder, or an address such as http://localhost:8000/v1."
    )


def _version(name: str, resolved: Resolved) -> Path:
    """The checkpoint of a registered version, kept in the home folder once it was fetched."""
    from components.cli.models import registry_client
    from components.core.errors import UserError
    from components.policy.checkpoint import verify_checkpoint
    from components.registry import models

    client, registered = registry_client(resolved), resolved.params.registry.model
    number = models.aliases(client, registered).get(name, name)
    if not number.isdigit():
        raise UserError(
            f"--policy {name}: {registered} has no {name} yet; cuda-agent models list shows what there is."
        )
    run = models.describe(client, registered, number)["run_id"]
    target = home_of(resolved) / "policies" / f"{registered}-{number}-{run[:8]}"
    if not (target / "manifest.json").is_file():
        from components.core.files import atomic_folder

        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        with atomic_folder(target) as temporary:
            shutil.copytree(
                models.checkpoint(client, registered, number, temporary / "download"),
                temporary,
                dirs_exist_ok=True,
            )
            shutil.rmtree(temporary / "download", ignore_errors=True)
    verify_checkpoint(target)
    return target


Number = Annotated[
    int, typer.Argument(help="which one, counted from 1; 0 is the first of those with the highest reward")
]
Folder = Annotated[Path, typer.Argument(help="folder that a stage, an evaluation or an optimisation wrote")]


@trajectory_app.command("show")
def trajectory_show(
    folder: Folder,
    number: Annotated[int, typer.Argument(help="which one, counted from 1; without it a table of all")] = 0,
    as_json: Json = False,
) -> None:
    """A table of the trajectories, or one of them turn by turn."""
    from rich.table import Table

    with answer(as_json) as out:
        from components.agent import trajectory_viewer

        trajectories, console = trajectory_viewer.find(folder), stderr_console()
        if number or len(trajectories) == 1:
            number, trajectory = trajectory_viewer.choose(trajectories, number, folder)
            for text, style in trajectory_viewer.lines(trajectory):
                console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
        else:
            table = Table(
                "",
                "task",
                "turns",
                "calls",
                "reward",
                "ended by",
                "final answer",
                box=None,
                padding=(0, 2, 0, 0),
            )
            for index, one in enumerate(trajectories, 1):
                calls = sum(len(turn.calls) for turn in one.turns)
                table.add_row(
                    str(index),
                    one.task_id,
                    str(len(one.turns)),
                    str(calls),
                    f"{one.reward:g}",
                    one.finish_reason,
                    trajectory_viewer.words(one.final),
                )
            console.print(table)
        shown = [trajectories[number - 1]] if number else trajectories
        keys = ("task_id", "reward", "finish_reason", "policy_version", "files")
        out(
            {
                "trajectories": [
                    {key: getattr(one, key) for key in keys}
                    | {"turns": len(one.turns), "final": one.final.model_dump(mode="json")}
                    for one in shown
                ]
            }
        )


@trajectory_app.command("html")
def trajectory_html(
    folder: Folder,
    number: Number = 0,
    out_file: Annotated[Path, typer.Option("--out", help="file to write")] = Path("trajectory.html"),
    as_json: Json = False,
) -> None:
    """One page that needs no other file: speed-up by turn, every change as a diff, every observation."""
    with answer(as_json) as out:
        from components.agent import trajectory_viewer
        from components.core.files import atomic_write

        number, trajectory = trajectory_viewer.choose(trajectory_viewer.find(folder), number, folder)
        atomic_write(out_file, trajectory_viewer.page(trajectory, f"Trajectory {number} of {folder.name}"))
        stderr_console().print(
            f"{out_file}: trajectory {number}", highlight=False, soft_wrap=True, markup=False
        )
        out({"path": str(out_file.resolve()), "trajectory": number})


@trajectory_app.command("replay")
@with_common_options()
def trajectory_replay(given: CommonOptions, folder: Folder, number: Number = 0) -> None:
    """Execute the recorded calls again and report what differs apart from measured times; exit 1 when anything does."""
    import dataclasses

    with answer(given.as_json) as out:
        from components.agent import trajectory_viewer
        from components.agent.replay import replay
        from components.judge.pool import open_pool

        number, trajectory = trajectory_viewer.choose(trajectory_viewer.find(folder), number, folder)
        device = trajectory.settings.get("device", "cpu")
        resolved = given.for_judging(f"device={device}")
        pool, console = open_pool(resolved.params, home_of(resolved) / "verdicts"), stderr_console()
        try:
            # An epoch of its own, so that no verdict comes from the journal of an earlier replay.
            found = replay(trajectory, resolved.params, pool, epoch=f"replay/{uuid.uuid4().hex}")
        finally:
            pool.close()
        calls = sum(len(turn.calls) for turn in trajectory.turns)
        for difference in found:
            place = f"turn {difference.turn}, call {difference.call}" if difference.turn else "at the end"
            console.print(f"{place}, {difference.tool}:", style="bold", highlight=False, markup=False)
            console.print(
                f"  recorded: {difference.recorded}\n  replayed: {difference.replayed}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        console.print(
            f"trajectory {number}: {calls} calls, {len(found)} difference{'' if len(found) == 1 else 's'}",
            highlight=False,
        )
        out(
            {
                "trajectory": number,
                "calls": calls,
                "differences": [dataclasses.asdict(difference) for difference in found],
            }
        )
    if found:
        raise typer.Exit(1)
