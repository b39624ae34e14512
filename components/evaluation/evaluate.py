"""Evaluate a policy on a suite, which is a set of kernel tasks.

The policy first attempts each task in one or more episodes. Then the judge measures the final answer of the
first attempt again, that is, the candidate's files (the kernels and their module) at the end of the episode,
unless it was wrong or did not build.
The verdict of this final measurement is the result of the task. The best solution of a trajectory is not
reported, because choosing the best of several noisy measurements would overestimate the speed-up. If the
policy has one attempt of one turn, nothing is chosen, and its answer is measured once if it is compared with
one mode of torch.compile.

Every result is written to disk as soon as it is known, so a repeated call with the same folder continues:

    out/plan.json               settings of the evaluation; other settings in the same folder are refused
    out/task_checks.json        which tasks the judge can measure on this device, and their shapes
    out/episodes/0000/ ...      trajectories, one folder for each batch of tasks
    out/tasks/<task_id>.json    result of one task
    out/cost.json               device-seconds by phase, without the seconds of interrupted steps
    out/results.json            the evaluation; it is written last, so it exists only if all else is complete
"""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any

from components.agent.episode import MAX_LOST_SHARE, RolloutRequest, judge_failures
from components.agent.policies import Policy
from components.agent.trajectory import Trajectory, load_trajectories, save_trajectories
from components.core.config import result_values
from components.core.errors import InfrastructureError, StageFailed, UserError
from components.core.files import digest_json, write_json
from components.core.progress import Progress
from components.core.records import read_as
from components.core.task import KernelTask
from components.evaluation.metrics import by_level, summarise
from components.evaluation.results import (
    RESULTS,
    Attempt,
    Evaluation,
    NotMeasurable,
    TaskResult,
    load_evaluation,
)
from components.judge.pool.local_pool import TASK_FAULTS, Candidate, Job, JudgePool
from components.judge.pool.measurable import check_tasks
from components.judge.verdict import Labels, Status, Verdict

# Seconds to wait before final answers on which the judge failed are measured again, for each retry. Tasks on
# which the judge fails even in the last retry become errors of the evaluation.
RETRY_SECONDS = (0.0, 30.0, 120.0)
# Reasons for refusing admission that do not make a task degenerate; the empty one stands for admitted.
SOUND = ("", "eager_time", "infrastructure", "too_large", "does_not_run")
FINAL = "evaluation/final/{}"  # the judge's epoch of final answers, by the epoch of an evaluation
# Results of judging a kernel after which it is not measured again.
DECIDED: tuple[Status, ...] = ("build_failed", "load_failed", "wrong_output", "forbidden")


def evaluate(
    policy: Policy,
    tasks: Sequence[KernelTask],
    pool: JudgePool,
    out: Path,
    *,
    epoch: str,
    progress: Progress,
    seed: int,
) -> Evaluation:
    """Evaluate `policy` on `tasks` with the policy's own parameters and keep all results in the folder `out`.

    `pool` judges the kernels. `epoch` is a name of the evaluation that the caller chooses. It is part of the
    key under which the judge keeps its verdicts, so equal candidates (kernels to be judged) share one
    measurement only within one epoch. `seed` is that of the sampling. Tasks whose own source fails, and tasks
    that take more memory than there is (`check_tasks`), are left out and listed in
    `Evaluation.not_measurable`. A task that has no evidence of an admission (`KernelTask.evidence`) is
    admitted by `pool` if its result is correct; if a wrong kernel could pass on it too, it is marked as
    degenerate but remains included in the figures. Raises UserError if there is no task, if the judge fails
    in the check of the tasks, if less than the share sandbox.measurable_share of the tasks can be measured,
    if `out` holds a different evaluation, or if the policy's server does not answer. Raises StageFailed if
    the judge fails on more than the share MAX_LOST_SHARE of the attempts of a batch or of the tasks.
    """
    params = policy.params
    if not tasks:
        raise UserError(
            f"evaluation.suite: {params.evaluation.suite} holds no task; give a suite with at least one."
        )
    # The settings that affect the results.
    suite_digest = digest_json([task.task_id for task in tasks])
    sections = ("evaluation", "policy.prompt", "policy.context", "sandbox", "device", "precision")
    plan = {"policy_digest": policy.digest, "suite_digest": suite_digest, "epoch": epoch, "seed": seed}
    claim(out, plan | result_values(params, sections))
    if (out / RESULTS).is_file():
        return load_evaluation(out)

    suite = f"evaluation.suite: {params.evaluation.suite}"
    share = params.sandbox.measurable_share
    checks = check_tasks(
        tasks, pool, params, out / "task_checks.json", least_share=share, origin=suite, progress=progress
    )
    # A workspace begins with a model_new.py that is made from the evidence.
    measurable = [
        task if task.evidence else task.model_copy(update={"evidence": checks[task.task_id].evidence})
        for task in tasks
        if checks[task.task_id].admitted
    ]
    attempts = _attempts(policy, measurable, pool, out, epoch=epoch, progress=progress, seed=seed)
    results = _measure(measurable, attempts, pool, out, epoch=epoch, progress=progress)
    degenerate = _degenerate(tasks, results, pool, progress)
    results = [
        result.model_copy(update={"degenerate": degenerate.get(result.task_id, "")}) for result in results
    ]
    evaluation = Evaluation(
        suite=params.evaluation.suite,
        suite_digest=suite_digest,
        policy=policy.name,
        policy_digest=policy.digest,
        device=params.device,
        precision=params.precision,
        dtype=params.evaluation.dtype,
        labels=Labels.of(params.sandbox),
        epoch=epoch,
        seed=seed,
        tasks=tuple(results),
        overall=summarise(results),
        levels=by_level(results),
        errors=sum(result.error for result in results),
        not_measurable=tuple(
            NotMeasurable(
                task_id=task.task_id,
                name=task.name,
                level=task.level,
                reason=str(checks[task.task_id].evidence["detail"]),
            )
            for task in tasks
            if not checks[task.task_id].admitted
        ),
    )
    write_json(out / RESULTS, evaluation.model_dump(mode="json"))
    return evaluation


def claim(out: Path, plan: dict[str, Any]) -> None:
    """Write `plan`, the settings of an evaluation, to plan.json in `out` unless it exists, and compare them.

    `out` is the folder of the evaluation. Raises UserError, which names the settings that differ, if one of
    the settings in `plan` has another value in the file.
    """
    file = out / "plan.json"
    if not file.is_file():
        write_json(file, plan)
    begun = read_as(dict[str, Any], file, "delete its folder and evaluate again")
    if different := sorted(key for key in plan if begun.get(key) != plan[key]):
        raise UserError(
            f"{out}: holds another evaluation (its {', '.join(different)} differ); "
            "give another folder or delete this one."
        )


def add_cost(out: Path, phase: str, seconds: float) -> None:
    """Add `seconds`, during which `phase` (such as "episodes") occupied the device, to cost.json in `out`.

    The file has the sum of seconds for each phase, and is made if it does not exist.
    """
    file = out / "cost.json"
    costs = read_as(dict[str, float], file, "delete it") if file.is_file() else {}
    write_json(file, costs | {phase: round(costs.get(phase, 0.0) + seconds, 3)})


def _degenerate(
    tasks: Sequence[KernelTask], results: Sequence[TaskResult], pool: JudgePool, progress: Progress
) -> dict[str, str]:
    """Return, by task id, the reasons why a wrong kernel could pass, for tasks with a correct result.

    `pool` admits these tasks, unless they have evidence of an earlier admission, as those of a data set. Most
    of the time of an admission goes into data that a measurement makes too, so that on a suite of large tasks
    all admissions would take as long as the measurements of all answers.
    """
    passed = {result.task_id for result in results if result.correct}
    codes = {task.task_id: task.code for task in tasks if not task.evidence and task.task_id in passed}
    pending = {task_id: pool.admit(code) for task_id, code in codes.items()}
    for number, _ in enumerate(as_completed(pending.values())):
        progress.update("admission", number + 1, len(pending))
    reasons = {task_id: future.result().reason for task_id, future in pending.items()}
    return {task_id: reason for task_id, reason in reasons.items() if reason not in SOUND}


def _attempts(
    policy: Policy,
    tasks: Sequence[KernelTask],
    pool: JudgePool,
    out: Path,
    *,
    epoch: str,
    progress: Progress,
    seed: int,
) -> list[list[Trajectory]]:
    """Return a list of trajectories for each task, in the order of `tasks`, loaded from `out` or sampled.

    They are sampled in batches of as many trajectories as the parameter `policy.batch` says. An interrupted
    evaluation continues after the last batch that is complete, also with another `policy.batch`, because each
    trajectory has a seed of its own. `epoch` is part of the keys under which the judge keeps its verdicts.
    Raises UserError if a stored batch is of other tasks than `tasks`, as after a change of what can be
    measured, or if the policy's server answers no turn of a batch, and StageFailed if a failure of the
    judge ended more than the share MAX_LOST_SHARE of the trajectories of a batch. In both cases the batch is
    not stored.
    """
    settings = policy.params.evaluation
    # The verdict at the end of the only attempt is then kept under the key of the final measurement. Several
    # modes of torch.compile are started only for kernels that may be right.
    one_mode = policy.params.device == "cpu" or policy.params.sandbox.compile_modes == "default"
    is_measured_once = one_mode and settings.attempts == settings.max_turns == 1
    requested = [task for task in tasks for _ in range(settings.attempts)]
    found: list[Trajectory] = []
    folders = (out / "episodes" / f"{batch:04d}" for batch in itertools.count())
    while (first := len(found)) < len(requested):
        folder = next(folders)
        if folder.is_dir():
            found += load_trajectories(folder)
            attempted = [trajectory.task_id for trajectory in found]
            if attempted != [task.task_id for task in requested[: len(found)]]:
                raise UserError(
                    f"{folder}: has attempts at other tasks than those that can be measured now; "
                    f"delete {out}, and evaluate again."
                )
            continue
        started = time.monotonic()

        def on_progress(finished: int, _: int, before: int = first) -> None:
            progress.update("evaluation", before + finished, len(requested) + len(tasks))

        trajectories = policy.sample(
            RolloutRequest(
                tasks=requested[first : first + policy.params.policy.batch],
                first=first,
                params=policy.params,
                pool=pool,
                epoch=FINAL.format(epoch) if is_measured_once else f"episodes/{epoch}",
                compare_compile=is_measured_once,
                seed=seed,
                max_turns=settings.max_turns,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                on_progress=on_progress,
            )
        )
        if all(trajectory.finish_reason == "server" and not trajectory.turns for trajectory in trajectories):
            raise UserError(
                f"--policy {policy.name}: {trajectories[0].error}; "
                "fix the server, the same command continues."
            )
        _check_lost(
            out,
            [
                one.final
                for one in trajectories
                if one.finish_reason == "judge" and one.final.reason not in TASK_FAULTS
            ],
            len(trajectories),
            "attempts",
        )
        save_trajectories(folder, trajectories)
        add_cost(out, "episodes", time.monotonic() - started)
        found += trajectories
    return [found[start : start + settings.attempts] for start in range(0, first, settings.attempts)]


def _check_lost(out: Path, lost: Sequence[Verdict], count: int, things: str) -> None:
    """Raise StageFailed if the judge failed on more than MAX_LOST_SHARE of `count` attempts or tasks.

    `lost` are the verdicts on the attempts or tasks on which the judge failed, and `things` is the word for
    these in the message, which begins with the evaluation's folder `out`. The error has an
    InfrastructureError as its cause unless the tasks' own sources caused all failures, so that another try
    would not help.
    """
    if len(lost) > MAX_LOST_SHARE * count:
        said = judge_failures([(verdict.reason or verdict.status, verdict.log) for verdict in lost])
        raise StageFailed(
            f"{out}: the judge failed on {len(lost)} of {count} {things} ({said}), so there is no result; "
            "run cuda-agent doctor, and then the same command again, which continues."
        ) from (
            None if {verdict.reason for verdict in lost} <= set(TASK_FAULTS) else InfrastructureError(said)
        )


def _has_answer(attempt: Trajectory) -> bool:
    """Return whether an attempt ended with files that can be judged.

    This is not so if it has no files, or if a failure of the policy's server or of the judge ended it.
    """
    return bool(attempt.files) and attempt.finish_reason not in ("server", "judge")


def _measure(
    tasks: Sequence[KernelTask],
    attempts: list[list[Trajectory]],
    pool: JudgePool,
    out: Path,
    *,
    epoch: str,
    progress: Progress,
) -> list[TaskResult]:
    """Return one result per entry of `tasks`, in order, from a final measurement of its first attempt.

    `attempts` has the trajectories of each task, and the files of the first one are measured. `epoch` is part
    of the keys under which the judge keeps its verdicts. A result that is on disk in `out` already is not
    measured again. If the judge fails, and not because of the task (`TASK_FAULTS`), the measurement is
    repeated after pauses of `RETRY_SECONDS`. A task that is listed several times is measured only once.
    Raises StageFailed if the judge failed on more than the share MAX_LOST_SHARE of the tasks; no result of
    these tasks is stored then, so the next call measures them again.
    """
    first = {task.task_id: (task, own) for task, own in reversed(list(zip(tasks, attempts, strict=True)))}
    files = {task_id: out / "tasks" / f"{task_id}.json" for task_id in first}
    results = {
        task_id: read_as(TaskResult, file, "delete it, and the task is measured again")
        for task_id, file in files.items()
        if file.is_file()
    }
    sampled = sum(map(len, attempts))

    def keep(task_id: str, verdict: Verdict) -> None:
        task, own = first[task_id]
        results[task_id] = TaskResult(
            task_id=task_id,
            name=task.name,
            ops=task.ops,
            level=task.level,
            status=verdict.status,
            reason=verdict.reason,
            milestone=verdict.milestone,
            seconds=verdict.seconds,
            speedup=verdict.speedup,
            workloads=verdict.workloads,
            attempts=tuple(map(Attempt.of, own)),
            source=task.code,
            files=own[0].files,
            evidence=verdict.evidence,
        )
        write_json(files[task_id], results[task_id].model_dump(mode="json"))
        passed = sum(result.correct for result in results.values()) / len(results)
        progress.update("evaluation", sampled + len(results), sampled + len(first), pass_rate=passed)

    lost: dict[str, Verdict] = {}
    for delay in (*RETRY_SECONDS, None):
        started = time.monotonic()
        pending = {
            _final(task, own[0], pool, epoch): task_id
            for task_id, (task, own) in first.items()
            if task_id not in results and (task_id not in lost or lost[task_id].reason not in TASK_FAULTS)
        }
        for future in as_completed(pending):
            task_id, verdict = pending[future], future.result()
            if verdict.status == "infrastructure":
                lost[task_id] = verdict
            else:
                lost.pop(task_id, None)
                keep(task_id, verdict)
                add_cost(out, "final measurements", time.monotonic() - started)
                started = time.monotonic()
        if delay is None or not any(
            verdict.reason not in TASK_FAULTS and _has_answer(first[task_id][1][0])
            for task_id, verdict in lost.items()
        ):
            break
        progress.update(
            "evaluation",
            sampled + len(results),
            sampled + len(first),
            measured_again=len(first) - len(results),
        )
        time.sleep(delay)
    _check_lost(out, [each for each in lost.values() if each.reason != "server"], len(first), "tasks")
    for task_id, verdict in lost.items():
        keep(task_id, verdict)
    return [
        results[task.task_id].model_copy(update={"name": task.name, "level": task.level}) for task in tasks
    ]


def _final(task: KernelTask, attempt: Trajectory, pool: JudgePool, epoch: str) -> Future[Verdict]:
    """Measure the files of a finished attempt once more, and return a future of the verdict.

    `epoch` is part of the key under which the judge keeps the verdict. A kernel that crashed or was too slow
    at the end of the episode is not compared with all modes of torch.compile, which are started before the
    kernel. Nothing is measured if the verdict from the end of the episode decides (`DECIDED`), if the
    attempt has no files, or if the policy's server or the judge ended it. The
    future then has that verdict, or one with the status `infrastructure` if the server ended the attempt.
    """
    if _has_answer(attempt) and attempt.final.status not in DECIDED:
        may_be_right = attempt.final.status in ("correct", "infrastructure")
        return pool.submit(
            Job(task, Candidate.of(attempt.files), FINAL.format(epoch), compare_compile=may_be_right)
        )
    done: Future[Verdict] = Future()
    done.set_result(
        Verdict(status="infrastructure", reason="server", log=attempt.error)
        if attempt.finish_reason == "server"
        else attempt.final
    )
    return done
