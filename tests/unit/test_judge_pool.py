"""Claims about a pool's judge: it starts when it is needed, and its GPUs are free after a release."""

from pathlib import Path
from typing import Any

import pytest

from components.core.config import resolve
from components.judge.pool import LocalPool


class Judge:
    """A judge that admits everything and counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def admit(self, code: str, *, headroom: bool = False) -> Any:
        from components.judge.admission import Admission

        return Admission(True, "", {})

    def close(self) -> None:
        self.closed += 1


def test_a_released_judge_is_closed_once_and_the_next_job_starts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Judge] = []

    def start() -> Judge:
        started.append(Judge())
        return started[-1]

    pool = LocalPool(resolve("smoke").params, tmp_path)
    monkeypatch.setattr(pool, "start", start)
    pool.release()
    assert not started, "nothing was running"
    for code in ("a", "b"):
        assert pool.admit(code).result().admitted
        assert started[-1].closed == 0
        pool.release()
        pool.release()
    pool.close()
    assert [judge.closed for judge in started] == [1, 1]
