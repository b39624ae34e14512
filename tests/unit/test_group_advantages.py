"""Advantages without a critic against formulas written one number at a time, and their properties.

The second implementation shares no code with the first.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from components.agent.trajectory import ToolCall, Trajectory, Turn
from components.judge.verdict import Ratio, Speedup, Verdict
from components.training.group_advantages import (
    leave_one_out,
    tasks_with_one_sample,
    token_advantages,
    turn_advantages,
    turn_of_token,
    turn_rewards,
)

FAILED = Verdict(status="build_failed")
INFRASTRUCTURE = Verdict(status="infrastructure")


def correct(eager: float, compiled: float = 1.0) -> Verdict:
    """Return the verdict on a correct candidate with these speed-ups over eager and torch.compile."""
    ratios = [Ratio(estimate=ratio, low=ratio, high=ratio) for ratio in (eager, compiled)]
    return Verdict(status="correct", speedup=Speedup(eager=ratios[0], compile=ratios[1]))


SLOW, FASTER, FASTEST = correct(0.5), correct(1.5), correct(1.5, 1.5)


def trajectory(
    task: str, turns: Sequence[Sequence[Verdict]], final: Verdict, reward: float, tokens: Sequence[int] = ()
) -> Trajectory:
    """Return a trajectory whose turns were given `turns`, one call for each verdict.

    `tokens` are the numbers of own tokens of the turns, by default 1, 2, 3 and so on.
    """
    counts = tokens or range(1, len(turns) + 1)
    mask = [0, 0]
    for number, count in enumerate(counts):
        mask += [0] * (number > 0) + [1] * count
    calls = [tuple(ToolCall("Bash", {}, "", verdicts=1) for _ in given) for given in turns]
    return Trajectory(
        task_id=task,
        ids=tuple(range(len(mask))),
        action_mask=tuple(mask),
        sampler_logprob=(0.0,) * len(mask),
        turns=tuple(Turn("", (ToolCall("Read", {}, ""), *made)) for made in calls),
        verdicts=(*(verdict for given in turns for verdict in given), final),
        reward=reward,
        finish_reason="stop",
        policy_version="",
    )


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[str], list[list[float]]]:
    """Return tasks and the rewards of the turns of each of their trajectories."""
    count = draw(st.integers(1, 9))
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tasks = [str(task) for task in source.integers(0, draw(st.integers(1, 4)), count)]
    return tasks, [source.normal(size=source.integers(1, 6)).tolist() for _ in range(count)]


def expected_leave_one_out(rewards: Sequence[float], tasks: Sequence[str]) -> list[float]:
    advantages = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and tasks[j] == tasks[i]]
        advantages.append(reward - float(np.mean(others)) if others else 0.0)
    return advantages


def expected_turn(
    rewards: Sequence[Sequence[float]], tasks: Sequence[str], gamma: float, i: int, t: int
) -> float:
    """G_it less the mean of G_jt over the other samples j of the task that reach turn t."""

    def future(j: int) -> float:
        return math.fsum(gamma ** (later - t) * rewards[j][later] for later in range(t, len(rewards[j])))

    others = [
        future(j) for j in range(len(rewards)) if j != i and tasks[j] == tasks[i] and t < len(rewards[j])
    ]
    return future(i) - math.fsum(others) / len(others) if others else 0.0


@settings(max_examples=100, deadline=None)
@given(groups())
def test_the_baseline_is_the_mean_of_the_other_samples(data: tuple[list[str], list[list[float]]]) -> None:
    tasks, rewards = data
    last = [own[-1] for own in rewards]
    np.testing.assert_allclose(leave_one_out(last, tasks), expected_leave_one_out(last, tasks), atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(groups(), st.sampled_from([0.0, 0.4, 0.9, 1.0]))
def test_a_turn_is_compared_with_the_samples_that_reach_it(
    data: tuple[list[str], list[list[float]]], gamma: float
) -> None:
    tasks, rewards = data
    found = turn_advantages(rewards, tasks, gamma)
    assert [len(advantages) for advantages in found] == [len(own) for own in rewards]
    for i, advantages in enumerate(found):
        for t, advantage in enumerate(advantages):
            assert advantage == pytest.approx(expected_turn(rewards, tasks, gamma, i, t), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(groups(), st.integers(0, 2**32 - 1))
def test_the_order_of_the_samples_and_of_the_other_tasks_does_not_matter(
    data: tuple[list[str], list[list[float]]], seed: int
) -> None:
    tasks, rewards = data
    order = np.random.default_rng(seed).permutation(len(tasks)).tolist()
    found = turn_advantages(rewards, tasks, 0.9)
    shuffled = turn_advantages([rewards[i] for i in order], [tasks[i] for i in order], 0.9)
    for place, i in enumerate(order):
        np.testing.assert_allclose(shuffled[place], found[i], atol=1e-12)
    alone = [i for i, task in enumerate(tasks) if task == tasks[0]]
    part = turn_advantages([rewards[i] for i in alone], [tasks[0]] * len(alone), 0.9)
    assert part == [found[i] for i in alone]


@settings(max_examples=60, deadline=None)
@given(groups())
def test_advantages_of_a_task_sum_to_zero_and_its_level_does_not_count(
    data: tuple[list[str], list[list[float]]],
) -> None:
    tasks, rewards = data
    last = [own[-1] for own in rewards]
    found = leave_one_out(last, tasks)
    for task in set(tasks):
        own = [advantage for advantage, other in zip(found, tasks, strict=True) if other == task]
        assert math.fsum(own) == pytest.approx(0.0, abs=1e-12)
    raised = [reward + 10 * int(task) for reward, task in zip(last, tasks, strict=True)]
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


def test_a_task_with_one_sample_has_no_advantage_and_is_counted() -> None:
    assert leave_one_out([3.0, 1.0, 2.0], ["a", "b", "a"]) == [1.0, 0.0, -1.0]
    assert tasks_with_one_sample(["a", "b", "a", "c"]) == 2
    assert leave_one_out([], []) == [] and turn_advantages([], [], 1.0) == []


def test_known_numbers_of_turns() -> None:
    # Returns with gamma 0.5: [1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4], [-1 + 0.5 * 3, 3] and [2].
    found = turn_advantages([[1.0, 2.0, 4.0], [-1.0, 3.0], [2.0]], ["a"] * 3, 0.5)
    assert found == [
        [pytest.approx(3.0 - (0.5 + 2.0) / 2), pytest.approx(4.0 - 3.0), 0.0],
        [pytest.approx(0.5 - (3.0 + 2.0) / 2), pytest.approx(3.0 - 4.0)],
        [pytest.approx(2.0 - (3.0 + 0.5) / 2)],
    ]


def test_runs_of_own_tokens_are_the_turns() -> None:
    assert turn_of_token([0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0]).tolist() == [0, 0, 1, 2, 2, 2]
    assert turn_of_token([1, 0, 1]).tolist() == [0, 1]
    assert turn_of_token([0, 0]).tolist() == []


@pytest.mark.parametrize(
    ("turns", "final", "reward", "expected"),
    [
        ([[FAILED], [SLOW, FASTER], [FASTEST]], FASTEST, 3.0, [-1, 2, 3]),
        ([[], [FASTEST], []], SLOW, 1.0, [0, 3, 1]),  # the files were changed after the last measurement
        ([[SLOW, FAILED], []], FASTER, 2.0, [-1, 2]),  # the last verdict of a turn counts
        ([[FASTER, INFRASTRUCTURE], [INFRASTRUCTURE], []], SLOW, 1.0, [2, 0, 1]),
        ([[FASTEST]], FAILED, -1.0, [-1]),  # the final verdict alone is the last turn's
    ],
)
def test_a_turn_earns_its_last_verdict_and_the_last_turn_the_trajectorys(
    turns: list[list[Verdict]], final: Verdict, reward: float, expected: list[float]
) -> None:
    assert turn_rewards(trajectory("a", turns, final, reward)) == expected


def test_the_bare_speed_up_is_a_reward_too() -> None:
    made = trajectory("a", [[FAILED], [correct(0.5)], []], correct(4.0), 2.0)
    assert turn_rewards(made, "speedup") == [-1.0, 0.5, 4.0]
    assert turn_rewards(made, "log_speedup") == [-1.0, math.log2(1.5), math.log2(5)]
    other = trajectory("a", [[]], Verdict(status="correct"), 1.0)  # its speed-up was not measured
    found = token_advantages([made, other], "group", 1.0, "speedup")
    assert found[0].tolist() == [5.0] * 6 and found[1].tolist() == [-5.0]


def test_an_empty_last_turn_leaves_its_reward_to_the_turn_before() -> None:
    made = trajectory("a", [[FAILED], [SLOW], []], FASTER, 2.0, tokens=(1, 2))
    assert turn_rewards(made) == [-1, 2]
    for turns in (made.turns[:1], (*made.turns, *made.turns)):
        with pytest.raises(ValueError, match=f"task a has {len(turns)} turns and 2 runs"):
            turn_rewards(dataclasses.replace(made, turns=turns))


def test_each_own_token_has_the_advantage_of_its_turn() -> None:
    batch = [
        trajectory("a", [[FAILED], [FASTER], []], FASTER, 2.0, tokens=(2, 1, 3)),
        trajectory("b", [[SLOW]], SLOW, 1.0, tokens=(4,)),
        trajectory("a", [[SLOW], []], FASTEST, 3.0, tokens=(1, 2)),
    ]
    # The rewards of the turns are [-1, 2, 2] and [1, 3], so the returns are [2, 3, 2] and [2.5, 3].
    found = token_advantages(batch, "turns", 0.5)
    returns = [[-1 + 0.5 * 2 + 0.25 * 2, 2 + 0.5 * 2, 2.0], [1 + 0.5 * 3, 3.0]]
    first = returns[0][0] - returns[1][0]
    assert [row.tolist() for row in found] == [
        [first] * 2 + [0.0] + [0.0] * 3,
        [0.0] * 4,
        [-first] + [0.0] * 2,
    ]
    assert {row.dtype for row in found} == {np.dtype(np.float32)}
    grouped = token_advantages(batch, "group", 0.5)
    assert [row.tolist() for row in grouped] == [[-1.0] * 6, [0.0] * 4, [1.0] * 3]
    for row, made in zip([*found, *grouped], [*batch, *batch], strict=True):
        assert len(row) == sum(made.action_mask)


@settings(max_examples=40, deadline=None)
@given(groups(), st.sampled_from([0.0, 0.5, 1.0]))
def test_with_one_turn_turns_and_group_are_the_same(
    data: tuple[list[str], list[list[float]]], gamma: float
) -> None:
    tasks, rewards = data
    batch = [trajectory(task, [[]], SLOW, own[0]) for task, own in zip(tasks, rewards, strict=True)]
    for one, other in zip(
        token_advantages(batch, "turns", gamma), token_advantages(batch, "group", gamma), strict=True
    ):
        assert np.array_equal(one, other)


def test_equal_rewards_within_each_task_give_no_advantage_at_all() -> None:
    batch = [
        trajectory(task, [[verdict], []], verdict, reward)
        for task, verdict, reward in (("a", FAILED, -1.0), ("b", FASTEST, 3.0))
        for _ in range(3)
    ]
    for mode in ("group", "turns"):
        assert not any(row.any() for row in token_advantages(batch, mode, 1.0))


def test_the_longest_trajectories_of_training_take_milliseconds() -> None:
    """150 turns in 131,072 tokens, 64 trajectories: the size of one step of the paper, divided by 16."""
    tokens = 131_072 // 150 - 1
    verdicts = [[SLOW], []] * 75
    batch = [trajectory(str(i // 8), verdicts, SLOW, float(i % 3), (tokens,) * 150) for i in range(64)]
    found = token_advantages(batch, "turns", 0.9)
    assert all(len(row) == 150 * tokens for row in found)
    # Only the final rewards differ, so an advantage grows by 1 / gamma from turn to turn.
    own = found[0].reshape(150, tokens)
    assert np.ptp(own, axis=1).max() == 0
    np.testing.assert_allclose(own[1:, 0] * np.float32(0.9), own[:-1, 0], rtol=1e-4, atol=1e-6)
