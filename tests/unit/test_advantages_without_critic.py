"""Advantages without a critic against formulas written one number at a time, and their properties.

The second implementation shares no code with the first.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from components.training.advantages import leave_one_out


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[str], list[float]]:
    """Return tasks and the rewards of their trajectories."""
    count = draw(st.integers(1, 9))
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tasks = [str(task) for task in source.integers(0, draw(st.integers(1, 4)), count)]
    return tasks, source.normal(size=count).tolist()


def expected_leave_one_out(rewards: Sequence[float], tasks: Sequence[str]) -> list[float]:
    advantages = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and tasks[j] == tasks[i]]
        advantages.append(reward - float(np.mean(others)) if others else 0.0)
    return advantages


@settings(max_examples=100)
@given(groups())
def test_the_baseline_is_the_mean_of_the_other_samples(data: tuple[list[str], list[float]]) -> None:
    tasks, rewards = data
    np.testing.assert_allclose(
        leave_one_out(rewards, tasks), expected_leave_one_out(rewards, tasks), atol=1e-12
    )


@settings(max_examples=60)
@given(groups(), st.integers(0, 2**32 - 1))
def test_the_order_of_the_samples_and_of_the_other_tasks_does_not_matter(
    data: tuple[list[str], list[float]], seed: int
) -> None:
    tasks, rewards = data
    order = np.random.default_rng(seed).permutation(len(tasks)).tolist()
    found = leave_one_out(rewards, tasks)
    shuffled = leave_one_out([rewards[i] for i in order], [tasks[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place] == pytest.approx(found[i], abs=1e-12)
    alone = [i for i, task in enumerate(tasks) if task == tasks[0]]
    part = leave_one_out([rewards[i] for i in alone], [tasks[0]] * len(alone))
    assert part == [found[i] for i in alone]


@settings(max_examples=60)
@given(groups())
def test_advantages_of_a_task_sum_to_zero_and_its_level_does_not_count(
    data: tuple[list[str], list[float]],
) -> None:
    tasks, rewards = data
    found = leave_one_out(rewards, tasks)
    for task in set(tasks):
        own = [advantage for advantage, other in zip(found, tasks, strict=True) if other == task]
        assert math.fsum(own) == pytest.approx(0.0, abs=1e-12)
    raised = [reward + 10 * int(task) for reward, task in zip(rewards, tasks, strict=True)]
    np.testing.assert_allclose(leave_one_out(raised, tasks), found, atol=1e-10)


@given(st.floats(-3, 3, allow_nan=False), st.integers(1, 20))
@example(0.1, 3)  # the mean of three times 0.1 is not 0.1
def test_equal_rewards_give_exactly_zero(reward: float, samples: int) -> None:
    assert leave_one_out([reward] * samples, ["a"] * samples) == [0.0] * samples


def test_the_gradient_of_a_bandit_is_unbiased() -> None:
    """Two answers with probability p and 1 - p: the expected p gradient is the difference of their rewards.

    A baseline that includes the sample itself would make it (n - 1) / n of that.
    """
    p, rewards, samples = 0.3, (3.0, -1.0), 3
    total = 0.0
    for outcome in range(2**samples):
        answers = [outcome >> i & 1 for i in range(samples)]
        probability = math.prod(p if answer == 0 else 1 - p for answer in answers)
        scores = [1 / p if answer == 0 else -1 / (1 - p) for answer in answers]  # of log probability, by p
        advantages = leave_one_out([rewards[answer] for answer in answers], ["a"] * samples)
        total += probability * sum(a * s for a, s in zip(advantages, scores, strict=True)) / samples
    assert total == pytest.approx(rewards[0] - rewards[1])


def test_a_task_with_one_sample_has_no_advantage() -> None:
    assert leave_one_out([3.0, 1.0, 2.0], ["a", "b", "a"]) == [1.0, 0.0, -1.0]
    assert leave_one_out([], []) == []
