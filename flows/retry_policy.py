"""Retries with back-off for faults that pass by themselves, by the kind of fault.

boto3, MLflow and Prefect retry for seconds to a minute; a fault that arrives here lasted longer. Everything
else (bad input, a stage that failed, a mistake in the code) is not tried again, since it would fail in the
same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx
from mlflow.exceptions import MlflowException
from requests.exceptions import ConnectionError as RequestsConnectionError
from requests.exceptions import Timeout as RequestsTimeout
from sqlalchemy.exc import OperationalError

from components.core.errors import InfrastructureError, error_chain
from flows.run_context import Busy


@dataclass(frozen=True)
class RetryKind:
    """A kind of fault that passes by itself. `delays` are the seconds before each further try."""

    name: str
    delays: tuple[float, ...]


SERVICE = RetryKind("service", (5.0, 30.0, 120.0, 600.0))
"""A server or the network does not answer: a restart takes seconds, a failed node minutes."""
BUSY = RetryKind("busy", (60.0, 300.0, 900.0, 1800.0))
"""Another process works in the home or holds DVC's lock: wait as long as a short run takes."""
JUDGE = RetryKind("judge", (30.0, 300.0))
"""The judge itself failed in all of its own attempts."""

UNAVAILABLE = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "ABORTED")


def retry_kind(error: BaseException) -> RetryKind | None:
    """Return the kind of a fault, by the error and its causes; None when it does not pass by itself."""
    for seen in error_chain(error):
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
    call: Callable[[], T], report: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> T:
    """Call until it succeeds, with the back-off of the fault's kind.

    Raises the last error when the delays of its kind are used up. `call` must be safe to repeat; a pipeline
    run is, since each of its steps is found again by its digests. `report` gets one line for each fault.
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
            report(
                f"{kind.name} fault, try {used[kind] + 1} of {len(kind.delays) + 1} in {delay:g} s: "
                f"{' '.join(str(error).split())[:300]}"
            )
        sleep(delay)
