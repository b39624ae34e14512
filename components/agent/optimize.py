"""Optimise one module: several trajectories, the best kernels of them measured anew, and an honest answer.

The figure in the answer selects nothing: the trajectories' own verdicts choose a few kernels, a second measurement
chooses one of those, and a third, in fresh runners, is what is reported.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from components.agent.policies import Policy
from components.agent.rollout import RolloutRequest
from components.agent.trajectory import Trajectory
from components.bootstrap.canonicalize import canonicalize
from components.core.config import Params
from components.core.errors import UserError
from components.core.files import digest_json
from components.core.progress import Progress
from components.core.task import KernelTask
from components.judge.pool import Candidate, Job, JudgePool
from components.judge.verdict import Admission, Verdict

FINALISTS = 3
"""Kernels that are measured a second time."""
COMPACT_ATTEMPTS, FULL_ATTEMPTS = 24, 4
"""Default number of trajectories, by the policy's prompt."""
FULL_TURNS = 30
"""Default number of turns of one trajectory with the full prompt."""
TEMPERATURE = 1.0
SHORT_SECONDS = 2e-5
UNSURE = "_does_not_matter"
NOT_LEARNED = "The module was not recognised as a chain of the operators that this policy has learned; a larger policy (--policy) is the one to ask."
UNJUDGEABLE = {
    "zeros_pass": "an output of zeros would pass as right",
    "mean_passes": "a constant would pass as right",
    "seeds_agree": "its output does not depend on its inputs",
    "half_precision_passes": "half precision would pass as right",
    "first_input_passes": "returning the input unchanged would pass as right",
    "untouched_parameters_pass": "its parameters make no difference",
    "not_deterministic": "it gives different outputs for equal inputs (dropout and batch norm belong in evaluation mode)",
    "not_finite": "its output is not finite",
    "no_float_output": "it has no output of floating point",
}


class Bench(JudgePool, Protocol):
    """A judge pool that can say whether a task is fit for it, such as `LocalPool`."""

    def admit(self, code: str) -> Future[Admission]: ...


@dataclass(frozen=True)
class SearchBudget:
    """How hard to search."""

    attempts: int
    """Trajectories."""
    turns: int
    """Turns of one trajectory."""
    seconds: float | None = None
    """Time after which no turn begins; None is no limit."""


def search_budget(params: Params, attempts: int = 0, turns: int = 0, seconds: float = 0) -> SearchBudget:
    """Return the budget that the user has set; 0 stands for what suits the policy's prompt, or for no time limit."""
    compact = params.policy.prompt == "compact"
    return SearchBudget(
        attempts or (COMPACT_ATTEMPTS if compact else FULL_ATTEMPTS),
        turns or (params.evaluation.max_turns if compact else FULL_TURNS),
        seconds or None,
    )


class RecordingPool:
    """A judge pool that remembers which candidate got which verdict: the best one may not be a trajectory's last."""

    def __init__(self, pool: JudgePool):
        self.pool = pool
        self.lock = threading.Lock()
        self.asked: dict[Candidate, Future[Verdict]] = {}

    def prepare(self) -> None:
        self.pool.prepare()

    def submit(self, job: Job) -> Future[Verdict]:
        with self.lock:
            self.asked[job.candidate] = future = self.pool.submit(job)
        return future

    @property
    def judged(self) -> dict[Candidate, Verdict]:
        """The verdicts that there are by now."""
        with self.lock:
            done = {
                candidate: future
                for candidate, future in self.asked.items()
                if future.done() and not future.cancelled()
            }
        return {candidate: future.result() for candidate, future in done.items()}

    def drop(self) -> None:
        self.pool.drop()

    def close(self) -> None:
        self.pool.close()


@dataclass(frozen=True)
class Outcome:
    """`verdict` is the reported measurement of `files`, None when no correct kernel was found; `notes` are for people."""

    task: KernelTask
    found: bool
    verdict: Verdict | None
    files: dict[str, str]
    trajectories: tuple[Trajectory, ...]
    judged: tuple[Verdict, ...]
    """One verdict for each different candidate."""
    notes: tuple[str, ...]
    seconds: float

    @property
    def turns(self) -> int:
        return sum(len(trajectory.turns) for trajectory in self.trajectories)


def admitted_task(params: Params, task: KernelTask, origin: str, pool: Bench) -> tuple[KernelTask, list[str]]:
    """The task with what the judge found out about it, and notes; UserError when the judge could not tell right from wrong.

    `pool` must have been made for params with `any_time`, so that the module may take as long as it likes.
    """
    admission = pool.admit(task.code).result()
    detail = " ".join(str(admission.evidence.get("detail", "")).split())
    if admission.reason == "infrastructure":
        raise UserError(f"{origin}: the judge failed ({detail}); run cuda-agent doctor.")
    if admission.reason == "does_not_run":
        raise UserError(
            f"{origin}: the module does not run by itself ({detail}); mend it: it may import torch, and nothing of your own."
        )
    notes = []
    if not admission.admitted and not admission.reason.endswith(UNSURE):
        why = UNJUDGEABLE.get(admission.reason, admission.reason)
        raise UserError(
            f"{origin}: the judge could not tell a wrong kernel from a right one: {why}; give other inputs or another module."
        )
    if admission.reason.endswith(UNSURE):
        notes.append(
            f"{admission.reason.removesuffix(UNSURE).replace('_', ' ', 1)} makes no difference to the output, so nothing about it was checked."
        )
    if admission.evidence["eager_seconds"] < SHORT_SECONDS:
        notes.append(
            f"One call takes {admission.evidence['eager_seconds'] * 1e6:.1f} us in eager: overhead of the call dominates, larger inputs would be more telling."
        )
    return task.model_copy(update={"evidence": admission.evidence}), notes


def optimize(
    policy: Policy,
    task: KernelTask,
    pool: Bench,
    budget: SearchBudget,
    *,
    origin: str,
    progress: Progress,
) -> Outcome:
    """Search for the fastest verified kernel for `task`; `origin` names the module in messages.

    The same search finds its verdicts in the judge's journal, so that an interrupted one continues.
    """
    begun, params = time.monotonic(), policy.params
    task, notes = admitted_task(params, task, origin, pool)
    if params.policy.prompt == "compact" and canonicalize(task.code) is None:
        notes.append(NOT_LEARNED)
    epoch = digest_json([task.task_id, policy.version, str(budget.turns), str(params.seed)])[:16]
    recorder = RecordingPool(pool)
    trajectories = policy.sample(
        RolloutRequest(
            tasks=[task] * budget.attempts,
            params=params,
            pool=recorder,
            epoch=f"optimize/{epoch}",
            seed=params.seed,
            max_turns=budget.turns,
            max_new_tokens=params.evaluation.max_new_tokens,
            temperature=TEMPERATURE,
            deadline=None if budget.seconds is None else begun + budget.seconds,
            shorten_history=True,
            on_progress=lambda done, total: progress.update(
                "attempts", done, total, correct=float(len(_correct(recorder)))
            ),
        )
    )
    failed = [trajectory.error for trajectory in trajectories if trajectory.finish_reason == "server"]
    if (
        failed
        and len(failed) == len(trajectories)
        and not any(trajectory.turns for trajectory in trajectories)
    ):
        raise UserError(f"--policy: {failed[0]}; mend the server or give another policy.")
    if failed:
        notes.append(
            f"The policy's server failed in {len(failed)} of {len(trajectories)} attempts: {failed[0]}."
        )
    broken = sum(verdict.status == "infrastructure" for verdict in recorder.judged.values())
    if broken:
        notes.append(
            f"The judge itself failed on {broken} candidates; they count as neither right nor wrong."
        )

    finalists = sorted(_correct(recorder).items(), key=lambda item: -_speed(item[1]))[:FINALISTS]
    again: dict[Candidate, Verdict] = {}
    for number, (candidate, _) in enumerate(finalists):
        progress.update("measuring anew", number, len(finalists) + 1)
        again[candidate] = pool.submit(
            Job(task, candidate, f"evaluation/choice/{epoch}", compare_compile=True)
        ).result()
    chosen = max(
        (item for item in again.items() if item[1].status == "correct"),
        key=lambda item: _speed(item[1]),
        default=None,
    )
    verdict = None
    if chosen is not None:
        verdict = pool.submit(
            Job(task, chosen[0], f"evaluation/reported/{epoch}", compare_compile=True)
        ).result()
        progress.update("measuring anew", len(finalists) + 1, len(finalists) + 1)
    eager = verdict.speedup.eager if verdict is not None and verdict.status == "correct" else None
    return Outcome(
        task=task,
        found=verdict is not None and eager is not None and verdict.milestone >= 2 and eager.low > 1,
        verdict=verdict,
        files=dict(chosen[0].files) if chosen is not None else {},
        trajectories=tuple(trajectories),
        judged=tuple(recorder.judged.values()),
        notes=tuple(notes),
        seconds=time.monotonic() - begun,
    )


def _correct(recorder: RecordingPool) -> dict[Candidate, Verdict]:
    return {
        candidate: verdict for candidate, verdict in recorder.judged.items() if verdict.status == "correct"
    }


def _speed(verdict: Verdict) -> float:
    return verdict.speedup.eager.estimate if verdict.speedup.eager is not None else 0.0
