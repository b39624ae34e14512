"""Check, before training or an evaluation begins, which tasks the judge can measure on its device.

A task is a PyTorch module that is to be made faster. A data set that was built on another device or with
other parameters may have tasks whose source does not run here, or that take more memory than
`sandbox.device_bytes` allows.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path

from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_json, read_json, write_json
from components.core.params import Params
from components.core.progress import Progress
from components.core.task import KernelTask
from components.judge.pool.local_pool import JudgePool
from components.judge.verdict import protocol_digest

# How to make tasks measurable, by the reason for which they are not.
MENDS = {
    "too_large": "raise sandbox.device_bytes (0 is all of the GPU) or sandbox.host_bytes, or build smaller "
    "tasks with data.numel",
    "does_not_run": "build the data set for this device, or raise sandbox.memory_bytes",
}


def refused_tasks(
    tasks: Sequence[KernelTask],
    pool: JudgePool,
    params: Params,
    file: Path,
    *,
    least_share: float = 0.0,
    origin: str,
    progress: Progress,
) -> dict[str, tuple[str, str]]:
    """Return the tasks whose candidates cannot be judged: reason (such as `too_large`) and detail by task id.

    A candidate is an implementation of a task's module. The result is stored in `file`. If `file` has the
    result of an earlier call with the same tasks and the same settings of the judge (in `params`), it is
    returned without a check. The checks are made by `pool`, and `progress` is told how many have ended.
    `origin` names the tasks in messages, for example by the path of their data set. Raises UserError, and
    stores nothing, if the judge fails, if no task can be judged, or if the share of those that can be judged
    is below `least_share`, which is sandbox.measurable_share or 0.
    """
    subject = digest_json([protocol_digest(params), [task.task_id for task in tasks]])
    if file.is_file() and (stored := read_json(file))["subject"] == subject:
        return {task_id: (reason, detail) for task_id, (reason, detail) in stored["refused"].items()}
    codes = {task.task_id: task.code for task in tasks}
    checks = {task_id: pool.check(code) for task_id, code in codes.items()}
    for number, _ in enumerate(as_completed(checks.values())):
        progress.update("task check", number + 1, len(checks))
    refused: dict[str, tuple[str, str]] = {}
    for task_id, check in checks.items():
        found = check.result()
        if not found.admitted:
            refused[task_id] = (found.reason, str(found.evidence["detail"]))
    if failed := [detail for reason, detail in refused.values() if reason == "infrastructure"]:
        raise UserError(
            f"{origin}: the judge failed in the check of {len(failed)} of {len(checks)} tasks ({failed[0]}); "
            "run cuda-agent doctor, and then the same command again."
        ) from InfrastructureError(failed[0])
    remaining = len(checks) - len(refused)
    if refused and (not remaining or remaining < least_share * len(checks)):
        limit = f", less than the share of {least_share:g} in sandbox.measurable_share" if remaining else ""
        raise UserError(f"{origin}: {left_out(refused, len(checks))}; {remaining} tasks remain{limit}.")
    if refused:
        logging.getLogger(__name__).warning("%s: %s", origin, left_out(refused, len(checks)))
    write_json(file, {"subject": subject, "refused": refused})
    return refused


def left_out(refused: dict[str, tuple[str, str]], count: int) -> str:
    """Return a clause on the tasks that are left out of `count` tasks: how many, why, and what to change.

    `refused` has the reason (such as `too_large`) and the detail of each by task id. The clause is empty if
    `refused` is.
    """
    if not refused:
        return ""
    examples = dict(reversed(refused.values()))
    reasons = [
        f"{number} {reason}, such as: {examples[reason]}; {MENDS[reason]}"
        for reason, number in Counter(reason for reason, _ in refused.values()).items()
    ]
    return (
        f"{len(refused)} of {count} tasks are left out, because the judge cannot measure them on this device "
        f"({'; '.join(reasons)})"
    )
