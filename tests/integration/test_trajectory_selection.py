"""Which tasks a step samples, and which trajectories the stages learn from."""

import dataclasses
from pathlib import Path

import pytest
from training_fixtures import params, stage

from components.agent.trajectory import ToolCall, Trajectory, Turn
from components.judge.verdict import Verdict
from components.training.critic import StoredRow, split_by_task
from components.training.fine_tuning import has_loop, rejection_reason, select
from components.training.rejection import schedule
from components.training.rollouts import choose_tasks


def call(text: str, valid: bool = True) -> ToolCall:
    return ToolCall("Write", {"content": text}, "ok", valid)


def example(
    task: str, reward: float, *calls: ToolCall, ids: tuple[int, ...] = (1, 2, 3), finish: str = "stop"
) -> Trajectory:
    verdict = Verdict(status="correct" if reward > 0 else "build_failed")
    return Trajectory(
        task,
        ids,
        (0, *(1 for _ in ids[1:])),
        (0.0,) * len(ids),
        (Turn("", calls),),
        (verdict,),
        reward,
        finish,
        "v",
    )


def test_trajectories_without_token_ids_are_told_apart_by_their_texts() -> None:
    """Those of a chat server have no ids."""
    made = [example("a", 3, call("x"), ids=()) for _ in range(3)]
    made[1] = dataclasses.replace(made[1], turns=(Turn("another answer", (call("y"),)),))
    kept, reasons = select(made, params("rejection.per_task=3").rejection)
    assert kept == made[:2] and reasons == {"kept": 2, "duplicate": 1}


def test_rejection_counts_every_trajectory_under_one_reason() -> None:
    limits = params("rejection.per_task=1").rejection
    trajectories = [
        example("a", -1),
        example("a", 1, call("x"), ids=(1, 2)),
        example("a", 3, call("y"), ids=(1, 3)),
        example("a", 3, call("y"), ids=(1, 3)),
        example("b", 2, call("x"), call("x"), ids=(1, 4)),
        example("b", 2, call("x", valid=False), ids=(1, 5)),
        example("b", 2, call("x"), ids=(1, 6), finish="length"),
        example("c", 1, call("x"), ids=(1, 7)),
    ]
    kept, reasons = select(trajectories, limits)
    assert [(t.task_id, list(t.ids)) for t in kept] == [("a", [1, 3]), ("c", [1, 7])]
    assert reasons == {
        "kept": 2,
        "low_reward": 1,
        "over_task_limit": 1,
        "duplicate": 1,
        "redundant_call": 1,
        "invalid_call": 1,
        "length_clipped": 1,
    }


@pytest.mark.parametrize(
    ("reward", "valid", "reason"), [(-1, True, "low_reward"), (1, False, "invalid_call"), (1, True, "")]
)
def test_a_call_with_half_of_a_surrogate_pair_has_the_reason_of_any_other(
    reward: float, valid: bool, reason: str
) -> None:
    made = example("a", reward, call("\ud800", valid), call("x"))
    assert rejection_reason(made, params().rejection) == reason


@pytest.mark.parametrize(
    ("calls", "loops"),
    [("ab", False), ("abcb", False), ("aa", True), ("abab", True), ("abcbdb", False), ("abcc", True)],
)
def test_measuring_again_after_an_edit_is_no_loop(calls: str, loops: bool) -> None:
    assert has_loop(list(calls)) is loops


def test_every_batch_holds_its_share_of_demonstrations() -> None:
    kept = [example("t", 1, ids=(1, i)) for i in range(2, 12)]
    limits = params("rejection.replay_share=0.5", "rejection.batch=8", "rejection.epochs=2").rejection
    batches = schedule(kept, limits, lambda count: [((0, 0), (0, 1))] * count, seed=0)
    assert [len(batch) for batch in batches] == [8, 8, 4, 8, 8, 4]
    assert all(sum(ids == (0, 0) for ids, _ in batch) * 2 == len(batch) for batch in batches)


def test_no_task_is_on_both_sides_of_the_critics_split() -> None:
    rows = [StoredRow(Path("step"), i, f"task-{i % 10}", 1.0, 3, 2) for i in range(40)]
    taught, held_out = split_by_task(rows, 0.2, seed=1)
    assert {t.task_id for t in taught}.isdisjoint({t.task_id for t in held_out})
    assert (len(taught), len(held_out)) == (32, 8)


def test_tasks_come_in_shuffled_passes_that_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    tasks = stage(tmp_path, "warmup").tasks()
    steps = [choose_tasks(tasks, 5, seed=3, step=step) for step in range(12)]
    names = [task.task_id for step in steps for task in step]
    for first in range(0, 60, 12):
        assert len(set(names[first : first + 12])) == 12
    assert names[:12] != names[12:24]
    assert choose_tasks(tasks, 5, seed=3, step=7) == steps[7]
