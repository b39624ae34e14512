"""The MCP tools over HTTP, at `/mcp` of the service.

The tools send requests to the routes of the service inside this process, with the token of the agent's own
request. An agent therefore has exactly the rights and limits that its token has on these routes.
"""

import contextlib
import re
from collections.abc import AsyncIterator, Callable

import httpx
from fastapi import FastAPI
from fastapi.security.utils import get_authorization_scheme_param
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from components.service.errors import ServiceError
from components.service.mcp_server import make_mcp_server

# Origins of requests that a browser may send: pages of programs on the agent's own machine.
LOOPBACK_ORIGIN = re.compile(r"https?://(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")


class Guard:
    """ASGI application that passes authenticated requests on to `app`.

    Requests that a web page of another machine sends are refused. `authenticate` takes the token's secret or
    None, and raises ServiceError if the caller has no rights.
    """

    def __init__(self, app: ASGIApp, authenticate: Callable[[str | None], object]):
        self.app = app
        self.authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and not LOOPBACK_ORIGIN.fullmatch(origin):
            raise ServiceError(403, "Origin: web pages may not use the judge's tools.")
        scheme, secret = get_authorization_scheme_param(headers.get("authorization"))
        self.authenticate(secret if scheme.lower() == "bearer" and secret else None)
        await self.app(scope, receive, send)


@contextlib.asynccontextmanager
async def serving_mcp(app: FastAPI, authenticate: Callable[[str | None], object]) -> AsyncIterator[None]:
    """Add the route `/mcp` to the application `app` of the service, and answer its requests in the context.

    `authenticate` is passed on to `Guard`.
    """
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        server = make_mcp_server(client, is_remote=True)
        # Host and Origin are checked by the service.
        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        server.streamable_http_app(stateless_http=True, transport_security=security)
        guard = Guard(server.session_manager.handle_request, authenticate)
        app.router.routes.append(Route("/mcp", guard))
        async with server.session_manager.run():
            yield
