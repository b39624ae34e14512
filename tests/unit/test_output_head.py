"""Sliced scores of tokens equal those of all logits at once, and only a few slices are alive."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from components.training import output_head
from components.training.output_head import TokenScores

VOCABULARY, HIDDEN = 1000, 16


class PeakMemory(TorchDispatchMode):
    """The largest sum, over the time that it is active, of the bytes of all tensors made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def scores_of(head: nn.Linear, states: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Log-probabilities, entropies, and the gradients of a weighted sum of the log-probabilities."""
    head.zero_grad()
    states = states.clone().requires_grad_()
    logprob, entropy = TokenScores(head, 0.7)(states, targets)
    weights = torch.linspace(-1, 2, len(targets))
    (logprob * weights).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    return gradients | {"logprob": logprob.detach(), "entropy": entropy, "states": states.grad}


def inputs(tokens: int, dtype: torch.dtype, bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(3)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias).to(dtype)
    return head, torch.randn(tokens, HIDDEN).to(dtype), torch.randint(VOCABULARY, (tokens,))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 100])
@pytest.mark.parametrize("limit", [4, 4 * VOCABULARY * 3, 4 * VOCABULARY * 50])
def test_slices_of_any_size_give_the_scores_and_gradients_of_all_logits(
    limit: int, tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = inputs(tokens, torch.float32, bias)
    whole = scores_of(*arguments)
    monkeypatch.setattr(output_head, "LOGITS_BYTES", limit)
    sliced = scores_of(*arguments)
    assert whole.keys() == sliced.keys()
    for name, expected in whole.items():
        torch.testing.assert_close(sliced[name], expected, atol=1e-5, rtol=1e-5, msg=name)


def test_slicing_loses_no_precision_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    head, states, targets = inputs(4000, torch.bfloat16)
    double = nn.Linear(HIDDEN, VOCABULARY, bias=False).double()
    double.load_state_dict({"weight": head.weight.double()})
    exact = scores_of(double, states.double(), targets)

    def error(found: dict[str, Tensor]) -> dict[str, float]:
        return {
            name: float((found[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact
        }

    whole = error(scores_of(head, states, targets))
    monkeypatch.setattr(output_head, "LOGITS_BYTES", 4 * VOCABULARY * 40)
    sliced = error(scores_of(head, states, targets))
    for name in exact:
        assert sliced[name] < 1.3 * whole[name] + 1e-4, name


def test_no_token_gives_empty_scores_and_gradients_of_zero() -> None:
    found = scores_of(*inputs(0, torch.float32))
    assert len(found["logprob"]) == len(found["entropy"]) == 0
    assert float(found["weight"].abs().max()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [64, 65, 6400])
def test_at_most_four_slices_of_logits_are_alive(
    tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4 * VOCABULARY * 64
    monkeypatch.setattr(output_head, "LOGITS_BYTES", limit)
    head, states, targets = inputs(tokens, dtype)
    memory = PeakMemory()
    with memory:
        scores_of(head, states, targets)
    # Everything else grows with the number of tokens or the vocabulary, but not with both.
    others = 4 * (5 * HIDDEN + 20) * tokens + 4 * 4 * VOCABULARY * HIDDEN
    assert limit < memory.peak < 4 * limit + others
