"""The servers of the service: on a Unix socket for the account that runs it, on TCP for other callers.

Callers on TCP have tokens, unless only this machine can connect.
"""

import contextlib
import fcntl
import ipaddress
import logging
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import uvicorn

from components.core.errors import UserError, refuse
from components.core.files import user_cache
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.pool.service_client import socket_address, socket_path
from components.service.app import make_app
from components.service.connections import BACKLOG, BoundedServer
from components.service.jobs import DAY, JobService
from components.service.judges import WarmJudges
from components.service.tokens import LOCAL, OWNER, Token, TokenFile

# Days for which a job is kept after its end, and seconds between two searches for older ones.
KEEP_DAYS, SEARCH_SECONDS = 30, 3600.0
# Seconds that open requests may take when the server ends.
GRACE_SECONDS = 3


def bind(address: str, *, has_tokens: bool) -> socket.socket:
    """Return a socket that listens at `address`, which is `[HOST:]PORT` with the default host 127.0.0.1.

    `has_tokens` is whether callers need tokens. Raises UserError, which names the option --http, if the text
    has another form, if the address is not of this machine or is in use, or if other machines could connect
    and callers need no tokens.
    """
    named, _, port = address.rpartition(":")
    refuse(
        (
            not port.isdecimal() or int(port) >= 1 << 16,
            f"--http {address}: give a port, or an address and a port such as 127.0.0.1:8470.",
        )
    )
    host = named.strip("[]") or "127.0.0.1"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"--http {address}: no such address ({error.strerror}).") from error
    refuse(
        (
            not has_tokens and not ipaddress.ip_address(place[0]).is_loopback,
            f"--http {address}: other machines could connect; give a token file with --tokens (cuda-agent "
            "token create makes one), or listen on 127.0.0.1.",
        )
    )
    # asyncio sets TCP_NODELAY only if the protocol is named; without it each answer waits 40 ms for an ACK.
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"--http {address}: cannot listen there ({error.strerror}); end the other server, or give "
            "another port."
        ) from error
    return listener


@contextlib.contextmanager
def serving(
    service: JobService, listener: socket.socket, callers: TokenFile | Token = LOCAL
) -> Iterator[None]:
    """Return a context in which a thread serves HTTP on the listening socket `listener`.

    `callers` has the tokens of the callers, or is one token whose rights every caller on this machine has. At
    the end of the context the server ends, and no further job begins.
    """
    server = make_server(service, callers)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
    thread.start()
    try:
        yield
    finally:
        service.stop()
        server.should_exit = True
        thread.join()


def make_server(service: JobService, callers: TokenFile | Token) -> uvicorn.Server:
    return BoundedServer(
        uvicorn.Config(
            make_app(service, callers),
            log_level="error",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


@contextlib.contextmanager
def retaining(service: JobService, days: float = KEEP_DAYS) -> Iterator[None]:
    """Return a context in which a thread deletes the jobs that ended more than `days` days ago.

    The thread does so at once and then every hour. If the database or the journal fails, the error is logged.
    """
    ending = threading.Event()

    def delete() -> None:
        while True:
            try:
                service.delete_old(time.time() - days * DAY)
            except (OSError, sqlite3.Error):  # for instance a disk that cannot be written for a while
                logging.getLogger(__name__).exception("old jobs could not be deleted")
            if ending.wait(SEARCH_SECONDS):
                return

    thread = threading.Thread(target=delete, name="retention", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def serve(
    params: Params,
    home: Path,
    tasks: list[KernelTask],
    started: Callable[[Path], None],
    *,
    listener: socket.socket | None = None,
    tokens: TokenFile | None = None,
    keep_days: float = KEEP_DAYS,
) -> None:
    """Serve the judges of the folder `home`, where runs keep everything, until SIGINT or SIGTERM.

    Requests are accepted on a Unix socket in the folder `judge` of `home`. The queue of jobs and the journal
    (a file for each verdict) are in its folder `service/<device>`. `tasks` are the tasks (PyTorch modules
    that are to be made faster) that callers may name. `started` is called with the path of the socket when
    the server accepts requests. With `listener`, a listening TCP socket, the same queue is served there too,
    for callers with `tokens`, or for every caller on this machine if `tokens` is None. Jobs are deleted
    `keep_days` days after their end. Raises UserError if another service already runs for this device in
    `home`, or on this GPU for the same account.
    """
    folder = home / "judge"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # only this account can connect to the socket
    with contextlib.ExitStack() as resources:
        resources.enter_context(_only_one(folder / f"service-{params.device}.lock", str(folder)))
        path = socket_path(folder, params.device)
        path.unlink(missing_ok=True)
        own = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        own.bind(socket_address(path, resources))
        resources.callback(path.unlink, missing_ok=True)
        judges = resources.enter_context(contextlib.closing(WarmJudges(params, folder)))
        if params.device == "cuda":
            gpu = str(torch.cuda.get_device_properties(0).uuid)
            resources.enter_context(_only_one(user_cache("locks") / f"{gpu}.lock", f"the GPU {gpu}"))
        service = JobService(judges, params, home / "service" / params.device, tasks)
        resources.callback(service.close)
        resources.enter_context(retaining(service, keep_days))
        if listener is not None:
            resources.enter_context(serving(service, listener, tokens or LOCAL))
        server = make_server(service, OWNER)
        resources.callback(service.stop)
        own.listen()
        started(path)
        server.run(sockets=[own])


@contextlib.contextmanager
def _only_one(path: Path, place: str) -> Iterator[None]:
    """Return a context in which this process holds the lock of the file `path`.

    `place` describes the folder or the GPU whose judges only one process may have. Raises UserError with this
    description if another process holds the lock.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{place}: a judge already runs there; end it first.") from error
        yield
