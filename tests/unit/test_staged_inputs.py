"""Inputs of timed calls that an earlier call had are drawn again."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.judge import staged_inputs
from components.judge.input_mixing import InputBank, InputMix
from components.judge.staged_inputs import StagedInputs

CALLS, BYTES = 4, 256


@pytest.fixture
def staged() -> StagedInputs:
    bank = InputBank(
        [[torch.randn(BYTES // 4)] for _ in range(5)], ["given"], "cpu", timed_distributions=("integers",)
    )

    def views(memory: torch.Tensor, number: int) -> list[torch.Tensor]:
        return [memory[number * BYTES :][:BYTES].view(torch.float32)]

    def write(mix: InputMix, views: list[torch.Tensor]) -> None:
        bank.write(mix, 0, views[0])

    reference: Any = SimpleNamespace(
        layout=SimpleNamespace(inputs=SimpleNamespace(stride=BYTES, views=views)),
        params=SimpleNamespace(device="cpu"),
        inputs=bank,
        write_inputs=write,
    )
    made = StagedInputs(reference, CALLS)
    made.fingerprints.add(0)
    return made


def distributions(staged: StagedInputs, number: int) -> list[str]:
    return sorted(mix.distribution for mix in staged.hold_fresh(CALLS, number).mixes)


def test_inputs_that_are_drawn_again_keep_their_distribution(
    staged: StagedInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.chain.from_iterable((0, number) for number in itertools.count(1))
    monkeypatch.setattr(staged_inputs, "fingerprint", lambda *_: next(looks))
    assert distributions(staged, 0) == ["given"] * (CALLS - 1) + ["integers"]
    assert len(staged.fingerprints) == 1 + CALLS


def test_a_distribution_that_has_no_new_inputs_is_given_up(
    staged: StagedInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = itertools.count(1)

    def fingerprint(memory: torch.Tensor, _: int | None) -> int:
        values = memory.view(torch.float32)
        return 0 if torch.equal(values, values.round()) else next(number)

    monkeypatch.setattr(staged_inputs, "fingerprint", fingerprint)
    assert distributions(staged, 0) == ["given"] * CALLS
