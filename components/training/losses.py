"""The losses of PPO and of supervised fine-tuning, over the policy's own tokens.

Each exists as a sum over own tokens: an optimizer step divides by the own tokens of all its micro-batches on all ranks,
once and in one place (a mean per micro-batch was wrong by 44 % of the gradient with uneven micro-batches, knowledge:
training, A6). The public functions are the token means. All tensors are [batch, seq]; what stands at masked positions
changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

MetricSums = dict[str, Tensor]
"""Metrics as sums over own tokens; divide by their number."""


def masked_sum(x: Tensor, action_mask: Tensor) -> Tensor:
    """Sum over own tokens; torch.where, so that NaN at a masked position stays out of the sum."""
    return torch.where(action_mask.bool(), x, 0.0).sum()


def policy_loss_sum(
    actor_logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    clip_low: float,
    clip_high: float,
    importance: Tensor | None = None,
) -> tuple[Tensor, MetricSums]:
    """Clipped surrogate of PPO, max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), times `importance`, summed.

    `importance` holds the detached truncated weights between sampler and trainer (`importance_weights`).
    """
    mask = action_mask.bool()
    # Masked positions get a ratio of 1 before exp, so that neither the loss nor its gradient can be infinite there.
    difference = torch.where(mask, actor_logprob - old_logprob, 0.0)
    ratio = torch.exp(difference.clamp(-20.0, 20.0))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    if importance is not None:
        loss = loss * importance
    active = (clipped > unclipped).detach()
    metrics = {
        "clip_fraction": active.float(),
        "clip_fraction_low": (active & (ratio < 1.0)).float(),
        "clip_fraction_high": (active & (ratio > 1.0)).float(),
        "approx_kl": -difference.detach(),
    }
    return masked_sum(loss, mask), {name: masked_sum(value, mask) for name, value in metrics.items()}


def value_loss_sum(
    values: Tensor, old_values: Tensor, returns: Tensor, action_mask: Tensor, clip: float | None
) -> tuple[Tensor, MetricSums]:
    """Half the squared error, or the larger one of it and that of the value clipped to `clip` around the old; summed."""
    error = (values - returns).square()
    active = torch.zeros_like(action_mask, dtype=torch.bool)
    if clip is not None:
        clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        active = (clipped > error).detach()
        error = torch.maximum(error, clipped)
    return 0.5 * masked_sum(error, action_mask), {
        "value_clip_fraction": masked_sum(active.float(), action_mask)
    }


def policy_loss(
    actor_logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, float]]:
    """Token mean of the clipped surrogate, with clip fractions and the mean of old - actor log-probability."""
    total, sums = policy_loss_sum(actor_logprob, old_logprob, advantages, action_mask, clip_low, clip_high)
    return _mean(total, sums, action_mask)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, action_mask: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, float]]:
    """Token mean of the value loss; `clip` is in units of the reward, None is off."""
    total, sums = value_loss_sum(values, old_values, returns, action_mask, clip)
    return _mean(total, sums, action_mask)


def _mean(total: Tensor, sums: MetricSums, action_mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    tokens = action_mask.bool().sum().clamp(min=1)
    return total / tokens, {name: float(value / tokens) for name, value in sums.items()}


def likelihood_loss_sum(actor_logprob: Tensor, action_mask: Tensor) -> Tensor:
    """Negative log-likelihood of the own tokens, summed: supervised fine-tuning, and the replay term of PPO."""
    return -masked_sum(actor_logprob, action_mask)


def importance_weights(
    old_logprob: Tensor, sampler_logprob: Tensor, action_mask: Tensor, cap: float
) -> Tensor:
    """min(pi_old / mu, cap) per own token, 1 elsewhere: corrects the trainer's difference from the sampler (TIS)."""
    difference = torch.where(action_mask.bool(), old_logprob - sampler_logprob, 0.0)
    return torch.exp(difference.clamp(-20.0, 20.0)).clamp(max=cap).detach()


def effective_sample_size(old_logprob: Tensor, sampler_logprob: Tensor, action_mask: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of the untruncated weights w = pi_old / mu over the n own tokens: 1 when the policies agree."""
    mask = action_mask.bool()
    weights = torch.exp((old_logprob - sampler_logprob)[mask].double().clamp(-20.0, 20.0))
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))


def kl_k2(actor_logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Half the squared log-ratio: its gradient is that of the KL divergence on-policy, so it is the one to train with."""
    return 0.5 * (actor_logprob - reference_logprob).square()


def kl_k3(actor_logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """exp(-d) + d - 1 for d = actor - reference: never negative, unbiased, of low variance, so it is the one to log."""
    difference = actor_logprob - reference_logprob
    return torch.exp((-difference).clamp(-20.0, 20.0)) + difference - 1.0
