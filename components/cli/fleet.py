"""The command `cuda-agent fleet`: start vLLM servers on this host and keep them running."""

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import CommonOptions, home_of, print_line, with_common_options


@with_common_options(prints_output=False)
def fleet(
    options: CommonOptions,
    model: Annotated[Path, typer.Argument(help="folder of the model that is trained or evaluated")],
    gpus: Annotated[str, typer.Option("--gpus", help="numbers of the GPUs, for instance 0,1,2,3")],
    vllm: Annotated[
        Path, typer.Option("--vllm", help="the executable of the environment in which vLLM is installed")
    ] = Path("vllm"),
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

    With --announce, runs on the Ray cluster find the servers if they set policy.servers=[ray].

    The servers get the context window, dtype, weight transfer and sleep mode of the parameters. Logs are
    written to the folder vllm of the home.
    """
    from components.core.errors import UserError
    from components.policy.vllm.start import launches, running

    resolved = options.resolve()
    if not (model / "config.json").is_file():
        raise UserError(f"{model}: no model in this folder, config.json is missing; give another folder.")
    logs = home_of(resolved) / "vllm"
    names = [name.strip() for name in gpus.split(",") if name.strip()]
    started = launches(
        resolved.params,
        model.resolve(),
        vllm=vllm,
        gpus=names,
        replicas=replicas,
        tensor_parallel=tensor_parallel,
        host=host,
        port=port,
        logs=logs,
    )
    if announced:
        if find_spec("ray") is None:
            raise UserError("--announce: needs Ray; install the extra ray, or leave the option out.")
        from components.planning.ray_cluster import announcing, connect

        connect()
    print_line(f"{replicas} servers start; their logs are in {logs}.")
    urls = [launch.url for launch in started]
    with running(started, print_line) as watch, announcing(urls) if announced else nullcontext():
        typer.echo(f"policy.servers=[{','.join(urls)}]")
        watch()
