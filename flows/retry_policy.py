"""Retries after temporary faults, with delays that depend on the kind of fault.

boto3, MLflow and Prefect themselves retry for up to a minute, so a fault that they report has lasted longer.
A permanent error (bad input, a failed stage, a mistake in the code) is not retried, because it would occur
again.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import httpx
from mlflow.exceptions import MlflowException
from requests.exceptions import ConnectionError as RequestsConnectionError
from requests.exceptions import Timeout as RequestsTimeout
from sqlalchemy.exc import OperationalError

from components.core.errors import InfrastructureError, error_chain
from flows.run_context import Busy

# Seconds to wait before each further try, by the kind of fault.
DELAYS = {
    # A server or the network does not answer. The delays cover the restart of a server, which takes seconds,
    # and the replacement of a node, which takes minutes.
    "service": (5.0, 30.0, 120.0, 600.0),
    # Another process works in the home or holds DVC's lock. The delays cover the length of a short run.
    "busy": (60.0, 300.0, 900.0, 1800.0),
    # The judge itself failed in all of its own attempts to judge a candidate.
    "judge": (30.0, 300.0),
}

# MLflow's error codes of temporary faults.
UNAVAILABLE = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "ABORTED")


def retry_kind(error: BaseException) -> str | None:
    """Return the kind of a temporary fault, a key of DELAYS, or None if the fault is permanent.

    The error and then its causes are searched, and the first one that is a temporary fault decides.
    """
    for seen in error_chain(error):
        match seen:
            case Busy():
                return "busy"
            case InfrastructureError():
                return "judge"
            case (
                ConnectionError()
                | TimeoutError()
                | httpx.TransportError()
                | RequestsConnectionError()
                | RequestsTimeout()
                | OperationalError()
            ):
                return "service"
            case MlflowException(error_code=code) if code in UNAVAILABLE:
                return "service"
    return None


T = TypeVar("T")


def retry_by_kind(
    call: Callable[[], T], report: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> T:
    """Return the result of `call`, which is repeated after temporary faults with the delays of their kind.

    `call` must be safe to repeat. `report` is called with one line for each fault, and `sleep` with the
    seconds to wait after it. Raises the last error if it is permanent, or if all delays of its kind are used
    up.
    """
    used: Counter[str] = Counter()
    while True:
        try:
            return call()
        except Exception as error:
            kind = retry_kind(error)
            if kind is None or used[kind] == len(DELAYS[kind]):
                raise
            delay = DELAYS[kind][used[kind]]
            used[kind] += 1
            report(
                f"{kind} fault, try {used[kind] + 1} of {len(DELAYS[kind]) + 1} in {delay:g} s: "
                f"{' '.join(str(error).split())[:300]}"
            )
        sleep(delay)
