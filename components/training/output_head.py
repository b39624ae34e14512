"""Log-probabilities and entropies of sampled tokens, computed with a bounded number of logits in memory.

A vocabulary of 152,000 tokens has 608 kB of float32 logits a token, 32 GB for the 52,000 own tokens of a long
trajectory. So the forward pass computes the logits of a slice of tokens at a time and keeps one number per
token, and the backward pass computes the logits again, those of a slice of the vocabulary at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Maximum size in bytes of one float32 tensor of logits. At most four tensors of this size are alive at once,
# so the logits take at most 1 GiB, about a hundredth of a GPU of 96 GB. A slice has then 441 tokens at a
# vocabulary of 151,936. That is enough for speed: each byte of the output head's bfloat16 weight is used for
# 441 FLOP, and an H20 (148 TFLOP/s, 4 TB/s) needs 37 and an H200 (989 TFLOP/s, 4.8 TB/s) 206 to be limited by
# arithmetic instead of memory.
LOGITS_BYTES = 2**28


class TokenScores(nn.Module):
    """Output head that returns log-probabilities of given tokens, and entropies, instead of logits.

    Both are in nats. The entropies are those of the distributions of the given tokens. The output head shares
    the parameters of `head`, the output head of a language model, tied to the embeddings or not.
    `temperature` is the sampling temperature, which divides the logits.

    One call must score all tokens of a micro-batch. Under ZeRO 3, DeepSpeed gathers the parameters of a
    module on all ranks before every call of the module and in the backward pass of every call, so all ranks
    must call it equally often. What happens within a call is not collective: ranks may have different numbers
    of tokens, and therefore of slices, or no token at all.
    """

    def __init__(self, head: nn.Linear, temperature: float):
        super().__init__()
        self.weight = head.weight  # [vocabulary, hidden]
        self.bias = head.bias  # [vocabulary] or None
        self.temperature = temperature
        # Whether torch.compile fuses the operations on logits, which are limited by memory bandwidth.
        self.is_compiled = False

    def forward(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of `targets` [n] after the hidden states `states` [n, hidden].

        Also returns the entropies of the distributions of the tokens after these states. Both results are [n]
        in nats. Only the log-probability has a gradient.
        """
        score, gradient = (
            (_compiled(_score), _compiled(_gradient)) if self.is_compiled else (_score, _gradient)
        )
        if 4 * len(states) * len(self.weight) <= LOGITS_BYTES:
            # Keep the logits for the backward pass, which is faster than to compute them again.
            logprob, entropy, _ = score(states, self.weight, self.bias, targets, self.temperature)
            return logprob, entropy
        scores: tuple[Tensor, Tensor] = _SlicedScores.apply(  # type: ignore[no-untyped-call]
            states, self.weight, self.bias, targets, self.temperature, score, gradient
        )
        return scores


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled for tensors of any size; it is compiled when it is first called."""
    return torch.compile(function, dynamic=True)


class _SlicedScores(torch.autograd.Function):
    """Autograd function that returns the log-probabilities and entropies (nats) of given tokens.

    It computes them in slices of tokens and does not keep the logits, which the backward pass computes again.
    Only the log-probability has a gradient. The last two arguments are the functions `_score` and
    `_gradient`, or what they were compiled to.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        score: Callable[..., tuple[Tensor, Tensor, Tensor]],
        gradient: Callable[..., Tensor],
    ) -> tuple[Tensor, Tensor]:
        tokens = max(1, LOGITS_BYTES // (4 * len(weight)))
        parts = [
            score(part, weight, bias, chosen, temperature)
            for part, chosen in zip(states.split(tokens), targets.split(tokens), strict=True)
        ]
        logprob, entropy, normaliser = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(states, weight, bias, targets, normaliser)
        ctx.temperature, ctx.gradient = temperature, gradient
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(
        ctx: Any, logprob_gradient: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None, None]:
        states, weight, bias, targets, normaliser = ctx.saved_tensors
        # Slices of the vocabulary, not of the tokens, because each row of the weight's gradient is then one
        # sum over all tokens in the precision of the matrix product, which is float32, and not a sum of
        # rounded sums.
        width = max(1, LOGITS_BYTES // (4 * len(states)))
        states_gradient = torch.zeros_like(states, dtype=torch.float32)
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        scale = logprob_gradient.float()[:, None] / ctx.temperature  # [n, 1]
        for first in range(0, len(weight), width):
            rows = slice(first, first + width)
            part = weight[rows]
            offset = None if bias is None else bias[rows]
            gradient = ctx.gradient(
                states, part, offset, targets - first, normaliser, scale, ctx.temperature
            )  # [n, rows]
            states_gradient += gradient @ part
            if weight_gradient is not None:
                torch.mm(gradient.T, states, out=weight_gradient[rows])
            if bias_gradient is not None:
                bias_gradient[rows] = gradient.sum(0)
        return states_gradient.to(states.dtype), weight_gradient, bias_gradient, None, None, None, None


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return the float32 logits [n, vocabulary] after the states [n, hidden], divided by the temperature.

    `weight` [vocabulary, hidden] and `bias` [vocabulary] are those of the output head, or some rows of them,
    so that the result has only as many columns.
    """
    return functional.linear(states, weight, bias).float().div_(temperature)


def _gradient(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normaliser: Tensor,
    scale: Tensor,
    temperature: float,
) -> Tensor:
    """Return the gradient [n, width] of the loss with respect to logits before division by the temperature.

    The logits are those of a slice of the vocabulary, of which `weight` [width, hidden] and `bias` [width]
    are the rows. `targets` [n] count from the first row of the slice and may be outside of the slice.
    `normaliser` [n] is the logarithm of the softmax's denominator, and `scale` [n, 1] the gradient with
    respect to the log-probabilities, divided by the temperature. The result has the precision of `states` [n,
    hidden].
    """
    # The derivative of a log-probability by the logits is one_hot(target) - softmax(logits).
    logits = _logits(states, weight, bias, temperature)
    gradient = logits.sub_(normaliser[:, None]).exp_().mul_(-scale)
    column = targets[:, None]
    is_inside = (column >= 0) & (column < len(weight))
    gradient.scatter_add_(1, column.clamp(0, len(weight) - 1), torch.where(is_inside, scale, 0.0))
    return gradient.to(states.dtype)


def _score(
    states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Score the tokens `targets` [n] after the hidden states `states` [n, hidden].

    `weight` [vocabulary, hidden] and `bias` [vocabulary] are those of the output head, and `temperature` is
    the sampling temperature, which divides the logits. Returns log-probability, entropy (nats) and the
    logarithm of the softmax's denominator, each [n].
    """
    logits = _logits(states, weight, bias, temperature)
    chosen = logits.detach().gather(-1, targets[:, None])
    logprobs = functional.log_softmax(logits, dim=-1)
    del logits
    logprob = logprobs.gather(-1, targets[:, None])
    with torch.no_grad():
        entropy = -logprobs.exp().mul_(logprobs).sum(-1)
        normaliser = chosen - logprob
    return logprob.squeeze(-1), entropy, normaliser.squeeze(-1)
