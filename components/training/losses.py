"""The losses of PPO and of supervised fine-tuning over own tokens, which are those that the policy sampled.

The functions named *_loss_sum return sums over own tokens. `engine.train_step` divides these sums by the
number of own tokens in all micro-batches on all ranks, because a mean per micro-batch would give more weight
to tokens of small micro-batches. The shape of all tensors is written [batch, seq]; any other shape that all
tensors of a call share, such as [own tokens], is computed in the same way. Values where `action_mask` is 0 do
not influence any sum.
"""

import torch
from torch import Tensor

# Metrics by name, each summed over own tokens.
TokenSums = dict[str, Tensor]


def masked_sum(x: Tensor, action_mask: Tensor) -> Tensor:
    """Return the sum of `x` where `action_mask`, of the same shape, is true, as a tensor without dimensions.

    A NaN elsewhere does not influence the sum.
    """
    return torch.where(action_mask.bool(), x, 0.0).sum()


def policy_loss_sum(
    actor_logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    clip_low: float,
    clip_high: float,
    importance: Tensor | None = None,
) -> tuple[Tensor, TokenSums]:
    """Return PPO's clipped surrogate loss, and its metrics, each summed where `action_mask` is true.

    All tensors have one shape, such as [batch, seq]; log-probabilities are in nats. The loss of a token is
    max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) * importance, where A is the advantage and rho =
    pi_actor / pi_old. `importance` holds the weights from `importance_weights`; None means weights of 1. The
    metrics count the tokens that are clipped (clip_fraction), those clipped with rho below 1
    (clip_fraction_low) and above 1 (clip_fraction_high), and add up log pi_old - log pi_actor (approx_kl).

    This is decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5): pi_old is
    the proximal policy, which the trainer evaluates before the step's updates, and only it bounds the update.
    The behaviour policy mu, with which tokens were sampled some steps earlier, occurs in the weights alone.
    """
    mask = action_mask.bool()
    # Set the difference to 0 at masked positions before exp, so that neither the loss nor its gradient can
    # be infinite there.
    difference = torch.where(mask, actor_logprob - old_logprob, 0.0)  # [batch, seq], nats
    ratio = torch.exp(difference.clamp(-20.0, 20.0))  # [batch, seq], rho
    unclipped = -advantages * ratio  # [batch, seq]
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)  # [batch, seq]
    loss = torch.maximum(unclipped, clipped)  # [batch, seq]
    if importance is not None:
        loss = loss * importance
    active = (clipped > unclipped).detach()  # [batch, seq], bool
    metrics = {
        "clip_fraction": active.float(),
        "clip_fraction_low": (active & (ratio < 1.0)).float(),
        "clip_fraction_high": (active & (ratio > 1.0)).float(),
        "approx_kl": -difference.detach(),
    }
    return masked_sum(loss, mask), {name: masked_sum(value, mask) for name, value in metrics.items()}


def value_loss_sum(
    values: Tensor, old_values: Tensor, returns: Tensor, action_mask: Tensor, clip: float | None
) -> tuple[Tensor, TokenSums]:
    """Return PPO's value loss, and the number of clipped values as the metric value_clip_fraction.

    All tensors have one shape, such as [batch, seq]. Both results are sums over the tokens where
    `action_mask` is true. The loss is the sum of 0.5 * max(error^2, clipped_error^2), where error is the
    difference between value and return, and clipped_error is the difference between clipped value and return.
    A value is clipped to a distance of at most `clip` from the old value. If `clip` is None, values are not
    clipped. The metric counts the values whose clipped error is the larger one.
    """
    error = (values - returns).square()  # [batch, seq]
    active = torch.zeros_like(action_mask, dtype=torch.bool)
    if clip is not None:
        clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        active = (clipped > error).detach()  # [batch, seq], bool
        error = torch.maximum(error, clipped)
    return 0.5 * masked_sum(error, action_mask), {
        "value_clip_fraction": masked_sum(active.float(), action_mask)
    }


def importance_weights(old_logprob: Tensor, sampler_logprob: Tensor, cap: float) -> Tensor:
    """Return min(pi_old / mu, cap) for each token that the policy sampled, [own tokens], without gradient.

    pi_old is the trainer's and mu the sampler's probability of the token, whose logarithms (nats) are given.
    These weights of truncated importance sampling correct for the behaviour policy mu: the sampler computes
    slightly different probabilities than the trainer from the same weights, and it may have had weights that
    are some steps older.
    """
    return torch.exp((old_logprob - sampler_logprob).clamp(-20.0, 20.0)).clamp(max=cap).detach()


def effective_sample_size(old_logprob: Tensor, sampler_logprob: Tensor) -> float:
    """Return the effective sample size as a share of the n tokens that the policy sampled, of at least one.

    The log-probabilities (nats) are [n], without other tokens. The result is (sum w)^2 / (n sum w^2) for the
    importance weights w = pi_old / mu, where pi_old is the trainer's and mu the sampler's probability. It is
    1 if both always agree. The weights are not truncated at ppo.importance_cap, but limited to [exp(-20),
    exp(20)] so that the sums stay finite.
    """
    weights = torch.exp((old_logprob - sampler_logprob).double().clamp(-20.0, 20.0))  # [n]
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))


def kl_k2(actor_logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Return half the squared log-ratio of the probabilities of each token under actor and reference policy.

    Both log-probabilities (nats) and the result have the same shape, such as [batch, seq]. For tokens sampled
    from the actor, the expected gradient of the result is the gradient of the KL divergence of the actor from
    the reference.
    """
    return 0.5 * (actor_logprob - reference_logprob).square()


def kl_k3(actor_logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Return exp(-d) + d - 1 for d = actor_logprob - reference_logprob, for each token.

    Both log-probabilities (nats) and the result have the same shape, such as [batch, seq]. For tokens sampled
    from the actor, the result is an unbiased estimate of the KL divergence of the actor from the reference
    policy.
    """
    difference = actor_logprob - reference_logprob  # [batch, seq], nats
    return torch.exp((-difference).clamp(-20.0, 20.0)) + difference - 1.0
