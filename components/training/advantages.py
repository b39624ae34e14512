"""Advantages of token sequences in which observations follow the policy's tokens.

With a critic they are those of generalised advantage estimation. Only own tokens, the tokens that the policy
sampled, are time steps. So a long observation does not discount the rewards after it, and the critic's values
at observation tokens are not used.

Without a critic, all own tokens of a trajectory have one advantage: its reward less the mean reward of the
other trajectories of its task (REINFORCE leave-one-out, Ahmadian et al., arXiv 2402.14740). The trajectory
itself is not part of its baseline, because that would scale the gradient by (n - 1) / n for n trajectories of
the task.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from scipy.signal import lfilter
from torch import Tensor

from components.training.batches import EarnedRows, stream


def gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return the advantages, which are not whitened, and the returns of generalised advantage estimation.

    All tensors are [batch, seq]. `action_mask` is 1 at the tokens that the policy sampled; both results are 0
    at all other tokens. `rewards[:, t]` is earned at token t, and `values[:, t]` is the value of the state
    before token t is emitted. `gamma` is the discount and `lam` the lambda of the estimation. The state after
    the last token that the policy sampled has the value 0, also in a truncated episode. The results are
    computed backward over the sampled tokens (CUDA Agent paper, section 4.2): delta = r + gamma V' - V, A =
    delta + gamma lam A', and return = A + V, where V' and A' are the value and the advantage of the next
    sampled token.
    """
    mask = action_mask.bool()
    advantages = torch.zeros_like(values)
    for row, own in enumerate(mask):
        advantages[row, own] = _advantages(rewards[row, own], values[row, own], gamma, lam)
    returns = torch.where(mask, advantages + values, 0.0)
    return advantages, returns


def row_gae(batch: EarnedRows, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of generalised advantage estimation for the rows of a batch.

    Only own tokens, those that the policy sampled, are time steps, and each row of tokens is an episode (see
    `gae`). The reward of a row is earned at its last own token. `values` and both results are float32 [own
    tokens], with the own tokens of all rows one after the other. `gamma` is the discount and `lam` the lambda
    of the estimation.
    """
    advantages, returns = stream(batch.tokens), stream(batch.tokens)
    for row, (first, last) in enumerate(itertools.pairwise(batch.offsets.tolist())):
        rewards = torch.zeros(last - first)
        rewards[-1] = batch.rewards[row]
        advantages[first:last] = _advantages(rewards, values[first:last], gamma, lam)
        returns[first:last] = advantages[first:last] + values[first:last]
    return advantages, returns


def _advantages(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the generalised advantage estimates [n] of n successive steps, from rewards [n] and values [n].

    The steps are the tokens of one row that the policy sampled; the value after the last one is 0. The
    estimates are computed in float64, as a recursive filter from the last step to the first, A_i = delta_i +
    gamma lam A_(i+1), where `gamma` is the discount and `lam` the lambda of the estimation. The result has
    the dtype of `values`.
    """
    following = torch.zeros_like(values, dtype=torch.float64)
    following[:-1] = values[1:]
    deltas = rewards.double() + gamma * following - values.double()
    sums = lfilter([1.0], [1.0, -gamma * lam], deltas.flip(0).numpy())
    return torch.from_numpy(sums).flip(0).to(values.dtype)


def discounted_rewards(batch: EarnedRows, gamma: float) -> Tensor:
    """Return the Monte Carlo return of each token that the policy sampled, float32 [sampled tokens].

    It is the reward of the token's row times gamma^k, where `gamma` is the discount and k the number of
    sampled tokens that follow in the row. The sampled tokens of all rows come one after the other.
    """
    returns = stream(batch.tokens)
    for row, (first, last) in enumerate(itertools.pairwise(batch.offsets.tolist())):
        returns[first:last] = batch.rewards[row] * gamma ** torch.arange(last - first - 1, -1, -1)
    return returns


def leave_one_out(rewards: Sequence[float], tasks: Sequence[str]) -> list[float]:
    """Return each reward less the mean of the other rewards of the same task.

    `tasks` has the task id of each reward. A reward that is the only one of its task gives 0.
    """
    rewards_of: dict[str, list[float]] = defaultdict(list)
    for task, reward in zip(tasks, rewards, strict=True):
        rewards_of[task].append(reward)
    advantages = []
    for task, reward in zip(tasks, rewards, strict=True):
        group = rewards_of[task]
        # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1). Equal rewards give exactly 0, also where their
        # mean is rounded.
        is_equal = min(group) == max(group)
        mean = sum(group) / len(group)
        advantages.append(0.0 if is_equal else (reward - mean) * len(group) / (len(group) - 1))
    return advantages


def whiten(advantages: Tensor) -> Tensor:
    """Return the advantages [own tokens] of all ranks' rows, scaled to zero mean and unit (biased) variance.

    There must be at least one token that the policy sampled, and no other token. Whitened advantages have
    lost the scale of the rewards, so they cannot be used to compute returns.
    """
    return (advantages - advantages.mean()) * torch.rsqrt(advantages.var(correction=0) + 1e-8)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / (Var(returns) + 1e-5) over the tokens that the policy sampled.

    Both tensors are [own tokens], without other tokens. Returns NaN if the variance of the returns is below
    1e-8, as when all returns are equal, or if there is no token.
    """
    variance = float(returns.var(correction=0)) if len(returns) else math.nan
    if not variance >= 1e-8:
        return math.nan
    return 1.0 - float((returns - values).var(correction=0)) / (variance + 1e-5)
