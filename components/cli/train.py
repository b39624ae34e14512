"""The commands for a node without an orchestrator: `cuda-agent train` and `cuda-agent fleet`.

`train` runs one training stage, and `fleet` starts vLLM servers. Launchers that set RANK and WORLD_SIZE can
start `train` directly as one rank:

    torchrun --nproc-per-node 4 -m components.cli train agentic …
    deepspeed --no_local_rank --num_gpus 4 --module components.cli train agentic …
"""

import contextlib
import math
import os
import sys
from contextlib import closing
from importlib.util import find_spec
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
from components.core.errors import StageFailed, refuse
from components.core.files import MANIFEST, digest_json


@with_common_options(prints_output=False)
def train(
    options: CommonOptions,
    stage: Annotated[
        Literal["coldstart", "warmup", "rejection", "critic", "agentic"],
        typer.Argument(metavar="STAGE", help="coldstart, warmup, rejection, critic or agentic"),
    ],
    start: Annotated[
        Path,
        typer.Option(
            "--input",
            help="initial checkpoint, its stage's folder, a Hugging Face folder, or a GGUF file",
        ),
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

    A stage is a step of the pipeline, such as PPO or the training of the critic. The same command continues
    an interrupted stage.
    """
    from components.core.config import check_policy_source
    from components.training.run_stage import check_stages

    resolved = options.resolve()
    check_policy_source(resolved.params)
    check_stages(resolved.params, (stage,))
    start = _checkpoint(start, output)
    from components.training.launcher import LAUNCHED, end_with_launcher

    if ranks > 1 and LAUNCHED not in os.environ:
        _launch(ranks, output)
        return
    distributed, rank = "WORLD_SIZE" in os.environ, int(os.environ.get("RANK", "0"))
    if LAUNCHED in os.environ:
        end_with_launcher()

    from components.cli.progress_view import ProgressView
    from components.core.progress import Quiet
    from components.core.sources import project_digests
    from components.judge.pool.open_pool import open_pool
    from components.policy.vllm.own_servers import OWN_SERVERS
    from components.training.run_stage import run_stage
    from components.training.stage import Stage
    from components.training.training_loop import Terminated

    progress_view = ProgressView(stderr_console()) if rank == 0 else contextlib.nullcontext(Quiet())
    with json_stdout(options.as_json and rank == 0) as print_json:
        try:
            with (
                closing(OWN_SERVERS),
                closing(open_pool(resolved.params, home_of(resolved) / "verdicts", trains=True)) as pool,
                progress_view as progress,
            ):
                result = run_stage(
                    Stage(
                        name=stage,
                        params=resolved.params,
                        actor=start,
                        dataset=dataset,
                        out=output,
                        pool=pool,
                        progress=progress,
                        code=digest_json(project_digests()),
                        critic=_checkpoint(values, output) if values is not None else None,
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


def _checkpoint(given: Path, output: Path) -> Path:
    """Return the folder of the checkpoint that the path `given` of a user stands for.

    If `given` is a checkpoint, it is returned itself. If it is a Hugging Face folder without a manifest or a
    GGUF file, a checkpoint is made of it below the folder `input` of `output`, the stage's folder. Otherwise
    `given` is taken for the folder of a stage, and the path of the checkpoint in it is returned, which may
    not exist.
    """
    from components.core.config import is_gguf
    from components.policy.first_policy import adopted
    from components.training.stage import CHECKPOINT

    if (given / MANIFEST).is_file():
        return given
    is_foreign = given.is_file() if is_gguf(given) else (given / "config.json").is_file()
    return adopted(given, output / "input") if is_foreign else given / CHECKPOINT


def _launch(ranks: int, output: Path) -> None:
    """Start this command once for each rank, and exit when all have ended.

    The exit code is 0, or 143 if the ranks ended because of SIGTERM. Rank 0 prints to the outputs of this
    process, and each other rank to a folder of its own below `output`/logs, where `output` is the stage's
    folder. Raises UserError or StageFailed if a rank fails.
    """
    import logging

    from components.training.launcher import launch

    # torchrun's agent would print its own report of a failed rank beside the sentence of this command.
    logging.disable(logging.ERROR)
    try:
        code = launch([sys.executable, "-m", "components.cli", *sys.argv[1:]], ranks, output / "logs")
    except StageFailed as error:
        raise StageFailed(f"train: {error}") from error
    raise typer.Exit(code)


@with_common_options(prints_output=False)
def fleet(
    options: CommonOptions,
    model: Annotated[Path, typer.Argument(help="folder of the model that is trained or evaluated")],
    gpus: Annotated[str, typer.Option("--gpus", help="numbers of the GPUs, for instance 0,1,2,3")],
    vllm: Annotated[
        str,
        typer.Option(
            "--vllm", help="executable of the environment in which vLLM is installed; by default policy.vllm"
        ),
    ] = "",
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="number of servers")] = 1,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", min=1, help="GPUs of each server")] = 1,
    host: Annotated[
        str, typer.Option("--host", help="address to listen on; whoever can connect to it can run code")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="port of the first server")] = 8000,
    announced: Annotated[
        bool, typer.Option("--announce", help="also name the servers on the Ray cluster at RAY_ADDRESS")
    ] = False,
) -> None:
    """Start vLLM servers, print the value of policy.servers, and keep the servers running until interrupted.

    Training and evaluation sample trajectories from these servers if policy.servers names them. With
    --announce, runs on the Ray cluster find the servers if they set policy.servers=[ray].

    The servers get the context window, dtype, weight transfer and sleep mode of the parameters. Logs are
    written to the folder vllm of the home folder.
    """
    from components.policy.vllm.start import find_vllm, launches, running

    resolved = options.resolve()
    refuse(
        (
            not (model / "config.json").is_file(),
            f"{model}: no model in this folder, config.json is missing; give another folder.",
        ),
        (
            announced and find_spec("ray") is None,
            "--announce: needs Ray; install the extra ray, or leave the option out.",
        ),
    )
    logs = home_of(resolved) / "vllm"
    started = launches(
        resolved.params,
        model.resolve(),
        vllm=find_vllm(vllm or resolved.params.policy.vllm),
        gpus=[name.strip() for name in gpus.split(",") if name.strip()],
        tensor_parallel=tensor_parallel,
        host=host,
        ports=range(port, port + replicas),
        logs=logs,
    )
    if announced:
        from components.planning.ray_cluster import announcing, connect

        connect()
    print_line(f"{replicas} servers start; their logs are in {logs}.")
    urls = [launch.url for launch in started]
    with (
        running(started, print_line, max_ends=math.inf) as watch,
        announcing(urls) if announced else contextlib.nullcontext(),
    ):
        typer.echo(f"policy.servers=[{','.join(urls)}]")
        watch()
