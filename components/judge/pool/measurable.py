"""Check, before training or an evaluation begins, which tasks the judge can measure on its device.

A task is a PyTorch module that is to be made faster. A data set that was built on another device or with
other parameters may have tasks whose source does not run here, or that take more memory than
`sandbox.device_bytes` allows.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict
from pathlib import Path

from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_json, read_json, write_json
from components.core.params import Params
from components.core.progress import Progress
from components.core.task import KernelTask
from components.judge.pool.local_pool import JudgePool
from components.judge.verdict import Admission, protocol_digest

# How to make tasks measurable, by the reason for which they are not.
MENDS = {
    "too_large": "raise sandbox.device_bytes (0 is all of the GPU) or sandbox.host_bytes, or build smaller "
    "tasks with data.numel",
    "does_not_run": "build the data set for this device, or raise sandbox.memory_bytes",
}


def check_tasks(
    tasks: Sequence[KernelTask],
    pool: JudgePool,
    params: Params,
    file: Path,
    *,
    least_share: float = 0.0,
    origin: str,
    progress: Progress,
) -> dict[str, Admission]:
    """Return, by task id, whether candidates of each task can be judged, and the task's shapes if they can.

    A candidate is an implementation of a task's module. The evidence of a task that can be judged has the
    shapes of inputs and outputs and the names of parameters; that of another task has a detail. The result is
    stored in `file`. If `file` has the result of an earlier call with the same tasks and the same settings of
    the judge (in `params`), it is returned without a check. The checks are made by `pool`, and `progress` is
    told how many have ended. `origin` names the tasks in messages, for example by the path of their data set.
    Raises UserError, and stores nothing, if the judge fails, if no task can be judged, or if the share of
    those that can be judged is below `least_share`, which is sandbox.measurable_share or 0.
    """
    subject = digest_json([protocol_digest(params), [task.task_id for task in tasks]])
    if file.is_file() and (stored := read_json(file))["subject"] == subject:
        return {task_id: Admission(**record) for task_id, record in stored["checks"].items()}
    codes = {task.task_id: task.code for task in tasks}
    pending = {task_id: pool.check(code) for task_id, code in codes.items()}
    for number, _ in enumerate(as_completed(pending.values())):
        progress.update("task check", number + 1, len(pending))
    checks = {task_id: future.result() for task_id, future in pending.items()}
    refused = [found for found in checks.values() if not found.admitted]
    if failed := [str(found.evidence["detail"]) for found in refused if found.reason == "infrastructure"]:
        raise UserError(
            f"{origin}: the judge failed in the check of {len(failed)} of {len(checks)} tasks ({failed[0]}); "
            "run cuda-agent doctor, and then the same command again."
        ) from InfrastructureError(failed[0])
    remaining = len(checks) - len(refused)
    if refused and (not remaining or remaining < least_share * len(checks)):
        limit = f", less than the share of {least_share:g} in sandbox.measurable_share" if remaining else ""
        raise UserError(f"{origin}: {left_out(checks)}; {remaining} tasks remain{limit}.")
    if refused:
        logging.getLogger(__name__).warning("%s: %s", origin, left_out(checks))
    write_json(file, {"subject": subject, "checks": {key: asdict(found) for key, found in checks.items()}})
    return checks


def left_out(checks: Mapping[str, Admission]) -> str:
    """Return a clause on the tasks that are left out: how many of all, why, and what to change.

    `checks` says, by task id, whether candidates of each task can be judged. The clause is empty if all can.
    """
    refused = [found for found in checks.values() if not found.admitted]
    if not refused:
        return ""
    examples = {found.reason: found.evidence["detail"] for found in reversed(refused)}
    reasons = [
        f"{number} {reason}, such as: {examples[reason]}; {MENDS[reason]}"
        for reason, number in Counter(found.reason for found in refused).items()
    ]
    return (
        f"{len(refused)} of {len(checks)} tasks are left out, because the judge cannot measure them on this "
        f"device ({'; '.join(reasons)})"
    )
