"""The commands for coding agents: `cuda-agent mcp` (tools) and `cuda-agent skill install`."""

from pathlib import Path
from typing import Annotated

import typer

from components.cli.common import Output, print_line, with_common_options
from components.core.errors import UserError

SERVICE = "http://127.0.0.1:8470"
Service = Annotated[str, typer.Option("--service", help="address of cuda-agent serve --http")]
TokenPath = Annotated[Path | None, typer.Option("--token", help="file with the service's token")]

skill_app = typer.Typer(help="The skill of writing kernels, for coding agents.", no_args_is_help=True)


def mcp(service: Service = SERVICE, token: TokenPath = None) -> None:
    """Serve the judge's tools to a coding agent by MCP on standard input and output."""
    import httpx

    from components.service.mcp_server import make_mcp_server

    headers = {}
    if token is not None:
        try:
            headers["Authorization"] = f"Bearer {token.read_text().strip()}"
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--token {token}: cannot be read ({error}).") from error
    client = httpx.AsyncClient(base_url=service, headers=headers)
    make_mcp_server(client).run("stdio")


@skill_app.command()
@with_common_options()
def install(
    agent: Annotated[str, typer.Argument(help="claude, codex or cursor")],
    project: Annotated[Path, typer.Option("--project", help="folder of the project")] = Path("."),
    service: Service = SERVICE,
    token: TokenPath = None,
) -> Output:
    """Write the skill and the configuration of the judge's tools into a project of a coding agent.

    A skill with the same name that cuda-agent did not write is not replaced.
    """
    from components.service.skill import install_skill

    written = install_skill(agent, project, service, token)
    for path in written:
        print_line(f"wrote {path}")
    return Output({"agent": agent, "files": [str(path) for path in written]})
