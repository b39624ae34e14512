"""Which faults pass by themselves, and how long each kind is given: retries with back-off by kind of fault.

The clients below retry too (boto3, MLflow, Prefect: seconds to a minute). What arrives here outlasted them.
Everything else (bad input, a stage that failed, a mistake in the code) is not tried again: it would fail in
the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import httpx
from mlflow.exceptions import MlflowException
from requests.exceptions import ConnectionError as RequestsConnectionError
from requests.exceptions import Timeout as RequestsTimeout
from sqlalchemy.exc import OperationalError

from components.core.errors import InfrastructureError
from flows.run_context import Busy


@dataclass(frozen=True)
class RetryKind:
    """A kind of fault that passes. `delays` are the seconds before each further try."""

    name: str
    delays: tuple[float, ...]


SERVICE = RetryKind("service", (5.0, 30.0, 120.0, 600.0))
"""A server or the network is away: a restart takes seconds, a failed node minutes."""
BUSY = RetryKind("busy", (60.0, 300.0, 900.0, 1800.0))
"""Somebody else works in the home or holds DVC's lock: wait for it as long as a short run takes."""
JUDGE = RetryKind("judge", (30.0, 300.0))
"""The judge failed by its own fault after its own attempts."""

UNAVAILABLE = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "ABORTED")


def retry_kind(error: BaseException) -> RetryKind | None:
    """The kind of a fault, looked for in the error and what caused it; None when it does not pass."""
    for seen in _chain(error):
        match seen:
            case Busy():
                return BUSY
            case InfrastructureError():
                return JUDGE
            case (
                ConnectionError()
                | TimeoutError()
                | httpx.TransportError()
                | RequestsConnectionError()
                | RequestsTimeout()
                | OperationalError()
            ):
                return SERVICE
            case MlflowException(error_code=code) if code in UNAVAILABLE:
                return SERVICE
            case _:
                continue
    return None


T = TypeVar("T")


def retry_by_kind(
    call: Callable[[], T], tell: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> T:
    """Call until it succeeds, with the back-off of the fault's kind.

    Raises the last error when the kind's delays are used up.

    `call` must be safe to repeat: a night is, since every step of it is found again by its digests.
    """
    used: dict[RetryKind, int] = {}
    while True:
        try:
            return call()
        except Exception as error:
            kind = retry_kind(error)
            if kind is None or used.get(kind, 0) >= len(kind.delays):
                raise
            delay = kind.delays[used.get(kind, 0)]
            used[kind] = used.get(kind, 0) + 1
            tell(
                f"{kind.name} fault, try {used[kind] + 1} of {len(kind.delays) + 1} in {delay:g} s: "
                f"{' '.join(str(error).split())[:300]}"
            )
        sleep(delay)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
