"""The script that checks large tasks on a GPU, run on cpu with small ones."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))

from large_tasks import check

from components.judge import memory_plan
from components.judge.task_layout import PLACEMENTS, Placement


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_verdicts_are_the_expected_ones(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "PLACEMENTS", PLACEMENTS)  # restored at the end
    assert check("cpu", 0.004, 0, (placement,))
