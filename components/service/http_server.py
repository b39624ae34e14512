"""The HTTP server of the service, in a thread beside the resident judge's own server."""

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from components.core.errors import UserError
from components.core.params import Params
from components.core.task import KernelTask
from components.service.app import make_app
from components.service.jobs import JobService
from components.service.judges import ServiceJudges
from components.service.retention import KEEP_DAYS, retaining
from components.service.tokens import TokenFile

# Seconds that open requests may take when the server ends.
GRACE_SECONDS = 3


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `[HOST:]PORT`; raise UserError if it has another form."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise UserError(f"--http {text}: give a port, or an address and a port such as 127.0.0.1:8470.")
    return host.strip("[]") or "127.0.0.1", int(port)


def bind(address: str, *, has_tokens: bool) -> socket.socket:
    """Return a listening socket at `[HOST:]PORT`.

    Raises UserError if the address is not of this machine or is in use, or if other machines could connect
    and there are no tokens.
    """
    host, port = parse_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"--http {address}: no such address ({error.strerror}).") from error
    if not has_tokens and not ipaddress.ip_address(place[0]).is_loopback:
        raise UserError(
            f"--http {address}: other machines could connect; give a token file with --tokens (cuda-agent "
            "token create makes one), or listen on 127.0.0.1."
        )
    # asyncio sets TCP_NODELAY only if the protocol is named; without it each answer waits 40 ms for an ACK.
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UserError(
            f"--http {address}: cannot listen there ({error.strerror}); end the other server, or give "
            "another port."
        ) from error
    return listener


@contextlib.contextmanager
def serving(
    judges: ServiceJudges,
    params: Params,
    folder: Path,
    tasks: list[KernelTask],
    listener: socket.socket,
    tokens: TokenFile | None,
    *,
    keep_days: float = KEEP_DAYS,
) -> Iterator[JobService]:
    """Serve HTTP on `listener` inside the context, and yield the service.

    `folder` has the queue and the journal of the service, and `tasks` are the tasks that callers may name.
    `tokens` has the tokens of the callers, or is None if none are needed. Jobs are kept for `keep_days` days
    after their end.
    """
    service = JobService(judges, params, folder, tasks)
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(service, tokens),
            log_level="error",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
    thread.start()
    try:
        with retaining(service, keep_days):
            yield service
    finally:
        service.stop()
        server.should_exit = True
        thread.join()
        service.close()
