"""Advantages, losses and statistics against numpy formulas written one number at a time.

The second implementation shares no code with the first.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from training_fixtures import token_means

from components.training.advantages import explained_variance, gae, whiten
from components.training.losses import (
    effective_sample_size,
    importance_weights,
    kl_k3,
    policy_loss_sum,
    value_loss_sum,
)

Array = NDArray[np.float64]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Array]:
    """Rows of policy tokens and observations, each row with at least one own token."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = source.random((rows, width)) < draw(st.floats(0.2, 1.0))
    mask[np.arange(rows), source.integers(0, width, rows)] = True
    numbers = {
        name: source.normal(size=(rows, width))
        for name in ("rewards", "values", "old", "actor", "advantages", "old_values", "returns")
    }
    return {"mask": mask, **numbers}


def expected_gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """A_i = sum over k of (gamma lam)^k delta_(i+k) along the own tokens of a row."""
    advantages = np.zeros_like(values)
    for row in range(len(values)):
        own = np.flatnonzero(mask[row])
        deltas = [
            rewards[row, t]
            + (gamma * values[row, own[i + 1]] if i + 1 < len(own) else 0.0)
            - values[row, t]  # the end is worth nothing
            for i, t in enumerate(own)
        ]
        for i, t in enumerate(own):
            advantages[row, t] = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    return advantages, np.where(mask, advantages + values, 0.0)


def tensor(x: Array) -> torch.Tensor:
    return torch.tensor(x)


@settings(max_examples=60)
@given(batches(), st.sampled_from([1.0, 0.99, 0.5]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_is_the_sum_of_discounted_errors_along_the_own_tokens(
    batch: dict[str, Array], gamma: float, lam: float
) -> None:
    found = gae(tensor(batch["rewards"]), tensor(batch["values"]), tensor(batch["mask"]), gamma, lam)
    for one, other in zip(
        found, expected_gae(batch["rewards"], batch["values"], batch["mask"], gamma, lam), strict=True
    ):
        np.testing.assert_allclose(one.numpy(), other, atol=1e-12)


@settings(max_examples=60)
@given(batches(), st.integers(0, 2**32 - 1))
def test_nothing_at_a_masked_position_reaches_a_single_bit_of_any_result(
    batch: dict[str, Array], seed: int
) -> None:
    mask = tensor(batch["mask"])
    source = np.random.default_rng(seed)
    junk = {
        name: np.where(batch["mask"], x, source.choice([np.nan, np.inf, -1e30, 7.0], x.shape))
        for name, x in batch.items()
        if name != "mask"
    }

    def results(x: dict[str, Array]) -> list[torch.Tensor]:
        t = {name: tensor(value) for name, value in x.items() if name != "mask"}
        surrogate, _ = policy_loss_sum(t["actor"], t["old"], t["advantages"], mask, 0.2, 0.28)
        error, _ = value_loss_sum(t["values"], t["old_values"], t["returns"], mask, 0.2)
        return [
            *gae(t["rewards"], t["values"], mask, 0.99, 0.95),
            surrogate,
            error,
            torch.tensor(explained_variance(t["values"][mask.bool()], t["returns"][mask.bool()])),
        ]

    for one, other in zip(results(batch), results(junk), strict=True):
        assert torch.equal(one.nan_to_num(nan=123.0), other.nan_to_num(nan=123.0))


@settings(max_examples=60)
@given(batches(), st.sampled_from([0.0, 0.2]), st.sampled_from([0.28, 1.0]))
def test_the_policy_loss_is_the_clipped_surrogate_of_each_token(
    batch: dict[str, Array], low: float, high: float
) -> None:
    total, clipped = 0.0, 0
    tokens = list(zip(*np.nonzero(batch["mask"]), strict=True))
    for place in tokens:
        ratio, advantage = math.exp(batch["actor"][place] - batch["old"][place]), batch["advantages"][place]
        inside = min(max(ratio, 1 - low), 1 + high)
        total += max(-advantage * ratio, -advantage * inside)
        clipped += -advantage * inside > -advantage * ratio
    mask = tensor(batch["mask"])
    sums = policy_loss_sum(*(tensor(batch[name]) for name in ("actor", "old", "advantages")), mask, low, high)
    loss, metrics = token_means(sums, mask)
    assert float(loss) == pytest.approx(total / len(tokens), abs=1e-9)
    assert metrics["clip_fraction"] == pytest.approx(clipped / len(tokens))


@settings(max_examples=60)
@given(batches(), st.sampled_from([None, 0.0, 0.2, 5.0]))
def test_the_value_loss_takes_the_larger_error_of_each_token(
    batch: dict[str, Array], clip: float | None
) -> None:
    total = 0.0
    tokens = list(zip(*np.nonzero(batch["mask"]), strict=True))
    for place in tokens:
        value, old, target = (batch[name][place] for name in ("values", "old_values", "returns"))
        held = old + min(max(value - old, -clip), clip) if clip is not None else value
        total += 0.5 * max((value - target) ** 2, (held - target) ** 2)
    mask = tensor(batch["mask"])
    sums = value_loss_sum(*(tensor(batch[name]) for name in ("values", "old_values", "returns")), mask, clip)
    loss, _ = token_means(sums, mask)
    assert float(loss) == pytest.approx(total / len(tokens), abs=1e-9)


@settings(max_examples=60)
@given(batches())
def test_statistics_are_those_of_the_own_tokens(batch: dict[str, Array]) -> None:
    mask = batch["mask"]
    own = batch["advantages"][mask]
    found = whiten(tensor(own)).numpy()
    np.testing.assert_allclose(found, (own - own.mean()) / np.sqrt(own.var() + 1e-8), atol=1e-7)
    returns, values = batch["returns"][mask], batch["values"][mask]
    explained = explained_variance(tensor(values), tensor(returns))
    if len(returns) == 1:
        assert math.isnan(explained)
    else:
        assert explained == pytest.approx(1 - (returns - values).var() / (returns.var() + 1e-5))
    old, actor = batch["old"][mask], batch["actor"][mask]
    weights = np.exp(old - actor)
    assert effective_sample_size(tensor(old), tensor(actor)) == pytest.approx(
        weights.sum() ** 2 / (weights**2).sum() / len(weights)
    )
    truncated = importance_weights(tensor(old), tensor(actor), 2.0).numpy()
    np.testing.assert_allclose(truncated, np.minimum(weights, 2.0), atol=1e-9)
    k1 = batch["actor"][mask] - batch["old"][mask]
    np.testing.assert_allclose(
        kl_k3(tensor(batch["actor"]), tensor(batch["old"])).numpy()[mask], np.exp(-k1) + k1 - 1, atol=1e-9
    )


def test_equal_rewards_have_no_explained_variance_whatever_the_critic_says() -> None:
    source = np.random.default_rng(0)
    assert math.isnan(explained_variance(tensor(source.normal(size=(3, 5))), torch.full((3, 5), 2.0)))
    assert math.isnan(explained_variance(torch.zeros(0), torch.zeros(0)))


@pytest.mark.parametrize("discount", [1.0, 0.95, 0.999, 0.0])
@pytest.mark.parametrize("length", [1, 255, 256, 257, 70_000])
def test_advantages_of_long_rows_are_those_of_the_recurrence(length: int, discount: float) -> None:
    source = np.random.default_rng(0)
    rewards, values = (tensor(source.normal(size=(1, length))) for _ in range(2))
    found, _ = gae(rewards, values, torch.ones(1, length), 0.999, discount)
    expected, following = np.zeros(length), (0.0, 0.0)
    for t in reversed(range(length)):
        delta = float(rewards[0, t]) + 0.999 * following[0] - float(values[0, t])
        expected[t] = delta + 0.999 * discount * following[1]
        following = float(values[0, t]), expected[t]
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-9, rtol=1e-9)
