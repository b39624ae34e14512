"""Headroom: torch.compile's time over the limit of the device, and its use in a pass of training."""

from pathlib import Path

import pytest
from synthesis_fixtures import Borrowed

from components.core.config import resolve
from components.core.errors import UserError
from components.core.task import KernelTask
from components.judge.judge import Judge
from components.training.stage import repeat_by_headroom

CODE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x):
        return torch.sigmoid(self.linear(x))

def get_inputs():
    return [torch.randn(512, 256)]

def get_init_inputs():
    return []
"""


def test_tasks_with_headroom_come_more_often() -> None:
    tasks = [
        KernelTask(code=f"x = {left}", evidence={"headroom": left} if left else {})
        for left in (0, 0.7, 1.9, 2.0, 4.1, 500.0)
    ]
    assert [repeat_by_headroom(tasks).count(task) for task in tasks] == [1, 1, 1, 2, 3, 4]


def test_weighing_needs_the_measurement() -> None:
    with pytest.raises(UserError, match=r"data\.headroom"):
        resolve("ci", ("data.weigh_by_headroom=true",))


def test_compile_is_measured_once_and_kept(judge: Judge, tmp_path: Path) -> None:
    params = resolve("ci", ("data.eager_seconds=[1e-7, 10]",)).params
    pool = Borrowed(judge, params, tmp_path / "verdicts")
    try:
        first = pool.admit(CODE, headroom=True).result()
        assert first.admitted and first.evidence["compile_seconds"] > 0
        limit = first.evidence["limit"]
        assert limit["bytes"] == 4 * (2 * 512 * 256 + 256 * 256 + 256)
        assert limit["operations"] == 2 * 512 * 256 * 256
        assert first.evidence["headroom"] == pytest.approx(
            first.evidence["compile_seconds"] / limit["seconds"], abs=1e-4
        )
    finally:
        pool.close()
    again = Borrowed(judge, params, tmp_path / "verdicts")
    try:
        assert again.admit(CODE, headroom=True).result() == first and again._judge is None
    finally:
        again.close()
