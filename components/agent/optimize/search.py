"""Search for a kernel that computes a user's module faster than PyTorch does.

A policy is sampled for several trajectories, which are attempts at the module. The judge's verdicts within
the trajectories choose a few kernels, a second measurement of each chooses one of these kernels, and a third
measurement of this kernel, in fresh processes, is reported. The reported speed-up is thus not biased upwards
by the choice of the best kernel.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from components.agent.episode import RolloutRequest
from components.agent.policies import Policy
from components.agent.trajectory import Trajectory
from components.core.errors import InfrastructureError, UserError, refuse
from components.core.files import digest_json
from components.core.progress import Progress
from components.core.task import KernelTask
from components.judge.pool.local_pool import Candidate, Job, JudgePool, LocalPool
from components.judge.verdict import UNSURE, Verdict

# Largest number of kernels that are measured a second time.
FINALISTS = 3
# Default number of trajectories of policies whose `policy.prompt` is compact, and of those with full.
COMPACT_ATTEMPTS, FULL_ATTEMPTS = 24, 4
# Default limit of the turns of one trajectory for policies with the full prompt.
FULL_TURNS = 30
TEMPERATURE = 1.0
SHORT_SECONDS = 2e-5  # eager time of a call below which call overhead dominates
NOT_LEARNED = (
    "The module was not recognised as a chain of the operators that this policy knows; "
    "a larger policy (--policy) is the one to ask."
)
UNJUDGEABLE = {
    "zeros_pass": "an output of zeros would pass as right",
    "mean_passes": "a constant would pass as right",
    "seeds_agree": "its output does not depend on its inputs",
    "half_precision_passes": "half precision would pass as right",
    "float8_passes": "float8 would pass as right",
    "first_input_passes": "returning the input unchanged would pass as right",
    "untouched_parameters_pass": "its parameters make no difference",
    "not_deterministic": "it gives different outputs for equal inputs (dropout and batch norm belong in "
    "evaluation mode)",
    "not_finite": "its output is not finite",
    "no_float_output": "it has no output of floating point",
}


@dataclass(frozen=True)
class Outcome:
    """Result of an optimisation, which is a search for a kernel that makes the module of `task` faster.

    `files` are the files of the chosen kernel by workspace path, and `verdict` is the verdict on them that is
    reported. If no kernel was correct when it was measured a second time, `files` is empty and `verdict` is
    None. `found` is True if the kernel is faster than eager PyTorch (`verdict.milestone` is 2 or 3, for which
    the speed-up must be above 1.05) and the lower end of the speed-up's interval is above 1. `trajectories`
    are the records of the policy's attempts. `judged` holds one verdict for each different candidate (a
    kernel with its files), `notes` are sentences for the user, and `seconds` is the duration of the search.
    """

    task: KernelTask
    found: bool
    verdict: Verdict | None
    files: dict[str, str]
    trajectories: tuple[Trajectory, ...]
    judged: tuple[Verdict, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def turns(self) -> int:
        return sum(len(trajectory.turns) for trajectory in self.trajectories)


def admitted_task(task: KernelTask, origin: str, pool: LocalPool) -> tuple[KernelTask, list[str]]:
    """Check that the judge can judge a user's task, and return the task and sentences for the user.

    The returned task has what the check recorded, such as shapes and times, in `evidence`. `origin` names the
    module in messages. `pool` is expected to have parameters from `judge.pool.local_pool.with_any_duration`,
    with which a task is accepted whatever its duration is. A task with an input or a parameter that has no
    effect on the output is accepted, and a sentence says so. Raises UserError if the judge fails, if the
    module does not run or takes too much memory to be judged, or if the judge could not distinguish a wrong
    kernel from a correct one for a reason other than such an input.
    """
    admission = pool.check(task.code).result()
    if admission.admitted:
        admission = pool.admit(task.code).result()
    evidence = admission.evidence
    detail = " ".join(str(evidence.get("detail", "")).split())
    is_unsure = admission.reason.endswith(UNSURE)
    refuse(
        (
            admission.reason == "infrastructure",
            f"{origin}: the judge failed ({detail}); run cuda-agent doctor.",
        ),
        (
            admission.reason == "does_not_run",
            f"{origin}: the module does not run by itself ({detail}); "
            "fix it: it may import torch, and nothing of your own.",
        ),
        (
            admission.reason == "too_large",
            f"{origin}: the judge cannot measure the module here ({detail}); give smaller inputs.",
        ),
        (
            not admission.admitted and not is_unsure,
            f"{origin}: the judge could not tell a wrong kernel from a right one: "
            f"{UNJUDGEABLE.get(admission.reason, admission.reason)}; give other inputs or another module.",
        ),
    )
    notes = []
    if is_unsure:
        name = admission.reason.removesuffix(UNSURE).replace("_", " ", 1)
        notes.append(f"{name} makes no difference to the output, so nothing about it was checked.")
    if evidence["eager_seconds"] < SHORT_SECONDS:
        notes.append(
            f"One call takes {evidence['eager_seconds'] * 1e6:.1f} us in eager: overhead of the call "
            "dominates, larger inputs would be more telling."
        )
    return task.model_copy(update={"evidence": evidence}), notes


def find_kernel(
    policy: Policy,
    task: KernelTask,
    pool: LocalPool,
    *,
    attempts: int = 0,
    turns: int = 0,
    seconds: float = 0,
    origin: str,
    progress: Progress,
) -> Outcome:
    """Sample `policy` for kernels for `task`, and return the outcome with the fastest correct kernel.

    `attempts` trajectories are sampled, each with at most `turns` turns, none of which begins later than
    `seconds` after the start of the search. If `attempts` or `turns` is 0, a default is used that depends on
    the parameter `policy.prompt` (compact or full). If `seconds` is 0, there is no limit of time. `origin`
    names the module in messages. If an interrupted search is repeated, the judge takes the verdicts that it
    has already reached from its journal, the store of verdicts on disk. Raises UserError if the task cannot
    be judged, if the judge fails on every candidate, or if the policy's server never answers, and
    InfrastructureError if the judge fails when it measures the best kernels again.
    """
    begun, params = time.monotonic(), policy.params
    task, notes = admitted_task(task, origin, pool)
    compact = params.policy.prompt == "compact"
    if not policy.knows(task.code):
        notes.append(NOT_LEARNED)
    attempts = attempts or (COMPACT_ATTEMPTS if compact else FULL_ATTEMPTS)
    turns = turns or (params.evaluation.max_turns if compact else FULL_TURNS)
    epoch = digest_json([task.task_id, policy.version, str(turns), str(params.seed)])[:16]
    judged: dict[Candidate, Verdict] = {}
    trajectories = policy.sample(
        RolloutRequest(
            tasks=[task] * attempts,
            params=params,
            pool=pool,
            epoch=f"optimize/{epoch}",
            seed=params.seed,
            max_turns=turns,
            max_new_tokens=params.evaluation.max_new_tokens,
            temperature=TEMPERATURE,
            deadline=begun + seconds if seconds else None,
            shorten_history=True,
            on_progress=lambda done, total: progress.update(
                "attempts", done, total, correct=float(len(_correct(judged)))
            ),
            on_verdict=judged.__setitem__,
        )
    )
    notes += _failures(trajectories, judged, origin)
    chosen, verdict = _measure_again(task, judged, pool, epoch, progress)
    eager = verdict.speedup.eager if verdict is not None and verdict.status == "correct" else None
    return Outcome(
        task=task,
        found=verdict is not None and eager is not None and verdict.milestone >= 2 and eager.low > 1,
        verdict=verdict,
        files=dict(chosen.files) if chosen is not None else {},
        trajectories=tuple(trajectories),
        judged=tuple(judged.values()),
        notes=tuple(notes),
        seconds=time.monotonic() - begun,
    )


def _failures(trajectories: list[Trajectory], judged: dict[Candidate, Verdict], origin: str) -> list[str]:
    """Return notes, which are sentences for the user, on failures of the policy's server and of the judge.

    `judged` has the verdict on each candidate (a kernel with its files), and `origin` names the user's module
    in messages. Raises UserError if the server answered no turn of any trajectory, or if the judge failed on
    every candidate.
    """
    notes = []
    failed = [trajectory.error for trajectory in trajectories if trajectory.finish_reason == "server"]
    if failed and len(failed) == len(trajectories) and not any(one.turns for one in trajectories):
        raise UserError(f"--policy: {failed[0]}; fix the server or give another policy.")
    if failed:
        notes.append(
            f"The policy's server failed in {len(failed)} of {len(trajectories)} attempts: {failed[0]}."
        )
    broken = [verdict for verdict in judged.values() if verdict.status == "infrastructure"]
    if broken:
        said = f"{broken[0].reason}: {broken[0].log[:300]}"
        if len(broken) == len(judged):
            raise UserError(f"{origin}: the judge failed on every candidate ({said}); run cuda-agent doctor.")
        notes.append(
            f"The judge itself failed on {len(broken)} candidates ({said}); they count as neither right nor "
            "wrong, and an attempt ends there."
        )
    return notes


def _measure_again(
    task: KernelTask,
    judged: dict[Candidate, Verdict],
    pool: JudgePool,
    epoch: str,
    progress: Progress,
) -> tuple[Candidate | None, Verdict | None]:
    """Choose the best of the kernels in `judged`, and return it with the verdict that is reported.

    `judged` has the verdict on each kernel so far. The `FINALISTS` fastest of the correct kernels are
    measured a second time. The fastest of them in this second measurement is chosen and measured a third
    time, and the third verdict is returned. The judge keeps the new verdicts under names that contain
    `epoch`. Returns (None, None) if no kernel is correct in the second measurement. Raises
    InfrastructureError if that is so because the judge failed, or if it failed in the third measurement.
    """

    def measure(candidate: Candidate, purpose: str) -> Verdict:
        return pool.submit(
            Job(task, candidate, f"evaluation/{purpose}/{epoch}", compare_compile=True)
        ).result()

    finalists = sorted(_correct(judged).items(), key=lambda item: -_speed(item[1]))[:FINALISTS]
    again: dict[Candidate, Verdict] = {}
    for number, (candidate, _) in enumerate(finalists):
        progress.update("measuring anew", number, len(finalists) + 1)
        again[candidate] = measure(candidate, "choice")
    if not (right := _correct(again)):
        _require_judge(again.values())
        return None, None
    chosen = max(right, key=lambda candidate: _speed(right[candidate]))
    reported = measure(chosen, "reported")
    _require_judge([reported])
    progress.update("measuring anew", len(finalists) + 1, len(finalists) + 1)
    return chosen, reported


def _require_judge(verdicts: Iterable[Verdict]) -> None:
    """Raise InfrastructureError if the judge itself failed to reach one of the verdicts."""
    for verdict in verdicts:
        if verdict.status == "infrastructure":
            raise InfrastructureError(
                "the judge failed when the best kernels were measured again "
                f"({verdict.reason}: {verdict.log[:300]})"
            )


def _correct(judged: dict[Candidate, Verdict]) -> dict[Candidate, Verdict]:
    # Episodes may add verdicts at the same time, so a copy is iterated.
    return {candidate: verdict for candidate, verdict in judged.copy().items() if verdict.status == "correct"}


def _speed(verdict: Verdict) -> float:
    return verdict.speedup.eager.estimate if verdict.speedup.eager is not None else 0.0
