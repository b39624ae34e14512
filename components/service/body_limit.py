"""Limit of the size of an HTTP request's body, which is checked before and while the body is read."""

import json
from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

# Multiple of the limit that is read and dropped before the answer. The client of a connection that is closed
# while it sends gets no answer.
DROPPED = 4


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than `limit` bytes, without keeping the body."""

    def __init__(self, app: ASGIApp, limit: int):
        self.app = app
        self.limit = limit
        self.message = f"body: larger than {limit} bytes; send the sources of one candidate."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.limit:
            body = json.dumps({"error": self.message}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            await self._drop(receive)
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        received = 0

        async def limited() -> MutableMapping[str, Any]:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.limit:
                if message.get("more_body", False):
                    await self._drop(receive)
                raise HTTPException(413, self.message)
            return message

        await self.app(scope, limited, send)

    async def _drop(self, receive: Receive) -> None:
        """Read and discard the rest of a request's body, up to `DROPPED` times the limit."""
        left, more = DROPPED * self.limit, True
        while left > 0 and more:
            message = await receive()
            left -= len(message.get("body", b""))
            more = message.get("more_body", False)
