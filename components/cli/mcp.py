"""The command `cuda-agent mcp`, which serves the judge's tools to coding agents."""

from pathlib import Path
from typing import Annotated

import typer

from components.core.errors import UserError

SERVICE = "http://127.0.0.1:8470"
Service = Annotated[str, typer.Option("--service", help="address of cuda-agent serve --http")]
TokenPath = Annotated[Path | None, typer.Option("--token", help="file with the service's token")]


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
