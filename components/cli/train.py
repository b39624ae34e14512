"""The command `cuda-agent train`: run one training stage on this machine, or one rank of the stage.

The command needs no orchestrator. Launchers that set RANK and WORLD_SIZE can start it directly as one rank:

    torchrun --nproc-per-node 4 -m components.cli train agentic …
    deepspeed --no_local_rank --num_gpus 4 --module components.cli train agentic …
"""

import contextlib
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from components.cli.common import (
    CommonOptions,
    home_of,
    json_stdout,
    print_line,
    stderr_console,
    with_common_options,
)
from components.core.errors import StageFailed


@with_common_options(prints_output=False)
def train(
    options: CommonOptions,
    stage: Annotated[
        Literal["warmup", "rejection", "critic", "agentic"],
        typer.Argument(metavar="STAGE", help="warmup, rejection, critic or agentic"),
    ],
    start: Annotated[
        Path,
        typer.Option("--input", help="initial checkpoint, or the folder of the stage that wrote it"),
    ],
    output: Annotated[
        Path, typer.Option("--output", help="folder of the stage; an interrupted stage continues there")
    ],
    dataset: Annotated[Path, typer.Option("--dataset", help="folder with tasks.parquet")],
    values: Annotated[
        Path | None,
        typer.Option(
            "--critic",
            help="stage 4: the checkpoint or folder of stage 3; none unless agentic.advantages is critic",
        ),
    ] = None,
    trajectories: Annotated[
        list[Path] | None,
        typer.Option("--trajectories", help="stage 3: folder of an earlier stage; may be repeated"),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="processes on this host, one for each GPU")
    ] = 1,
) -> None:
    """Run one training stage, which reads a checkpoint and writes a checkpoint.

    The same command continues an interrupted stage.
    """
    from components.core.config import check_policy_source
    from components.training.run_stage import check_stages

    resolved = options.resolve()
    check_policy_source(resolved.params)
    check_stages(resolved.params, (stage,))
    if ranks > 1:
        _launch(ranks, output)
        return
    distributed, rank = "WORLD_SIZE" in os.environ, int(os.environ.get("RANK", "0"))

    from components.cli.progress_view import ProgressView
    from components.core.files import MANIFEST, digest_json
    from components.core.progress import Quiet
    from components.core.sources import project_digests
    from components.judge.pool.open_pool import open_pool
    from components.training.launcher import LAUNCHED
    from components.training.run_stage import run_stage
    from components.training.stage import CHECKPOINT, Stage
    from components.training.training_loop import Terminated

    def checkpoint(folder: Path) -> Path:
        return folder if (folder / MANIFEST).is_file() else folder / CHECKPOINT

    progress_view = ProgressView(stderr_console()) if rank == 0 else contextlib.nullcontext(Quiet())
    with json_stdout(options.as_json and rank == 0) as print_json:
        try:
            with (
                closing(open_pool(resolved.params, home_of(resolved) / "verdicts")) as pool,
                progress_view as progress,
            ):
                result = run_stage(
                    Stage(
                        name=stage,
                        params=resolved.params,
                        actor=checkpoint(start),
                        dataset=dataset,
                        out=output,
                        pool=pool,
                        progress=progress,
                        code=digest_json(project_digests()),
                        critic=checkpoint(values) if values is not None else None,
                        trajectories=tuple(trajectories or ()),
                    )
                )
        except StageFailed as error:
            # With the launcher, only the launcher prints the error, for the first rank that failed.
            if LAUNCHED in os.environ and not isinstance(error, Terminated):
                raise typer.Exit(error.exit_code) from error
            raise
        if rank == 0:
            print_line(f"{output / result.checkpoint}: {result.stopped or 'done'}")
        print_json(result.model_dump(mode="json"))
    if distributed:
        # After ZeRO 3 the interpreter sometimes aborts at exit, so its shutdown is skipped. All files are
        # written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _launch(ranks: int, output: Path) -> None:
    """Start this command once for each rank, without its option `--ranks`, and exit with its exit code."""
    from components.training.launcher import launch

    arguments = [word for word in sys.argv[1:] if not word.startswith("--ranks=")]
    if "--ranks" in arguments:
        index = arguments.index("--ranks")
        del arguments[index : index + 2]
    try:
        code = launch([sys.executable, "-m", "components.cli", *arguments], ranks, output / "logs")
    except StageFailed as error:
        raise StageFailed(f"train: {error}") from error
    raise typer.Exit(code)
