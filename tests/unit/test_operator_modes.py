"""What a constructor computes is recorded in one process, and is data in another."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from components.sandbox import inside

sys.path.insert(0, str(Path(inside.__file__).parent))
from operator_modes import ConstructorMode, UnknownResult

NAMES = (
    "aten::mul.Tensor",
    "aten::add_.Tensor",
    "aten::exp.out",
    "aten::max.dim",
    "aten::_local_scalar_dense",
)


def construct() -> list[torch.Tensor | float]:
    torch.manual_seed(1)
    weight = torch.randn(3, 4) * 0.02
    weight += 1.0
    table = torch.empty(0)
    torch.exp(weight, out=table)
    return [weight, table, *weight.max(1), weight[0, 0].item()]


def recorded() -> list[Any]:
    with ConstructorMode(NAMES, None) as mode:
        construct()
    torch.save(mode.results, file := io.BytesIO())
    file.seek(0)
    results: list[Any] = torch.load(file, weights_only=True)
    return results


def test_recorded_results_replace_computing() -> None:
    with ConstructorMode(NAMES, recorded()):
        replayed = construct()
    for given, expected in zip(replayed, construct(), strict=True):
        assert torch.equal(torch.as_tensor(given), torch.as_tensor(expected))


def test_an_unknown_result_is_not_computed() -> None:
    with ConstructorMode(NAMES, []), pytest.raises(UnknownResult, match=r"aten::mul\.Tensor"):
        construct()
    results = recorded()[1:]
    with ConstructorMode(NAMES, results), pytest.raises(UnknownResult):
        construct()


def test_a_constructor_that_only_fills_needs_no_results() -> None:
    with ConstructorMode(NAMES, []):
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Conv2d(1, 2, 3), torch.nn.LSTM(2, 2))
