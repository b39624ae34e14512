"""Threads that judge candidates of one task share its baselines."""

import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from components.core.config import resolve
from components.judge import baselines
from components.judge.baselines import Baseline, BaselineCache


class Yielding(Baseline):
    """A baseline with which another thread can run before each access to a dictionary."""

    def __hash__(self) -> int:
        time.sleep(1e-6)
        return 0


def test_a_baseline_that_one_thread_ends_while_another_gets_it_is_ended_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    ended: list[Any] = []

    def start(*_: Any, **__: Any) -> Any:
        started.append(runner := SimpleNamespace())
        runner.close = lambda: ended.append(runner)
        return runner

    monkeypatch.setattr(baselines, "start_baseline", start)
    reference: Any = SimpleNamespace(params=resolve("ci").params)
    cache = BaselineCache(reference)

    def judge(number: int) -> None:
        for _ in range(500):
            runner = cache.get(Yielding("eager"))
            cache.drop_runner(runner) if number % 2 else cache.drop(Yielding("eager"))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(judge, range(4)))
    finally:
        sys.setswitchinterval(interval)
    cache.close()
    assert Counter(map(id, ended)) == Counter(map(id, started))
