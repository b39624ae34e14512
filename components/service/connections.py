"""Limits on the HTTP server's connections, so that clients that send nothing cannot block other clients."""

import asyncio
import contextlib
import logging
import resource
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

LOG = logging.getLogger(__name__)

# Largest number of open connections, and the share of the process's descriptors that they may take.
MOST_CONNECTIONS, DESCRIPTOR_SHARE = 1024, 0.25
# Seconds in which a client must have sent a whole request, after it connected or got its last answer.
REQUEST_SECONDS = 30.0
# Connections that are accepted at once, before older ones are closed.
BACKLOG = 256
REFUSAL = b'{"error": "connections: the service has no place for another one."}'
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nConnection: close\r\n"
UNAVAILABLE += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(REFUSAL), REFUSAL)


def most_connections() -> int:
    """Return how many connections may be open.

    It is MOST_CONNECTIONS, or the share DESCRIPTOR_SHARE of the process's limit of file descriptors if that
    is less, so that most file descriptors are left for the judge.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST_CONNECTIONS, int(DESCRIPTOR_SHARE * limit))


class BoundedConnection(H11Protocol):
    """One connection of an HTTP server that keeps at most `most_connections()` connections open.

    A connection waits while its client has not sent a whole request. If there are too many connections, the
    one that has waited longest is closed; if that is a new connection, because all others are being answered,
    it gets the answer 503 first. A connection that waits for `REQUEST_SECONDS` is closed too.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting_since = self.loop.time()
        self.timer = self.loop.call_later(REQUEST_SECONDS, self._close_if_late)
        if len(self.connections) <= most_connections():
            return
        waiting = [one for one in self.connections if isinstance(one, BoundedConnection) and one.is_waiting]
        oldest = min(waiting, key=lambda one: one.waiting_since)
        if oldest is self:  # every other one is being answered
            transport.write(UNAVAILABLE)
        self.connections.discard(oldest)
        oldest.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.waiting_since = self.loop.time()
        super().on_response_complete()

    @property
    def is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _close_if_late(self) -> None:
        waited = self.loop.time() - self.waiting_since if self.is_waiting else 0.0
        if waited >= REQUEST_SECONDS:
            self.transport.close()
        else:
            self.timer = self.loop.call_later(REQUEST_SECONDS - waited, self._close_if_late)


class BoundedServer(uvicorn.Server):
    """An HTTP server with `BoundedConnection`, which limits the number of its connections.

    It goes on accepting connections after the process has run out of file descriptors.
    """

    def __init__(self, config: uvicorn.Config):
        config.http, config.backlog = BoundedConnection, BACKLOG
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_briefly)
        await super().serve(sockets)


def _log_briefly(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop without its traceback, because a traceback opens files.

    An exception that this handler raises would end the loop, so it is suppressed.
    """
    with contextlib.suppress(Exception):
        LOG.error("%s: %r", context["message"], context.get("exception"))
