"""Retries after temporary faults, with delays that depend on the kind of fault.

boto3, MLflow and Prefect themselves retry for up to a minute, so a fault that they report has lasted longer.
A permanent error (bad input, a failed stage, a mistake in the code) is not retried, because it would occur
again.
"""

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
    """A kind of temporary fault. `delays` are the seconds to wait before each further try."""

    name: str
    delays: tuple[float, ...]


# The kind of fault in which a server or the network does not answer. The delays cover the restart of a
# server, which takes seconds, and the replacement of a node, which takes minutes.
SERVICE = RetryKind("service", (5.0, 30.0, 120.0, 600.0))
# The kind of fault in which another process works in the home or holds DVC's lock. The delays cover the
# length of a short run.
BUSY = RetryKind("busy", (60.0, 300.0, 900.0, 1800.0))
# The kind of fault in which the judge itself failed in all of its own attempts to judge a candidate.
JUDGE = RetryKind("judge", (30.0, 300.0))

# MLflow's error codes of temporary faults.
UNAVAILABLE = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "ABORTED")


def retry_kind(error: BaseException) -> RetryKind | None:
    """Return the kind of fault according to the error and its causes, or None if the fault is permanent."""
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
    return None


T = TypeVar("T")


def retry_by_kind(
    call: Callable[[], T], report: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> T:
    """Return the result of `call`, which is repeated after temporary faults with the delays of their kind.

    `call` must be safe to repeat. `report` is called with one line for each fault. Raises the last error if
    it is permanent, or if all delays of its kind are used up.
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
