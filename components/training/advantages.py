"""Generalised advantage estimation for token sequences in which observations follow the policy's tokens.

Only own tokens, the tokens that the policy sampled, are time steps. So a long observation does not discount
the rewards after it, and the critic's values at observation tokens are not used.
"""

import math

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return the advantages, which are not whitened, and the returns of generalised advantage estimation.

    All tensors are [batch, seq]. `action_mask` is 1 at the tokens that the policy sampled; both results are 0
    at all other tokens. `values[:, t]` is the value of the state before token t is emitted. The state after
    the last token that the policy sampled has the value 0, also in a truncated episode. The results are
    computed backward over the sampled tokens (paper, section 4.2): delta = r + gamma V' - V,
    A = delta + gamma lam A', and return = A + V, where V' and A' are the value and the advantage of the next
    sampled token.
    """
    mask = action_mask.bool()
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])  # [batch], V'
    next_advantage = torch.zeros_like(values[:, 0])  # [batch], A'
    for t in reversed(mask.any(0).nonzero().flatten().tolist()):
        own = mask[:, t]  # [batch]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        # torch.where instead of a multiplication, because a masked value may be NaN.
        next_advantage = torch.where(own, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(own, values[:, t], next_value)
        advantages[:, t] = torch.where(own, next_advantage, 0.0)
    returns = torch.where(mask, advantages + values, 0.0)
    return advantages, returns


def whiten(advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Return the advantages scaled to zero mean and unit (biased) variance over the tokens of the policy.

    These are the tokens that the policy sampled, where `action_mask` is 1; the result is 0 at all others.
    Both tensors are [batch, seq] and contain the rows of all ranks. Whitened advantages have lost the scale
    of the rewards, so they cannot be used to compute returns.
    """
    mask = action_mask.bool()
    own = advantages[mask]  # [own tokens]
    if own.numel() == 0:
        return torch.zeros_like(advantages)
    scaled = (advantages - own.mean()) * torch.rsqrt(own.var(correction=0) + 1e-8)
    return torch.where(mask, scaled, 0.0)


def explained_variance(values: Tensor, returns: Tensor, action_mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / (Var(returns) + 1e-5) over the tokens that the policy sampled.

    All tensors are [batch, seq], and `action_mask` is 1 at these tokens. Returns NaN if the returns at these
    tokens are all equal or there is no such token.
    """
    mask = action_mask.bool()
    own_returns, own_values = returns[mask].double(), values[mask].double()
    if own_returns.numel() == 0 or own_returns.var(correction=0) < 1e-8:
        return math.nan
    return 1.0 - float((own_returns - own_values).var(correction=0) / (own_returns.var(correction=0) + 1e-5))
