"""Choice between the judges of this machine and those of a Ray cluster."""

from pathlib import Path

from components.core.params import Params
from components.judge.pool import LocalPool
from components.sandbox.preflight import check_isolation


def open_pool(params: Params, verdicts: Path, *, use_resident: bool = False) -> LocalPool:
    """Return a pool with a judge on this machine, or with judges on a Ray cluster if `sandbox.pool` is `ray`.

    `verdicts` is the journal's folder. `use_resident` is explained at `LocalPool`. For a judge on this
    machine, raises IsolationUnavailable if no runner can be isolated here; this is checked before anything is
    loaded or sampled.
    """
    if params.sandbox.pool == "ray":
        from components.judge.ray_pool import RayPool

        return RayPool(params, verdicts)
    check_isolation(params.sandbox, params.device)
    return LocalPool(params, verdicts, use_resident=use_resident)
