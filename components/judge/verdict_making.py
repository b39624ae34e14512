"""Making of verdicts: of one measurement, and of the measurements of all workloads of a task together.

A verdict is the record of what the judge found about a candidate, which is an implementation of a task's
module. A workload is one of several calls of a task's `get_inputs`.
"""

from collections.abc import Sequence
from typing import Any

from components.core.params import JudgeParams
from components.core.task import KernelTask
from components.core.text import readable
from components.judge.statistics import geometric_mean, mean_ratio
from components.judge.verdict import (
    VERSION,
    Labels,
    Seconds,
    Speedup,
    Status,
    Verdict,
    WorkloadFigures,
    milestone,
    workload_line,
)

# Largest number of characters in the log of a verdict; the middle of a longer log is cut out.
LOG_CHARACTERS = 2000
REASON_CHARACTERS = 200


def verdict_over_workloads(task: KernelTask, calls: Sequence[str], verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a candidate that is correct on all workloads of a task.

    A candidate is an implementation of the task's module. `verdicts` are those on the single workloads (calls
    of the task's `get_inputs`), and `calls` are these calls, such as `get_inputs(32, 128)`. Speed-ups and
    seconds are geometric means over the workloads. The log has a line for each workload. Entries of the
    evidence (the record of measurements in a verdict) that are not equal on all workloads are in a list under
    `workloads`.
    """
    figures = [
        WorkloadFigures(call=call, seconds=verdict.seconds, speedup=verdict.speedup)
        for call, verdict in zip(calls, verdicts, strict=True)
    ]
    found = [verdict.evidence | {"task": task.code_digest} for verdict in verdicts]
    shared = {name: value for name, value in found[0].items() if all(one.get(name) == value for one in found)}
    single = [{name: value for name, value in one.items() if name not in shared} for one in found]
    logs = dict.fromkeys(verdict.log for verdict in verdicts if verdict.log)
    verdict = verdicts[0].model_copy(
        update={
            "speedup": Speedup(
                eager=mean_ratio([one.speedup.eager for one in figures]),
                compile=mean_ratio([one.speedup.compile for one in figures]),
                against=mean_ratio([one.speedup.against for one in figures]),
            ),
            "seconds": Seconds.model_validate(
                {
                    name: geometric_mean([getattr(one.seconds, name) for one in figures])
                    for name in Seconds.model_fields
                }
            ),
            "evidence": shared | {"workloads": single},
            "log": readable("\n".join([*map(workload_line, figures), *logs]), LOG_CHARACTERS),
            "workloads": tuple(figures),
        }
    )
    return verdict.model_copy(update={"milestone": milestone(verdict)})


def make_verdict(
    params: JudgeParams,
    status: Status,
    reason: str = "",
    log: str = "",
    *,
    speedup: Speedup | None = None,
    seconds: Seconds | None = None,
    evidence: dict[str, Any] | None = None,
    workloads: tuple[WorkloadFigures, ...] = (),
) -> Verdict:
    """Return a verdict with the given fields, and with the milestone that follows from them.

    The milestone is the reward (-1, 1, 2 or 3), computed from the status and the speed-ups by
    `verdict.milestone`. The version of the judge, the isolation and the rules of judging (`verdict.Labels`)
    are added to `evidence`, the record of what was measured. Long reasons and logs are shortened, and their
    terminal escapes and control characters are removed.
    """
    verdict = Verdict(
        status=status,
        reason=readable(reason, REASON_CHARACTERS),
        device=params.device,
        precision=params.precision,
        seconds=seconds or Seconds(),
        speedup=speedup or Speedup(),
        evidence={
            "judge": VERSION,
            "isolation": params.sandbox.isolation,
            "labels": Labels.of(params.sandbox).model_dump(),
            **(evidence or {}),
        },
        log=readable(log, LOG_CHARACTERS),
        workloads=workloads,
    )
    return verdict.model_copy(update={"milestone": milestone(verdict)})
