"""Selection of the trajectories that a policy learns from by supervised fine-tuning.

A trajectory is kept if its reward is above rejection.min_reward, if it was not cut off at the length limit,
if it has no redundant or invalid tool calls (CUDA Agent paper, section 4.2), and if no trajectory before it
that is kept has the same tokens. Only the best rejection.per_task trajectories of each task are kept, because
easy tasks would dominate otherwise.
"""

from collections import Counter
from collections.abc import Sequence

from components.agent.trajectory import Trajectory
from components.core.files import digest_json
from components.core.stage_params import Rejection


def select(trajectories: Sequence[Trajectory], rejection: Rejection) -> tuple[list[Trajectory], Counter[str]]:
    """Return the trajectories to learn from, in their given order, and the number of trajectories by outcome.

    A trajectory is rejected for its `rejection_reason`, if an earlier one that was not rejected has the same
    token ids, or if its task has rejection.per_task better ones: with a higher reward, then a higher
    speed-up, then fewer tokens. The outcome is "kept" or the reason of the rejection: that of
    `rejection_reason`, such as "low_reward", or "duplicate" or "over_task_limit".
    """
    reasons: Counter[str] = Counter(kept=0)
    kept: dict[bytes, Trajectory] = {}  # by token ids
    for trajectory in trajectories:
        is_duplicate = bytes(trajectory.ids) in kept
        reason = rejection_reason(trajectory, rejection) or ("duplicate" if is_duplicate else "")
        if reason:
            reasons[reason] += 1
        else:
            kept[bytes(trajectory.ids)] = trajectory
    per_task: Counter[str] = Counter()
    for one in sorted(kept.values(), key=lambda one: (-one.earned, -_speedup(one), len(one.ids))):
        per_task[one.task_id] += 1
        if per_task[one.task_id] > rejection.per_task:
            reasons["over_task_limit"] += 1
            del kept[bytes(one.ids)]
    reasons["kept"] = len(kept)
    return list(kept.values()), reasons


def rejection_reason(trajectory: Trajectory, rejection: Rejection) -> str:
    """Return the reason why a trajectory is rejected, or "" if it may be learned from.

    The reasons are low_reward (at most rejection.min_reward), length_clipped (cut off at the length limit),
    invalid_call (a tool call that is not valid) and redundant_call (`has_loop`).
    """
    if trajectory.earned <= rejection.min_reward:
        return "low_reward"
    if trajectory.finish_reason == "length":
        return "length_clipped"
    calls = [call for turn in trajectory.turns for call in turn.calls]
    if any(not call.valid for call in calls):
        return "invalid_call"
    return "redundant_call" if has_loop([digest_json([call.name, call.arguments]) for call in calls]) else ""


def has_loop(calls: Sequence[str]) -> bool:
    """Return whether a call is repeated and no call was made for the first time in between.

    `calls` are the digests of all tool calls of a trajectory (name and arguments), in order.
    """
    latest_new = 0
    last: dict[str, int] = {}
    for index, call in enumerate(calls):
        if call not in last:
            latest_new = index
        elif latest_new <= last[call]:
            return True
        last[call] = index
    return False


def _speedup(trajectory: Trajectory) -> float:
    ratio = trajectory.final.speedup.eager
    return ratio.estimate if ratio is not None else 0.0
