"""The commands `cuda-agent token`, which create, list and revoke tokens of the HTTP service."""

from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import Output, print_line, print_table, with_common_options
from components.core.errors import UserError

token_app = typer.Typer(help="Tokens of callers of cuda-agent serve --http.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="name of the caller")]
File = Annotated[Path, typer.Option("--file", help="token file")]
DEFAULT = Path(".cuda-agent/service/tokens.json")


@token_app.command()
@with_common_options()
def create(
    name: Name,
    file: File = DEFAULT,
    days: Annotated[float | None, typer.Option("--days", min=0, help="days until it expires")] = None,
    queued: Annotated[int, typer.Option("--queued", min=1, help="jobs that may wait at once")] = 1000,
    per_day: Annotated[int, typer.Option("--per-day", min=1, help="new jobs within 24 hours")] = 10_000,
    device: Annotated[
        list[str] | None, typer.Option("--device", help="device that may be measured on; may be repeated")
    ] = None,
    measurements: Annotated[
        int, typer.Option("--measurements", min=1, help="how often an equal candidate may be measured")
    ] = 16,
    listed_tasks_only: Annotated[
        bool, typer.Option("--listed-tasks-only", help="refuse tasks that the service does not list")
    ] = False,
    operator: Annotated[bool, typer.Option("--operator", help="may read /metrics")] = False,
) -> Output:
    """Create a token, and print it once; only its digest is stored."""
    from pydantic import ValidationError

    from components.service.tokens import Token, create_token

    try:
        token = Token.model_validate(
            {
                "name": name,
                "digest": "",
                "queued": queued,
                "per_day": per_day,
                "devices": tuple(device or ("cpu", "cuda")),
                "own_tasks": not listed_tasks_only,
                "measurements": measurements,
                "operator": operator,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"token: {first['loc'][0]}: {first['msg']}.") from error
    secret = create_token(file, token, days)
    print_line(f"token {name}, which is shown only now (its digest is in {file}):")
    print_line(secret)
    return Output({"name": name, "token": secret})


@token_app.command(name="list")
@with_common_options()
def list_tokens(file: File = DEFAULT) -> Output:
    """List the tokens of a file with their rights."""
    from components.service.tokens import read_tokens

    tokens = read_tokens(file)
    columns = ("name", "expires", "queued", "per_day", "devices", "own_tasks", "measurements", "operator")
    print_table(
        columns,
        [[str(getattr(token, column)) for column in columns] for token in tokens],
        empty="no tokens",
    )
    return Output({"tokens": [token.model_dump(mode="json", exclude={"digest"}) for token in tokens]})


@token_app.command()
@with_common_options()
def revoke(name: Name, file: File = DEFAULT) -> Output:
    """Remove a token; a running service refuses it from then on."""
    from components.service.tokens import read_tokens, write_tokens

    tokens = read_tokens(file)
    kept = [token for token in tokens if token.name != name]
    if len(kept) == len(tokens):
        raise UserError(f"{file}: no token named {name}; cuda-agent token list shows all.")
    write_tokens(file, kept)
    return Output({"revoked": name})
