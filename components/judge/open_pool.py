"""The choice of the pool that judges for a run: one here, on a Ray cluster, or behind the HTTP service."""

from pathlib import Path

from components.core.errors import UserError
from components.core.params import Params
from components.judge.http_pool import HttpPool
from components.judge.pool import LocalPool
from components.sandbox.preflight import check_isolation


def open_pool(params: Params, verdicts: Path, *, use_resident: bool = False) -> LocalPool:
    """Return a pool, after checking that this machine can isolate runners if the pool's judge is here.

    The arguments are those of `LocalPool`. Raises IsolationUnavailable if no runner can be isolated; this is
    checked before anything is loaded or sampled.
    """
    if params.pool.service:
        if params.pool.judges:
            raise UserError("pool.service: pool.judges starts other judges; set pool.judges to 0.")
        return HttpPool(params, verdicts)
    if not params.pool.judges:
        check_isolation(params.sandbox, params.device)
    return LocalPool(params, verdicts, use_resident=use_resident)
