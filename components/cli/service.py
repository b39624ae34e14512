"""The commands of the judge's service: `cuda-agent serve`, `cuda-agent mcp` and `cuda-agent token …`."""

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import (
    CommonOptions,
    Device,
    Output,
    home_of,
    newest_dataset,
    print_line,
    print_table,
    with_common_options,
)
from components.core.errors import UserError, refuse

token_app = typer.Typer(help="Tokens of callers of cuda-agent serve --http.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="name of the caller")]
File = Annotated[Path, typer.Option("--file", help="token file")]
DEFAULT = Path(".cuda-agent/service/tokens.json")


@with_common_options("", prints_output=False)
def serve(
    options: CommonOptions,
    device: Device = "",
    http: Annotated[
        str, typer.Option("--http", metavar="[HOST:]PORT", help="also serve HTTP (docs/service.md)")
    ] = "",
    tokens: Annotated[
        Path | None, typer.Option("--tokens", help="token file; by default only this machine is served")
    ] = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="tasks to list: shipped, a folder, or a parquet file")
    ] = "shipped",
    keep_days: Annotated[
        int, typer.Option("--keep-days", min=1, max=36_500, help="days for which ended jobs are kept")
    ] = 30,
) -> None:
    """Keep a judge of kernels with its processes and baselines ready, until Ctrl-C or SIGTERM.

    `cuda-agent judge`, `cuda-agent optimize` and the utilities of a workspace then answer in seconds, if they
    have the same home folder and device. With `--http` other machines and programs are served too.
    """
    refuse((tokens and not http, "--tokens: they are for HTTP; give an address with --http as well."))
    resolved = options.resolve_for_judging(f"evaluation.suite={json.dumps(tasks)}", device=device)
    params, home = resolved.params, home_of(resolved)
    from components.evaluation.suites import load_suite
    from components.service.server import bind
    from components.service.server import serve as serve_judges
    from components.service.tokens import TokenFile

    listed = load_suite(params, newest_dataset(home))
    file = TokenFile(tokens) if tokens is not None else None
    with contextlib.ExitStack() as resources:
        listener = resources.enter_context(bind(http, has_tokens=file is not None)) if http else None

        def started(path: object) -> None:
            print_line(f"judging on {params.device} at {path}; Ctrl-C ends it")
            if listener is not None:
                host, port = listener.getsockname()[:2]
                print_line(f"serving HTTP at http://{host}:{port}")

        serve_judges(params, home, listed, started, listener=listener, tokens=file, keep_days=keep_days)


def mcp(
    service: Annotated[
        str, typer.Option("--service", help="address of cuda-agent serve --http")
    ] = "http://127.0.0.1:8470",
    token: Annotated[Path | None, typer.Option("--token", help="file with the service's token")] = None,
) -> None:
    """Serve the judge's tools to a coding agent by MCP on standard input and output.

    The tools send their requests to a running `cuda-agent serve --http`.
    """
    import httpx

    from components.judge.pool.service_client import token_headers
    from components.service.mcp_server import make_mcp_server

    headers = {} if token is None else token_headers(str(token), "--token")
    make_mcp_server(httpx.AsyncClient(base_url=service, headers=headers)).run("stdio")


@token_app.command()
@with_common_options()
def create(
    name: Name,
    file: File = DEFAULT,
    days: Annotated[
        float | None, typer.Option("--days", min=0, max=36_500, help="days until it expires")
    ] = None,
    queued: Annotated[int, typer.Option("--queued", min=1, help="jobs that may wait at once")] = 1000,
    measurements: Annotated[
        int, typer.Option("--measurements", min=1, help="how often an equal candidate may be measured")
    ] = 16,
    listed_tasks_only: Annotated[
        bool, typer.Option("--listed-tasks-only", help="refuse tasks that the service does not list")
    ] = False,
    operator: Annotated[bool, typer.Option("--operator", help="may read /metrics")] = False,
) -> Output:
    """Create a token for a caller of `cuda-agent serve --http`, and print it once.

    Only the token's digest is stored, in the token file.
    """
    from pydantic import ValidationError

    from components.core.records import reason
    from components.service.tokens import Token, create_token

    try:
        token = Token.model_validate(
            {
                "name": name,
                "digest": "",
                "queued": queued,
                "own_tasks": not listed_tasks_only,
                "measurements": measurements,
                "operator": operator,
            }
        )
    except ValidationError as error:
        raise UserError(f"token: {reason(error)}.") from error
    secret = create_token(file, token, days)
    print_line(f"token {name}, which is shown only now (its digest is in {file}):")
    print_line(secret)
    return Output({"name": name, "token": secret})


@token_app.command(name="list")
@with_common_options()
def list_tokens(file: File = DEFAULT) -> Output:
    """List the tokens in a token file: names of the callers, times of expiry, rights and limits."""
    from components.service.tokens import read_tokens

    tokens = read_tokens(file)
    columns = ("name", "expires", "queued", "own_tasks", "measurements", "operator")
    print_table(
        columns,
        [[str(getattr(token, column)) for column in columns] for token in tokens],
        empty="no tokens",
    )
    return Output({"tokens": [token.model_dump(mode="json", exclude={"digest"}) for token in tokens]})


@token_app.command()
@with_common_options()
def revoke(name: Name, file: File = DEFAULT) -> Output:
    """Remove the token of a caller; a running service refuses it from then on."""
    from components.service.tokens import revoke_token

    revoke_token(file, name)
    return Output({"revoked": name})
