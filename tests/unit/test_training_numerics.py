"""Advantages, losses and batches against golden numbers and properties.

Golden numbers were computed with independent public implementations (verl, OpenRLHF); see the cases'
comments.
"""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from training_fixtures import token_means

from components.agent.trajectory import Trajectory
from components.judge.verdict import Verdict
from components.training.advantages import discounted_rewards, explained_variance, gae, row_gae, whiten
from components.training.batches import collate, make_batch, pack, plan, stream
from components.training.losses import (
    importance_weights,
    kl_k2,
    kl_k3,
    policy_loss_sum,
    value_loss_sum,
)
from components.training.networks import Critic

REWARDS = torch.tensor([[0.0, 0, 0, 0, 0, 1]])
VALUES = torch.tensor([[0.2, 0.4, 9, -7, 0.5, 0.7]])
MASK = torch.tensor([[1, 1, 0, 0, 1, 1]])


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1.0, 1.0, [0.8, 0.6, 0, 0, 0.5, 0.3]),
        (1.0, 0.95, [0.732713, 0.56075, 0, 0, 0.485, 0.3]),
        (0.99, 0.95, [0.705637, 0.541879, 0, 0, 0.47515, 0.3]),
        (1.0, 0.0, [0.2, 0.1, 0, 0, 0.2, 0.3]),
    ],
)
def test_gae_skips_observations(gamma: float, lam: float, expected: list[float]) -> None:
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma, lam)
    torch.testing.assert_close(advantages, torch.tensor([expected]), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, torch.where(MASK.bool(), advantages + VALUES, 0.0))


def test_gae_returns_are_golden() -> None:
    _, returns = gae(REWARDS, VALUES, MASK, 1.0, 0.95)
    torch.testing.assert_close(
        returns, torch.tensor([[0.932713, 0.96075, 0, 0, 0.985, 1]]), atol=1e-6, rtol=0
    )


def test_gae_without_observations_is_the_textbook_one() -> None:
    # SkyRL's test cases: rewards 1, 2, 3, values .5, 1, 1.5.
    rewards, values, mask = torch.tensor([[1.0, 2, 3]]), torch.tensor([[0.5, 1.0, 1.5]]), torch.ones(1, 3)
    torch.testing.assert_close(gae(rewards, values, mask, 0.5, 1.0)[1], torch.tensor([[2.75, 3.5, 3.0]]))
    torch.testing.assert_close(gae(rewards, values, mask, 1.0, 0.5)[1], torch.tensor([[3.625, 4.25, 3.0]]))


@given(
    st.floats(allow_nan=True, allow_infinity=True, width=32),
    st.floats(allow_nan=True, allow_infinity=True, width=32),
)
def test_values_of_observations_change_nothing_to_the_last_bit(first: float, second: float) -> None:
    other = VALUES.clone()
    other[0, 2], other[0, 3] = first, second
    for expected, found in zip(
        gae(REWARDS, VALUES, MASK, 0.99, 0.95), gae(REWARDS, other, MASK, 0.99, 0.95), strict=True
    ):
        assert torch.equal(expected, found)


def test_padding_and_row_order_change_no_advantage() -> None:
    torch.manual_seed(0)
    rewards, values, mask = torch.randn(4, 9), torch.randn(4, 9), torch.rand(4, 9) > 0.4
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(gae(rewards[order], values[order], mask[order], 1.0, 0.95)[0], advantages[order])
    padded = [
        torch.cat([x, torch.full((4, 3), fill, dtype=x.dtype)], 1)
        for x, fill in ((rewards, 7.0), (values, -3.0), (mask, False))
    ]
    assert torch.equal(gae(padded[0], padded[1], padded[2], 1.0, 0.95)[1][:, :9], returns)


def test_whitening_divides_by_the_biased_deviation() -> None:
    expected = torch.tensor([1.03664, -1.55496, 0.69109, -0.17277])
    torch.testing.assert_close(whiten(torch.tensor([1.0, -0.5, 0.8, 0.3])), expected, atol=1e-5, rtol=0)
    assert torch.equal(whiten(torch.full((3,), 0.5)), torch.zeros(3))


def test_explained_variance_is_golden_and_undefined_for_equal_returns() -> None:
    values, returns = torch.tensor([[0.1, 0.4, 0.35, 0.8]]), torch.tensor([[0.0, 1, 0, 1]])
    assert explained_variance(values, returns) == pytest.approx(0.498, abs=1e-3)
    assert math.isnan(explained_variance(values, torch.ones(1, 4)))


ACTOR = torch.tensor([[-0.2, -0.4, -0.1, -9], [-0.7, -0.3, -0.2, -0.6]])
OLD = ACTOR - torch.tensor([[0.3, -0.4, 0.05, 0], [0.1, 0.25, -0.35, 0]])
ADVANTAGES = torch.tensor([[1, -0.5, 0.8, 9], [0.3, 1.2, -1.5, -0.7]])
FIRST, SECOND = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])


@pytest.mark.parametrize(
    ("mask", "mean", "clip_fraction", "kl"),
    [(FIRST, -0.513142, 0.5, -0.0125), (SECOND, -0.481428, 0.5, -0.05)],
)
def test_policy_loss_is_golden(mask: Tensor, mean: float, clip_fraction: float, kl: float) -> None:
    loss, metrics = token_means(policy_loss_sum(ACTOR, OLD, ADVANTAGES, mask, 0.2, 0.28), mask)
    assert float(loss) == pytest.approx(mean, abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(clip_fraction)
    assert metrics["clip_fraction_low"] + metrics["clip_fraction_high"] == pytest.approx(clip_fraction)
    assert metrics["approx_kl"] == pytest.approx(kl, abs=1e-6)


V = torch.tensor([[0.1, 0.9, 0.4, 5], [0.2, -0.3, 0.7, 0]])
V_OLD = torch.tensor([[0.3, 0.2, 0.5, 0], [0.2, 0.4, 0, 0.1]])
G = torch.tensor([[1.0, 1, 1, 7], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("mask", "clipped", "unclipped", "fraction"),
    [(FIRST, 0.19625, 0.1525, 0.25), (SECOND, 0.138333, 0.109167, 0.166667)],
)
def test_value_loss_is_golden(mask: Tensor, clipped: float, unclipped: float, fraction: float) -> None:
    loss, metrics = token_means(value_loss_sum(V, V_OLD, G, mask, 0.2), mask)
    assert float(loss) == pytest.approx(clipped, abs=1e-6)
    assert metrics["value_clip_fraction"] == pytest.approx(fraction, abs=1e-6)
    loss, _ = token_means(value_loss_sum(V, V_OLD, G, mask, None), mask)
    assert float(loss) == pytest.approx(unclipped, abs=1e-6)


def test_kl_estimators_are_golden() -> None:
    difference = torch.tensor([0.3, -0.4, 0.05, 0.1])
    torch.testing.assert_close(kl_k2(difference, torch.zeros(4)), torch.tensor([0.045, 0.08, 0.00125, 0.005]))
    torch.testing.assert_close(
        kl_k3(difference, torch.zeros(4)),
        torch.tensor([0.040818, 0.091825, 0.001229, 0.004837]),
        atol=1e-6,
        rtol=0,
    )


def test_nan_at_masked_positions_reaches_neither_loss_nor_gradient() -> None:
    actor = torch.where(FIRST.bool(), ACTOR, math.nan).requires_grad_()
    advantages = torch.where(FIRST.bool(), ADVANTAGES, math.nan)
    loss, _ = token_means(policy_loss_sum(actor, OLD, advantages, FIRST, 0.2, 0.28), FIRST)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.513142, abs=1e-6)
    assert actor.grad is not None and torch.isfinite(actor.grad).all()


def test_importance_weights_are_truncated_and_scale_the_loss() -> None:
    weights = importance_weights(OLD[0, :3], torch.tensor([-0.2, -3.0, -0.1]), 2.0)
    assert float(weights[1]) == 2.0
    assert float(weights[0]) == pytest.approx(math.exp(-0.3))
    doubled, _ = policy_loss_sum(ACTOR, OLD, ADVANTAGES, FIRST, 0.2, 0.28, torch.full_like(ACTOR, 2.0))
    single, _ = policy_loss_sum(ACTOR, OLD, ADVANTAGES, FIRST, 0.2, 0.28)
    assert float(doubled) == pytest.approx(2 * float(single))


def trajectory(mask: list[int], reward: float) -> Trajectory:
    return Trajectory(
        "task",
        tuple(range(len(mask))),
        tuple(mask),
        tuple(-0.5 * m for m in mask),
        (),
        (Verdict(status="correct"),),
        reward,
        "stop",
        "v0",
    )


def test_reward_stands_on_the_last_own_token_not_on_a_later_observation() -> None:
    batch = collate([trajectory([0, 1, 1, 0, 1, 0, 0], 3.0), trajectory([0, 1], -1.0)])
    assert batch.lengths == [7, 2] and batch.offsets.tolist() == [0, 3, 4]
    advantages, returns = row_gae(batch, torch.zeros(4), 1.0, 0.5)
    assert advantages.tolist() == returns.tolist() == [0.75, 1.5, 3.0, -1.0]
    assert discounted_rewards(batch, 0.5).tolist() == [0.75, 1.5, 3.0, -1.0]


@pytest.mark.parametrize("mask", [[0, 0], [1, 1]])
def test_a_row_without_own_tokens_or_with_one_before_any_state_is_refused(mask: list[int]) -> None:
    with pytest.raises(ValueError, match="mask"):
        make_batch([([1, 2], mask)])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(40, 120), st.integers(1, 4))
def test_a_plan_computes_each_row_once_within_the_budget_and_in_step_on_all_ranks(
    lengths: list[int], budget: int, world: int
) -> None:
    plans = [plan(lengths, range(len(lengths)), budget, rank, world) for rank in range(world)]
    assert len({len(microbatches) for microbatches in plans}) == 1
    counted = [
        row
        for microbatches in plans
        for microbatch in microbatches
        if microbatch.counted
        for row in microbatch.rows
    ]
    assert sorted(counted) == list(range(len(lengths)))
    for microbatches in plans:
        for microbatch in microbatches:
            assert sum(lengths[row] for row in microbatch.rows) <= budget


class Positions(nn.Module):
    """A backbone whose hidden state is the position."""

    class Output:
        def __init__(self, last_hidden_state: Tensor):
            self.last_hidden_state = last_hidden_state

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: object) -> Output:
        return self.Output(position_ids[..., None].float())


def test_the_value_of_a_token_comes_from_the_state_before_it() -> None:
    critic = Critic(Positions(), hidden=1)
    nn.init.ones_(critic.value_head.weight)
    batch = make_batch([([0] * 3, [0, 0, 1]), ([0] * 5, [0, 1, 0, 1, 1])])
    (values,) = critic(pack(batch, [1, 0]))
    assert values.tolist() == [0, 2, 3, 1]


def test_a_large_stream_is_kept_in_a_mapped_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.training.batches.MAPPED_BYTES", 4 * 1000)
    mapped = stream(1000)
    assert not mapped.any() and stream(999).untyped_storage().data_ptr() != mapped.data_ptr()
    mapped[7] = 3.0
    assert mapped.sum() == 3.0
    files = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("(deleted)")]
    first, last = zip(*(line.split()[0].split("-") for line in files), strict=True)
    assert any(int(a, 16) <= mapped.data_ptr() < int(b, 16) for a, b in zip(first, last, strict=True))
