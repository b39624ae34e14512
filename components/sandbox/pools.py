"""Which pool of judges a run uses."""

from __future__ import annotations

from pathlib import Path

from components.config import Params
from components.sandbox.pool import LocalPool
from components.sandbox.preflight import check_isolation


def open_pool(params: Params, verdicts: Path) -> LocalPool:
    """The judges of this machine, or those of a Ray cluster where `sandbox.pool` says so; `verdicts` is the journal's folder.

    Raises IsolationUnavailable where no runner can be isolated on this machine, before anything is loaded or sampled.
    """
    if params.sandbox.pool == "ray":
        from components.sandbox.ray_pool import RayPool

        return RayPool(params, verdicts)
    check_isolation(params.sandbox, params.device)
    return LocalPool(params, verdicts)
