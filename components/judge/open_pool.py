"""Choice of where candidates of a run are judged: on this machine, on a Ray cluster, or by a service."""

from pathlib import Path

from components.core.errors import UserError
from components.core.params import Params
from components.judge.http_pool import HttpPool
from components.judge.pool import LocalPool
from components.sandbox.preflight import check_isolation


def open_pool(params: Params, verdicts: Path, *, use_resident: bool = False) -> LocalPool:
    """Return a pool of judges as the parameters in the section pool ask for.

    `verdicts` is the folder of the journal. With `use_resident`, a pool on this machine has the resident
    judge of its folder do the work if one runs. If the judge is on this machine, the isolation of runners is
    checked first, so that nothing is loaded or sampled in vain; IsolationUnavailable is raised if no runner
    can be isolated. Raises UserError if both `pool.service` and `pool.judges` are set.
    """
    if params.pool.service:
        if params.pool.judges:
            raise UserError("pool.service: pool.judges starts other judges; set pool.judges to 0.")
        return HttpPool(params, verdicts)
    if not params.pool.judges:
        check_isolation(params.sandbox, params.device)
    return LocalPool(params, verdicts, use_resident=use_resident)
