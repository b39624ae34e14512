"""The command `cuda-agent train`: one stage on this machine, or one rank of it.

It needs no orchestrator. Launchers that set RANK and WORLD_SIZE run it as it is:

    torchrun --nproc-per-node 4 -m components.cli train agentic …
    deepspeed --no_local_rank --num_gpus 4 --module components.cli train agentic …
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from components.cli.common import CommonOptions, answer, home_of, stderr_console, with_common_options

FAILED = 1


@with_common_options()
def train(
    given: CommonOptions,
    stage: Annotated[
        Literal["warmup", "rejection", "critic", "agentic"],
        typer.Argument(metavar="STAGE", help="warmup, rejection, critic or agentic"),
    ],
    start: Annotated[
        Path,
        typer.Option(
            "--input", help="checkpoint that the stage starts from, or the folder of the stage that wrote it"
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", help="folder of the stage; one that was interrupted is continued")
    ],
    dataset: Annotated[Path, typer.Option("--dataset", help="folder with tasks.parquet")],
    values: Annotated[
        Path | None, typer.Option("--critic", help="stage 4: the checkpoint or folder of stage 3")
    ] = None,
    trajectories: Annotated[
        list[Path] | None,
        typer.Option("--trajectories", help="stage 3: folder of an earlier stage; may be repeated"),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="processes on this host, one for each GPU")
    ] = 1,
) -> None:
    """Run one training stage: from a checkpoint to a checkpoint, as often as it takes."""
    resolved = given.resolved()
    if ranks > 1:
        _launch(ranks, output)
        return
    distributed, rank = "WORLD_SIZE" in os.environ, int(os.environ.get("RANK", "0"))

    from components.core.config import PROJECT
    from components.core.errors import StageFailed
    from components.core.files import MANIFEST, digest_json, digest_tree
    from components.core.progress import Quiet
    from components.core.progress_view import ProgressView
    from components.judge.pool import open_pool
    from components.training.collapse_detection import Terminated
    from components.training.launcher import LAUNCHED, TERMINATED
    from components.training.run_stage import RankLost, run_stage
    from components.training.stage import CHECKPOINT, Stage

    def checkpoint(folder: Path) -> Path:
        return folder if (folder / MANIFEST).is_file() else folder / CHECKPOINT

    code = digest_json(
        {
            name: digest
            for name, digest in digest_tree(PROJECT / "components").items()
            if "__pycache__" not in name
        }
    )
    place, console = home_of(resolved), stderr_console()
    with answer(given.as_json and rank == 0) as out:
        pool = open_pool(resolved.params, place / "verdicts")
        try:
            with ProgressView(console) if rank == 0 else contextlib.nullcontext(Quiet()) as progress:
                result = run_stage(
                    Stage(
                        name=stage,
                        params=resolved.params,
                        actor=checkpoint(start),
                        dataset=dataset,
                        out=output,
                        pool=pool,
                        progress=progress,
                        code=code,
                        critic=checkpoint(values) if values is not None else None,
                        trajectories=tuple(trajectories or ()),
                    )
                )
        except StageFailed as error:
            if not (isinstance(error, RankLost) and LAUNCHED in os.environ):
                print(f"cuda-agent: {error}", file=sys.stderr)
            raise typer.Exit(TERMINATED if isinstance(error, Terminated) else FAILED) from error
        finally:
            pool.close()
        if rank == 0:
            console.print(
                f"{output / result.checkpoint}: {result.stopped or 'done'}",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
        out(result.model_dump(mode="json"))
    if distributed:
        # ZeRO 3 sometimes aborts when the interpreter ends, after everything is written.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _launch(ranks: int, output: Path) -> None:
    """This very command once for each rank."""
    from components.core.errors import StageFailed
    from components.training.launcher import launch

    arguments = sys.argv[1:]
    place = arguments.index("--ranks") if "--ranks" in arguments else -1
    own = (
        arguments[:place] + arguments[place + 2 :]
        if place >= 0
        else [word for word in arguments if not word.startswith("--ranks=")]
    )
    try:
        code = launch([sys.executable, "-m", "components.cli", *own], ranks, output / "logs")
    except StageFailed as error:
        print(f"cuda-agent: train: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    if code:
        raise typer.Exit(code)
