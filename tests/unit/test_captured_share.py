"""The figures that compare a policy with a search of random schedules."""

import itertools
import math

import pytest
from captured_share import (
    WRONG,
    Attainable,
    TaskSearch,
    attainable_log,
    best_fixed_row,
    best_fixed_schedule,
    captured_share,
    equivalence_text,
    expected_best,
    policy_row,
    search_equivalence,
    share_rows,
    share_text,
)
from hypothesis import given
from hypothesis import strategies as st

from components.evaluation.metrics import summarise
from components.evaluation.results import Attempt, Evaluation, Measurement, TaskResult
from components.judge.verdict import Ratio, Speedup

LOG2 = math.log(2)


def correct(eager: float) -> Measurement:
    return Measurement(status="correct", eager=eager)


BAD = Measurement(status="wrong_output")
LOST = Measurement(status="infrastructure")


def task(number: int, first: list[Measurement], second: list[Measurement | None]) -> TaskSearch:
    names = tuple(f"k{index}" for index in range(len(first)))
    return TaskSearch(
        task_id=f"t{number}",
        kernels=names,
        first=dict(zip(names, first, strict=True)),
        second={name: found for name, found in zip(names, second, strict=True) if found is not None},
    )


# Task 0: schedule 1 is chosen (4.0) and reported with 2.0. Task 1: schedule 0 is chosen (2.0), reported with
# 4.0; schedule 1 is wrong. Task 2: every schedule is slower than eager, so eager stays.
TASKS = (
    task(0, [correct(2.0), correct(4.0), correct(1.0)], [correct(2.0), correct(2.0), None]),
    task(1, [correct(2.0), BAD, correct(1.0)], [correct(4.0), None, correct(1.0)]),
    task(2, [correct(0.5), correct(0.5), BAD], [correct(0.5), correct(0.25), None]),
)
FOUND = Attainable(
    schedules=({"style": "a"}, {"style": "b"}, {"style": "c"}),
    space=12,
    tasks=TASKS,
    left_out=0,
    judgements=15,
    errors=0,
)


def result(number: int, first: Measurement | None, final: float | None) -> TaskResult:
    ratio = None if final is None else Ratio(estimate=final, low=final, high=final)
    return TaskResult(
        task_id=f"t{number}",
        status="correct" if final is not None else "wrong_output",
        speedup=Speedup(eager=ratio),
        attempts=(Attempt(status="correct", reward=1, first=first),),
    )


def evaluation(*results: TaskResult) -> Evaluation:
    return Evaluation(
        suite="held-out",
        suite_digest="0",
        policy="p",
        policy_digest="1",
        device="cpu",
        precision="strict-fp32",
        epoch="e",
        seed=0,
        tasks=results,
        overall=summarise(results),
        levels={},
        errors=0,
    )


def test_attainable_is_chosen_on_the_first_and_reported_on_the_second_measurement() -> None:
    assert [attainable_log(one.outcomes()) for one in TASKS] == pytest.approx([LOG2, 2 * LOG2, 0])


def test_eager_stays_where_no_schedule_is_correct_or_none_was_measured() -> None:
    assert attainable_log([(WRONG, 0.0), (WRONG, 0.0)]) == attainable_log([]) == 0


def test_captured_share_of_three_tasks() -> None:
    """Logs of the first answers: 1, -1 and 0 times log 2 (the last is wrong); attainable are 1, 2 and 0."""
    row = policy_row(
        "p", evaluation(result(0, correct(2), 4), result(1, correct(0.5), 2), result(2, BAD, 1)), FOUND
    )
    assert row.captured_share == pytest.approx(0.0)
    assert row.geomean == pytest.approx(1.0)
    # The final answers are 2, 1 and 0 times log 2.
    assert row.gain_per_turn == pytest.approx((2 + 1 + 0) * LOG2 / 3)
    assert (row.tasks, row.schedules, row.search_equivalence) == (3, 3, 0)


def test_a_share_may_be_above_one_and_has_an_interval_around_it() -> None:
    share, interval = captured_share([(2.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
    assert share == pytest.approx(6 / 4)
    assert interval.low is not None and interval.high is not None
    assert 0.5 <= interval.low < 1.5 < interval.high <= 3


def test_nothing_attainable_gives_no_share() -> None:
    share, interval = captured_share([(0.3, 0.0)])
    assert share is None and interval.low is None
    assert captured_share([])[0] is None


def test_tasks_on_which_the_judge_failed_and_tasks_without_a_search_are_left_out() -> None:
    found = evaluation(result(0, correct(2), 2), result(1, LOST, 2), result(9, correct(9), 9))
    row = policy_row("p", found, FOUND)
    assert (row.tasks, row.captured_share, row.gain_per_turn) == (1, pytest.approx(1.0), pytest.approx(0.0))
    assert policy_row("old", evaluation(result(0, None, 2)), FOUND).captured_share is None


def test_best_fixed_schedule_is_chosen_on_first_and_reported_on_second_measurements() -> None:
    """Means of the first logs: (1 + 1 - 1), (2 + 0 - 1) and (0 + 0 + 0) thirds of log 2; the first of equals.

    Its second measurements are 1, 2 and -1 times log 2, of attainable 1, 2 and 0.
    """
    assert best_fixed_schedule(TASKS, 3) == 0
    row = best_fixed_row(FOUND)
    assert row is not None and row.choices == {"style": "a"}
    assert row.captured_share == pytest.approx((1 + 2 - 1) / 3)
    assert (
        best_fixed_schedule([], 0) is None and best_fixed_row(FOUND.model_copy(update={"tasks": ()})) is None
    )


def test_a_kernel_on_which_the_judge_failed_is_neither_wrong_nor_chosen() -> None:
    one = task(0, [LOST, correct(3), correct(2)], [None, LOST, correct(2)])
    assert one.outcomes() == [(LOG2, LOG2)]
    assert best_fixed_schedule([one], 3) == 1, "its first measurement was made"


def test_the_expected_best_of_two_among_three() -> None:
    """Subsets of ranks {0, 1}, {0, 2} and {1, 2} report 1, 1 and 5."""
    outcomes = [(3.0, 1.0), (2.0, 5.0), (1.0, 9.0)]
    assert expected_best(outcomes, 4) == pytest.approx([0, 15 / 3, 7 / 3, 1, 1])
    assert expected_best([], 2) == pytest.approx([0, 0, 0])


@given(
    st.lists(
        st.tuples(st.floats(-3, 3) | st.just(WRONG), st.floats(-3, 3)),
        max_size=7,
        unique_by=lambda one: one[0],
    ),
    st.integers(1, 8),
)
def test_the_expected_best_is_the_mean_over_all_subsets(
    outcomes: list[tuple[float, float]], count: int
) -> None:
    outcomes = [(first, 0.0 if first == WRONG else second) for first, second in outcomes]
    size = min(count, len(outcomes))
    subsets = list(itertools.combinations(outcomes, size))
    mean = math.fsum(attainable_log(subset) for subset in subsets) / len(subsets)
    assert expected_best(outcomes, count)[count] == pytest.approx(mean, abs=1e-9)


def test_search_equivalence_is_the_smallest_number_that_reaches_the_mean() -> None:
    searches = [[(3.0, 3.0), (2.0, 2.0), (1.0, 1.0)], [(WRONG, 0.0), (2.0, 2.0), (WRONG, 0.0)]]
    means = list((expected_best(searches[0], 3) + expected_best(searches[1], 3)) / 2)
    assert means == sorted(means)
    assert [search_equivalence(searches, mean, 3) for mean in means] == [0, 1, 2, 3]
    assert search_equivalence(searches, means[1] + 0.01, 3) == 2
    assert search_equivalence(searches, means[3] + 0.01, 3) is None


def test_rows_name_evaluations_and_the_best_fixed_schedule() -> None:
    first, fixed = share_rows({"after": evaluation(result(0, correct(9), 9))}, FOUND)
    assert (first.name, fixed.name) == ("after", "best fixed schedule")
    assert equivalence_text(first) == ">3"
    assert share_text(fixed).startswith("0.67 [")
