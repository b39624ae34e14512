"""Choice of where candidates of a run are judged: on this machine, on a Ray cluster, or by a service."""

from pathlib import Path

from components.core.errors import UserError
from components.core.params import Params
from components.judge.pool.http_pool import HttpPool
from components.judge.pool.local_pool import LocalPool
from components.sandbox.preflight import check_isolation


def open_pool(params: Params, verdicts: Path, *, use_service: bool = False) -> LocalPool:
    """Return a pool whose judges are where the parameters of the section pool say.

    `verdicts` is the folder of the journal. With `use_service`, a pool on this machine uses the service that
    runs on its folder (`cuda-agent serve`), instead of a new judge. If the judge is on this machine, the
    isolation of runners is checked at once, because the caller may do long work before the first job. Raises
    IsolationUnavailable if runners cannot be isolated, and UserError if both `pool.service` and `pool.judges`
    are set.
    """
    if params.pool.service:
        if params.pool.judges:
            raise UserError("pool.service: pool.judges starts other judges; set pool.judges to 0.")
        return HttpPool(params, verdicts)
    if not params.pool.judges:
        check_isolation(params.sandbox, params.device)
    return LocalPool(params, verdicts, use_service=use_service)
