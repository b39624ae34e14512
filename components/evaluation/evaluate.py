"""Evaluate a policy on a suite: episodes in the agent loop, then each final answer measured anew in clean runners.

What counts for a task is the answer that the first attempt itself declares final. It is judged again under a new epoch,
so that nothing selects the luckiest of several noisy measurements (the paper reports the best solution of a trajectory
by its measured speed-up, which is optimistic).

Everything is durable as soon as it is known, and a rerun in the same folder continues:

    out/plan.json               what is evaluated; another evaluation in the same folder is refused
    out/episodes/0000/ ...      trajectories, one folder for each batch of tasks
    out/tasks/<task_id>.json    one result per task
    out/cost.json               seconds that the device was held, by what for; an interrupted step is not counted
    out/results.json            the evaluation; written last, its presence says that it is complete
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any

from components.agent.policies import Policy
from components.agent.rollout import RolloutRequest
from components.agent.trajectory import Trajectory, load_trajectories, save_trajectories
from components.core.config import Params
from components.core.errors import UserError
from components.core.files import digest_json, read_json, write_json
from components.core.progress import Progress
from components.core.task import KernelTask
from components.evaluation.metrics import Attempt, TaskResult, by_level, summarise
from components.evaluation.results import RESULTS, Evaluation, load_evaluation
from components.judge.pool import Candidate, Job, JudgePool
from components.judge.verdict import Admission, Verdict

AGAIN = (0.0, 30.0, 120.0)
"""Seconds until final answers on which the judge itself failed are measured again: at once, with the device to themselves; then
when a lost node of judges can be back. After that the task is an error, and no gate lets an error pass."""


def evaluate(
    policy: Policy,
    tasks: Sequence[KernelTask],
    pool: JudgePool,
    out: Path,
    *,
    epoch: str,
    progress: Progress,
    seed: int,
    admit: Callable[[str], Future[Admission]] | None = None,
) -> Evaluation:
    """Evaluate `policy` on `tasks` with its own parameters and leave the evidence in `out` (see the module's text).

    `epoch` names this evaluation to the judge: measurements are shared inside it and never across. `admit` tells whether
    a cheat could pass on a task (the pool's; None trusts every task): such tasks count, and are marked degenerate.
    Raises UserError when `out` holds a different evaluation, or the policy's server does not answer.
    """
    params = policy.params
    if not tasks:
        raise UserError(
            f"evaluation.suite: {params.evaluation.suite} holds no task; give a suite with at least one."
        )
    plan = _plan(policy, tasks, epoch, seed)
    _claim(out, plan)
    if (out / RESULTS).is_file():
        return load_evaluation(out)

    attempts = _attempts(policy, tasks, pool, out, epoch=epoch, progress=progress, seed=seed)
    results = _measure(tasks, attempts, pool, out, admit, epoch=epoch, progress=progress)
    evaluation = Evaluation(
        suite=params.evaluation.suite,
        suite_digest=plan["suite_digest"],
        policy=policy.name,
        policy_digest=policy.digest,
        device=params.device,
        precision=params.precision,
        epoch=epoch,
        seed=seed,
        tasks=tuple(results),
        overall=summarise(results),
        levels=by_level(results),
        errors=sum(result.error for result in results),
    )
    write_json(out / RESULTS, evaluation.model_dump(mode="json"))
    return evaluation


def _plan(policy: Policy, tasks: Sequence[KernelTask], epoch: str, seed: int) -> dict[str, Any]:
    """What tells this evaluation from any other."""
    params = policy.params
    return {
        "policy_digest": policy.digest,
        "suite_digest": digest_json([task.task_id for task in tasks]),
        "evaluation": params.evaluation.model_dump(mode="json"),
        "policy": {
            "prompt": params.policy.prompt,
            "context": params.policy.context,
            "batch": params.policy.batch,
        },
        "sandbox": params.sandbox.model_dump(mode="json"),
        "device": params.device,
        "precision": params.precision,
        "epoch": epoch,
        "seed": seed,
    }


def _claim(out: Path, plan: dict[str, Any]) -> None:
    file = out / "plan.json"
    if not file.is_file():
        write_json(file, plan)
        return
    found = read_json(file)
    different = sorted(key for key in plan if found.get(key) != plan[key])
    if different:
        raise UserError(
            f"{out}: holds another evaluation (its {', '.join(different)} differ); give another folder or delete this one."
        )


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
    """The attempts of every task. Batches of tasks are the unit of resumption; their cut depends on parameters only."""
    settings = policy.params.evaluation
    attempts = settings.attempts
    size = max(1, policy.params.policy.batch // attempts)
    batches = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    found: list[list[Trajectory]] = []
    for index, batch in enumerate(batches):
        folder = out / "episodes" / f"{index:04d}"
        if folder.is_dir():
            trajectories = load_trajectories(folder)
        else:
            started = time.monotonic()
            before = len(found) * attempts

            def on_progress(finished: int, _: int, before: int = before) -> None:
                progress.update("evaluation", before + finished, len(tasks) * (attempts + 1))

            repeated = [task for task in batch for _ in range(attempts)]
            trajectories = policy.sample(
                RolloutRequest(
                    tasks=repeated,
                    params=policy.params,
                    pool=pool,
                    epoch=f"episodes/{epoch}",
                    seed=seed * 1_000_003 + index,
                    max_turns=settings.max_turns,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperature,
                    on_progress=on_progress,
                )
            )
            if all(_unserved(trajectory) and not trajectory.turns for trajectory in trajectories):
                raise UserError(
                    f"--policy {policy.name}: {trajectories[0].error}; mend the server, the same command continues."
                )
            save_trajectories(folder, trajectories)
            _spend(out, "episodes", time.monotonic() - started)
        found += [trajectories[start : start + attempts] for start in range(0, len(trajectories), attempts)]
    return found


def _unserved(trajectory: Trajectory) -> bool:
    """Whether the policy's server failed: the trajectory says nothing about the policy."""
    return trajectory.finish_reason == "server"


def _measurable(attempt: Trajectory) -> bool:
    return bool(attempt.files) and not _unserved(attempt)


def _measure(
    tasks: Sequence[KernelTask],
    found: list[list[Trajectory]],
    pool: JudgePool,
    out: Path,
    admit: Callable[[str], Future[Admission]] | None,
    *,
    epoch: str,
    progress: Progress,
) -> list[TaskResult]:
    """One result per task, in the suite's order; a task that stands twice in the suite is measured once."""
    first = {
        task.task_id: (task, attempts) for task, attempts in reversed(list(zip(tasks, found, strict=True)))
    }
    files = {task_id: out / "tasks" / f"{task_id}.json" for task_id in first}
    results = {
        task_id: TaskResult.model_validate(read_json(file))
        for task_id, file in files.items()
        if file.is_file()
    }
    admissions: dict[str, Future[Admission]] = {}
    sampled = sum(map(len, found))
    for delay in (*AGAIN, None):
        pending: dict[Future[Verdict], str] = {}
        started = time.monotonic()
        for task_id, (task, attempts) in first.items():
            if task_id in results:
                continue
            # Tasks of our own data sets were admitted when they were made: their evidence says so.
            if admit is not None and not task.evidence and task_id not in admissions:
                admissions[task_id] = admit(task.code)
            pending[_final(task, attempts[0], pool, epoch)] = task_id
        for future in as_completed(pending):
            task_id, verdict = pending[future], future.result()
            task, attempts = first[task_id]
            if verdict.status == "infrastructure" and delay is not None and _measurable(attempts[0]):
                continue
            degenerate = _degenerate(admissions[task_id].result()) if task_id in admissions else ""
            results[task_id] = _result(task, attempts, verdict, degenerate)
            write_json(files[task_id], results[task_id].model_dump(mode="json"))
            _spend(out, "final measurements", time.monotonic() - started)
            started = time.monotonic()
            passed = sum(result.correct for result in results.values()) / len(results)
            progress.update("evaluation", sampled + len(results), sampled + len(first), pass_rate=passed)
        if len(results) == len(first):
            break
        progress.update(
            "evaluation",
            sampled + len(results),
            sampled + len(first),
            measured_again=len(first) - len(results),
        )
        time.sleep(delay or 0)
    return [
        results[task.task_id].model_copy(update={"name": task.name, "level": task.level}) for task in tasks
    ]


def _final(task: KernelTask, attempt: Trajectory, pool: JudgePool, epoch: str) -> Future[Verdict]:
    """What counts for the task; where the attempt wrote nothing there is nothing to measure, and its own verdict stands."""
    if _measurable(attempt):
        return pool.submit(
            Job(task, Candidate.of(attempt.files), f"evaluation/final/{epoch}", compare_compile=True)
        )
    done: Future[Verdict] = Future()
    done.set_result(
        Verdict(status="infrastructure", reason="server", log=attempt.error)
        if _unserved(attempt)
        else attempt.final
    )
    return done


def for_admission(params: Params) -> Params:
    """The same parameters without the window of eager times: whether a task is sound does not depend on which ones are trained on."""
    return params.model_copy(update={"data": params.data.model_copy(update={"eager_seconds": (1e-9, 1e9)})})


SOUND = ("", "eager_time", "infrastructure")
"""Admission's answers that say nothing against a task's soundness."""


def _degenerate(admission: Admission) -> str:
    return "" if admission.reason in SOUND else admission.reason


def _spend(out: Path, what: str, seconds: float) -> None:
    """Add to the seconds that the device was held."""
    file = out / "cost.json"
    spent: dict[str, float] = read_json(file) if file.is_file() else {}
    write_json(file, spent | {what: round(spent.get(what, 0.0) + seconds, 3)})


def _result(task: KernelTask, attempts: list[Trajectory], verdict: Verdict, degenerate: str) -> TaskResult:
    return TaskResult(
        task_id=task.task_id,
        name=task.name,
        ops=task.ops,
        level=task.level,
        status=verdict.status,
        reason=verdict.reason,
        milestone=verdict.milestone,
        seconds=verdict.seconds,
        speedup=verdict.speedup,
        attempts=tuple(
            Attempt(
                status="infrastructure" if _unserved(attempt) else attempt.final.status,
                reward=attempt.reward,
                turns=len(attempt.turns),
                finish_reason=attempt.finish_reason,
            )
            for attempt in attempts
        ),
        source=task.code,
        files=attempts[0].files,
        evidence=verdict.evidence,
        degenerate=degenerate,
    )
